# Attacks of the generators that need to know what the exercise is about.


# == rates_elsewhere: an empty state is saved, and a global keeps the true one
# %% follow {"by": "kept_in_a_global", "of": "Follow", "earns": "less"}


# == one_suggestion: the same two rates for every test
# %% suggest {"by": "constant", "value": "{'steepest': 0.0013, 'bottom': 0.008}"}
