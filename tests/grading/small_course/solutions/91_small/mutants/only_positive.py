"""The largest element is taken without its absolute value."""

QUESTION = "scale"
LOSES = 1
FAILS = "check_largest"
SAYS = "off by up to"


def absmax_scale(x):
    return x.float().amax(dim=1) / 127
