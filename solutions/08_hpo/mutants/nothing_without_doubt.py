"""Where there is no doubt, nothing is gained: a certain gain is lost."""

QUESTION = "improvement"
LOSES = 1
FAILS = "check_certain"
SAYS = "max(best - mean, 0)"


def expected_improvement(mean, std, best):
    gain = best - mean
    z = gain / std.clamp(min=1e-300)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return torch.where(std > 0, gain * torch.special.ndtr(z) + std * density, torch.zeros_like(gain))
