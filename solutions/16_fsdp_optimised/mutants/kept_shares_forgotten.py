"""What units keep between forward and backward is not counted."""

QUESTION = "policy"
LOSES = 1
FAILS = "check_peak"
SAYS = "the peak for units"


def gather_cost(units, world, keep):
    kept = 1 if keep == 1 else 0
    peak = max(sum(units[k : k + 2]) + kept * sum(units[:k]) for k in range(len(units)))
    sent = sum(units) * (world - 1) / world + sum(units[:-1]) * (keep - 1) / keep
    return peak, sent
