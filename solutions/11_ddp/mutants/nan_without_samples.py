"""The mean of no samples is 0 / 0."""

QUESTION = "moments"
LOSES = 1
FAILS = "check_rank_without_samples"
SAYS = "the mean on rank"


def global_moments(x):
    count = torch.tensor(float(len(x)))
    weighted = x.mean(0) * count
    dist.all_reduce(weighted)
    dist.all_reduce(count)
    mean = weighted / count
    squares = (x - mean).square().sum(0)
    dist.all_reduce(squares)
    return mean, squares / count
