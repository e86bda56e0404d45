"""The end would be reached one step after the last."""

QUESTION = "one_cycle"
LOSES = 2
FAILS = "check_cycle_fall"
SAYS = "the last one"


def one_cycle(step, top, steps, start, final, low, high):
    def between(a, b, share):
        return b + (a - b) * (1 + math.cos(math.pi * share)) / 2

    if step <= top:
        return between(start, 1.0, step / top), between(high, low, step / top)
    share = (min(step, steps - 1) - top) / (steps - 1 - top)
    late = (step - top) / (steps - top) if step < steps else 1.0
    return between(1.0, final, late), between(low, high, share)
