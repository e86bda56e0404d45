"""No clamp: a variance that rounding made negative gives NaN."""

QUESTION = "process"
LOSES = 1
FAILS = "check_sure_points"
SAYS = "clamp them to 0"


def posterior(points, values, new, length, noise):
    def kernel(a, b):
        return torch.exp(-(a[:, None] - b[None]).square().sum(-1) / (2 * length**2))

    covariance = kernel(points, points) + noise * torch.eye(len(points), dtype=points.dtype)
    across = kernel(points, new)
    weights = torch.linalg.solve(covariance, across)
    return weights.T @ values, (1 - (across * weights).sum(0)).sqrt()
