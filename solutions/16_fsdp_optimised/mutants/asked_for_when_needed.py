"""Each unit is asked for when it is its turn: nothing travels while another computes."""

QUESTION = "plan"
LOSES = 1
FAILS = "check_next_is_under_way"
SAYS = "nobody has asked"


def plan(units, reshard=True):
    last, actions = units - 1, []
    for k in range(units):
        actions += [("gather", k), ("forward", k)]
        if reshard and k < last:
            actions.append(("free", k))
    for k in reversed(range(units)):
        if reshard and k < last:
            actions.append(("gather", k))
        actions += [("backward", k), ("free", k), ("reduce", k)]
    return actions
