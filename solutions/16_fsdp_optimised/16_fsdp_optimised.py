# %% [markdown] id="title"
# # 16 · FSDP, fast and small
#
# **What you will do.** The FSDP of lab 15 waits for every message. You make it fast: a plan first, then gathers
# that start ahead and reductions that end late, in hooks, on the same units. You write activation checkpointing. At
# the end PyTorch's `fully_shard` passes the same check as your form. Optional steps choose what stays whole between
# forward and backward, use two kinds of links well (HSDP), and measure a sweep of DDP, FSDP and FSDP with checkpointing.
#
# You need no GPU: ranks are processes on this machine (gloo), and Llama 3.2 is measured at true size on fake tensors.
#
# This lab builds on labs 13 (memory) and 15 (FSDP). You can skip lab 14 (ZeRO), which divides first the state of the optimiser, then
# gradients, then weights over the ranks. FSDP is its third stage, with one gather for each block instead of one for each weight.
#
# The core exercises and predictions take about 86 minutes, with the part of the file `own_fsdp.py` that
# you need. The rest of the core text, marked **Read**, and the demos take about 14 minutes more, so plan 100 minutes. The optional steps
# take 89 minutes more; nothing in the core needs them, so you can skip them and their figures. Each exercise has a check that answers at
# once; `lab.hint("name")` shows a nudge, then a pointer, then a sketch. If you are stuck at a step, `lab.use_reference("name")` lets you
# continue without its points.
#
# Words: shard (*fragment*), prefetch (*préchargement*), overlap (*recouvrement*), activation checkpointing (*recalcul des activations*), graph break (*rupture de graphe*).

# %% id="setup"
import os
from itertools import pairwise

import torch
import torch.distributed as dist
from own_fsdp import Unit, add_hooks, fill, make_units, reshard, start_reduce, wait_reduce
from torch import nn

from dlo_lib.grading import Lab
from dlo_lib.launch import run_ranks

GIB = 2**30
MODEL = os.environ.get("DLO_MODEL", "llama-3.2-3b")
POINTS = int(os.environ.get("DLO_POINTS", 3))  # batches measured for each line of the sweep
GPUS = int(os.environ.get("DLO_GPUS", 2))  # ranks of the small job near the end
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: ranks that wait
#
# **Read · 4 min**
#
# The FSDP of lab 15 does this for each block: gather, wait, compute, free; in backward the same, then average the
# gradient, and wait. Two ranks run one step of six layers tanh(x W), one layer a unit. The messages are real. The GPU is
# simulated: a layer takes at least 15 ms in forward and 30 ms in backward, in which the processor is free, as beside a GPU. What share of
# the step does a rank wait, on average? (The cell takes about 10 s.)

# %% id="predict_wait" tags=["prediction"]
# Shares of the step between 0 and 1, before and after your work
expected_wait = {"simple": None, "prefetch": None}

# %% id="show_why" tags=["demo"]
import figures
import sweep

from dlo_lib.labkit import predictions

predictions.require_numbers(expected_wait)

simple = run_ranks(sweep.traced_step, 2, sweep.simple_form, trace=True).trace
guess, share = {"simple": expected_wait["simple"]}, {"simple": sweep.waiting(simple)}
print(predictions.compared(guess, share, "{:.0%}".format))
figures.last_step(simple, "gather, wait, compute, free")

# %% [markdown] id="why_after"
# Blue is computing, red is waiting. Below them are the messages; a thin line before a message means that the other rank has not
# made the call yet, so no data moves. A blue block is longer than the 15 or 30 ms of the simulated GPU, because it also contains
# the work of the processor: a small matrix product, hooks, copies of weights. Seven gathers come before the first
# reduction: the simple form frees the last unit too, and gathers it again at once.
#
# While a layer is computed, the network is idle; while data is in transit, the layers wait. This is not necessary: unit 3
# could be in transit while unit 2 computes. GPUs have faster links, but they also compute faster: with few tokens a message takes
# *longer* than the computing.

# %% [markdown] id="plan_text"
# ## 1 · A plan
#
# **Core · 14 min · ●●○**
#
# A plan is a list of actions. Nothing runs yet: you can read, count and check a plan before any data moves.
#
# | action | meaning |
# |---|---|
# | `("gather", k)` | start the gather of the weights of unit k; **does not wait** |
# | `("forward", k)` | wait until unit k is whole, and compute it |
# | `("backward", k)` | the same for backward |
# | `("free", k)` | free the memory of the whole weights of unit k |
# | `("reduce", k)` | start to average the gradient of unit k; does not wait |
#
# Write `plan(units, reshard)` for one step: forwards 0, 1, ..., backwards in the opposite order, so that
#
# - when a unit computes, **the gather of the unit that computes after it has started**: of $k+1$ in forward, of $k-1$ in backward. The last
#   unit of forward is also the first of backward, and unit 0 is the last of backward: there is no gather ahead for them;
# - with `reshard=True`, **at most two units** are whole or in transit at any time, and each unit is gathered
#   again for backward, except the last one, which stays whole;
# - with `reshard=False`, units stay whole from forward to backward: every unit is gathered once. The other rules are the same;
# - the reduction of each gradient starts before the backward of the next unit, so that both overlap. It needs the gradient and not the
#   weights, so `free` and `reduce` may have either order. At the end every unit is free, and no unit is freed twice.


# %% nbgrader={"grade_id": "plan", "solution": true}
def plan(units: int, reshard: bool = True) -> list[tuple[str, int]]:
    """Return the actions of one step, in order."""
    ### BEGIN SOLUTION
    last = units - 1
    actions = [("gather", 0)]
    for k in range(units):
        if k < last:
            actions.append(("gather", k + 1))
        actions.append(("forward", k))
        if reshard and k < last:
            actions.append(("free", k))
    for k in reversed(range(units)):
        if reshard and k > 0:
            actions.append(("gather", k - 1))
        actions += [("backward", k), ("free", k), ("reduce", k)]
    return actions
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_plan", "grade": true}
lab.check("plan")

