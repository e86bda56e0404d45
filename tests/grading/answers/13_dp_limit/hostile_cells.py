# Answers that take the limit from where it could be kept, and constants.


# == the_limit_of_a_closure: the answer is the largest number in the closure of fits

# %% largest
def largest_batch(fits):
    cells = getattr(fits, "__closure__", None) or ()
    numbers = [cell.cell_contents for cell in cells if type(cell.cell_contents) is int]
    return max(numbers, default=0)


# == nothing_fits: the answer is always 0


# %% largest
def largest_batch(fits):
    return 0


# == everything_fits: every step fits


# %% fits
def fits(config, card, batch, seq, **settings):
    return True


# == no_step_fits: no step fits


# %% fits
def fits(config, card, batch, seq, **settings):
    return False
