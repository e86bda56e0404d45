"""A learning rate may leave its bounds."""

QUESTION = "population"
LOSES = 1
FAILS = "check_bounds"
SAYS = "set to the bound"


def new_generation(losses, rates, quantile, picks, ups, low, high):
    ranked = survivors(losses, len(losses))
    few = max(1, int(quantile * len(losses)))
    parents, changed = list(range(len(losses))), list(rates)
    for member in ranked[-few:]:
        parents[member] = ranked[:few][picks[member]]
        changed[member] = rates[parents[member]] * (1.2 if ups[member] else 0.8)
    return parents, changed