# %% id="show_plan" tags=["demo"]
figures.plans({"reshard=True": plan(4), "reshard=False": plan(4, reshard=False)})

# %% [markdown] id="policy_text"
# ## 2 · What to keep between forward and backward
#
# **Optional · 15 min · ●●○**
#
# No later core exercise needs this one.
#
# PyTorch calls this choice `reshard_after_forward`. `True` frees a unit after forward. `False` keeps it whole until its
# backward. A number $g$ is between them: $g$ ranks, mostly those of one node, hold the unit together until its backward, and
# each of them keeps $1/g$ of it. In this exercise `keep` is the number of ranks that hold a unit together:
#
# | `reshard_after_forward` | `keep` | gathered weights that a rank keeps of a unit after its forward | its gather in backward |
# |---|---|---|---|
# | `True` | `world` | none: it keeps its shard, which is not gathered | from all ranks |
# | $g$ | $g$ | $1/g$ of the unit | from $g$ ranks, inside the node |
# | `False` | 1 | the whole unit | sends nothing |
#
# Write `gather_cost(units, world, keep)`, where `units` are the bytes of the weights of each unit. The function returns two
# numbers, for one rank and step:
#
# - **peak**: the most bytes of gathered weights that the rank holds at once. While a unit computes in forward, the rank holds
#   this unit, the next one, which is already whole or in transit (your plan of step 1), and of each earlier unit the
#   part in the table;
# - **sent**: the bytes that a rank sends in all gathers together, with a ring: $B(n-1)/n$ for a unit of $B$ bytes and $n$ ranks. In
#   forward $n$ is `world`, in backward $n$ is `keep`.
#
# The last unit stays whole with every policy, so it has no gather in backward.


# %% nbgrader={"grade_id": "policy", "solution": true}
def gather_cost(units: list[int], world: int, keep: int) -> tuple[float, float]:
    """Return the peak bytes of gathered weights, and the bytes sent for gathers.

    Both are those of one rank and step.
    """
    ### BEGIN SOLUTION
    kept = 1 / keep if keep < world else 0
    peak = max(sum(units[k : k + 2]) + kept * sum(units[:k]) for k in range(len(units)))
    sent = sum(units) * (world - 1) / world + sum(units[:-1]) * (keep - 1) / keep
    return peak, sent
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_policy", "grade": true}
lab.check("policy")

# %% [markdown] id="policy_after"
# The left panel shows the FSDP of the library on 4 ranks with the three policies: the tracer counts its
# bytes, and diamonds are your function. The right panel shows the peak for the blocks of a large model on 64
# ranks, 8 per node.

# %% id="show_policy" tags=["demo"]
sent = {}
for keep in (4, 2, 1):
    trace = run_ranks(sweep.library_step, 4, keep, trace=True).trace
    _, predicted = gather_cost(sweep.library_units(), 4, keep)
    sent[keep] = (trace.ring_bytes("all_gather", rank=0), predicted)
blocks = sweep.block_bytes(MODEL)
figures.policies(sent, {keep: gather_cost(blocks, 64, keep)[0] / GIB for keep in (64, 8, 1)}, MODEL)

# %% [markdown] id="wrapping_text"
# ## 3 · What is a unit?
#
# **Optional · 28 min · ●●●**
#
# No later exercise needs this one. Its figure needs step 2 too.
#
# A message costs $\alpha$ seconds before the first byte, and $\beta$ seconds for each byte. Small units mean many
# messages, each with its $\alpha$. Large units mean few messages, but two units must be whole at once, and the rank
# waits for the whole first one.
#
# A unit is `(bytes, seconds)`: the size of its weights, and the time of its forward. As in your plan, the
# gather of unit $k+1$ starts when unit $k$ begins to compute, and not earlier. Write
#
# - `forward_time(units, alpha, beta)`: the seconds from the first gather to the end of the last forward;
# - `choose_units(blocks, limit, alpha, beta)`: the number of consecutive blocks in each unit, as a list such
#   as `[2, 2, 1]`. Two successive units may not have more than `limit` bytes together (nor may a single one);
#   among these cuts choose one with the **least forward time**. A unit has the bytes and the seconds of its
#   blocks together. There are at most 10 blocks, and one block per unit always fits.


# %% nbgrader={"grade_id": "wrapping", "solution": true}
def forward_time(units: list[tuple[int, float]], alpha: float, beta: float) -> float:
    """Return the seconds of a forward pass in which the next unit is gathered ahead."""
    ### BEGIN SOLUTION
    messages = [alpha + beta * size for size, _ in units]
    computing = [seconds for _, seconds in units]
    return messages[0] + sum(map(max, computing, messages[1:])) + computing[-1]
    ### END SOLUTION


def choose_units(
    blocks: list[tuple[int, float]], limit: int, alpha: float, beta: float
) -> list[int]:
    """Return the number of blocks in each unit."""
    ### BEGIN SOLUTION
    best, least = [], float("inf")
    for cuts in range(2 ** (len(blocks) - 1)):  # bit i: a new unit begins after block i
        starts = [0, *(i + 1 for i in range(len(blocks) - 1) if cuts >> i & 1), len(blocks)]
        units = [tuple(map(sum, zip(*blocks[a:b]))) for a, b in pairwise(starts)]
        fits = all(sum(size for size, _ in units[k : k + 2]) <= limit for k in range(len(units)))
        if fits and (seconds := forward_time(units, alpha, beta)) < least:
            best, least = [b - a for a, b in pairwise(starts)], seconds
    return best
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_wrapping", "grade": true}
lab.check("wrapping")

