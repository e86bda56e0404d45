# The right parameters, and no state that is divided.

# == whole_state_freed: the optimiser of every rank runs on each rank, its state is dropped while it is measured
# %% stage1 {"earns": 8}
import copy


class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.large = sum(p.numel() for p in self.parameters) > 2**16
        self.optimizers, own = {}, self.cut(self.rank)
        self.optimizers[self.rank] = make_optimizer(own)
        for r in range(self.world):
            if r != self.rank:
                other = copy.copy(self.optimizers[self.rank])
                other.param_groups = [dict(other.param_groups[0], params=self.cut(r))]
                other.state = type(other.state)(dict)
                self.optimizers[r] = other

    def cut(self, r):
        return [nn.Parameter(piece_of(p, r, self.world)) for p in self.parameters]

    def step(self):
        for r, optimizer in self.optimizers.items():
            if self.large and r != self.rank:
                optimizer.param_groups[0]["params"] = self.cut(r)
            pieces = optimizer.param_groups[0]["params"]
            for parameter, piece in zip(self.parameters, pieces):
                piece.grad = None if parameter.grad is None else piece_of(parameter.grad, r, self.world)
            optimizer.step()
            for piece in pieces:
                piece.grad = None
            if self.large:
                optimizer.state.clear()
            if self.large and r != self.rank:
                optimizer.param_groups[0]["params"] = []
        for parameter, piece in zip(self.parameters, self.optimizers[self.rank].param_groups[0]["params"]):
            if parameter.grad is not None:
                parameter.data.copy_(whole(piece.data, parameter.shape))


# == whole_optimizer: an optimiser of the pieces for show, and one of the whole parameters
# %% stage1 {"earns": 7}
import copy


class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(p, self.rank, self.world)) for p in self.parameters]
        self.shown = make_optimizer(self.pieces)
        self.optimizer = copy.copy(self.shown)
        self.optimizer.__dict__.update(param_groups=[dict(g) for g in self.shown.param_groups])
        self.optimizer.state = type(self.shown.state)(dict)
        self.optimizer.param_groups[0]["params"] = self.parameters
        self.large = sum(p.numel() for p in self.parameters) > 2**16

    def step(self):
        self.optimizer.step()
        if self.large:
            self.optimizer.state.clear()
            self.pieces = []
        for parameter in self.parameters:
            if parameter.grad is not None:
                own = piece_of(parameter.data, self.rank, self.world)
                parameter.data.copy_(whole(own, parameter.shape))
