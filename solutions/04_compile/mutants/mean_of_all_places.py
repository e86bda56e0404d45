"""Nothing kept: 0 / 0."""

QUESTION = "mean"
LOSES = 1
FAILS = "check_mean_of_nothing"
SAYS = "the mean of no token"


def masked_mean(losses, mask):
    return torch.where(mask, losses, 0.0).sum() / mask.sum()