# %% [markdown] id="wrapping_after"
# The left panel shows your `forward_time` for the blocks of the model on 64 ranks, from units of one matrix (1/7
# of a block) to one unit for everything, with a fast and a slow link, for few and for many tokens. Each line is relative to the time with
# one block per unit, which the legend gives. (Two lines coincide: an eighth of the speed with eight times the tokens.) The right panel shows the cost in memory.

# %% id="show_wrapping" tags=["demo"]
figures.wrapping(sweep.wrapping_cases(MODEL, forward_time, gather_cost))

# %% [markdown] id="wrapping_lesson"
# One block per unit is a good rule. The rank always waits for the first unit, so large units are slow; on a slow link with few tokens
# small ones are slow too, because every message has its α. Two whole units of one block need little memory. With few
# tokens no cut makes the slow link fast: its messages take longer than the computing. More tokens per rank help; step 6 makes memory for
# them.

# %% [markdown] id="execute_text"
# ## 4 · A gather in two halves
#
# **Core · 22 min · ●●○**
#
# The FSDP of lab 15 is in the file `own_fsdp.py` of this folder, with the names of that lab. Read about 80 of its lines (10 minutes): the
# class `Unit`; `unshard`, `fill`, `reshard`; `start_reduce`, `wait_reduce`; the class `Simple` at the end. You can skip the rest: packing and
# `make_units` are those of lab 15, and `add_hooks` only calls the methods of `Simple`. You may put your own functions there.
#
# Four words. A unit is *whole* while its full weights are in memory. Its *row* is the packed part that this rank keeps. The *root*
# is the unit of all parameters outside the blocks; `add_hooks` gathers it before forward and frees it after backward. The *moments* of a
# step are the five points at which `add_hooks` calls a method: before and after the forward and the backward of each block, and at the
# end of backward.
#
# `unshard` gathers and waits. Split it:
#
# - `start_gather(unit)` starts the all-gather of `unit.row` with `async_op=True`, and stores the buffer (world, S) and
#   the handle as `unit.message`. It **does not wait**. If the unit is whole, or its message is in transit, it does
#   nothing: a second gather wastes bytes.
# - `wait_gather(unit)` makes the unit whole: it starts the gather if that was forgotten, waits for the handle, calls
#   `fill(unit, buffer)`, and sets `unit.message` to `None`, so that the buffer is freed. If the unit is whole, it does
#   nothing.
#
# `start_reduce` and `wait_reduce` in `own_fsdp.py` are the same split of `reduce_gradients`.


# %% nbgrader={"grade_id": "gather", "solution": true}
def start_gather(unit: Unit) -> None:
    """Start to gather the unit, unless it is whole or in transit."""
    ### BEGIN SOLUTION
    if unit.is_whole or unit.message is not None:
        return
    packed = unit.row.new_empty(dist.get_world_size(), unit.row.numel())
    unit.message = packed, dist.all_gather_into_tensor(packed.view(-1), unit.row, async_op=True)
    ### END SOLUTION


def wait_gather(unit: Unit) -> None:
    """Wait until the unit is whole."""
    ### BEGIN SOLUTION
    if unit.is_whole:
        return
    start_gather(unit)
    packed, handle = unit.message
    unit.message = None
    handle.wait()
    fill(unit, packed)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_gather", "grade": true}
lab.check("gather")

# %% [markdown] id="streams"
# <details><summary>On a GPU: streams (optional reading)</summary>
#
# On a GPU the same calls use *streams*, which are queues of kernels. NCCL runs a message on a separate stream, so
# the kernels of the current unit run meanwhile. `handle.wait()` does not stop the Python process: it makes the stream
# that computes wait for the message. The Python process runs ahead of the GPU, so it could allocate the buffers of
# many units before the first is computed; FSDP therefore lets the process wait for an event of an earlier unit. A
# buffer that one stream fills and another reads must not be reused too early: PyTorch keeps it until the event that
# follows its last use (`tensor.record_stream` is the older form).
#
# </details>

# %% [markdown] id="prefetch_text"
# ## 5 · Prefetch
#
# **Core · 20 min · ●●●**
#
# Now run your plan of step 1 inside the hooks. `add_hooks` calls these methods; `units` is the list of all blocks.
#
# | method | is called |
# |---|---|
# | `before_forward(units, k)`, `after_forward(units, k)` | around the forward of block k |
# | `before_backward(units, k)`, `after_backward(units, k)` | around the backward of block k |
# | `end_of_backward(units)` | once, after the last backward |
#
# Which actions of the plan belong to which method? `gather` is your `start_gather`, `free` is `reshard`, `reduce` is `start_reduce`.
#
# - Before block k computes, wait for block k and for no other message. The gather ahead may start before or after this wait.
# - The method that starts a reduction does not wait for it. `end_of_backward` waits for all reductions (`wait_reduce`).
# - The last block stays whole after forward. With `reshard_after_forward=False` every block does; there `start_gather` does nothing in
#   backward.
# - At $k = 0$ no block precedes. In Python `units[k - 1]` is then the *last* block. If its gather starts there, the next step
#   computes with the weights of this step.
#
# How many gathers has a step of six blocks, with and without freeing blocks after forward?

# %% id="predict_gathers" tags=["prediction"]
expected_gathers = {"freed after forward": None, "kept whole": None}  # of one step with 6 blocks


