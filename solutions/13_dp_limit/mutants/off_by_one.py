"""The bisection stops with a gap of two."""

QUESTION = "largest"
LOSES = 2
FAILS = "check_exact"
SAYS = "your answer is"


def largest_batch(fits):
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 2:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
