"""NaN is no comparison: the trial goes on for ever."""

QUESTION = "prune"
LOSES = 1
FAILS = "check_nan_stops"
SAYS = "will not come back"


def should_stop(losses, others, warmup, enough):
    epoch = len(losses)
    told = sorted(other[epoch - 1] for other in others if len(other) >= epoch)
    if epoch <= warmup or len(told) < enough:
        return False
    half = len(told) // 2
    median = told[half] if len(told) % 2 else (told[half - 1] + told[half]) / 2
    return min(losses) > median and losses[-1] == losses[-1]
