# %% [markdown] id="title"
# # 16 · FSDP, fast and small
#
# **What you will do.** FSDP lets a model train that fits on no rank: each rank keeps 1/N of everything, gathers a unit before it computes, and frees it after. Done
# simply, it waits. Here you make it fast (the next unit arrives while this one computes), choose what to keep and what to send again, cut the model into good units,
# write activation checkpointing, move the optimiser off the device, use two kinds of links well, and compile. At the end you repeat the sweep of the original
# course: DDP, FSDP, FSDP with `torch.compile`, and find which one wins on which card.
#
# You need no GPU: ranks are processes on this machine (gloo), and Llama 3.2 is measured at true size on fake tensors.
#
# Builds on labs 13 (memory) and 14 (ZeRO; stage 3 is FSDP). It takes about 90 minutes. Each exercise has a check that answers at once; `lab.hint("name")` gives a
# nudge, then a pointer, then a sketch. If a step stays stuck, `lab.use_reference("name")` lets you go on without its points.
#
# Words: shard (*fragment*), prefetch (*préchargement*), overlap (*recouvrement*), activation checkpointing (*recalcul des activations*), graph break (*rupture de graphe*).

# %% id="setup"
import os
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.grading import Lab
from dlo_lib.launch import run_ranks

GIB = 2**30
MODEL = os.environ.get("DLO_MODEL", "llama-3.2-3b")
POINTS = int(os.environ.get("DLO_POINTS", 3))  # batches measured for each line of the sweep
BACKEND = os.environ.get("DLO_BACKEND", "")  # of torch.compile; empty: inductor where there is a C++ compiler
GPUS = int(os.environ.get("DLO_GPUS", 2))  # ranks of the small job near the end
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: ranks that wait
#
# The simplest FSDP that is right: for each unit, gather, compute, free; in backward the same, then average the gradient. `sharded_work.simple_step` in the folder of
# this lab is just that, 25 lines, with a stack of layers tanh(W x), one layer a unit. Two ranks run it; the trace shows what each process did.

# %% id="show_why" tags=["demo"]
import figures
import sharded_work

simple = run_ranks(sharded_work.traced_step, 2, sharded_work.simple_step, trace=True).trace
print("of the last step a rank has waited", ", ".join(f"{share:.0%} (rank {rank})" for rank, share in sharded_work.waiting(simple).items()))
figures.last_step(simple, "gather, wait, compute, free")

# %% [markdown] id="why_after"
# Blue is computing, red is waiting. While the processor multiplies, the network is idle; while data travels, the processor is idle. Nothing in the *task* asks for this:
# unit 3 could travel while unit 2 computes. GPUs have faster links, but they compute faster still: with few tokens a message takes *longer* than the computing.

# %% [markdown] id="plan_text"
# ## 1 · A plan
#
# What is to be done is a list of actions. Nothing runs yet: a plan can be looked at, counted, and checked before a single byte moves.
#
# | action | means |
# |---|---|
# | `("gather", k)` | ask for the weights of unit k; **does not wait** |
# | `("forward", k)` | wait until unit k is whole, and compute it |
# | `("backward", k)` | the same for backward |
# | `("free", k)` | give back the memory of unit k's whole weights |
# | `("reduce", k)` | begin to average the gradient of unit k; does not wait |
#
# Write `plan(units, reshard)` for one step: forwards 0, 1, ..., backwards in the opposite order, so that
#
# - when a unit computes, **the next one has been asked for already** (in forward k+1, in backward k-1): its message travels meanwhile;
# - with `reshard=True`, **at most two units** are whole or on their way at any time, and a unit is gathered again for backward. But not the last one: backward begins with it;
# - with `reshard=False`, units stay whole from forward to backward: every unit is gathered once;
# - each gradient is reduced before the next unit's backward, so that it travels beside it; at the end every unit is free.

# %% nbgrader={"grade_id": "plan", "solution": true}
def plan(units: int, reshard: bool = True) -> list[tuple[str, int]]:
    """The actions of one step, in order."""
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


