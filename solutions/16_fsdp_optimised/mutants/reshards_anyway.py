"""The policy is not looked at."""

QUESTION = "plan"
LOSES = 1
FAILS = "check_kept_whole"
SAYS = "gathered once"


def plan(units, reshard=True):
    last, actions = units - 1, [("gather", 0)]
    for k in range(units):
        if k < last:
            actions.append(("gather", k + 1))
        actions.append(("forward", k))
        if k < last:
            actions.append(("free", k))
    for k in reversed(range(units)):
        if k > 0:
            actions.append(("gather", k - 1))
        actions += [("backward", k), ("free", k), ("reduce", k)]
    return actions
