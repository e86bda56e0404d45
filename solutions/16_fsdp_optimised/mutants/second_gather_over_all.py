"""The second gather is counted as if it went over all ranks."""

QUESTION = "policy"
LOSES = 1
FAILS = "check_sent"
SAYS = "the bytes sent"


def gather_cost(units, world, keep):
    kept = 1 / keep if keep < world else 0
    peak = max(sum(units[k : k + 2]) + kept * sum(units[:k]) for k in range(len(units)))
    sent = sum(units) * (world - 1) / world + (sum(units[:-1]) * (world - 1) / world if keep > 1 else 0)
    return peak, sent