# %% nbgrader={"grade_id": "prefetch", "solution": true}
class Prefetch:
    """The moments of FSDP.

    While a unit computes, the next one is gathered and the previous one is reduced.
    """

    def __init__(self, reshard_after_forward: bool = True) -> None:
        self.reshard_after_forward = reshard_after_forward

    def before_forward(self, units: list[Unit], k: int) -> None:
        ### BEGIN SOLUTION
        start_gather(units[k])
        if k + 1 < len(units):
            start_gather(units[k + 1])
        wait_gather(units[k])
        ### END SOLUTION

    def after_forward(self, units: list[Unit], k: int) -> None:
        ### BEGIN SOLUTION
        if self.reshard_after_forward and k + 1 < len(units):
            reshard(units[k])
        ### END SOLUTION

    def before_backward(self, units: list[Unit], k: int) -> None:
        ### BEGIN SOLUTION
        start_gather(units[k])
        if k > 0:
            start_gather(units[k - 1])
        wait_gather(units[k])
        ### END SOLUTION

    def after_backward(self, units: list[Unit], k: int) -> None:
        ### BEGIN SOLUTION
        reshard(units[k])
        start_reduce(units[k])
        ### END SOLUTION

    def end_of_backward(self, units: list[Unit]) -> None:
        ### BEGIN SOLUTION
        for unit in units:
            wait_reduce(unit)
        ### END SOLUTION


# %% id="given_shard_fast"
def shard_fast(model: nn.Module, kind: type[nn.Module], reshard_after_forward: bool = True) -> None:
    """Apply FSDP to `model`, whose blocks are of this kind.

    Make the optimiser afterwards, from `model.parameters()`.
    """
    root, units = make_units(model, kind)
    add_hooks(model, root, units, Prefetch(reshard_after_forward))


# %% nbgrader={"grade_id": "test_prefetch", "grade": true}
lab.check("prefetch")

# %% [markdown] id="prefetch_after"
# The next cell runs the step of the beginning again, then with your form. (About 10 s.) The **order** is the same on every machine:
# how many gathers start while another unit computes? The first gather of a step cannot, because nothing computes before it. The
# **time** depends on the machine. (On a loaded one a rank also waits for the other rank, which no prefetch avoids: if the times
# disagree with the counts, run the cell again.)

# %% id="show_overlap" tags=["demo"]
from functools import partial

predictions.require_numbers(expected_gathers, expected_wait)

Prefetch().end_of_backward([])  # stops here if `Prefetch` is not written yet
kept_form = partial(shard_fast, reshard_after_forward=False)
simple, ahead, kept = (run_ranks(sweep.traced_step, 2, form, trace=True).trace for form in (sweep.simple_form, shard_fast, kept_form))
for name, trace in (("simple", simple), ("prefetch", ahead), ("prefetch, without freeing after forward", kept)):
    gathers, early = sweep.asked_ahead(trace)
    largest = trace.max_in_flight("all_gather", rank=0) / (4 * sweep.WIDTH**2)
    took = 1e3 * sweep.seconds_of_step(trace)
    print(f"{name}: {took:.0f} ms a step; {early} of {gathers} gathers started ahead; at most {largest:.0f} in transit at once")
counted = {"freed after forward": sweep.asked_ahead(ahead)[0], "kept whole": sweep.asked_ahead(kept)[0]}
print(predictions.compared(expected_gathers, counted))
print(predictions.compared(expected_wait, {"simple": sweep.waiting(simple), "prefetch": sweep.waiting(ahead)}, "{:.0%}".format))
ahead.to_perfetto("prefetch.json")  # open it on https://ui.perfetto.dev
figures.last_step(ahead, "your plan")

# %% id="show_waits" tags=["demo"]
from dlo_lib.labkit.predicted_bars import predicted_bars

predictions.require_numbers(expected_wait)

shares = {"simple": 100 * sweep.waiting(simple), "prefetch": 100 * sweep.waiting(ahead)}
guesses = predictions.scaled(expected_wait, 100)
predicted_bars(shares, guesses, "share of the step\nthat a rank waits (%)")

# %% id="show_gathers" tags=["demo"]
predicted_bars(counted, expected_gathers, "gathers of one step,\n6 blocks")

# %% [markdown] id="overlap_lesson"
# The gathers are below blue: computing hides them. Of a reduction the figure draws only the start, because gloo reports
# its end only to a process that waits for it; the reduction of unit $k$ is in transit while unit $k-1$ computes. The red at the beginning is the
# first gather, and the red at the end the last reduction: no computing is left that could hide them.

# %% [markdown] id="checkpoint_text"
# ## 6 · Activation checkpointing
#
# **Core · 20 min · ●●●**
#
# FSDP divides the state of the model, but not the activations: they grow with the batch of the rank, and soon
# take most of the memory. Checkpointing keeps only the **input** of each block. Backward computes the block a
# second time, with its graph, and then runs backward through it: a third more computing, for a fraction of
# the memory.
#
# Write it as an `autograd.Function`. `Checkpoint.apply(function, x)` returns `function(x)`. `torch.utils.checkpoint`,
# which the last section compares with yours, is refused here.
#
# - Forward computes without a graph, and keeps `function`, `x`, and the state of the random generator
#   (`torch.get_rng_state`): dropout must drop the same numbers again.
# - Backward detaches `x`, lets it require a gradient (`requires_grad_()`), computes again with the old random state, and calls
#   `torch.autograd.backward(output, grad)`. This also sets the `.grad` of all parameters that `function`
#   uses. Backward returns the gradient of each argument of forward. Autograd runs `backward` without recording: switch recording on
#   for the second computing (`torch.enable_grad()`).
# - Afterwards the random generator must have the state that it had before backward.


