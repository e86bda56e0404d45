# Attacks of the generators that need to know what the exercise is about.


# == growth_is_two: the growth factor is 2 in every call
# %% scaler {"by": "frozen", "argument": "growth_factor", "value": "2.0", "earns": "less"}


# == state_elsewhere: an empty state is saved, and a global keeps the true one
# %% scaler {"by": "kept_in_a_global", "of": "LossScaler", "earns": "less"}