# %% nbgrader={"grade_id": "test_plan", "grade": true, "points": 5}
lab.check("plan")

# %% id="show_plan" tags=["demo"]
figures.plans({"reshard=True": plan(4), "reshard=False": plan(4, reshard=False)})

# %% [markdown] id="policy_text"
# ## 2 · What to keep between forward and backward
#
# PyTorch calls it `reshard_after_forward`. `True` frees a unit after forward, `False` keeps it whole. Between them is a number g: **keep 1/g of the unit**, shared with g
# neighbours of the same node, so that the second gather is short and never leaves the node.
#
# Write `gather_cost(units, world, keep)`. `units` are the bytes of each unit's weights. `keep` is the number of ranks that share a unit between forward and backward:
# `world` is `True`, 1 is `False`, g is the number. It returns two numbers, for one rank and step:
#
# - **peak**: the most bytes of gathered weights held at once. A unit counts fully from the moment it is asked for until it is freed (your plan of step 1). From then
#   until its backward asks for it again, what it keeps beyond its own shard counts: nothing with `keep == world`, else 1/keep of the unit;
# - **sent**: bytes that a ring all-gather sends for all gathers together: B(n-1)/n for a unit of B bytes shared by n ranks.
#
# Remember the last unit: it stays whole, whatever the policy.

# %% nbgrader={"grade_id": "policy", "solution": true}
def gather_cost(units: list[int], world: int, keep: int) -> tuple[float, float]:
    """Peak bytes of gathered weights, and bytes sent for gathers, of one rank and step."""
    ### BEGIN SOLUTION
    kept = 1 / keep if keep < world else 0
    peak = max(sum(units[k : k + 2]) + kept * sum(units[:k]) for k in range(len(units)))
    sent = sum(units) * (world - 1) / world + sum(units[:-1]) * (keep - 1) / keep
    return peak, sent
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_policy", "grade": true, "points": 4}
lab.check("policy")

# %% [markdown] id="policy_after"
# The library's FSDP on 4 ranks with the three policies, its bytes counted by the tracer; diamonds are your function. The other half of the picture, the peak, is for the
# blocks of a large model on 64 ranks, 8 a node.

# %% id="show_policy" tags=["demo"]
sent = {}
for keep in (4, 2, 1):
    trace = run_ranks(sharded_work.library_step, 4, keep, trace=True).trace
    sent[keep] = (trace.ring_bytes("all_gather", rank=0), gather_cost(sharded_work.library_units(), 4, keep)[1])
blocks = sharded_work.block_bytes(MODEL)
figures.policies(sent, {keep: gather_cost(blocks, 64, keep)[0] / GIB for keep in (64, 8, 1)}, MODEL)

# %% [markdown] id="wrapping_text"
# ## 3 · What is a unit?
#
# A message costs α seconds before the first byte, and β seconds for each byte. Small units: many messages, many α. Large units: few messages, but two of them must be
# whole at once, and the first one is waited for in full.
#
# A unit is `(bytes, seconds)`: its weights, and the time its forward computes. With your plan, unit k+1 is asked for when unit k begins to compute, and messages are
# sent one at a time. Write
#
# - `forward_time(units, alpha, beta)`: seconds from the first gather to the end of the last forward;
# - `choose_units(blocks, limit, alpha, beta)`: how many consecutive blocks to put into each unit, as a list such as `[2, 2, 1]`. Two units that follow each other may
#   not have more than `limit` bytes together (nor a single one); among these choose one with the **least forward time**. A unit has the bytes and the seconds of its
#   blocks together. There are at most 10 blocks, and one block a unit always fits.

# %% nbgrader={"grade_id": "wrapping", "solution": true}
def forward_time(units: list[tuple[int, float]], alpha: float, beta: float) -> float:
    """Seconds of a forward pass with the next unit gathered ahead."""
    ### BEGIN SOLUTION
    messages = [alpha + beta * size for size, _ in units]
    computing = [seconds for _, seconds in units]
    return messages[0] + sum(map(max, computing, messages[1:])) + computing[-1]
    ### END SOLUTION


