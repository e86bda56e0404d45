"""The peak is that of two neighbours, also where there is only one unit."""

QUESTION = "policy"
LOSES = 2
FAILS = "check_few_units"
SAYS = "With one or two units"


def gather_cost(units, world, keep):
    if len(units) == 1:
        return 2 * units[0], units[0] * (world - 1) / world
    kept = 1 / keep if keep < world else 0
    peak = max(sum(units[k : k + 2]) + kept * sum(units[:k]) for k in range(len(units)))
    sent = sum(units) * (world - 1) / world + sum(units[:-1]) * (keep - 1) / keep
    return peak, sent
