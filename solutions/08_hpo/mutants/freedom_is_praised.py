"""The sign of log |K| is wrong: short lengths win."""

QUESTION = "length"
LOSES = 4
FAILS = "check_length"
SAYS = "Both terms count"


def best_length(points, values, lengths, noise):
    def log_likelihood(length):
        kernel = torch.exp(-(points[:, None] - points[None]).square().sum(-1) / (2 * length**2))
        covariance = kernel + noise * torch.eye(len(points), dtype=points.dtype)
        return -0.5 * values @ torch.linalg.solve(covariance, values) + 0.5 * torch.logdet(covariance)

    return max(lengths, key=log_likelihood)