def choose_units(blocks: list[tuple[int, float]], limit: int, alpha: float, beta: float) -> list[int]:
    """The number of blocks in each unit."""
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


# %% nbgrader={"grade_id": "test_wrapping", "grade": true, "points": 4}
lab.check("wrapping")

# %% [markdown] id="wrapping_after"
# Your `forward_time` for the blocks of the model on 64 ranks, from units of one matrix (1/7 of a block) to one unit for everything: with a fast and a slow link, for few and
# for many tokens. The second panel is the price in memory.

# %% id="show_wrapping" tags=["demo"]
figures.wrapping(sharded_work.wrapping_cases(MODEL, forward_time, gather_cost))

# %% [markdown] id="wrapping_lesson"
# One block a unit is a good rule: large enough for α not to matter, small enough that two of them are little. With few tokens on a slow link no cut helps: the messages take
# longer than the computing. More tokens a rank help, and what you will do with memory in step 5 is just that.

# %% [markdown] id="execute_text"
# ## 4 · Carry the plan out
#
# Now the plan runs on real ranks. `execute(table, shards, x, grad, forward, backward)` carries out **any** table of actions, in its order:
#
# - `shards[k]` is this rank's piece of unit k, one-dimensional; all pieces one after the other are the unit. `gather` starts an all-gather with `async_op=True`;
# - `forward(k, weights, x)` computes unit k from its whole weights, one-dimensional. The first unit reads the argument `x`. Keep each unit's input for backward;
# - `backward(k, weights, x, grad)` gives the gradient of its input, and the gradient of the whole weights. The last unit gets the argument `grad`;
# - `reduce` starts a reduce-scatter (`async_op=True`) that makes the **mean over ranks** of the gradient, of which each rank gets its piece;
# - only computing waits, for its own weights. Reductions are waited for at the end;
# - after `free` nothing may hold the whole weights any more. Whole gradients may stay only as long as they travel.
#
# Return the output of the last forward, and the list of gradient pieces.

# %% nbgrader={"grade_id": "execute", "solution": true}
def execute(table, shards, x, grad, forward, backward) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Carry out a table of actions; the output, and this rank's pieces of the averaged gradients."""
    ### BEGIN SOLUTION
    world = dist.get_world_size()
    whole, inputs, gradients, reduced = {}, {}, {}, {}

    def arrived(k):
        weights, message = whole[k]
        message.wait()
        return weights

    for action, k in table:
        if action == "gather":
            weights = shards[k].new_empty(world * shards[k].numel())
            whole[k] = weights, dist.all_gather_into_tensor(weights, shards[k], async_op=True)
        elif action == "forward":
            inputs[k] = x
            x = forward(k, arrived(k), x)
        elif action == "backward":
            grad, gradients[k] = backward(k, arrived(k), inputs.pop(k), grad)
        elif action == "free":
            del whole[k]
        elif action == "reduce":
            piece = torch.empty_like(shards[k])
            reduced[k] = piece, dist.reduce_scatter_tensor(piece, gradients.pop(k) / world, async_op=True)
    for _, message in reduced.values():
        message.wait()
    return x, [reduced[k][0] for k in range(len(shards))]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_execute", "grade": true, "points": 9}
lab.check("execute")

# %% [markdown] id="execute_after"
# The same step as at the beginning, now with your plan and your `execute`. A stopwatch says little here: on a laptop the messages need the same cores as the computing. The
# **order** says it all, and it is the same on every machine: was unit k+1 asked for before the process began to wait for unit k, or to compute it?

# %% id="show_overlap" tags=["demo"]
ahead = run_ranks(sharded_work.traced_step, 2, sharded_work.planned_step(execute, plan(sharded_work.UNITS)), trace=True).trace
for name, trace in (("simple", simple), ("yours", ahead)):
    gathers, early = sharded_work.asked_ahead(trace)
    largest = trace.max_in_flight("all_gather", rank=0) / sharded_work.UNIT_BYTES
    print(f"{name:7} {early} of {gathers} gathers asked for ahead; at most {largest:.0f} on the way at once")
