"""The rates grow by the same sum."""

QUESTION = "sweep"
LOSES = 1
FAILS = "check_sweep_factor"
SAYS = "not exponential"


def sweep(lowest, highest, count):
    return [lowest + (highest - lowest) * i / (count - 1) for i in range(count)]
