"""Two all-reduces where one would do."""

QUESTION = "pi"
LOSES = 1
FAILS = "check_one_all_reduce"
SAYS = "put the two counts into one tensor"


def estimate_pi(points):
    inside = (points.square().sum(dim=1) <= 1).sum().double()
    number = torch.tensor(float(len(points)), dtype=torch.float64)
    dist.all_reduce(inside)
    dist.all_reduce(number)
    return float(4 * inside / number)
