"""The variance is the weighted mean of the ranks' variances."""

QUESTION = "moments"
LOSES = 2
FAILS = "check_moments"
SAYS = "the variance on rank 0"


def global_moments(x):
    count, total = torch.tensor(float(len(x))), x.sum(0)
    own = x.mean(0) if len(x) else total
    squares = (x - own).square().sum(0)
    for tensor in (count, total, squares):
        dist.all_reduce(tensor)
    return total / count, squares / count
