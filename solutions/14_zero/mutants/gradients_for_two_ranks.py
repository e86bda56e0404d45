"""Divided by two, whatever the number of ranks."""

QUESTION = "stage2"
LOSES = 3
FAILS = "check_averaged_pieces"
SAYS = "of 1 ranks together"


def shard_gradients(module, pieces):
    world = dist.get_world_size()

    def send(parameter, piece):
        padded = F.pad(parameter.grad.flatten() / 2, (0, piece.numel() * world - parameter.numel()))
        own = torch.empty_like(piece)
        dist.reduce_scatter_tensor(own, padded)
        piece.grad = own if piece.grad is None else piece.grad + own
        parameter.grad = None

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda parameter, piece=piece: send(parameter, piece))
