"""The mean of the ranks' own estimates: a rank with few points weighs as much as one with many."""

QUESTION = "pi"
LOSES = 1
FAILS = "check_unequal_shares"
SAYS = "every point should weigh the same"


def estimate_pi(points):
    own = 4 * (points.square().sum(dim=1) <= 1).double().mean()
    dist.all_reduce(own)
    return float(own / dist.get_world_size())
