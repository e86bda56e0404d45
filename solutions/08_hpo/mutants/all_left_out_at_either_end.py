"""1 - level is left out at *each* end, so that the interval is too narrow."""

QUESTION = "interval"
LOSES = 2
FAILS = "check_middle"
SAYS = "at either end"


def interval(left, right, chosen, level):
    means = (left - right)[chosen].mean(1)
    return float(torch.quantile(means, 1 - level)), float(torch.quantile(means, level))