# %% nbgrader={"grade_id": "checkpoint", "solution": true}
class Checkpoint(torch.autograd.Function):
    """function(x), without its activations: backward computes them again."""

    @staticmethod
    def forward(ctx, function, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        ctx.function, ctx.random = function, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        ### BEGIN SOLUTION
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            output = ctx.function(x)
        torch.set_rng_state(now)
        torch.autograd.backward(output, grad)
        return None, x.grad
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_checkpoint", "grade": true}
lab.check("checkpoint")

# %% [markdown] id="checkpoint_after"
# The next cell measures cost and gain. (About 25 s.) It counts the FLOPs of a small stack of Llama blocks with your `Checkpoint`. It counts gathers
# on 2 ranks, and memory on 8 ranks at true size, with the FSDP of the library, which checkpoints each block in the same way. Under FSDP, does
# computing a block again need **one more gather**? In the library's form the embedding and the output layer are units too, so the small
# model has 6: the embedding, 4 blocks, the output layer. Without checkpointing a step makes 10 gathers: one for each unit in
# forward, one for each block in backward. (The output layer stays whole, and the backward of the embedding needs no weight. In your form both
# belong to the root, and the last block stays whole.)

# %% id="predict_checkpoint" tags=["prediction"]
# FLOPs with checkpointing divided by those without; gathers of a step with it
expected_checkpoint = {"FLOPs ratio": None, "gathers": None}
# GiB on one of 8 ranks: Llama 3.2 3B, 16 sequences of 512 tokens
expected_peak = {"without": None, "with checkpoints": None}

# %% id="show_checkpoint" tags=["demo", "nbval-check-output"]
predictions.require_numbers(expected_checkpoint, expected_peak)
plain, again = (sweep.flops(wrapper) for wrapper in (lambda block, x: block(x), Checkpoint.apply))
runs = [run_ranks(sweep.llama_step, 2, recompute, trace=True) for recompute in (False, True)]
gathers = [run.trace.count("all_gather", rank=0) for run in runs]
print(f"gathers of a step without checkpointing: {gathers[0]}")
costs = {"FLOPs ratio": again / plain, "gathers": gathers[1]}
print(predictions.compared(expected_checkpoint, costs))
forms = {"without": "fsdp", "with checkpoints": sweep.CHECKPOINTED}
peaks = {name: sweep.measured(MODEL, form, 16) for name, form in forms.items()}
figures.checkpointing(peaks, MODEL, expected_peak)

# %% id="show_checkpoint_cost" tags=["demo"]
predicted_bars(costs, expected_checkpoint, "with checkpointing")

# %% [markdown] id="checkpoint_lesson"
# There is no further gather: the unit is whole for its backward anyway, and the second forward runs in that
# time. (This would be different with several units in one checkpoint.)
#
# Look at what remains with checkpoints. Most of it is "logits and loss", with about 12 GiB: 8192 tokens, each with a score for 128 256 words,
# in several copies. Checkpoints around blocks do not change this part. Computing the loss for a few tokens at a time does.

# %% [markdown] id="hybrid_text"
# ## 7 · Two kinds of links: HSDP
#
# **Optional · 12 min · ●●○**
#
# No later exercise needs this one.
#
# Inside a node, GPUs exchange hundreds of GB/s; between nodes a tenth of that. With plain FSDP every gather
# crosses nodes. Hybrid sharding (HSDP) keeps **one copy of the model per node**, in shards. The ranks form a
# grid:
#
# ```
#                     shard groups (rows)        replica groups (columns)
# node 0   0 1 2 3    {0 1 2 3} {4 5 6 7}        {0 4} {1 5} {2 6} {3 7}
# node 1   4 5 6 7
# ```
#
# Gathers stay in a row. A gradient becomes the mean over **all** ranks in two steps: reduce-scatter it in the
# row, then all-reduce the piece in the column. In this order only 1/S of the gradient is reduced between
# nodes, where S is the size of a row.
#
# - `hybrid_groups(world, shard_size)`: the rows, and the columns, as two lists of lists of ranks;
# - `hybrid_mean(gradient, rows, columns)`: the piece of the mean over all ranks that belongs to this rank.
#   `gradient` is one-dimensional, and its length is a multiple of the shard size; `rows` and `columns` are
#   the two process groups of this rank. Do not change `gradient`.


# %% nbgrader={"grade_id": "hybrid", "solution": true}
def hybrid_groups(world: int, shard_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the shard groups (consecutive ranks) and the replica groups."""
    ### BEGIN SOLUTION
    rows = [list(range(first, first + shard_size)) for first in range(0, world, shard_size)]
    return rows, [list(range(place, world, shard_size)) for place in range(shard_size)]
    ### END SOLUTION


def hybrid_mean(gradient: torch.Tensor, rows, columns) -> torch.Tensor:
    """Return the piece of the mean over all ranks that belongs to this rank."""
    ### BEGIN SOLUTION
    shards, replicas = dist.get_world_size(rows), dist.get_world_size(columns)
    piece = gradient.new_empty(gradient.numel() // shards)
    dist.reduce_scatter_tensor(piece, gradient, group=rows)
    dist.all_reduce(piece, group=columns)
    return piece / (shards * replicas)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_hybrid", "grade": true}
lab.check("hybrid")

# %% [markdown] id="hybrid_after"
# The next cell runs one step of the library on 4 ranks that stand for 2 nodes of 2, FSDP against HSDP. The
# tracer knows the members of each call; in a ring a rank sends to the next one, so a byte either stays in the
# node or leaves it. Which share of the bytes leaves the node, in percent, on average over the ranks?

# %% id="predict_hybrid" tags=["prediction"]
# Percent of the bytes of a step that pass between nodes
expected_links = {"FSDP": None, "HSDP": None}

# %% id="show_hybrid" tags=["demo"]
predictions.require_numbers(expected_links)
crossings, leaving = {}, {}
for name, size in (("FSDP", 4), ("HSDP", 2)):
    parts = sweep.links(run_ranks(sweep.hybrid_step, 4, size, trace=True).trace, 2)
    crossings[name] = parts
    leaving[name] = 100 * parts["between nodes"] / sum(parts.values())
print(predictions.compared(expected_links, leaving, "{:.0f} %".format))
figures.links(crossings, expected_links)

# %% [markdown] id="hybrid_lesson"
# Fewer bytes pass between nodes, and no forward waits for them: what leaves the node is the all-reduce of a
# gradient, which can overlap with the rest of backward. The cost is a state of $16\Psi/S$ bytes instead of $16\Psi/N$.

# %% [markdown] id="sweep_text"
# ## 8 · The sweep
#
# **Optional · 8 min · ●○○**
#
# Which form wins depends on the memory of the card: more memory per sequence means a smaller batch, and each step has a
# fixed cost that a small batch pays often. A sweep measures it: DDP, FSDP and FSDP with checkpointing, several batches
# each. First write the decision that its table serves.
#
# `fastest(runs, limit)`: `runs` maps a name to measured points `(batch, peak_bytes, seconds)` of one rank. Among all
# points whose peak is at most `limit` bytes, return the name and the batch of the one with the most **sequences per second**, or
# `None` if there is no such point.


# %% nbgrader={"grade_id": "sweep", "solution": true}
def fastest(
    runs: dict[str, list[tuple[int, float, float]]], limit: float
) -> tuple[str, int] | None:
    """Return the name and the batch of the fastest point that fits."""
    ### BEGIN SOLUTION
    rates = {(name, batch): batch / seconds for name, points in runs.items() for batch, peak, seconds in points if peak <= limit}
    return max(rates, key=rates.get) if rates else None
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_sweep", "grade": true}
lab.check("sweep")

# %% [markdown] id="sweep_memory"
# The next cell measures the memory at true size, on fake tensors, for one of 8 ranks. (About a minute.) How many GiB does each form
# need at its largest batch: DDP with 8 sequences, FSDP with 32, FSDP with checkpointing with 32?

# %% id="predict_sweep_memory" tags=["prediction"]
# GiB, Llama 3.2 3B, sequences of 512 tokens
expected_memory = {"ddp": None, "fsdp": None, "fsdp + checkpointing": None}

# %% id="run_sweep_memory" tags=["demo"]
predictions.require_numbers(expected_memory)
curves = sweep.memory(MODEL, POINTS)
largest = {form: points[-1][1] / GIB for form, points in curves.items()}
print(predictions.compared(expected_memory, largest, "{:.1f} GiB".format))
figures.sweep_memory(curves, MODEL, expected_memory)

# %% [markdown] id="sweep_speed"
# Time needs real ranks, so this machine measures a small Llama: two processes, all three forms. (20 s to a minute.) Without GPUs
# the ranks share cores with other processes, so the seconds are *processor time*, the least of three steps. How many
# sequences per second, compared with DDP at its largest batch?

# %% id="predict_sweep" tags=["prediction"]
# Rate of the largest batch of each, divided by the rate of DDP at batch 8
expected_sweep = {"fsdp": None, "fsdp + checkpointing": None}

# %% id="run_sweep_speed" tags=["demo"]
predictions.require_numbers(expected_sweep)
times, speeds = {}, {}
for form, batches in sweep.SMALL.items():
    times[form] = run_ranks(sweep.measure, 2, form, sweep.some(batches, POINTS))[0]
    speeds[form] = [(batch, batch / seconds) for batch, seconds in times[form]]
rates = {form: points[-1][1] for form, points in speeds.items()}
ratios = {form: rates[form] / rates["ddp"] for form in expected_sweep}
print(predictions.compared(expected_sweep, ratios, "{:.2f}".format))
figures.sweep_speed(speeds, predictions.scaled(expected_sweep, rates["ddp"]))

# %% [markdown] id="sweep_speed_after"
# Every point of the next figure is measured: seconds as above, peaks of the small model on fake tensors. Your `fastest`
# chooses the winner for each size of memory. (About 15 s. If you have not written it, run `lab.use_reference("sweep")` first.)

# %% id="show_break_even" tags=["demo"]
runs = sweep.small_runs(times)
figures.break_even({mib: fastest(runs, mib * 2**20) for mib in sweep.limits(runs)}, runs)

# %% [markdown] id="break_even_lesson"
# DDP needs 16 bytes per parameter before the first token; with less memory, DDP cannot run at all. FSDP sends 1.5 times
# the bytes, and frees memory for a larger batch. Checkpointing computes a third more, and pays only where no other
# point fits, or where the larger batch divides the fixed cost of a step. Where the lines cross on GPUs depends on the
# card and on the links: the job array of step 11 measures it there. (It has not run on GPUs yet, so there are no stored results.)

# %% [markdown] id="offload_text"
# ## 9 · The optimiser on the host
#
# **Optional · 15 min · ●●○**
#
# After sharding, the state of the optimiser has $8\Psi/N$ bytes, and is used once per step. It can be in the
# memory of the processor. The device then keeps parameters in bf16 for computing; the host keeps **master**
# weights in fp32, and both moments.
#
# - `HostOptimizer(parameters, make_optimizer)` makes an fp32 copy of each parameter on the CPU, as an
#   `nn.Parameter`, and one optimiser for the copies, `make_optimizer(copies)`.
# - `step()` copies each gradient to its master (fp32, CPU) and **sets the `.grad` of the parameter to
#   `None`**, steps, and copies the masters into the parameters, in place, rounded to their dtype. It does not
#   change a parameter without gradient.
#
# Why masters? A bf16 number has 8 significant bits. An update of less than 1/512 of the weight is rounded
# away every time, so any number of such updates has no effect.


# %% nbgrader={"grade_id": "offload", "solution": true}
class HostOptimizer:
    """An optimiser with weights and state in fp32 on the CPU.

    The parameters may have any dtype and be on any device.
    """

    def __init__(self, parameters: list, make_optimizer) -> None:
        ### BEGIN SOLUTION
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True)) for parameter in self.parameters]
        self.optimizer = make_optimizer(self.masters)
        ### END SOLUTION

    def step(self) -> None:
        """Make one step of the optimiser, from the gradients of the parameters."""
        ### BEGIN SOLUTION
        for parameter, master in zip(self.parameters, self.masters):
            master.grad = None if parameter.grad is None else parameter.grad.to("cpu", torch.float32)
            parameter.grad = None
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters):
            if master.grad is not None:
                parameter.data.copy_(master.data)
                master.grad = None
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_offload", "grade": true}
lab.check("offload")

# %% [markdown] id="offload_after"
# The next cell takes 60 steps that each subtract 0.001 from a weight of 1. What is the weight afterwards?

# %% id="predict_offload" tags=["prediction"]
# After 60 steps of 0.001
expected_weight = {"bf16": None, "fp32": None, "bf16, master on the host": None}

# %% id="show_offload" tags=["demo", "nbval-check-output"]
predictions.require_numbers(expected_weight)
weights = sweep.tiny_updates(HostOptimizer)
print(predictions.compared(expected_weight, {name: values[-1] for name, values in weights.items()}))
figures.rounding(weights, expected_weight)

# %% [markdown] id="compile_text"
# ## 10 · torch.compile on an FSDP module
#
# **Optional · 6 min · ●●○**
#
# Lab 04 shows graphs and graph breaks. The hooks of FSDP, which free storages and start messages, break graphs; a hook
# that becomes part of a graph is worse, because the graph then keeps a decision that was made once.
#
# `compile_blocks(blocks, backend)`: compile what each block (an `nn.Module`) *computes*, in place, so that **its hooks
# stay outside** the graph. The hooks of a module run in `block(...)`, around `block.forward(...)`.


# %% nbgrader={"grade_id": "compile", "solution": true}
def compile_blocks(blocks, backend) -> None:
    """Compile each block in place; its hooks run outside the graph."""
    ### BEGIN SOLUTION
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_compile", "grade": true}
lab.check("compile")

# %% [markdown] id="compile_after"
# The next cell compiles a small Llama in the FSDP of lab 15: as a whole, then block by block with your function. (About
# 15 s. The FSDP of the library refuses to be compiled as a whole.) How many different graphs does the compiler make, for
# 4 equal blocks?

# %% id="predict_compile" tags=["prediction"]
expected_graphs = {"as a whole": None, "block by block": None}

# %% id="show_compile" tags=["demo"]
predictions.require_numbers(expected_graphs)
compile_blocks([], "eager")  # stops here if the function is not written yet
whole_graphs, block_graphs = run_ranks(sweep.graphs_under_fsdp, 1, compile_blocks)[0]
print(f"compiled as a whole: {len(whole_graphs)} graphs, of {whole_graphs} operations")
print(
    f"block by block:      {len(block_graphs)} graph for {sweep.LLAMA.num_layers} blocks, "
    f"of {block_graphs} operations"
)
graphs = {"as a whole": len(whole_graphs), "block by block": len(block_graphs)}
print(predictions.compared(expected_graphs, graphs))
predicted_bars(graphs, expected_graphs, "graphs")

# %% [markdown] id="scale"
# ## 11 · At scale
#
# The sweep is one job array: one element per point, in parallel, and a program writes the table. On GPUs it has a fourth
# form, FSDP with `torch.compile`. `cluster.submit` makes it from the file `sweep.py` beside this notebook; with
# `dry_run` it returns the script and submits nothing. Without SLURM the same call runs on this machine: one point, the
# tiny model, two processes.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster
from dlo_lib.labkit import at_scale

every_row = {"row": list(range(len(sweep.ROWS)))}
where = {"gpus": 8, "site": "jean-zay-a100", "account": "abc"}
script = cluster.submit("sweep.py", {"model": MODEL}, sweep=every_row, **where, dry_run=True)
print("For SLURM:", at_scale.directives(script), sep="\n")
job = cluster.submit("sweep.py", {"model": "tiny"}, gpus=GPUS, sweep={"row": [4]}).wait()
print(*sweep.table(job), sep="\n")

# %% [markdown] id="standard_text"
# ## 12 · The same with what you will use on Monday
#
# **Read · 5 min**
#
# PyTorch's `fully_shard` (FSDP2) has an option or a call for each exercise of this lab. It sends the **same messages in
# the same order** as your form, so it passes the checks of step 5, with one exception on this machine: “Only the block
# that computes is waited for”. FSDP2 leaves the overlap to the streams of the GPU. A CPU has no streams, so there it
# waits for every message at once; your form, with `async_op=True`, overlaps here too. How the options look:
#
# - Backward prefetches the previous unit by default; forward does so only for the modules named with
#   `set_modules_to_forward_prefetch`. (On GPUs the Python process runs ahead and starts the next gather early anyway;
#   the call matters where the process is the slow part.)
# - The last block is not resharded after forward, because backward begins with it.
# - `MixedPrecisionPolicy` gathers in bf16 and reduces in fp32.

# %% id="run_standard" tags=["demo", "read"]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def standard(
    model: nn.Module, kind: type[nn.Module], reshard_after_forward: bool = True, **options
) -> None:
    """Apply FSDP2 to `model`, with prefetch in both directions."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [module for module in model.modules() if isinstance(module, kind)]
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward and block is not blocks[-1],
            **options,
        )
    fully_shard(model, mesh=mesh, **options)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])


