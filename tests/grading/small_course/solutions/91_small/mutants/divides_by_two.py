"""The sum is divided by two, whatever the number of ranks."""

QUESTION = "mean"
LOSES = 1
FAILS = "check_three_ranks"
SAYS = "of 3"


def all_reduce_mean(x):
    total = x.clone()
    dist.all_reduce(total)
    return total / 2
