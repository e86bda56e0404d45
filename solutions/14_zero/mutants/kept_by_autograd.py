"""No checkpoint: autograd keeps every whole weight."""

QUESTION = "stage3"
LOSES = 2
FAILS = "check_weights_are_freed"
SAYS = "After forward a rank holds whole weights"


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        ctx.size = piece.numel()
        return whole(piece, shape)

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        padded = F.pad(grad.flatten() / world, (0, ctx.size * world - grad.numel()))
        own = grad.new_empty(ctx.size)
        dist.reduce_scatter_tensor(own, padded)
        return own, None


def sharded_linear(x, weight_piece, shape):
    return F.linear(x, Gather.apply(weight_piece, shape))
