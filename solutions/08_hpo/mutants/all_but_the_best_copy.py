"""Everyone who is not among the best is replaced."""

QUESTION = "population"
LOSES = 2
FAILS = "check_exploit"
SAYS = "only these are replaced"


def new_generation(losses, rates, quantile, picks, ups, low, high):
    ranked = survivors(losses, len(losses))
    few = max(1, int(quantile * len(losses)))
    parents, changed = list(range(len(losses))), list(rates)
    for member in ranked[few:]:
        parents[member] = ranked[:few][picks[member]]
        changed[member] = min(high, max(low, rates[parents[member]] * (1.2 if ups[member] else 0.8)))
    return parents, changed