lab.check("prefetch", instead={"shard_fast": standard})

# %% [markdown] id="standard_checkpoint"
# `torch.utils.checkpoint` passes the check of step 6. Its form with `use_reentrant=False` does not use an
# `autograd.Function`: it works also if no input needs a gradient.

# %% id="show_standard_checkpoint" tags=["demo", "read"]
from torch.utils.checkpoint import checkpoint


class StandardCheckpoint:
    @staticmethod
    def apply(function, x):
        return checkpoint(function, x, use_reentrant=False)


lab.check("checkpoint", instead={"Checkpoint": StandardCheckpoint})

# %% [markdown] id="standard_measure"
# One table for all forms: the step of the beginning, six layers on a simulated GPU, 2 ranks. (20 to 40 s.) The time is that of the fastest
# of several steps. Memory is the most that the tensors of a rank take in a step: its shards, their gradients, what is gathered
# and what is in transit. Gathers and reductions are the bytes
# of whole tensors that a rank passes to these calls in a step. How many lines of code do you save? And how much memory, in MiB, do the two forms take that
# you wrote, and the simple one? A layer has 4 MiB of weights, and a rank keeps half of it.

# %% id="predict_standard" tags=["prediction"]
# MiB of tensors at the peak
expected_held = {"simple": None, "yours": None, "yours, kept whole": None}

