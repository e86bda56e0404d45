# %% [markdown] id="title"
# # 14 · ZeRO, stage by stage
#
# **What you will do.** Lab 13 ended at a floor: 16 bytes a parameter on every rank, for any number of ranks.
# Now you remove this floor. First you divide the optimiser's state over the ranks (ZeRO stage 1), then the
# gradients (stage 2), then the parameters (stage 3). At each stage the training stays the same, up to
# rounding, and the checks also measure the memory of each process and the bytes sent between them.
#
# You need no GPU: ranks are processes on this machine (gloo), and the 3B model is measured at true size on fake tensors.
#
# Builds on labs 10 (collectives), 11 (data parallelism) and 13 (its limit). Lab 12 (gradient compression) sends fewer bits
# for each gradient and changes the gradients slightly. ZeRO computes the same gradients up to rounding, so nothing here
# needs lab 12. The core exercises, predictions and the quiz take about 93 minutes; with the text and the demos plan two hours. Each exercise has a check that answers at once;
# `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you are stuck, `lab.use_reference("name")`
# lets you continue without its points.
#
# Words: shard (*fragment*), optimiser state (*état de l'optimiseur*), padding (*remplissage*), offload (*déchargement*),
# master weights (*poids maîtres*).

# %% id="setup"
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlo_lib.grading import Lab
from dlo_lib.launch import run_ranks
from dlo_lib.models import model_config
from dlo_lib.models.counts import parameters_by_part
from dlo_lib.optim import Phase
from dlo_lib.profiling import Part, measure_memory

GIB = 2**30
MODEL = os.environ.get("DLO_MODEL", "llama-3.2-3b")
STEPS = int(os.environ.get("DLO_STEPS", 20))  # of the training near the end
GPUS = int(os.environ.get("DLO_GPUS", 2))  # ranks of the small job near the end
NUMBERS = int(os.environ.get("DLO_NUMBERS", 2**22))  # parameters of the offload that is measured
STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
SEQ = int(os.environ.get("DLO_SEQ", 2048))  # of the last measurements of memory
psi = sum(parameters_by_part(model_config(MODEL)).values())  # parameters of the model
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: 64 times the same numbers
#
# The cell runs one training step of Llama 3.2 3B on fake tensors, on one of 64 ranks with DDP, fp32 weights
# and AdamW. It reads the memory of the state after backward. (About 10 s.)

# %% id="show_why" tags=["demo"]
import figures

STATE = {"weights": Part.WEIGHTS, "gradients": Part.GRADIENTS, "optimizer": Part.OPTIMIZER_STATE}


def measured(stage: int, world: int) -> dict[str, int]:
    """Bytes of the state on one rank after backward."""
    report = measure_memory(MODEL, 1, 128, parallel=STAGES[stage], world_size=world)
    end = max(index for index, event in enumerate(report.events) if event.phase is Phase.BACKWARD)
    return {name: int(report.timeline[part][end]) for name, part in STATE.items()}


at_64 = {0: measured(0, 64)}
figures.copies(at_64[0], 64)

# %% [markdown] id="why_questions"
# All ranks hold the same three parts. For each part: **when** does a rank need it, and **how much** of it at
# once?
#
# - An optimiser updates each number separately. Which rank needs the moments of which parameter?
# - Which ranks need the average of a gradient, if only one rank updates each parameter?
# - Which rank needs the weights of layer 7 while layer 20 is computed?

# %% [markdown] id="idea"
# ## The idea
#
# | stage | divided over the $N$ ranks | bytes at rest (fp32, AdamW) |
# |---|---|---|
# | 0 (DDP) | nothing | $16\Psi$ |
# | 1 | optimiser state | $8\Psi + 8\Psi/N$ |
# | 2 | and gradients | $4\Psi + 12\Psi/N$ |
# | 3 | and parameters | $16\Psi/N$ |
#
# $\Psi$ is the number of parameters. An all-reduce *is* a reduce-scatter followed by an all-gather (lab 10): stage 2
# runs the optimiser's step between the two halves. What each stage sends, you will predict after step 6.

# %% [markdown] id="state_text"
# ## 1 · What is left on a rank
#
# **Core · 6 min · ●○○**
#
# The table has the sum of three parts, for AdamW. Write a function that returns each part, for any optimiser: `moments` is the
# number of values that it keeps for each parameter (AdamW 2, momentum 1, plain SGD 0). All numbers are fp32. (Real shards are
# rounded up; here keep the fractions. The check measures training steps: about 10 s.)

