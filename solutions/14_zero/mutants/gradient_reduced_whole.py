"""The gradient of the whole weight is all-reduced, and the piece cut from it."""

QUESTION = "stage3"
LOSES = 2
FAILS = "check_gathers"
SAYS = "sends more than a reduce-scatter"


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        ctx.size = piece.numel()
        return whole(piece, shape)

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        padded = F.pad(grad.flatten() / world, (0, ctx.size * world - grad.numel()))
        dist.all_reduce(padded)
        return piece_of(padded, dist.get_rank(), world), None


def sharded_linear(x, weight_piece, shape):
    def compute(x, weight_piece):
        return F.linear(x, Gather.apply(weight_piece, shape))

    return torch.utils.checkpoint.checkpoint(compute, x, weight_piece, use_reentrant=False)