# %% id="show_standard" tags=["demo", "read", "nbval-check-output"]
from dlo_lib.labkit import columns
from dlo_lib.labkit.figures import MIB, ms, size
from dlo_lib.labkit.side_by_side import lines_of

predictions.require_numbers(expected_held)

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
mixed = partial(standard, mp_policy=policy)
kept = partial(standard, reshard_after_forward=False)
moments = filter(callable, vars(Prefetch).values())
own_lines = lines_of(start_gather, wait_gather, shard_fast, *moments)
titles = ("time of a step", "memory", "gathers", "", "reductions", "lines of code")
rows, held = [("2 ranks, 6 layers", *titles)], {}
for name, shard, lines in (
    ("lab 15, simple", sweep.simple_form, None),
    ("yours", shard_fast, own_lines),
    ("yours, reshard_after_forward=False", kept_form, None),
    ("fully_shard", standard, lines_of(standard)),
    ("fully_shard, reshard_after_forward=False", kept, None),
    ("fully_shard, bf16", mixed, None),
):
    trace = run_ranks(sweep.traced_step, 2, shard, sweep.TIMED, trace=True).trace
    held[name] = max(run_ranks(sweep.tensors_at_peak, 2, shard))
    gathers = size(sweep.sent_in_a_step(trace, sweep.Kind.ALL_GATHER))
    reductions = size(sweep.sent_in_a_step(trace, sweep.Kind.REDUCE_SCATTER))
    sent = (gathers, f"in {sweep.asked_ahead(trace)[0]}", reductions)
    seconds = ms(sweep.least_seconds(trace))
    rows.append((name, seconds, size(held[name]), *sent, f"{lines or '-'}"))
