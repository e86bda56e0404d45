"""The difference with the wrong sign: the loser wins."""

QUESTION = "interval"
LOSES = 2
FAILS = "check_mean_of_differences"
SAYS = "the mean of left - right"


def interval(left, right, chosen, level):
    means = (right - left)[chosen].mean(1)
    outside = (1 - level) / 2
    return float(torch.quantile(means, outside)), float(torch.quantile(means, 1 - outside))
