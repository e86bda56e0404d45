"""The mean of the values is taken off, and never put back."""

QUESTION = "process"
LOSES = 2
FAILS = "check_mean"
SAYS = "the mean"


def posterior(points, values, new, length, noise):
    def kernel(a, b):
        return torch.exp(-(a[:, None] - b[None]).square().sum(-1) / (2 * length**2))

    covariance = kernel(points, points) + noise * torch.eye(len(points), dtype=points.dtype)
    across = kernel(points, new)
    weights = torch.linalg.solve(covariance, across)
    return weights.T @ (values - values.mean()), (1 - (across * weights).sum(0)).clamp(min=0).sqrt()
