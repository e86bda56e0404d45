"""The whole gradient is all-reduced, and the piece cut from it."""

QUESTION = "stage2"
LOSES = 2
FAILS = "check_reduce_scatter"
SAYS = "reduce-scatters of the gradients send"


def shard_gradients(module, pieces):
    world = dist.get_world_size()

    def send(parameter, piece):
        padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))
        dist.all_reduce(padded)
        own = piece_of(padded, dist.get_rank(), world)
        piece.grad = own if piece.grad is None else piece.grad + own
        parameter.grad = None

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda parameter, piece=piece: send(parameter, piece))