# %% nbgrader={"grade_id": "state", "solution": true}
def state_bytes(parameters: int, world: int, stage: int, moments: int = 2) -> dict[str, float]:
    """Return the bytes of "weights", "gradients" and "optimizer" on one rank after backward."""
    ### BEGIN SOLUTION
    share = 4 * parameters / world
    return {
        "weights": share if stage >= 3 else 4 * parameters,
        "gradients": share if stage >= 2 else 4 * parameters,
        "optimizer": moments * (share if stage >= 1 else 4 * parameters),
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_state", "grade": true}
lab.check("state")

# %% [markdown] id="state_after"
# This is the well-known figure of the ZeRO paper, for this model and at true size: bars are measured in one
# training step for each stage, on one of 64 ranks; diamonds are your function. In the last rows the parts are too
# thin to see: compare the two numbers. (About 30 s.)

# %% id="show_state" tags=["demo"]
at_64 |= {stage: measured(stage, 64) for stage in (1, 2, 3)}
figures.stages(at_64, {stage: state_bytes(psi, 64, stage) for stage in STAGES}, 64, "GiB")

# %% [markdown] id="explore_text"
# The same function for other numbers of ranks and other optimisers: move the sliders. From how many ranks on
# does each stage fit into a GPU of 32 GiB, if only the state needs memory? Which stage never fits?

# %% id="explore_state" tags=["demo"]
from dlo_lib.labkit.explore import explore


def state_of_ranks(ranks: int = 8, moments: int = 2):
    state_of_stages = {stage: state_bytes(psi, ranks, stage, moments) for stage in STAGES}
    return figures.budget(state_of_stages, ranks, 32 * GIB)


explore(state_of_ranks, ranks=[1, 2, 4, 8, 16, 64, 512], moments=[0, 1, 2])

# %% [markdown] id="pieces_text"
# ## 2 · Pieces
#
# **Core · 11 min · ●●○**
#
# The rest of the lab needs two functions.
#
# - `piece_of(tensor, rank, world)`: flatten the tensor, append zeros until `world` divides its length, cut it into `world` equal pieces, and return a **copy**
#   of this rank's piece, one-dimensional and of the same dtype. A tensor of 7 numbers on 4 ranks has pieces of 2; the last one is a number and a zero.
# - `whole(piece, shape)`: the inverse, with one **all-gather** (`dist.all_gather_into_tensor`, lab 10): each rank has a
#   piece, and all ranks get the tensor of that shape.
#
# Both must also work for tensors with fewer numbers than ranks, and for every dtype: `torch.empty(n)` is always fp32,
# `piece.new_empty(n)` has the dtype of `piece`. (The check starts up to 6 ranks, several times: 5 to 10 s.)

# %% nbgrader={"grade_id": "pieces", "solution": true}
def piece_of(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return a copy of this rank's piece: (ceil(numel / world),), padded with zeros."""
    ### BEGIN SOLUTION
    size = -(-tensor.numel() // world)
    padded = F.pad(tensor.detach().flatten(), (0, size * world - tensor.numel()))
    return padded[rank * size : (rank + 1) * size].clone()
    ### END SOLUTION


def whole(piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of that shape, from the pieces of all ranks."""
    ### BEGIN SOLUTION
    padded = piece.new_empty(piece.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(padded, piece)
    return padded[: torch.Size(shape).numel()].view(shape)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_pieces", "grade": true}
lab.check("pieces")

# %% [markdown] id="stage1_text"
# ## 3 · Stage 1: the optimiser's state
#
# **Core · 16 min · ●●○**
#
# DDP has averaged the gradients on every rank, and then all ranks compute the same update from the same
# moments. Instead:
#
# - in `__init__`, make a piece of each parameter, as an `nn.Parameter`, and **one optimiser for the pieces**:
#   `make_optimizer(pieces)` returns it. It can be any optimiser that updates each number separately.
# - in `step`, give each piece its piece of the gradient (`piece_of`), run the optimiser's step, and send the updated
#   pieces to all ranks (`whole`): copy the new values into the parameters **in place** (`parameter.data.copy_`). A
#   parameter whose `.grad` is `None` in a step keeps its value in this step: its piece has `None` as gradient, not zeros
#   and not the gradient of an earlier step.
#
# Each updated number is sent once, and `step` returns when all have arrived. The optimiser creates its moments in its first
# step, so a rank never holds more than 1/N of them. (The check takes 5 to 20 s.)

# %% nbgrader={"grade_id": "stage1", "solution": true}
class ShardedOptimizer:
    """An optimiser whose state is divided over the ranks.

    Gradients are averaged before `step`, on every rank.
    """

    def __init__(self, parameters: list, make_optimizer) -> None:
        ### BEGIN SOLUTION
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(parameter, self.rank, self.world)) for parameter in self.parameters]
        self.optimizer = make_optimizer(self.pieces)
        ### END SOLUTION

    def step(self) -> None:
        """Update all parameters, each rank its pieces."""
        ### BEGIN SOLUTION
        for parameter, piece in zip(self.parameters, self.pieces):
            piece.grad = None if parameter.grad is None else piece_of(parameter.grad, self.rank, self.world)
        self.optimizer.step()
        for parameter, piece in zip(self.parameters, self.pieces):
            if piece.grad is not None:
                parameter.data.copy_(whole(piece.data, parameter.shape))
            piece.grad = None
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_stage1", "grade": true}
lab.check("stage1")

# %% [markdown] id="norm_text"
# The checks compare the parameters with those of an unsharded optimiser in one process, and also measure the
# bytes between the ranks and the memory of each process. A plain AdamW on every rank gives the same
# parameters, but not all the points.
#
# ## 4 · Clipping needs all ranks
#
# **Optional · 8 min · ●○○**
#
# Exercise 5 does not need the code; read the text, because the quiz asks about it.
#
# Gradient clipping divides by the norm of **all** gradients. In stages 2 and 3 a rank has only its pieces.
# Compute the norm of the whole from `pieces`, a list of this rank's pieces of gradients. All ranks must get
# the same number; otherwise their weights diverge. One number is sent, in one call, however many pieces there are. The pieces
# stay as they are, because the optimiser needs them.

# %% nbgrader={"grade_id": "norm", "solution": true}
def global_norm(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of the gradients of which every rank has pieces, a scalar tensor."""
    ### BEGIN SOLUTION
    squares = torch.stack([piece.square().sum() for piece in pieces]).sum()
    dist.all_reduce(squares)
    return squares.sqrt()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_norm", "grade": true}
lab.check("norm")

# %% [markdown] id="stage2_text"
# ## 5 · Stage 2: the gradients
#
# **Core · 15 min · ●●○**
#
# In stage 1, a rank uses only its piece of the averaged gradient, 1/N of it. A **reduce-scatter**
# (`dist.reduce_scatter_tensor`, lab 10) gives each rank only the sum of its piece, for half the bytes. If it runs *during* backward, a gradient is whole only for a moment.
#
# Write `shard_gradients(module, pieces)`: it registers a hook on each parameter (`register_post_accumulate_grad_hook`, lab 11). `pieces` are the pieces of
# the parameters, in the same order. As soon as a gradient is complete, the hook
#
# - adds this rank's piece of the **average over the ranks** to `piece.grad` (which may be `None`, or hold the piece of an earlier micro-batch),
# - sets the `.grad` of the parameter to `None`, because it is no longer needed.
#
# A reduce-scatter needs a one-dimensional tensor whose length `world` divides: append zeros as in step 2.

# %% nbgrader={"grade_id": "stage2", "solution": true}
def shard_gradients(module: nn.Module, pieces: list) -> None:
    """Make backward leave averaged gradients in the pieces, none in the parameters of `module`."""
    ### BEGIN SOLUTION
    world = dist.get_world_size()

    def send(parameter, piece):
        padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))
        own = torch.empty_like(piece)
        dist.reduce_scatter_tensor(own, padded)
        piece.grad = own if piece.grad is None else piece.grad + own
        parameter.grad = None

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda parameter, piece=piece: send(parameter, piece))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_stage2", "grade": true}
lab.check("stage2")

# %% [markdown] id="stage3_text"
# ## 6 · Stage 3: the parameters
#
# **Core · 22 min · ●●●**
#
# Now a rank keeps only pieces of the parameters. Before a layer computes, its weight is gathered. Where does
# its gradient go? The gather is a *function* of the pieces: its backward maps the gradient of the whole
# weight on every rank to the gradient of each piece. An all-gather gives every rank the pieces of all ranks;
# its transpose **adds** the gradients of a piece from all ranks: a **reduce-scatter**. (Data parallelism
# needs the average, so divide by the number of ranks: the lines are those of your hook in step 5.)
#
# Write it as an `autograd.Function`, and a linear layer with it. The forward of `Gather` is `whole`, for any shape. Its `backward` returns
# one value for each argument of `forward` after `ctx`: the gradient of `piece`, and `None` for `shape`. The layer
# gathers the weight at most twice (for forward and for backward) and reduce-scatters its gradient once. Two rules for
# the layer:
#
# - autograd writes the gradient into `weight_piece.grad`, so micro-batches add up;
# - **the whole weight must not outlive the computation.** Autograd would keep it for backward, because
#   `F.linear` saves its weight. With `torch.utils.checkpoint.checkpoint(function, *tensors,
#   use_reentrant=False)`, autograd saves only the arguments and runs `function` again in backward. So pass the
#   piece as an argument, not the whole weight. (PyTorch recommends `use_reentrant=False`. The older form runs a second
#   backward pass inside the first, and gives no gradients if no argument needs one.)

# %% nbgrader={"grade_id": "stage3", "solution": true}
class Gather(torch.autograd.Function):
    """Forward: pieces to the whole tensor.

    Backward: gradients of the whole to the averaged gradient of the piece.
    """

    @staticmethod
    def forward(ctx, piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        ### BEGIN SOLUTION
        ctx.size = piece.numel()
        return whole(piece, shape)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        ### BEGIN SOLUTION
        world = dist.get_world_size()
        padded = F.pad(grad.flatten() / world, (0, ctx.size * world - grad.numel()))
        own = grad.new_empty(ctx.size)
        dist.reduce_scatter_tensor(own, padded)
        return own, None
        ### END SOLUTION


def sharded_linear(
    x: torch.Tensor, weight_piece: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """Return x @ weight.T.

    Every rank has a piece of the weight of that shape (out, in), and no rank keeps the whole.
    """
    ### BEGIN SOLUTION
    def compute(x, weight_piece):
        return F.linear(x, Gather.apply(weight_piece, shape))

    return torch.utils.checkpoint.checkpoint(compute, x, weight_piece, use_reentrant=False)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_stage3", "grade": true}
lab.check("stage3")

# %% [markdown] id="stage3_after"
# What does each stage cost? The next cells count the bytes that a rank sends in one step of an MLP of 4 layers,
# in units of $Bf$: the bytes of its parameters, times $(N-1)/N$.
#
# **Predict, then measure.** Replace each `None` by your number. (Here stage 1 uses DDP's all-reduce, then
# `ShardedOptimizer`; stage 3 gathers in forward and again in backward.) The cell is not graded.

# %% id="predict_traffic" tags=["prediction"]
# In units of B f
traffic_guess = {"stage 0": None, "stage 1": None, "stage 2": None, "stage 3": None}

# %% id="run_traffic" tags=["demo", "nbval-check-output"]
import alive

from dlo_lib.labkit.predicted_bars import predicted_bars
from dlo_lib.labkit.predictions import compared, require_numbers

require_numbers(traffic_guess)

WIDTH, LAYERS = 64, 4


def weights_of(seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(WIDTH, WIDTH, generator=random) / WIDTH**0.5 for _ in range(LAYERS)]


class MLP(nn.Module):
    """Four layers without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(weight) for weight in weights_of()])

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        return x


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def train(stage: int, steps: int) -> tuple[list[float], list[torch.Tensor], dict[str, int]]:
    """Losses, final weights, and the bytes of state after the last backward; every rank has other samples."""
    torch.set_num_threads(1)
    rank, world, model = dist.get_rank(), dist.get_world_size(), MLP()
    parameters = list(model.weights)
    pieces = [nn.Parameter(piece_of(parameter, rank, world)) for parameter in parameters] if stage >= 2 else []
    optimizer = ShardedOptimizer(parameters, adamw) if stage == 1 else adamw(pieces or parameters)
    if stage == 2:
        shard_gradients(model, pieces)
    if stage == 3:
        del model, parameters  # only the pieces are left
    losses = []
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        if stage == 3:
            out = x
            for piece in pieces:
                out = torch.tanh(sharded_linear(out, piece, (WIDTH, WIDTH)))
        else:
            out = model(x)
        loss = (out - x.roll(1, 1)).square().mean()
        loss.backward()
        if stage < 2:
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        kept = alive.state() if step == steps - 1 else None
        optimizer.step()
        for own in pieces or parameters:
            own.grad = None
        if stage == 2:
            for parameter, piece in zip(parameters, pieces):
                parameter.data.copy_(whole(piece.data, parameter.shape))
        losses.append(loss.item())
    if stage == 3:
        parameters = [whole(piece.data, (WIDTH, WIDTH)) for piece in pieces]
    return losses, [parameter.detach() for parameter in parameters], kept


unit = sum(weight.nbytes for weight in weights_of()) * 3 / 4  # B f on 4 ranks
traffic = {}
for stage in STAGES:
    trace = run_ranks(train, 4, stage, 1, trace=True).trace
    sent = {kind: trace.ring_bytes(kind, rank=0) / unit for kind in ("all_reduce", "reduce_scatter", "all_gather")}
    if stage == 3:
        sent["all_gather"] -= 1  # the last line of train, which is not part of a step
    traffic[f"stage {stage}"] = sum(sent.values())
    print(f"stage {stage}: ", "  ".join(f"{kind} {times:.2f}" for kind, times in sent.items() if times))
print(compared(traffic_guess, traffic, "{:.2f} B f".format))
predicted_bars(traffic, traffic_guess, "sent by a rank and step (B f)")

# %% [markdown] id="same_text"
# | stage | sent by a rank and step |
# |---|---|
# | 0 (DDP) | $2Bf$: an all-reduce is a reduce-scatter ($Bf$) and an all-gather ($Bf$) |
# | 1 | $2Bf + Bf$ with DDP's all-reduce, as here; $Bf + Bf$ with the reduce-scatter of stage 2 |
# | 2 | $Bf + Bf$: as many bytes as DDP |
# | 3 | $Bf + 2Bf$ |
#
# Stage 3 sends 1.5 times the bytes of DDP. For this price, the training state (weights, gradients, optimiser
# state) can be $N$ times as large; activations are not divided.
#
# ## 7 · For real: the same training
#
# The next cell but one runs all four stages on 4 ranks, with the same samples.
#
# **Predict, then measure.** How large is the largest difference of a weight to stage 0 after the last step? 0 if they are
# equal, about 1e-7 if they are equal up to rounding, about 0.1 as between two trainings with other samples.

# %% id="predict_apart" tags=["prediction"]
apart_guess = {"stage 1": None, "stage 2": None, "stage 3": None}

# %% id="run_training" tags=["demo"]
require_numbers(apart_guess)
runs = {stage: run_ranks(train, 4, stage, STEPS) for stage in STAGES}
apart = {
    f"stage {stage}": max(float((a - b).abs().max()) for a, b in zip(ranks[0][1], runs[0][0][1]))
    for stage, ranks in runs.items()
    if stage > 0
}
print(f"largest difference of a weight to stage 0 after {STEPS} steps:")
print(compared(apart_guess, apart, "{:.1e}".format))
losses = {stage: zip(*(by_step for by_step, _, _ in ranks)) for stage, ranks in runs.items()}
figures.losses({stage: [sum(step) / 4 for step in steps] for stage, steps in losses.items()})

# %% [markdown] id="memory_text"
# The curves are equal: sharding changes storage and communication, not the computation. Here even the weights are
# equal bit by bit, because with these sizes all stages add in the same order. On GPUs, or with other sizes, the order
# of additions differs: expect "equal up to rounding", about 1e-7.
#
# And the memory? In the same runs each rank counted the bytes of state in memory after the last backward.
# This is the figure of the ZeRO paper again, now for **your** three stages on real ranks.

# %% id="show_memory" tags=["demo"]
own = {stage: ranks[0][2] for stage, ranks in runs.items()}
numbers = sum(weight.numel() for weight in weights_of())
figures.stages(own, {stage: state_bytes(numbers, 4, stage) for stage in STAGES}, 4, "KiB")

# %% [markdown] id="memory_lesson"
# Where are the bars longer than the diamonds? In stages 1 and 2 your pieces are *copies* of weights that the
# rank also has whole: $4\Psi/N$ bytes more than the formula. The library moves the parameters into one flat
# buffer and makes each piece a *view* of it (`dlo_lib/parallel/zero/flat_params.py`), so it needs no copy.

# %% [markdown] id="offload_text"
# ## 8 · Offload
#
# **Core · 15 min · ●●○**
#
# The optimiser's state is needed once a step, so it need not be in the memory of the GPU. ZeRO-Offload keeps it
# in CPU memory, and the CPU computes the update. The GPU keeps pieces of weights and gradients in 16 bits; the
# CPU has the **master weights**, a copy of the pieces in fp32, because an update that is much smaller than a
# weight is lost in 16 bits.
#
# Write `OffloadedOptimizer(pieces, make_optimizer)` for this rank's pieces, in 16 bits (bf16 or fp16):
#
# - `__init__` makes the master weights, one `nn.Parameter` for each piece, in fp32 and on the CPU, and one
#   optimiser for them: `make_optimizer(masters)`.
# - `step` gives each master the gradient of its piece: moved to the CPU in 16 bits, then cast to fp32. It runs
#   the optimiser's step and copies the new values into the pieces **in place**. A piece whose gradient is `None` in a
#   step keeps its value in this step. After the step no gradient is left, neither of a piece nor of a master.
#
# `tensor.to("cpu", torch.float32, copy=True)` makes a copy even when the tensor is on the CPU already, as on a
# machine without GPU.

# %% nbgrader={"grade_id": "offload", "solution": true}
class OffloadedOptimizer:
    """An optimiser with its state and the fp32 master weights in CPU memory.

    The pieces are in 16 bits, on any device.
    """

    def __init__(self, pieces: list, make_optimizer) -> None:
        ### BEGIN SOLUTION
        self.pieces = list(pieces)
        self.masters = [nn.Parameter(piece.detach().to("cpu", torch.float32, copy=True)) for piece in self.pieces]
        self.optimizer = make_optimizer(self.masters)
        ### END SOLUTION

    def step(self) -> None:
        """Update the masters on the CPU, and the pieces from them."""
        ### BEGIN SOLUTION
        for piece, master in zip(self.pieces, self.masters):
            master.grad = None if piece.grad is None else piece.grad.to("cpu").float()
            piece.grad = None
        self.optimizer.step()
        for piece, master in zip(self.pieces, self.masters):
            piece.data.copy_(master.data)
            master.grad = None
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_offload", "grade": true}
lab.check("offload")

# %% [markdown] id="offload_after"
# Each step now has three parts that DDP does not have: gradients go to the CPU ($2\Psi/N$ bytes), weights return
# ($2\Psi/N$ bytes), and the CPU computes the update. The cell measures the third part with your class, on the cores
# of this machine, and scales it to the 3.2 billion parameters of the model on 1, 8 and 64 ranks. (Here each rank
# has the cores of this machine for itself; on a node, 8 ranks share the cores.)
#
# **Predict, then measure.** How many seconds does this CPU need for the update of a rank's share? The memory limits
# it, not the arithmetic: a step reads and writes about 40 bytes a parameter (master, moments, gradient and piece), and
# a few cores move 10 to 30 GB/s if no other program uses them. The cell also prints what a plain copy moves on this
# machine now, and the update that this speed allows.

# %% id="predict_update" tags=["prediction"]
update_guess = {"1 rank": None, "8 ranks": None, "64 ranks": None}  # seconds

# %% id="run_offload" tags=["demo"]
require_numbers(update_guess)
def seconds_of_update(numbers: int, repeats: int = 5) -> float:
    """The shortest step of `OffloadedOptimizer` for one piece of `numbers` parameters."""
    piece, times = nn.Parameter(torch.randn(numbers).bfloat16()), []
    optimizer = OffloadedOptimizer([piece], lambda masters: torch.optim.AdamW(masters, lr=0.01, fused=True))
    for _ in range(repeats):
        piece.grad = torch.randn(numbers).bfloat16()
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return min(times[1:])  # the first step allocates the moments


def copied_per_second(numbers: int, repeats: int = 5) -> float:
    """The bytes per second that a copy of fp32 numbers reads and writes, the fastest of several."""
    source, target, times = torch.ones(numbers), torch.empty(numbers), []
    for _ in range(repeats):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 2 * 4 * numbers / min(times)


speed, each = copied_per_second(NUMBERS), seconds_of_update(NUMBERS) / NUMBERS
print(f"a copy moves {speed / 1e9:.1f} GB/s, which allows {1e9 * 40 / speed:.2f} ns a parameter")
print(f"measured on {torch.get_num_threads()} thread(s): {1e9 * each:.2f} ns a parameter, with the copies")
update = {f"{world} rank{'s' if world > 1 else ''}": each * psi / world for world in (1, 8, 64)}
print(compared(update_guess, update, "{:.2f} s".format))
predicted_bars(update, update_guess, "seconds of an update", log=True)

# %% [markdown] id="offload_compare"
# Is this long? The figure compares it with the computation of the step. This machine may have no GPU, so two
# quantities are computed, not measured: the transfer at 25 GB/s (PCIe 4, sixteen lanes, in practice), and the
# computation of 6 floating-point operations a parameter and token at 40 % of 312 TFLOP/s.

# %% id="show_offload" tags=["demo"]
tokens = [2**k for k in range(10, 21)]
transfer = {name: 2 * 2 * psi / world / 25e9 for name, world in zip(update, (1, 8, 64))}
figures.offload(tokens, [6 * psi * count / (0.4 * 312e12) for count in tokens], transfer, update)

# %% [markdown] id="offload_lesson"
# The computation grows with the number of tokens, offload does not. With enough tokens a step its cost is
# small, and with N ranks each moves and updates only its share. So offload is combined with ZeRO-2 or ZeRO-3
# and with gradient accumulation. A node also has more cores than this machine, and all of them are free while
# the GPUs compute.
#
# ### ZeRO-Infinity: the state on a disk
#
# The next memory is a disk (NVMe). The cell moves the master weights and the moments of your
# `OffloadedOptimizer` into a file that is mapped into memory, and measures what the process holds itself, and
# the time of a step with and without writing the file to the disk. Your class does not change.

# %% id="run_infinity" tags=["demo"]
from dlo_lib.labkit.process_memory import private_bytes


def stepping(in_a_file: bool, to_disk: bool, repeats: int = 8) -> tuple[int | None, float]:
    """Private bytes of this process for the state, and the shortest step."""
    before = private_bytes()
    piece, made, times = nn.Parameter(torch.zeros(NUMBERS, dtype=torch.bfloat16)), [], []
    optimizer = OffloadedOptimizer([piece], lambda masters: made.append(torch.optim.AdamW(masters, lr=0.01, fused=True)) or made[0])
    with alive.file_for(3 * 4 * NUMBERS) as file:
        for step in range(1 + repeats):
            piece.grad = torch.full((NUMBERS,), 0.01, dtype=torch.bfloat16)
            began = time.perf_counter()
            optimizer.step()
            if to_disk:
                file.write_to_disk()
            times.append(time.perf_counter() - began)
            if step == 0 and in_a_file:
                file.move_here(made[0])
        after = private_bytes()
    return None if before is None else after - before, min(times[1:])


for name, chosen in {"in memory": (False, False), "in a file": (True, False), "in a file, written to disk in each step": (True, True)}.items():
    held, seconds = run_ranks(stepping, 1, *chosen)[0]
    print(f"{name:40}: {'?' if held is None else f'{held / 2**20:6.1f}'} MiB held, {1e3 * seconds:7.1f} ms a step")

# %% [markdown] id="infinity_lesson"
# The state has 12 bytes a parameter, and the process no longer holds them. While the file fits into the free
# memory of the machine, the kernel keeps its pages there, so a step takes about as long as before. (The first line can
# be up to twice as long: there a step may get new pages for its temporary gradients from the system; after the move it
# reuses those that the state has left.) The last line is what remains when it does not fit: each step writes 12 bytes
# a parameter, and also reads them. This is why ZeRO-Infinity divides the state over the disks of *all* nodes, and reads the next piece while it updates this
# one.
#
# ## 9 · What ZeRO does not divide
#
# The cell measures the peak of a whole step of ZeRO-3, on one of 64 ranks, without and with activation
# checkpointing. Each bar is at its own peak, and the label says when that is. (About 30 s.)

# %% id="show_rest" tags=["demo"]
reports = {
    name: measure_memory(MODEL, 1, SEQ, checkpointing=on, parallel="zero3", world_size=64)
    for name, on in (("ZeRO-3", False), ("ZeRO-3, checkpointing", True))
}
figures.rest(reports)

# %% id="show_checkpoints" tags=["demo"]
config = model_config(MODEL)
kept = config.num_layers * SEQ * config.hidden * 4
print(
    f"inputs of all blocks, kept for backward: {kept / GIB:.2f} GiB; "
    f"divided over 8 ranks of tensor parallelism: {kept / 8 / GIB:.2f} GiB"
)
print(
    f"one buffer with all gradients: {4 * psi / GIB:.2f} GiB; "
    f"buckets of 25 MiB: {2 * 25 / 1024:.2f} GiB for two of them"
)

# %% [markdown] id="rest_lesson"
# ZeRO-R is the name of three remedies for what is left:
#
# - **activations**: data parallelism does not divide them, because every rank has other samples. Checkpointing
#   keeps the input of each block only. Where several ranks keep the *same* input (tensor parallelism, lab 19),
#   each keeps a part of it and gathers it for backward: the first line that the cell prints. They can also go
#   to CPU memory.
# - **buffers**: a message of fixed size instead of one that grows with the model: the second line. Your hooks
#   of step 5 do this parameter by parameter, and buckets (lab 11) do it with fewer messages.
# - **fragments**: short-lived and long-lived tensors of different sizes leave holes in the memory, and a large
#   tensor then does not fit although enough bytes are free. DeepSpeed copies the long-lived ones into one
#   region. In PyTorch, try `PYTORCH_ALLOC_CONF=expandable_segments:True` first.
#
# Why has the second bar no activations, and why is it not as small as the state? (Which unit is the largest, and when
# is it whole?)
#
# <details><summary>Answer</summary>
#
# With checkpointing the peak is another moment, the end of backward: the activations of all blocks are gone by then.
# The last unit of backward is the largest one, the tied embedding (1.5 GiB in fp32). It is whole, and so is its
# gradient; no number of ranks divides them. These are 3.0 GiB. The other 1.8 GiB are the block that was computed last and is still
# whole (0.4), the gradient of the embedding in 16 bits, from which the one in fp32 is cast (0.7), and this rank's share of
# weights, gradients and optimiser state (0.7).
#
# </details>
#
# ## 10 · At scale
#
# In `dlo_lib.train`, one option selects the stage. `cluster.submit` is one call for a cluster and for this
# machine: with `dry_run` it returns the script for SLURM; without SLURM it runs the job here, with the same
# options, two processes and a small model. A second identical call finds the same job. (20 s to a minute, because the job starts its
# own processes.)

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster
from dlo_lib.labkit import at_scale

flags = ["--parallel", "zero2", "--batch", "2", "--accumulation", "2", "--clip", "1.0"]
large = ["--model", MODEL, "--seq", str(SEQ), "--precision", "bf16", "--steps", "100"]
little = ["--model", "tiny", "--seq", "32"]
little += ["--steps", f"{2 * STEPS}", "--log-every", f"{STEPS // 2}"]
where = {"gpus": 16, "site": "jean-zay-a100", "account": "abc"}
script = cluster.submit("dlo_lib.train", [*large, *flags], **where, dry_run=True)
print("For SLURM, 2 nodes of 8 GPUs:", at_scale.directives(script), sep="\n")
job = cluster.submit("dlo_lib.train", [*little, *flags], gpus=GPUS).wait()
print("Here, 2 ranks of the small model:")
print(at_scale.steps(job))

# %% [markdown] id="standard_text"
# ## 11 · The same with what you will use on Monday
#
# PyTorch's stage 1 is `ZeroRedundancyOptimizer`, behind DDP. It passes the checks of step 3, except “One optimiser, made once, of one
# piece of each parameter”, because it gives each parameter to one rank as a whole.

# %% id="check_standard" tags=["demo", "read"]
from torch.distributed.optim import ZeroRedundancyOptimizer


def standard(parameters, make_optimizer):
    return ZeroRedundancyOptimizer(parameters, make_optimizer)


lab.check("stage1", instead={"ShardedOptimizer": standard})

# %% [markdown] id="standard_table_text"
# The table compares both on 2 ranks: 8 matrices of 256 × 256, AdamW, the shortest of 20 steps of the optimiser,
# the optimiser's state on a rank, and the bytes that a rank passes to communication in a step.

# %% id="show_standard" tags=["demo", "read"]
from dlo_lib.labkit.side_by_side import Form, lines_of, table


def optimiser_steps(make, repeats: int) -> tuple[float, int]:
    """The shortest step after the first, and the bytes of the optimiser's state on this rank."""
    torch.set_num_threads(1)
    random, times = torch.Generator().manual_seed(0), []
    parameters = [nn.Parameter(torch.randn(256, 256, generator=random)) for _ in range(8)]
    optimizer = make(parameters, adamw)
    for _ in range(1 + repeats):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        dist.barrier()
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return min(times[1:]), alive.state()["optimizer"]


forms = []
own = (piece_of, whole, ShardedOptimizer.__init__, ShardedOptimizer.step)
for name, make, code in (
    ("yours, step 3", ShardedOptimizer, own),
    ("ZeroRedundancyOptimizer", standard, (standard,)),
):
    seconds, state = (max(column) for column in zip(*run_ranks(optimiser_steps, 2, make, 20)))
    traced = [run_ranks(optimiser_steps, 2, make, repeats, trace=True) for repeats in (1, 2)]
    two, three = (run.trace.bytes(rank=0) for run in traced)
    forms.append(Form(name, lines_of(*code), seconds, three - two, state))
print(table(forms))

# %% [markdown] id="standard_lesson"
# The bytes are equal. PyTorch gives each *whole parameter* to one rank and broadcasts it after the step, so no
# parameter is cut and an optimiser that needs matrices works, but a rank with one very large parameter holds
# more than 1/N. Which is faster depends on the number and the sizes of the parameters.
#
# Stages 2 and 3 of PyTorch are `fully_shard`. It divides the parameters of a module over the ranks, and gathers them by hooks before the
# module computes, in forward and in backward. The next table compares your stage 3 with it, for 8 layers of 256 × 256 on 2 ranks: the
# shortest of 10 steps (forward and backward), the most memory that the tensors of a rank take in a step, and the bytes that it sends with
# ring algorithms. The line below it compares the gradients of both.

# %% id="show_stage3" tags=["demo", "read", "nbval-check-output"]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dlo_lib.labkit.measured_step import peak_of_a_step, sent_in_last_step


def with_fully_shard(model):
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def layers_of(form: str):
    """Eight linear layers in this form, and the parameters that this rank has of them."""
    torch.set_num_threads(1)
    random, rank, world = torch.Generator().manual_seed(0), dist.get_rank(), dist.get_world_size()
    weights = [torch.randn(256, 256, generator=random) / 16 for _ in range(8)]
    if form == "yours":
        pieces = [nn.Parameter(piece_of(weight, rank, world)) for weight in weights]
        layers = [lambda x, piece=piece: sharded_linear(x, piece, (256, 256)) for piece in pieces]
        return layers, pieces
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in weights))
    for layer, weight in zip(model, weights):
        layer.weight.data.copy_(weight)
    with_fully_shard(model)
    return [model], list(model.parameters())


def stage3_step(form: str):
    """A function that runs forward and backward, and returns the gradients that this rank has."""
    layers, parameters = layers_of(form)
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1 + dist.get_rank()))

    def step():
        for parameter in parameters:
            parameter.grad = None
        out = x
        for layer in layers:
            out = layer(out)
        out.square().mean().backward()
        grads = [parameter.grad for parameter in parameters]
        return grads if form == "yours" else [grad.to_local().flatten() for grad in grads]

    return step


