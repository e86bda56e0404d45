"""The last epoch of the warm-up is judged."""

QUESTION = "prune"
LOSES = 1
FAILS = "check_patience"
SAYS = "of a warm-up"


def should_stop(losses, others, warmup, enough):
    epoch = len(losses)
    if math.isnan(losses[-1]):
        return True
    told = sorted(other[epoch - 1] for other in others if len(other) >= epoch)
    if epoch < warmup or len(told) < enough:
        return False
    half = len(told) // 2
    median = told[half] if len(told) % 2 else (told[half - 1] + told[half]) / 2
    return min(losses) > median
