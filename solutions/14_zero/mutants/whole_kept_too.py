"""The whole gradients are put aside."""

QUESTION = "stage2"
LOSES = 2
FAILS = "check_gradients_are_divided"
SAYS = "holds whole gradients"


def shard_gradients(module, pieces):
    world, kept = dist.get_world_size(), []

    def send(parameter, piece):
        padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))
        own = torch.empty_like(piece)
        dist.reduce_scatter_tensor(own, padded)
        piece.grad = own if piece.grad is None else piece.grad + own
        kept.append(parameter.grad)
        parameter.grad = None

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda parameter, piece=piece: send(parameter, piece))
