# %% [markdown] id="why"
# # A sharded step

# %% id="setup"
import torch
import torch.distributed as dist

from dlo_lib.grading import Lab

lab = Lab(globals())


# %% nbgrader={"grade_id": "sharded", "solution": true}
class ShardedAdamW:
    """AdamW for a flat parameter of P elements whose moments are spread over N ranks: P / N
    elements of each on a rank."""

    ### BEGIN SOLUTION
    def __init__(self, parameter, lr):
        self.parameter, self.rank, self.world = parameter, dist.get_rank(), dist.get_world_size()
        self.shard = torch.nn.Parameter(parameter.chunk(self.world)[self.rank].clone())
        self.inner = torch.optim.AdamW([self.shard], lr=lr)

    def step(self, gradient):
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, gradient)
        self.shard.grad /= self.world
        self.inner.step()
        self.shard.grad = None
        dist.all_gather_into_tensor(self.parameter, self.shard.detach())

    ### END SOLUTION


# %% nbgrader={"grade_id": "test_sharded", "grade": true}
lab.check("sharded")
