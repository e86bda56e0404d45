"""The rate is cut one step too early."""

QUESTION = "decay"
LOSES = 1
FAILS = "check_step_factor"
SAYS = "have factor 1"


def step_factor(step, every, gamma):
    return gamma ** ((step + 1) // every)


def cosine_factor(step, steps, final=0.0):
    return final + (1 - final) * (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2
