"""The updated pieces are added up with zeros elsewhere: twice the bytes."""

QUESTION = "stage1"
LOSES = 1
FAILS = "check_updates_travel"
SAYS = "the pieces make all-gathers"


class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(parameter, self.rank, self.world)) for parameter in self.parameters]
        self.optimizer = make_optimizer(self.pieces)

    def step(self):
        for parameter, piece in zip(self.parameters, self.pieces):
            piece.grad = None if parameter.grad is None else piece_of(parameter.grad, self.rank, self.world)
        self.optimizer.step()
        for parameter, piece in zip(self.parameters, self.pieces):
            if piece.grad is not None:
                size = piece.numel()
                padded = piece.new_zeros(size * self.world)
                padded[self.rank * size : (self.rank + 1) * size] = piece.data
                dist.all_reduce(padded)
                parameter.data.copy_(padded[: parameter.numel()].view(parameter.shape))
            piece.grad = None
