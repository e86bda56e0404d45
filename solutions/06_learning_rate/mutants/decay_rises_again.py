"""After its end the cosine goes on."""

QUESTION = "decay"
LOSES = 1
FAILS = "check_cosine_after_end"
SAYS = "stays at"


def step_factor(step, every, gamma):
    return gamma ** (step // every)


def cosine_factor(step, steps, final=0.0):
    return final + (1 - final) * (1 + math.cos(math.pi * step / steps)) / 2
