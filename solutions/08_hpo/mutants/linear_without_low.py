"""The linear scale begins at 0, whatever `low` is."""

QUESTION = "scale"
LOSES = 1
FAILS = "check_linear"
SAYS = "of the way from low to high"


def from_place(place, low, high, log):
    return low * (high / low) ** place if log else place * high
