"""After the last step the cosines go on."""

QUESTION = "one_cycle"
LOSES = 1
FAILS = "check_cycle_end"
SAYS = "nothing moves"


def one_cycle(step, top, steps, start, final, low, high):
    def between(a, b, share):
        return b + (a - b) * (1 + math.cos(math.pi * share)) / 2

    if step <= top:
        return between(start, 1.0, step / top), between(high, low, step / top)
    share = (step - top) / (steps - 1 - top)
    return between(1.0, final, share), between(low, high, share)