def stage3_time(form: str, repeats: int) -> tuple[float, list[torch.Tensor]]:
    """The shortest step after the first, and the gradients of the last one."""
    step, times = stage3_step(form), []
    for _ in range(1 + repeats):
        dist.barrier()
        began = time.perf_counter()
        grads = step()
        times.append(time.perf_counter() - began)
    return min(times[1:]), grads


def stage3_peak(form: str) -> int:
    return peak_of_a_step(lambda: stage3_step(form))


own = (piece_of, whole, Gather.forward, Gather.backward, sharded_linear)
forms, grads = [], {}
for name, code in {"yours": own, "fully_shard": (with_fully_shard,)}.items():
    run = run_ranks(stage3_time, 2, name, 10, trace=True)
    grads[name] = [grad for _, of_rank in run for grad in of_rank]
    seconds, sent = max(seconds for seconds, _ in run), sent_in_last_step(run.trace)
    peak = max(run_ranks(stage3_peak, 2, name))
    forms.append(Form(name, lines_of(*code), seconds, sent, peak))
print(table(forms, measured="forward and backward"))
pairs = zip(grads["yours"], grads["fully_shard"])
largest = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
print(
    "largest difference of a gradient, relative to the largest gradient of its layer: "
    f"{largest:.1g}"
)

