"""A plain optimiser on every rank, and all-gathers for show."""

QUESTION = "stage1"
LOSES = 3
FAILS = "check_state_is_divided"
SAYS = "All of AdamW's state would be 2 more"


class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.parameters = list(parameters)
        self.optimizer = make_optimizer(self.parameters)

    def step(self):
        self.optimizer.step()
        for parameter in self.parameters:
            if parameter.grad is not None:
                whole(piece_of(parameter, dist.get_rank(), dist.get_world_size()), parameter.shape)
