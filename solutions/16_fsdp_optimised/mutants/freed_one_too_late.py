"""A unit is freed after the next one's forward has been prepared: three are whole."""

QUESTION = "plan"
LOSES = 1
FAILS = "check_two_units"
SAYS = "two are enough"


def plan(units, reshard=True):
    last, actions = units - 1, [("gather", 0)]
    for k in range(units):
        if k < last:
            actions.append(("gather", k + 1))
        if reshard and k > 0:
            actions.append(("free", k - 1))
        actions.append(("forward", k))
    for k in reversed(range(units)):
        if reshard and k > 0:
            actions.append(("gather", k - 1))
        actions += [("backward", k), ("free", k), ("reduce", k)]
    return actions
