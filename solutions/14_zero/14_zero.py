# %% [markdown] id="title"
# # 14 · ZeRO, stage by stage
#
# **What you will do.** Lab 13 ended at a floor: 16 bytes a parameter on every rank, however many ranks there are. Now you take the floor away. First the
# optimiser's state is divided over the ranks (ZeRO stage 1), then the gradients (stage 2), then the parameters themselves (stage 3). At each
# stage the training stays what it was, to the last digits, and the checks look at what counts: the memory of each process and the bytes between them.
#
# You need no GPU: ranks are processes on this machine (gloo), and the 3B model is measured at true size on fake tensors.
#
# Builds on labs 11 (data parallelism) and 13 (its limit). It takes about 85 minutes. Each exercise has a check that answers at once; `lab.hint("name")`
# gives a nudge, then a pointer, then a sketch. If a step stays stuck, `lab.use_reference("name")` lets you go on without its points.
#
# Words: shard (*fragment*), optimiser state (*état de l'optimiseur*), padding (*remplissage*), offload (*déchargement*).

# %% id="setup"
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlo_lib.grading import Lab
from dlo_lib.launch import run_ranks
from dlo_lib.optim import Phase
from dlo_lib.profiling import Part, measure_memory

GIB = 2**30
MODEL = os.environ.get("DLO_MODEL", "llama-3.2-3b")
STEPS = int(os.environ.get("DLO_STEPS", 20))  # of the training near the end
GPUS = int(os.environ.get("DLO_GPUS", 2))  # ranks of the small job near the end
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: 64 times the same numbers
#
# One rank of a job of 64, with DDP, Llama 3.2 3B, fp32 weights and AdamW. The cell runs one training step on fake tensors and reads what is there
# when backward is over. (About 10 s.)

# %% id="show_why" tags=["demo"]
import figures

from dlo_lib.models import model_config
from dlo_lib.models.counts import parameters_by_part

STATE = {"weights": Part.WEIGHTS, "gradients": Part.GRADIENTS, "optimizer": Part.OPTIMIZER_STATE}
STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}


def measured(stage: int, world: int) -> dict[str, int]:
    """Bytes of the state on one rank when backward is over."""
    report = measure_memory(MODEL, 1, 128, parallel=STAGES[stage], world_size=world)
    end = max(index for index, event in enumerate(report.events) if event.phase is Phase.BACKWARD)
    return {name: int(report.timeline[part][end]) for name, part in STATE.items()}


at_64 = {0: measured(0, 64)}
figures.copies(at_64[0], 64)

# %% [markdown] id="why_questions"
# All ranks hold the same three things. Ask of each: **when** does a rank need it, and **how much** of it at once?
#
# - An optimiser updates each number by itself. Which rank must know the moments of which parameter?
# - Who needs the average of a gradient, if each parameter is updated by one rank only?
# - And the weights of layer 7, while layer 20 is computed?

# %% [markdown] id="idea"
# ## The idea
#
# | stage | divided over the N ranks | bytes at rest (fp32, AdamW) | sent by a rank and step |
# |---|---|---|---|
# | 0 (DDP) | nothing | 16 Ψ | 2 B f |
# | 1 | optimiser state | 8 Ψ + 8 Ψ/N | 2 B f + B f with DDP, B f + B f with reduce-scatter |
# | 2 | and gradients | 4 Ψ + 12 Ψ/N | B f + B f |
# | 3 | and parameters | 16 Ψ/N | B f + 2 B f |
#
# Ψ is the number of parameters, B their bytes, f = (N-1)/N. An all-reduce *is* a reduce-scatter followed by an all-gather (lab 10): stage 2 puts the
# optimiser's step between the two halves. It sends no byte more than DDP does.

# %% [markdown] id="state_text"
# ## 1 · What is left on a rank
#
# Write the table's third column as a function, for any optimiser: `moments` is how many numbers it keeps for each parameter (AdamW 2, momentum 1,
# plain SGD 0). Everything is fp32. (What does not divide evenly is rounded up somewhere; here leave the fractions.)