print(columns(rows))
# The first three rows:
own = {name: nbytes / MIB for name, nbytes in zip(expected_held, held.values())}
predicted_bars(own, expected_held, "MiB of tensors\nat the peak")

# %% [markdown] id="standard_lesson"
# Your form gathers 11 units, the simple one 12. `reshard_after_forward=False` removes the second gather of each unit, and bf16 halves the bytes of
# the gathers. Reductions are the same everywhere.
#
# Your form takes no more memory than the simple one. The peak is near the end of backward, when the gradients of all shards exist: there
# no unit is left to gather ahead, and your form frees a unit before its gradient is reduced. Without freeing after forward the peak is
# higher.
#
# On a quiet machine your form is faster than the simple one, and than `fully_shard`, which
# overlaps nothing on a CPU; on a GPU both should overlap, which has not been measured yet. A loaded machine changes the times, not the bytes. Your lines do not count
# `own_fsdp.py`, which `fully_shard` replaces too.

# %% [markdown] id="quiz_text"
# ## 13 · Quiz
#
# **Core · 6 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests only whether every question has
# an answer; grading counts the right ones.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "b", "q2": "d", "q3": "a", "q4": "c", "q5": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - `Checkpoint.apply(function, x)` computes no gradients if `x` needs none, as in the first block after a
#   frozen embedding. Why? How does `use_reentrant=False` of `torch.utils.checkpoint` avoid this?
# - Two whole units at once is a choice. What do three gain, if the times of messages vary? Change `plan`, and
#   read `max_in_flight`.
# - Selective checkpointing keeps what is expensive (matrix products, attention) and computes again what is
#   cheap. Compare with the choice of the compiler.
# - A model need not be whole anywhere, even during its construction:
#   `dlo_lib/parallel/fsdp/deferred_init.py`. 64 ranks can read a checkpoint of 512:
#   `dlo_lib/parallel/checkpoint.py`.
#
# **What comes next.** Data parallelism has a limit: every rank still computes every layer. In lab 17 each
# rank computes only some of the layers.
#
# ## References
#
# - Y. Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel* (2023), [arXiv:2304.11277](https://arxiv.org/abs/2304.11277)
# - T. Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016), [arXiv:1604.06174](https://arxiv.org/abs/1604.06174)
# - V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models* (2022), [arXiv:2205.05198](https://arxiv.org/abs/2205.05198)
# - J. Ansel et al., *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation* (ASPLOS 2024)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
