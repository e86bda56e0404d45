"""The table is not looked at: the plan of step 1 is carried out."""

QUESTION = "execute"
LOSES = 1
FAILS = "check_any_table"
SAYS = "messages"


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
        actions += [("backward", k), ("free", k), ("reduce", k)]
    return actions


def execute(table, shards, x, grad, forward, backward):
    world = dist.get_world_size()
    whole, inputs, gradients, reduced = {}, {}, {}, {}

    def arrived(k):
        weights, message = whole[k]
        message.wait()
        return weights

    for action, k in plan(len(shards)):
        if action == "gather":
            weights = shards[k].new_empty(world * shards[k].numel())
            whole[k] = weights, dist.all_gather_into_tensor(weights, shards[k], async_op=True)
        elif action == "forward":
            inputs[k] = x
            x = forward(k, arrived(k), x)
        elif action == "backward":
            grad, gradients[k] = backward(k, arrived(k), inputs.pop(k), grad)
        elif action == "free":
            del whole[k]
        elif action == "reduce":
            piece = torch.empty_like(shards[k])
            reduced[k] = piece, dist.reduce_scatter_tensor(piece, gradients.pop(k) / world, async_op=True)
    for _, message in reduced.values():
        message.wait()
    return x, [reduced[k][0] for k in range(len(shards))]