# %% [markdown] id="stage3_lesson"
# The gradients are equal, and both send $3Bf$: `fully_shard` also gathers each layer in forward and in backward, and reduce-scatters its
# gradient. Both hold about the same, because only one layer is whole at a time, with its whole gradient. `fully_shard` computes
# nothing twice: its hooks free the memory of the whole weight and fill it again before backward, where you use `checkpoint`. Its time on
# this machine says little, because two ranks share the cores with their messages. On GPUs it gathers the next layer while one computes. Lab 15
# builds these hooks, and lab 16 makes them fast.
#
# ## 12 · The same with DeepSpeed
#
# DeepSpeed, where ZeRO comes from, reads the stage from a JSON file. You will meet such files on clusters, also
# through Accelerate and Lightning. Read this one; the table says which of your functions each line selects.
#
# ```json
# {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
#  "bf16": {"enabled": true},
#  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": true,
#                        "offload_optimizer": {"device": "cpu", "pin_memory": true}}}
# ```
#
# | line | meaning | here |
# |---|---|---|
# | `stage` 0, 1, 2, 3 | what is divided; 0 when the line is missing | steps 3, 5, 6 |
# | `reduce_bucket_size` | *elements* of gradients in a message, not bytes | step 5, with buckets |
# | `gradient_clipping` | largest norm of all gradients; 0 is none | step 4 |
# | `bf16` | weights and gradients in 16 bits, master weights in fp32 | step 8 |
# | `offload_optimizer` | `"cpu"`: ZeRO-Offload, `"nvme"`: ZeRO-Infinity, with its path | step 8 |
# | `train_batch_size` | sequences in a step of **all** ranks: `train_micro_batch_size_per_gpu` × `gradient_accumulation_steps` × number of ranks | lab 11 |
#
# Two of the three numbers of the last line are enough; DeepSpeed computes the third, and refuses to start if
# they contradict each other.
#
# Read the file for a job of 16 GPUs. How many backward passes does a step have? How many bytes has a full bucket
# of gradients in bf16? What happens with the same file on 48 GPUs?
#
# <details><summary>Answers</summary>
#
# A step has $256 / (4 \times 16) = 4$ backward passes. A full bucket has $5 \cdot 10^8$ elements of 2 bytes, so $10^9$ bytes. On 48 GPUs,
# $256 / (4 \times 48)$ is not a whole number: DeepSpeed refuses to start.
#
# </details>
#
# The cell trains the MLP of step 7 with DeepSpeed on 2 ranks, three steps in each stage, and compares the losses with
# those of **your** stage 0. Without DeepSpeed it shows what it gave on a machine that has it. Which line of the
# table will not be the one that you know from step 6?

