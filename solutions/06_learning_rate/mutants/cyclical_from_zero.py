"""The triangles begin at 0, cut off at the lowest rate."""

QUESTION = "cyclical"
LOSES = 2
FAILS = "check_triangular"
SAYS = "from `lowest` to 1"


def triangular(step, rise, lowest, halve):
    cycle, place = divmod(step, 2 * rise)
    height = 1 - abs(place - rise) / rise
    return lowest + (1 - lowest) * height * 0.5**cycle if halve else max(lowest, height)
