"""z is divided by the variance."""

QUESTION = "improvement"
LOSES = 3
FAILS = "check_improvement"
SAYS = "EI, where lower values are better"


def expected_improvement(mean, std, best):
    gain = best - mean
    z = gain / std.square().clamp(min=1e-300)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return torch.where(std > 0, gain * torch.special.ndtr(z) + std * density, gain.clamp(min=0))
