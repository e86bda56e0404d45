"""The optimiser is AdamW, whatever was asked for."""

QUESTION = "stage1"
LOSES = 1
FAILS = "check_other_optimizer"
SAYS = "parameter 0 on rank 0"


class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(parameter, self.rank, self.world)) for parameter in self.parameters]
        asked = make_optimizer(self.pieces)
        options = {name: asked.defaults[name] for name in ("lr", "weight_decay")}
        self.optimizer = torch.optim.AdamW(self.pieces, foreach=False, **options)

    def step(self):
        for parameter, piece in zip(self.parameters, self.pieces):
            piece.grad = None if parameter.grad is None else piece_of(parameter.grad, self.rank, self.world)
        self.optimizer.step()
        for parameter, piece in zip(self.parameters, self.pieces):
            if piece.grad is not None:
                parameter.data.copy_(whole(piece.data, parameter.shape))
            piece.grad = None
