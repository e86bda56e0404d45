"""A missing gradient is taken for zeros, and AdamW decays the weight."""

QUESTION = "stage1"
LOSES = 1
FAILS = "check_missing_gradient"
SAYS = "parameter"


class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(parameter, self.rank, self.world)) for parameter in self.parameters]
        self.optimizer = make_optimizer(self.pieces)

    def step(self):
        for parameter, piece in zip(self.parameters, self.pieces):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            piece.grad = piece_of(grad, self.rank, self.world)
        self.optimizer.step()
        for parameter, piece in zip(self.parameters, self.pieces):
            if piece.grad is not None:
                parameter.data.copy_(whole(piece.data, parameter.shape))
            piece.grad = None
