"""x[mask] has a shape that depends on values."""

QUESTION = "mean"
LOSES = 2
FAILS = "check_mean"
SAYS = "masked_mean became 2 graphs"


def masked_mean(losses, mask):
    kept = losses[mask]
    return kept.sum() / max(len(kept), 1)
