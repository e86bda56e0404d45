"""The last loss counts, not the best so far."""

QUESTION = "prune"
LOSES = 1
FAILS = "check_best_so_far"
SAYS = "its best loss so far counts"


def should_stop(losses, others, warmup, enough):
    epoch = len(losses)
    if math.isnan(losses[-1]):
        return True
    told = sorted(other[epoch - 1] for other in others if len(other) >= epoch)
    if epoch <= warmup or len(told) < enough:
        return False
    half = len(told) // 2
    median = told[half] if len(told) % 2 else (told[half - 1] + told[half]) / 2
    return losses[-1] > median
