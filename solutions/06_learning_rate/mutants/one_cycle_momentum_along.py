"""The momentum rises with the rate."""

QUESTION = "one_cycle"
LOSES = 2
FAILS = "check_cycle_momentum"
SAYS = "while the rate rises"


def one_cycle(step, top, steps, start, final, low, high):
    def between(a, b, share):
        return b + (a - b) * (1 + math.cos(math.pi * share)) / 2

    if step <= top:
        return between(start, 1.0, step / top), between(low, high, step / top)
    share = (min(step, steps - 1) - top) / (steps - 1 - top)
    return between(1.0, final, share), between(low, high, share)
