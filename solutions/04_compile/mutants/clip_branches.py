"""An `if` on a tensor."""

QUESTION = "clip"
LOSES = 2
FAILS = "check_clip"
SAYS = "an `if` on a tensor"


def clip(gradient, limit):
    norm = gradient.norm()
    if norm > limit:
        return gradient * (limit / norm)
    return gradient.clone()
