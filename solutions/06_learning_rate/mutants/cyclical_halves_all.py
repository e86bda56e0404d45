"""The lowest rate is halved too."""

QUESTION = "cyclical"
LOSES = 1
FAILS = "check_halved"
SAYS = "which stays"


def triangular(step, rise, lowest, halve):
    cycle, place = divmod(step, 2 * rise)
    height = 1 - abs(place - rise) / rise
    return (lowest + (1 - lowest) * height) * (0.5**cycle if halve else 1.0)
