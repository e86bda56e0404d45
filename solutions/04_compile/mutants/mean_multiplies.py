"""Infinity times 0."""

QUESTION = "mean"
LOSES = 1
FAILS = "check_mean_of_infinite"
SAYS = "infinity times 0 is no number"


def masked_mean(losses, mask):
    return (losses * mask).sum() / mask.sum().clamp(min=1)
