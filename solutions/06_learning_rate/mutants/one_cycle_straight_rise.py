"""The rate rises in a straight line."""

QUESTION = "one_cycle"
LOSES = 1
FAILS = "check_cycle_rise"
SAYS = "Half a cosine from"


def one_cycle(step, top, steps, start, final, low, high):
    def between(a, b, share):
        return b + (a - b) * (1 + math.cos(math.pi * share)) / 2

    if step <= top:
        return start + (1 - start) * step / top, between(high, low, step / top)
    share = (min(step, steps - 1) - top) / (steps - 1 - top)
    return between(1.0, final, share), between(low, high, share)
