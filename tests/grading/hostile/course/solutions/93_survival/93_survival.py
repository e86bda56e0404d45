# %% [markdown] id="why"
# # What a grader must survive

# %% id="setup"
import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.grading import Lab

lab = Lab(globals())


# %% nbgrader={"grade_id": "scale", "solution": true}
def absmax_scale(x):
    """The scale of each row of x (rows, cols), so that its largest element becomes 127."""
    ### BEGIN SOLUTION
    return x.float().abs().amax(dim=1) / 127
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_scale", "grade": true}
lab.check("scale")


# %% nbgrader={"grade_id": "quantise", "solution": true}
def quantise(x):
    """int8 values and the scale of each row."""
    ### BEGIN SOLUTION
    scale = absmax_scale(x)
    return torch.round(x / scale[:, None]).to(torch.int8), scale
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_quantise", "grade": true}
lab.check("quantise")


# %% nbgrader={"grade_id": "mean", "solution": true}
def all_reduce_mean(x):
    """The mean of x over all ranks, on every rank."""
    ### BEGIN SOLUTION
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_mean", "grade": true}
lab.check("mean")


# %% nbgrader={"grade_id": "fsdp", "solution": true}
def fully_sharded(linear):
    """A module for the linear layer, of which each rank keeps its rows only: whole in forward,
    its gradients averaged over the ranks."""

    ### BEGIN SOLUTION
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, shard):
            whole = shard.new_empty(dist.get_world_size() * shard.shape[0], shard.shape[1])
            dist.all_gather_into_tensor(whole, shard)
            return whole

        @staticmethod
        def backward(ctx, gradient):
            shard = gradient.new_empty(gradient.shape[0] // dist.get_world_size(), gradient.shape[1])
            dist.reduce_scatter_tensor(shard, gradient.contiguous())
            return shard / dist.get_world_size()

    class Sharded(nn.Module):
        def __init__(self):
            super().__init__()
            self.shard = nn.Parameter(
                linear.weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
            )

        def forward(self, x):
            return x @ Gather.apply(self.shard).T

    return Sharded()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_fsdp", "grade": true}
lab.check("fsdp")

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": ""}
quiz = {"q1": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")
