# Attacks of the generators that need to know what the exercise is about.


# == order_elsewhere: an empty state is saved, and a global keeps the true one
# %% resume {"by": "kept_in_a_global", "of": "ResumableOrder", "earns": "less"}