figures.last_step(ahead, "your plan")

# %% [markdown] id="checkpoint_text"
# ## 5 · Activation checkpointing
#
# FSDP divides the state of the model. The activations it does not: they grow with the batch of the rank, and soon they are all there is. Checkpointing keeps only the
# **input** of each block. Backward computes the block a second time, with its graph, and goes through it: a third more computing, for a fraction of the memory.
#
# Write it as an `autograd.Function`. `Checkpoint.apply(function, x)` gives `function(x)`.
#
# - Forward computes without a graph, and keeps `function`, `x`, and the state of the random generator (`torch.get_rng_state`): dropout must drop the same numbers again.
# - Backward detaches `x`, computes again with the old random state, and calls `torch.autograd.backward(output, grad)`. So the gradients of all parameters that
#   `function` uses arrive in their `.grad`, by themselves. What backward returns is the gradient for each argument of forward.
# - Afterwards the random generator must be where it was before that backward, as if nothing had been computed.

# %% nbgrader={"grade_id": "checkpoint", "solution": true}
class Checkpoint(torch.autograd.Function):
    """function(x), whose inside is forgotten and computed again in backward."""

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


# %% nbgrader={"grade_id": "test_checkpoint", "grade": true, "points": 8}
lab.check("checkpoint")

# %% [markdown] id="checkpoint_after"
# What it costs and what it saves, measured: FLOPs with your function on a small stack of Llama blocks, memory with FSDP on 8 ranks at true size. And under FSDP, does computing
# a block again need **one more gather**? Guess first, then see what the tracer has counted.

# %% id="show_checkpoint" tags=["demo"]
import sweep

plain, again = (sharded_work.flops(wrapper) for wrapper in (lambda block, x: block(x), Checkpoint.apply))
print(f"FLOPs of a step: {again / plain:.2f} times those without checkpointing")
for checkpointing in (False, True):
    trace = run_ranks(sharded_work.llama_step, 2, checkpointing, trace=True).trace
    print(f"gathers of a step {'with' if checkpointing else 'without'} checkpointing: {trace.count('all_gather', rank=0)}")
peaks = {checkpointing: sweep.measured(MODEL, "fsdp", 16, checkpointing) for checkpointing in (False, True)}
figures.checkpointing(peaks, MODEL)

# %% [markdown] id="checkpoint_lesson"
# No gather more: the unit is whole for its backward anyway, and the second forward happens inside that time. (It would be different if one checkpoint held several units.)
#
# ## 6 · The optimiser on the host
#
# After sharding, the optimiser's state is 8Ψ/N bytes, and it is used once a step. It may as well lie in the memory of the processor. The device then keeps parameters in
# bf16 for computing; the host keeps **master** weights in fp32, and both moments.
#
# - `HostOptimizer(parameters, make_optimizer)` makes an fp32 copy of each parameter on the CPU, as an `nn.Parameter`, and one optimiser for the copies.
# - `step()` takes each gradient to its master (fp32, CPU) and **sets the parameter's own `.grad` to `None`**, steps, and copies the masters into the parameters, in place,
#   rounded to their dtype. A parameter without gradient is left alone.
#
# Why masters? A bf16 number has 8 significant bits. An update of less than 1/512 of the weight is rounded away: always, however many there are.

# %% nbgrader={"grade_id": "offload", "solution": true}
class HostOptimizer:
    """An optimiser whose weights and state are fp32 on the CPU, for parameters of any dtype on any device."""

    def __init__(self, parameters: list, make_optimizer) -> None:
        ### BEGIN SOLUTION
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True)) for parameter in self.parameters]
        self.optimizer = make_optimizer(self.masters)
        ### END SOLUTION

    def step(self) -> None:
        """One step of the optimiser, from the parameters' gradients."""
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


# %% nbgrader={"grade_id": "test_offload", "grade": true, "points": 4}
lab.check("offload")

