"""The last unit of forward is freed, and gathered again at once."""

QUESTION = "plan"
LOSES = 1
FAILS = "check_no_gather_too_many"
SAYS = "need not be gathered again"


def plan(units, reshard=True):
    last, actions = units - 1, [("gather", 0)]
    for k in range(units):
        if k < last:
            actions.append(("gather", k + 1))
        actions.append(("forward", k))
        if reshard:
            actions.append(("free", k))
    if reshard:
        actions.append(("gather", last))
    for k in reversed(range(units)):
        if reshard and k > 0:
            actions.append(("gather", k - 1))
        actions += [("backward", k), ("free", k), ("reduce", k)]
    return actions
