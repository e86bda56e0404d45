"""A row of zeros is filled with ones instead of zeros."""

QUESTION = "quantise"
LOSES = 1
FAILS = "check_row_of_zeros"
SAYS = "must stay zeros"


def quantise(x):
    scale = absmax_scale(x)
    return torch.round(torch.where(scale[:, None] == 0, 1.0, x / scale[:, None])).to(torch.int8), scale
