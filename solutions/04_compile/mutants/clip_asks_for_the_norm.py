"""The norm becomes a Python number."""

QUESTION = "clip"
LOSES = 2
FAILS = "check_clip"
SAYS = "clip became 2 graphs"


def clip(gradient, limit):
    norm = gradient.norm().item()
    return gradient * torch.clamp(limit / max(norm, 1e-12), max=1.0)
