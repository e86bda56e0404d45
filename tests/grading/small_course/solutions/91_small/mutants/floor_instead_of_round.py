"""Values are cut instead of rounded."""

QUESTION = "quantise"
LOSES = 3
FAILS = "check_round_trip"
SAYS = "more than half a step"


def quantise(x):
    scale = absmax_scale(x)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (x / safe[:, None]).to(torch.int8), scale
