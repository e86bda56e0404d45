"""One graph, but only of the side that was taken while it was made."""

QUESTION = "clip"
LOSES = 2
FAILS = "check_clip"
SAYS = "was decided once and for all while the graph was made"


def clip(gradient, limit):
    norm = gradient.norm()
    if torch.compiler.is_compiling():
        return gradient * (limit / norm)
    return gradient * torch.where(norm > limit, limit / norm, 1.0)
