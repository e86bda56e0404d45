"""A reduction is begun one message later than the table says: beside the next computation's gather."""

QUESTION = "execute"
LOSES = 2
FAILS = "check_in_order"
SAYS = "the table says"


def execute(table, shards, x, grad, forward, backward):
    world = dist.get_world_size()
    whole, inputs, gradients, reduced, waiting = {}, {}, {}, {}, []

    def arrived(k):
        weights, message = whole[k]
        message.wait()
        return weights

    def reduce(k):
        piece = torch.empty_like(shards[k])
        reduced[k] = piece, dist.reduce_scatter_tensor(piece, gradients.pop(k) / world, async_op=True)

    for action, k in table:
        if action in ("forward", "backward"):
            while waiting:
                reduce(waiting.pop(0))
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
            waiting.append(k)
    while waiting:
        reduce(waiting.pop(0))
    for _, message in reduced.values():
        message.wait()
    return x, [reduced[k][0] for k in range(len(shards))]
