"""The mean of the others: one bad trial, and nobody is stopped."""

QUESTION = "prune"
LOSES = 2
FAILS = "check_median"
SAYS = "Compare with the median"


def should_stop(losses, others, warmup, enough):
    epoch = len(losses)
    if math.isnan(losses[-1]):
        return True
    told = sorted(other[epoch - 1] for other in others if len(other) >= epoch)
    if epoch <= warmup or len(told) < enough:
        return False
    median = sum(told) / len(told)
    return min(losses) > median
