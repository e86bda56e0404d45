"""Whole weights stay under another name."""

QUESTION = "execute"
LOSES = 1
FAILS = "check_memory_of_the_step"
SAYS = "that were freed"


def execute(table, shards, x, grad, forward, backward):
    world = dist.get_world_size()
    whole, inputs, gradients, reduced, used = {}, {}, {}, {}, []

    def arrived(k):
        weights, message = whole[k]
        message.wait()
        used.append(weights)
        return weights

    for action, k in table:
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
