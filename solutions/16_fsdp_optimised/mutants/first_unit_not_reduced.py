"""The gradient of the first unit is never averaged: there is no unit after it."""

QUESTION = "plan"
LOSES = 1
FAILS = "check_plan_is_legal"
SAYS = "never reduced"


def plan(units, reshard=True):
    last, actions = units - 1, [("gather", 0)]
    for k in range(units):
        if k < last:
            actions.append(("gather", k + 1))
        actions.append(("forward", k))
        if reshard and k < last:
            actions.append(("free", k))
    for k in reversed(range(units)):
        if reshard and k > 0:
            actions.append(("gather", k - 1))
        actions += [("backward", k), ("free", k)] + ([("reduce", k)] if k > 0 else [])
    return actions