# %% id="run_deepspeed" tags=["demo", "read"]
from functools import partial

from dlo_lib.labkit import columns
from dlo_lib.labkit.stored_results import StoredResult, measured_or_stored


def by_deepspeed(stage: int, steps: int) -> tuple[list[float], int]:
    """Train the MLP with DeepSpeed; return this rank's losses, and the bytes of its state."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    rank, model = dist.get_rank(), MLP()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = adamw(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (engine(x) - x.roll(1, 1)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, alive.state()["optimizer"]


def compared_with_deepspeed(stage: int) -> list[float]:
    """The largest difference of a loss to your stage 0; what is sent in a step, in B f, by kind;
    the optimiser's state, in bytes a parameter."""
    run = run_ranks(by_deepspeed, 2, stage, 3, trace=True)
    yours = run_ranks(train, 2, 0, 3)
    apart = max(
        abs(a - b)
        for (losses, _), (own, _, _) in zip(run, yours)
        for a, b in zip(losses, own)
    )
    sent = [
        run.trace.ring_bytes(kind, rank=0) / 3 / (4 * numbers / 2)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    ]
    return [apart, *sent, run[0][1] / numbers]


on_two_cores = StoredResult(
    "2 CPU cores",
    "2026-11-25",
    "DeepSpeed 0.19.8, torch 2.13, gloo",
    {
        "stage 0": [0.0, 2.0001, 0.0, 0.0, 8.001],
        "stage 1": [0.0, 2.0001, 0.0, 1.0, 4.0002],
        "stage 2": [0.0, 2.0001, 0.0, 1.0, 4.0002],
        "stage 3": [0.0, 0.0002, 1.0, 2.0, 4.0002],
    },
)
stages = {f"stage {stage}": partial(compared_with_deepspeed, stage) for stage in STAGES}
found = measured_or_stored(stages, on_two_cores, package="deepspeed")
kinds = ("all-reduce", "reduce-scatter", "all-gather")
rows = [("DeepSpeed", "losses differ by", *kinds, "optimiser's state")]
for name, (apart, *sent, each) in found.items():
    messages = [f"{times:.2f} B f" for times in sent]
    rows.append((name, f"{apart:.0e}", *messages, f"{each:.1f} bytes/parameter"))
