"""1 where nothing fits."""

QUESTION = "largest"
LOSES = 1
FAILS = "check_nothing_fits"
SAYS = "it should be 0"


def largest_batch(fits):
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
