"""n gaps for n rates: the highest rate is never reached."""

QUESTION = "sweep"
LOSES = 1
FAILS = "check_sweep_ends"
SAYS = "n - 1 gaps"


def sweep(lowest, highest, count):
    return [lowest * (highest / lowest) ** (i / count) for i in range(count)]
