"""The logarithm to base 10 is undone with e."""

QUESTION = "scale"
LOSES = 2
FAILS = "check_logarithmic"
SAYS = "is a value between low and high"


def from_place(place, low, high, log):
    if not log:
        return low + place * (high - low)
    return math.exp(math.log10(low) + place * (math.log10(high) - math.log10(low)))