print(columns(rows))

# %% [markdown] id="deepspeed_lesson"
# The losses are yours. The line of stage 2 is the unexpected one: this version of DeepSpeed averages the gradients
# of stages 1 and 2 with an all-reduce for each bucket, of which a rank keeps its piece (its option
# `use_multi_rank_bucket_allreduce`). That saves memory as stage 2 does, but it sends $3Bf$ instead of $2Bf$. Stage 3
# sends a reduce-scatter and two all-gathers, as your `Gather` does. So read what a library sends in a trace, not in
# a paper.

# %% [markdown] id="quiz_text"
# ## 13 · Quiz
#
# **Core · 5 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests only that every question has an
# answer; grading counts the right ones.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "c", "q2": "a", "q3": "d", "q4": "b", "q5": "c"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Your pieces are padded parameter by parameter. How many bytes does that waste for Llama 3.2 3B on 512
#   ranks? How many with one flat tensor of all parameters?
# - `shard_gradients` sends a message for each parameter. Put them into buckets, as in lab 11. (See
#   `dlo_lib/parallel/zero/sharded_ddp.py`.)
# - Which optimisers do *not* update each number separately? What would ZeRO need for LAMB, or for Muon?
#   (`PartitionBy.PARAMETERS` in `dlo_lib/parallel/zero/flat_params.py`.)
# - Save the state of stage 1 on 4 ranks and load it on 2. What must the checkpoint record?
#   (`dlo_lib/parallel/zero/state_dict.py`.)
#
# **What comes next.** Stage 3 in step 6 gathers each weight twice and computes each layer twice. Lab 15
# improves this: FSDP gathers a block at a time, just before its use, and frees it after.
#
# ## References
#
# - S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (2020), [arXiv:1910.02054](https://arxiv.org/abs/1910.02054)
# - J. Ren et al., *ZeRO-Offload: Democratizing Billion-Scale Model Training* (2021), [arXiv:2101.06840](https://arxiv.org/abs/2101.06840)
# - S. Rajbhandari et al., *ZeRO-Infinity* (2021), [arXiv:2104.07857](https://arxiv.org/abs/2104.07857)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
