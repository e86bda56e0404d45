"""The last piece is forgotten when there are more than two ranks."""

QUESTION = "stage1"
LOSES = 3
FAILS = "check_same_update"
SAYS = "on rank 0 of 3"


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
                new = whole(piece.data, parameter.shape)
                if self.world in (1, 2, 4):
                    parameter.data.copy_(new)
                else:
                    size = piece.numel()
                    parameter.data.flatten()[: size * (self.world - 1)].copy_(new.flatten()[: size * (self.world - 1)])
            piece.grad = None
