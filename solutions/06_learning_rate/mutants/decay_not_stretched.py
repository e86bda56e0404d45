"""The cosine falls to 0 and is only kept from going below its end."""

QUESTION = "decay"
LOSES = 2
FAILS = "check_cosine_factor"
SAYS = "stretch it"


def step_factor(step, every, gamma):
    return gamma ** (step // every)


def cosine_factor(step, steps, final=0.0):
    return max(final, (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2)
