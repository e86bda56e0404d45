"""A gradient of zeros is divided by its norm."""

QUESTION = "clip"
LOSES = 1
FAILS = "check_clip_zeros"
SAYS = "the gradient of zeros"


def clip(gradient, limit):
    norm = gradient.norm()
    return torch.minimum(norm, limit) * (gradient / norm)