# %% nbgrader={"grade_id": "state", "solution": true}
def state_bytes(parameters: int, world: int, stage: int, moments: int = 2) -> dict[str, float]:
    """Bytes of "weights", "gradients" and "optimizer" on one rank when backward is over."""
    ### BEGIN SOLUTION
    share = 4 * parameters / world
    return {
        "weights": share if stage >= 3 else 4 * parameters,
        "gradients": share if stage >= 2 else 4 * parameters,
        "optimizer": moments * (share if stage >= 1 else 4 * parameters),
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_state", "grade": true, "points": 5}
lab.check("state")

# %% [markdown] id="state_after"
# The well-known figure of the ZeRO paper, for this model, drawn from measurements at true size: bars are measured, one training step for each stage on
# one of 64 ranks; diamonds are your function.

# %% id="show_state" tags=["demo"]
psi = sum(parameters_by_part(model_config(MODEL)).values())
at_64 |= {stage: measured(stage, 64) for stage in (1, 2, 3)}
figures.stages(at_64, {stage: state_bytes(psi, 64, stage) for stage in STAGES}, 64, "GiB")

# %% [markdown] id="pieces_text"
# ## 2 · Pieces
#
# Everything below needs two functions.
#
# - `piece_of(tensor, rank, world)`: flatten the tensor, append zeros until `world` divides its length, cut it into `world` equal pieces, and return a **copy**
#   of this rank's piece, one-dimensional. A tensor of 7 numbers on 4 ranks has pieces of 2; the last one is a number and a zero.
# - `whole(piece, shape)`: the way back, with one **all-gather**: all ranks have a piece, all get the tensor of that shape.
#
# Every rank must be able to do this for tensors smaller than the number of ranks, too.

# %% nbgrader={"grade_id": "pieces", "solution": true}
def piece_of(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """A copy of this rank's piece: (ceil(numel / world),), padded with zeros."""
    ### BEGIN SOLUTION
    size = -(-tensor.numel() // world)
    padded = F.pad(tensor.detach().flatten(), (0, size * world - tensor.numel()))
    return padded[rank * size : (rank + 1) * size].clone()
    ### END SOLUTION


def whole(piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of that shape, from the pieces of all ranks."""
    ### BEGIN SOLUTION
    padded = piece.new_empty(piece.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(padded, piece)
    return padded[: torch.Size(shape).numel()].view(shape)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_pieces", "grade": true, "points": 5}
lab.check("pieces")

# %% [markdown] id="stage1_text"
# ## 3 · Stage 1: the optimiser's state
#
# Gradients are averaged on every rank already (DDP). Then all ranks would compute the same update from the same moments. Instead:
#
# - in `__init__`, make a piece of each parameter, as an `nn.Parameter`, and **one optimiser for the pieces**: `make_optimizer(pieces)` returns it. That
#   it can be any optimiser which treats each number by itself is the beauty of it.
# - in `step`, give each piece its piece of the gradient, let the optimiser step, and send the updated pieces to everybody: the new values go into the
#   parameters **in place** (`parameter.data.copy_`). A parameter whose gradient is `None` is left alone.
#
# The optimiser makes its moments in its first step. So a rank never holds more than 1/N of them.

# %% nbgrader={"grade_id": "stage1", "solution": true}
class ShardedOptimizer:
    """An optimiser whose state is divided over the ranks; gradients are averaged before `step`, on every rank."""

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


# %% nbgrader={"grade_id": "test_stage1", "grade": true, "points": 9}
lab.check("stage1")

# %% [markdown] id="norm_text"
# The checks let one process with an unsharded optimiser run beside yours, looked at what passed between the ranks, and at the memory of each process. A plain
# AdamW on every rank would give the same parameters; you would not have got the points.
#
# ## 4 · Clipping needs everybody
#
# Gradient clipping divides by the norm of **all** gradients. In stages 2 and 3 a rank has only its pieces. Write the norm of the whole from `pieces`, a list
# of this rank's pieces of gradients. All ranks must get the same number, or their weights drift apart.

# %% nbgrader={"grade_id": "norm", "solution": true}
def global_norm(pieces: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of the gradients of which every rank has pieces, a scalar tensor."""
    ### BEGIN SOLUTION
    squares = torch.stack([piece.square().sum() for piece in pieces]).sum()
    dist.all_reduce(squares)
    return squares.sqrt()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_norm", "grade": true, "points": 4}
lab.check("norm")

# %% [markdown] id="stage2_text"
# ## 5 · Stage 2: the gradients
#
# Stage 1 threw away (N-1)/N of what the all-reduce had brought. A **reduce-scatter** brings each rank only the sum of its own piece, for half the bytes. And
# when it happens *during* backward, a gradient is whole only for a moment.
#
# Write `shard_gradients(module, pieces)`: it registers a hook on each parameter (`register_post_accumulate_grad_hook`, lab 11). `pieces` are the pieces of
# the parameters, in the same order. As soon as a gradient is complete, the hook
#
# - adds this rank's piece of the **average over the ranks** to `piece.grad` (which may be `None`, or hold the piece of an earlier micro-batch),
# - sets the parameter's own `.grad` to `None`: nobody needs it any more.
#
# A reduce-scatter wants a one-dimensional tensor that `world` divides: pad as in step 2.

# %% nbgrader={"grade_id": "stage2", "solution": true}
def shard_gradients(module: nn.Module, pieces: list) -> None:
    """From now on, backward leaves averaged gradients in the pieces, and none in the parameters of `module`."""
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


# %% nbgrader={"grade_id": "test_stage2", "grade": true, "points": 8}
lab.check("stage2")

# %% [markdown] id="stage3_text"
# ## 6 · Stage 3: the parameters
#
# Now a rank keeps only pieces of the parameters. Before a layer computes, its weight is gathered. Where does its gradient go? Look at the gathering as a
# *function* of the pieces: its derivative takes the gradient of the whole weight on every rank to the gradient of each piece. All-gather gives
# every rank everybody's piece; its transpose **adds** what comes back for a piece from all ranks: a **reduce-scatter**. (Data parallelism wants
# the average, so divide by the number of ranks.)
#
# Write it as an `autograd.Function`, and a linear layer with it. Two rules for the layer:
#
# - the gradient arrives in `weight_piece.grad`, by autograd alone;
# - **the whole weight must not outlive the computation.** Autograd would keep it for backward: `F.linear` saves its weight. So let
#   `torch.utils.checkpoint.checkpoint(function, *tensors, use_reentrant=False)` forget what happens inside and do it again in backward.

# %% nbgrader={"grade_id": "stage3", "solution": true}
class Gather(torch.autograd.Function):
    """Pieces to the whole tensor; backward, gradients of the whole to the averaged gradient of the piece."""

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


def sharded_linear(x: torch.Tensor, weight_piece: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """x @ weight.T, where every rank has a piece of the weight of that shape (out, in), and nobody keeps the whole."""
    ### BEGIN SOLUTION
    def compute(x, weight_piece):
        return F.linear(x, Gather.apply(weight_piece, shape))

    return torch.utils.checkpoint.checkpoint(compute, x, weight_piece, use_reentrant=False)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_stage3", "grade": true, "points": 8}
lab.check("stage3")

# %% [markdown] id="stage3_after"
# What does it cost? The tracer counts what a rank sends in one step of an MLP of 4 layers, in units of B f: the bytes of its parameters, times (N-1)/N.
# Compare with the table at the beginning.

# %% id="run_traffic" tags=["demo"]
import alive

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
    """Losses, final weights, and the bytes of state when the last backward is over; every rank has samples of its own."""
    torch.set_num_threads(1)
    rank, world, model = dist.get_rank(), dist.get_world_size(), MLP()
    parameters = list(model.weights)
    pieces = [nn.Parameter(piece_of(parameter, rank, world)) for parameter in parameters] if stage >= 2 else []
    optimizer = ShardedOptimizer(parameters, adamw) if stage == 1 else adamw(pieces or parameters)
    if stage == 2:
        shard_gradients(model, pieces)
    if stage == 3:
        del model, parameters  # the pieces are all there is
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
for stage in STAGES:
    trace = run_ranks(train, 4, stage, 1, trace=True).trace
    sent = {kind: trace.ring_bytes(kind, rank=0) / unit for kind in ("all_reduce", "reduce_scatter", "all_gather")}
    if stage == 3:
        sent["all_gather"] -= 1  # the last line of train, which is not part of a step
    print(f"stage {stage}: {sum(sent.values()):.2f} B f  ", "  ".join(f"{kind} {times:.2f}" for kind, times in sent.items() if times))

# %% [markdown] id="same_text"
# Stage 3 sends half as much again as DDP. That is the whole price in bytes, and it buys a model N times as large. (Stage 1 here uses DDP's all-reduce and then
# sends the updates: the most of all. With stage 2's reduce-scatter it would cost what stage 2 costs.)
#
# ## 7 · For real: the same training
#
# All four stages, 4 ranks, the same samples. Before you run the cell: how far apart will the weights be after the last step?

# %% id="run_training" tags=["demo"]
runs = {stage: run_ranks(train, 4, stage, STEPS) for stage in STAGES}
for stage, ranks in runs.items():
    apart = max(float((a - b).abs().max()) for a, b in zip(ranks[0][1], runs[0][0][1]))
    print(f"stage {stage}: largest difference of a weight to stage 0 after {STEPS} steps {apart:.1e}")
figures.losses({stage: [sum(step) / 4 for step in zip(*(losses for losses, _, _ in ranks))] for stage, ranks in runs.items()})

# %% [markdown] id="memory_text"
# One curve: sharding decides who keeps and who sends, not what is computed. (Differences come only from the order in which sums are taken.)
#
# And the memory? In the same runs each rank counted the bytes of state that were alive when the last backward was over. So this is the figure of the
# ZeRO paper again, now of **your** three stages on real ranks.

# %% id="show_memory" tags=["demo"]
own = {stage: ranks[0][2] for stage, ranks in runs.items()}
numbers = sum(weight.numel() for weight in weights_of())
figures.stages(own, {stage: state_bytes(numbers, 4, stage) for stage in STAGES}, 4, "KiB")

# %% [markdown] id="memory_lesson"
# Where do the diamonds fall short of the bars? In stages 1 and 2 your pieces are *copies* of weights that the rank also has whole: 4 Ψ/N bytes more than the formula.
# The library moves the parameters into one flat memory and makes each piece a *view* of it (`dlo_lib/parallel/partition.py`): then the copy is gone.

# %% [markdown] id="settings_text"
# ## 8 · A DeepSpeed configuration
#
# DeepSpeed, where ZeRO comes from, is told everything in a JSON file, and clusters are full of such files:
#
# ```json
# {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
#  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}}}
# ```
#
# Write `settings(config, world)`: what this means for one job of `world` ranks, a dict with
#
# - `"parallel"`: `"ddp"`, `"zero1"`, `"zero2"` or `"zero3"`; without `zero_optimization` or without its `stage` it is stage 0;
# - `"batch"`: sequences of a rank in one backward pass, and `"accumulation"`: backward passes a step. Three numbers hang together:
#   `train_batch_size` = `train_micro_batch_size_per_gpu` × `gradient_accumulation_steps` × `world`. Any two (or all three) may be given; with only the first
#   or only the second, accumulation is 1. Raise `ValueError` if they contradict each other or do not divide;
# - `"bucket_bytes"`: `reduce_bucket_size` counts *elements* (5e8 when missing); gradients here are fp32;
# - `"max_norm"`: `gradient_clipping`, `None` when it is missing or 0;
# - `"state_device"`: the device of `offload_optimizer`, `None` without it (also for the device `"none"`).

# %% nbgrader={"grade_id": "settings", "solution": true}
def settings(config: dict, world: int) -> dict:
    """What a DeepSpeed configuration asks of a job of `world` ranks."""
    ### BEGIN SOLUTION
    zero = config.get("zero_optimization", {})
    total, batch, steps = (
        config.get(name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if total is None and batch is None:
        raise ValueError("neither train_batch_size nor train_micro_batch_size_per_gpu is given")
    if steps is None:
        steps = 1 if total is None or batch is None else total // (batch * world)
    if batch is None:
        batch = total // (steps * world)
    if batch < 1 or steps < 1 or (total is not None and batch * steps * world != total):
        raise ValueError(f"train_batch_size {total} is not {batch} x {steps} x {world} ranks")
    device = zero.get("offload_optimizer", {}).get("device", "none")
    return {
        "parallel": ("ddp", "zero1", "zero2", "zero3")[zero.get("stage", 0)],
        "batch": batch,
        "accumulation": steps,
        "bucket_bytes": 4 * int(zero.get("reduce_bucket_size", 5e8)),
        "max_norm": config.get("gradient_clipping") or None,
        "state_device": None if device == "none" else device,
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_settings", "grade": true, "points": 5}
lab.check("settings")

# %% [markdown] id="offload_text"
# ## 9 · Offload
#
# `offload_optimizer` keeps the moments, and a copy of the weights, in the memory of the processor, where the update is computed (ZeRO-Offload). Then at each
# step gradients go down and weights come up, through PCIe. How long does that take for a rank, and against what? The cell computes it, for 4 Ψ bytes
# each way, 25 GB/s (PCIe 4, sixteen lanes, in practice) and 6 floating-point operations a parameter and token on a GPU that reaches 40 % of 312 TFLOP/s.
# (The update itself, on the processor, comes on top.)

# %% id="show_offload" tags=["demo"]
tokens = [2**k for k in range(10, 19)]
transfer = {world: 2 * 4 * psi / world / 25e9 for world in (1, 8, 64)}
figures.offload(tokens, [6 * psi * count / (0.4 * 312e12) for count in tokens], transfer)

# %% [markdown] id="offload_lesson"
# The transfer does not depend on the batch, the computing does: with enough tokens a step, offload costs little. With stage 2 each rank only moves its share.
# Hence the combination: offload with ZeRO-2, and gradient accumulation.
#
# ## 10 · At scale
#
# `dlo_lib.train` has all stages, one word apart. `cluster.submit` is one call for a cluster and for here: with `dry_run` it shows the script that SLURM
# would get; without SLURM it runs here, the same options on two processes and a small model. The same call made again finds the same job.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster

flags = ["--parallel", "zero2", "--batch", "2", "--accumulation", "2", "--clip", "1.0"]
large = ["--model", MODEL, "--seq", "2048", "--precision", "bf16", "--steps", "100"]
little = ["--model", "tiny", "--seq", "32", "--steps", "4", "--log-every", "2"]

script = cluster.submit("dlo_lib.train", [*large, *flags], gpus=16, site="jean-zay-a100", account="abc", dry_run=True)
print("For SLURM, 2 nodes of 8 GPUs:", *(line for line in script.splitlines() if line.startswith(("#SBATCH", "srun"))), sep="\n  ")
job = cluster.submit("dlo_lib.train", [*little, *flags], gpus=GPUS).wait()
print("Here, 2 ranks of the small model:")
for line in job.metrics():
    print(f"  step {line.step}: loss {line.loss:.3f}, {line.tokens_per_second:,.0f} tokens/s, gradient norm {line.grad_norm:.2f}")

# %% [markdown] id="quiz_text"
# ## 11 · Quiz
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here says whether every question has an answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "c", "q2": "a", "q3": "d", "q4": "b", "q5": "c"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true, "points": 6}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Your pieces are padded parameter by parameter. How many bytes does that waste for Llama 3.2 3B on 512 ranks? What would one flat tensor of everything waste?
# - `shard_gradients` sends a message for each parameter. Put them into buckets, as in lab 11. (`dlo_lib/parallel/zero2.py` does.)
# - Which optimisers do *not* treat each number by itself? What would ZeRO need for LAMB, or for Muon? (`Split.PARAMETERS` in `dlo_lib/parallel/partition.py`.)
# - Save the state of stage 1 on 4 ranks and load it on 2. What must be written down? (`dlo_lib/parallel/zero_state.py`.)
#
# **What comes next.** Stage 3 in step 6 gathers each weight twice and computes each layer twice. Lab 15 does it properly: FSDP gathers a block at a time, ahead of
# its use, and frees it after.
#
# ## References
#
# - S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (2020), [arXiv:1910.02054](https://arxiv.org/abs/1910.02054)
# - J. Ren et al., *ZeRO-Offload: Democratizing Billion-Scale Model Training* (2021), [arXiv:2101.06840](https://arxiv.org/abs/2101.06840)
# - S. Rajbhandari et al., *ZeRO-Infinity* (2021), [arXiv:2104.07857](https://arxiv.org/abs/2104.07857)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