# %% id="show_offload" tags=["demo"]
figures.rounding(sharded_work.tiny_updates(HostOptimizer))

# %% [markdown] id="hybrid_text"
# ## 7 · Two kinds of links: HSDP
#
# Inside a node, GPUs talk at hundreds of GB/s; between nodes at a tenth of that. With plain FSDP every gather crosses nodes. Hybrid sharding (HSDP) keeps **one copy of the
# model a node**, in shards. Ranks are a grid:
#
# ```
#                     shard groups (rows)        replica groups (columns)
# node 0   0 1 2 3    {0 1 2 3} {4 5 6 7}        {0 4} {1 5} {2 6} {3 7}
# node 1   4 5 6 7
# ```
#
# Gathers stay in a row. A gradient becomes the mean over **all** ranks in two steps: reduce-scatter it in the row, then all-reduce the piece in the column. In this order
# only 1/S of the bytes ever leaves the node.
#
# - `hybrid_groups(world, shard_size)`: the rows, and the columns, as two lists of lists of ranks;
# - `hybrid_mean(gradient, rows, columns)`: this rank's piece of the mean over all ranks. `gradient` is one-dimensional, its length a multiple of the shard size; `rows`
#   and `columns` are this rank's two process groups. Leave `gradient` as it is.

# %% nbgrader={"grade_id": "hybrid", "solution": true}
def hybrid_groups(world: int, shard_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """The shard groups (consecutive ranks) and the replica groups."""
    ### BEGIN SOLUTION
    rows = [list(range(first, first + shard_size)) for first in range(0, world, shard_size)]
    return rows, [list(range(place, world, shard_size)) for place in range(shard_size)]
    ### END SOLUTION


def hybrid_mean(gradient: torch.Tensor, rows, columns) -> torch.Tensor:
    """This rank's piece of the mean over all ranks."""
    ### BEGIN SOLUTION
    shards, replicas = dist.get_world_size(rows), dist.get_world_size(columns)
    piece = gradient.new_empty(gradient.numel() // shards)
    dist.reduce_scatter_tensor(piece, gradient, group=rows)
    dist.all_reduce(piece, group=columns)
    return piece / (shards * replicas)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_hybrid", "grade": true, "points": 6}
lab.check("hybrid")

# %% [markdown] id="hybrid_after"
# The library on 4 ranks that play 2 nodes of 2, one step, FSDP against HSDP. The tracer knows the members of each call; in a ring a rank sends to the next one, so a byte either
# stays in the node or leaves it.

# %% id="show_hybrid" tags=["demo"]
crossings = {name: sharded_work.links(run_ranks(sharded_work.hybrid_step, 4, size, trace=True).trace, 2) for name, size in (("FSDP", 4), ("HSDP", 2))}
figures.links(crossings)

# %% [markdown] id="hybrid_lesson"
# Fewer bytes between nodes, but above all other ones: no forward waits for them. What leaves the node is the all-reduce of a gradient, and it has the rest of backward to arrive. The
# price: state of 16Ψ/S bytes instead of 16Ψ/N.
#
# ## 8 · torch.compile on an FSDP module
#
# `torch.compile` reads Python and makes *graphs* of tensor operations, which it fuses. Where it meets something it cannot put into a graph, it ends the graph, lets Python run,
# and begins a new one: a **graph break**. FSDP's hooks, which free storages and start messages, are just that. And what is worse than a break: a hook that does go into the graph.
#
# A *backend* is a function `backend(graph_module, example_inputs)` that gets each graph and returns something to call instead, for example `graph_module.forward`.
#
# - `graphs_of(function, *inputs)`: run `function(*inputs)` compiled, from nothing (`torch._dynamo.reset()` first), and return the number of operations in each graph, in
#   order. Operations are the nodes with `node.op` one of `"call_function"`, `"call_method"`, `"call_module"`.
# - `compile_blocks(blocks, backend)`: compile what each block (an `nn.Module`) *computes*, in place, so that **its hooks stay outside** the graph. A module's hooks run
#   in `block(...)`, around `block.forward(...)`.

# %% nbgrader={"grade_id": "compile", "solution": true}
def graphs_of(function, *inputs) -> list[int]:
    """Operations in each of the graphs that torch.compile makes of function(*inputs)."""
    ### BEGIN SOLUTION
    counts = []

    def backend(graph_module, example_inputs):
        counts.append(sum(node.op in ("call_function", "call_method", "call_module") for node in graph_module.graph.nodes))
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return counts
    ### END SOLUTION


def compile_blocks(blocks, backend) -> None:
    """Compile each block in place; its hooks run outside the graph."""
    ### BEGIN SOLUTION
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_compile", "grade": true, "points": 6}
lab.check("compile")

# %% [markdown] id="compile_after"
# A small Llama in the library's FSDP: compiled as a whole, then block by block with your function. (About 10 s.)

# %% id="show_compile" tags=["demo"]
whole_graphs, block_graphs = run_ranks(sharded_work.graphs_under_fsdp, 1, graphs_of, compile_blocks)[0]
print(f"compiled as a whole: {len(whole_graphs)} graphs, of {whole_graphs} operations")
print(f"block by block:      {len(block_graphs)} graph for {sharded_work.LLAMA.num_layers} blocks, of {block_graphs} operations")

# %% [markdown] id="compile_memory"
# Compiling saves memory, too. The compiler sees forward and backward together, and decides what to keep: what is cheap to compute again (norms, activations, rotations) is not kept. That
# is checkpointing of its own kind, for almost nothing. How much does a block keep for backward, per token? We ask autograd what it saves, of a Llama block that is as
# the real one with 1/8 of its width.

# %% id="show_compiled_memory" tags=["demo"]
kept = sharded_work.kept_for_backward(MODEL)
share = kept["compiled"] / kept["eager"]
print(f"for backward a block keeps {kept['eager']:.1f} times the bytes of its input; compiled {kept['compiled']:.1f} times: {share:.0%}")

# %% [markdown] id="sweep_text"
# ## 9 · The sweep
#
# The original course ends with a sweep over sequences of 512 tokens: DDP with 1 to 8 of them a rank, FSDP with 4 to 32, FSDP with `torch.compile` with 8 to 24. Everyone puts numbers into
# a table: memory, tokens a second. First the decision that such a table is for, as a function.
#
# `fastest(runs, limit)`: `runs` maps a name to measured points `(batch, peak_bytes, seconds)` of one rank, two or more, in rising order. Between two points memory and time lie on
# a straight line; beyond the last one on the line through the last two. Below the first point nothing is known, so a name whose first point does not fit is left out. Of each
# name take the **largest batch that fits** into `limit` bytes (a whole number), and the sequences a second it gives. Return the name and the batch of the fastest, or `None`
# if nothing fits.

# %% nbgrader={"grade_id": "sweep", "solution": true}
def fastest(runs: dict[str, list[tuple[int, float, float]]], limit: float) -> tuple[str, int] | None:
    """The name and the batch of the fastest run that fits."""
    ### BEGIN SOLUTION
    def at(points, batch, column):
        low, high = next(((p, q) for p, q in pairwise(points) if batch <= q[0]), points[-2:])
        return low[column] + (batch - low[0]) * (high[column] - low[column]) / (high[0] - low[0])

    best, most = None, 0.0
    for name, points in runs.items():
        batch = points[0][0]
        if points[0][1] > limit:
            continue
        while at(points, batch + 1, 1) <= limit:
            batch += 1
        rate = batch / at(points, batch, 2)
        if rate > most:
            best, most = (name, batch), rate
    return best
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_sweep", "grade": true, "points": 4}
lab.check("sweep")

# %% [markdown] id="sweep_memory"
# Memory at true size on one of 8 ranks: measured for DDP and FSDP. For FSDP + compile the measured activations of FSDP are scaled by the share that you have just seen; the compiler itself does
# not run on fake tensors of this size. (About 20 s.)

# %% id="run_sweep_memory" tags=["demo"]
memory = sweep.memory(MODEL, POINTS, share)
figures.sweep_memory(memory, MODEL)

# %% [markdown] id="sweep_speed"
# Time on real ranks, at small size: two processes, a small Llama, all three forms. (About 30 s, most of it the compiler's first time.)

# %% id="run_sweep_speed" tags=["demo"]
speed = {form: run_ranks(sweep.measure, 2, form, sweep.some(batches, POINTS), BACKEND)[0] for form, batches in sweep.SMALL.items()}
figures.sweep_speed(speed)

# %% [markdown] id="sweep_speed_after"
# Read this picture with care. Two processes on one laptop share cores, so without GPUs a second is one of *processor time*, without the waiting; and their "network" is the
# same memory. So the *height* of the curves says nothing about a GPU. Their *shape* does: throughput rises with the batch, for what a step costs once is divided among more
# sequences.
#
# So who wins, on which card? Your function, with the memory of the figure above and seconds from a model of a node of 8 GPUs (`sweep.with_seconds`): computing at 40 % of the peak of
# an A100, and once a step what nothing hides: the first gather, the last reduction, the optimiser. Compiling is *assumed* to take 10 % off the computing. The job array of the
# next step measures all that.

# %% id="show_break_even" tags=["demo"]
runs = sweep.with_seconds(memory, MODEL)
winners = {limit: fastest(runs, limit * GIB) for limit in range(4, 81, 2)}
figures.break_even(sweep.with_rates(winners, runs), list(runs), MODEL)

# %% [markdown] id="break_even_lesson"
# DDP needs 16 bytes a parameter before the first token; below that it is not slow, it does not exist. Above, sharding costs little, for its messages hide, and the memory it frees
# becomes batch. But look how flat the curve is on the right: once computing hides everything, more memory buys nothing more.

# %% [markdown] id="scale"
# ## 10 · At scale
#
# The sweep is one job array: one element a point, in parallel, and a table at the end that nobody types. `cluster.submit` makes it of the file `sweep.py` beside this notebook,
# and shows the script instead of sending it with `dry_run`. Without SLURM the same call runs here: one point, the tiny model, two processes.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster

every_row = {"row": list(range(len(sweep.ROWS)))}
script = cluster.submit("sweep.py", {"model": MODEL}, gpus=8, site="jean-zay-a100", account="abc", sweep=every_row, dry_run=True)
print("For SLURM:", *(line for line in script.splitlines() if line.startswith(("#SBATCH", "srun"))), sep="\n  ")
job = cluster.submit("sweep.py", {"model": "tiny"}, gpus=GPUS, sweep={"row": [4]}).wait()
print(*sweep.table(job), sep="\n")

# %% [markdown] id="quiz_text"
# ## 11 · Quiz
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here says whether every question has an answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "b", "q2": "d", "q3": "a", "q4": "c", "q5": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true, "points": 6}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - `Checkpoint.apply(function, x)` gives no gradient to anybody when `x` itself needs none, as in the first block of a frozen embedding. Why? How does `use_reentrant=False` of
#   `torch.utils.checkpoint` get around it?
# - Two units whole at once is a choice. What does three buy, when messages vary in time? Change `plan`, and look at `max_in_flight`.
# - Selective checkpointing keeps what is expensive (matrix products, attention) and computes again what is cheap. Compare with what the compiler chose.
# - A model need never be whole anywhere, not even when it is made: `dlo_lib/parallel/deferred_init.py`. A checkpoint of 512 ranks can be read by 64: `sharded_checkpoint.py`.
#
# **What comes next.** Data parallelism is at its end: every rank still computes every layer. Lab 17 gives each rank layers of its own.
#
# ## References
#
# - Y. Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel* (2023), [arXiv:2304.11277](https://arxiv.org/abs/2304.11277)
# - T. Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016), [arXiv:1604.06174](https://arxiv.org/abs/1604.06174)
# - V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models* (2022), [arXiv:2205.05198](https://arxiv.org/abs/2205.05198)
# - J. Ansel et al., *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation* (ASPLOS 2024)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
