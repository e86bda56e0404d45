# %% [markdown] id="why"
# # A small lab
#
# **Core · 20 min · ●○○**
#
# **Core · 20 min · ●●○**
#
# **Core · 20 min · ●●●**

# %% id="setup"
import torch
import torch.distributed as dist

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
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.round(x / safe[:, None]).to(torch.int8), scale
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

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": ""}
quiz = {"q1": "b", "q2": "a"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% id="plot" tags=["demo"]
raise SystemExit("a demo cell is never run by the judge")
