"""E[x^2] - E[x]^2, which cancels."""

QUESTION = "moments"
LOSES = 1
FAILS = "check_large_mean"
SAYS = "the variance on rank"


def global_moments(x):
    sums = torch.cat([x.sum(0), x.square().sum(0), torch.tensor([float(len(x))])])
    dist.all_reduce(sums)
    mean, square = (sums[:-1] / sums[-1]).chunk(2)
    return mean, square - mean.square()
