# Attacks of the generators that need to know what the exercise is about.


# == always_zero: the mean is 0
# %% mean {"by": "constant", "value": "torch.tensor(0.0)"}
