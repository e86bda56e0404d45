# Attacks of the generators that need to know what the exercise is about.


# == one_list_of_samples: the same six samples on every rank
# %% sampler {"by": "constant", "value": "[8, 5, 7, 2, 3, 11]"}


# == epoch_is_zero: the order of the first epoch in every epoch
# %% sampler {"by": "frozen", "argument": "epoch", "value": "0", "earns": "less"}
