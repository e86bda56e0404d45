"""The gradient of the weight is divided by two, whatever the number of ranks."""

QUESTION = "stage3"
LOSES = 4
FAILS = "check_linear"
SAYS = "the gradients of the pieces of 1 ranks"


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        ctx.size = piece.numel()
        return whole(piece, shape)

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        padded = F.pad(grad.flatten() / 2, (0, ctx.size * world - grad.numel()))
        own = grad.new_empty(ctx.size)
        dist.reduce_scatter_tensor(own, padded)
        return own, None


def sharded_linear(x, weight_piece, shape):
    def compute(x, weight_piece):
        return F.linear(x, Gather.apply(weight_piece, shape))

    return torch.utils.checkpoint.checkpoint(compute, x, weight_piece, use_reentrant=False)
