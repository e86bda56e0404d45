# %% [markdown] id="title"
# # 10 · Collectives, from send and receive
#
# **What you will do.** Write the operations that distributed training is built on (broadcast, reduce-scatter,
# all-gather, all-reduce), using only messages between two ranks. You provoke a deadlock, count every byte,
# predict and measure your own algorithms, and then use the collectives of PyTorch, on groups of ranks.
#
# This lab builds on no other lab. The labs before it train on one device; you need from them only that backward
# computes a gradient for each parameter, and that an optimiser's step then changes the parameters. You should know
# tensors, and that a program can run as several processes, each with memory that the others cannot read. You need no
# GPU: the ranks are processes on this machine (gloo).
#
# The core exercises and predictions take about 100 minutes; with the text and the demos plan two hours. Three optional sections
# follow the quiz. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a
# pointer, then a sketch. If you are stuck, `lab.use_reference("name")` lets you continue without the points of
# that step.
#
# Words: rank (*rang*), collective operation (*opération collective*), broadcast (*diffusion*), reduction
# (*réduction*), deadlock (*interblocage*), latency (*latence*), bandwidth (*bande passante*), process group (*groupe de processus*).

# %% id="setup"
import os
import re
import time

import torch
import torch.distributed as dist

from dlo_lib.grading import Lab
from dlo_lib.labkit.explore import explore
from dlo_lib.labkit.predictions import compared, require_numbers

KIB, MIB = 1 << 10, 1 << 20
REPEATS = int(os.environ.get("DLO_REPEATS", 20))  # of each measurement near the end
LARGEST = int(os.environ.get("DLO_LARGEST", 4 << 20))  # bytes of the largest tensor measured
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: the obvious way
#
# In data parallelism every rank has its gradients, and all ranks need their **sum**. The obvious way: all
# ranks send to rank 0, which adds the tensors and sends the sum to the others. The code is short, and its
# results are right. It runs below on 2 to 6 real ranks; a tracer counts the bytes.

# %% id="show_why" tags=["demo", "read"]
import figures

from dlo_lib.comm.calls import Kind
from dlo_lib.launch import run_ranks


def star_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks; rank 0 computes it."""
    total, rank, world = tensor.clone(), dist.get_rank(), dist.get_world_size()
    if rank == 0:
        arriving = torch.empty_like(total)
        for other in range(1, world):
            dist.recv(arriving, other)
            total += arriving
        for other in range(1, world):
            dist.send(total, other)
    else:
        dist.send(total, 0)
        dist.recv(total, 0)
    return total


def through_busiest(all_reduce, world: int, size: int = 12_000) -> float:
    """Return the bytes sent and received by the busiest rank, divided by those of the tensor."""
    trace = run_ranks(lambda: all_reduce(torch.ones(size)).sum(), world, trace=True).trace
    moved = [trace.bytes(Kind.SEND, rank) + trace.bytes(Kind.RECV, rank) for rank in range(world)]
    return max(moved) / (4 * size)


WORLDS = (2, 3, 4, 6)
busiest = {"by way of rank 0": {world: through_busiest(star_all_reduce, world) for world in WORLDS}}
figures.busiest(busiest)

# %% id="show_why_seconds" tags=["demo"]
GRADIENTS = 4 * 3.21e9  # bytes: Llama 3.2 3B in fp32
PORT = 100e9 / 8  # bytes/s, one way: an Omni-Path port of 100 Gb/s
for world in (4, 64, 512):
    seconds = (world - 1) * GRADIENTS / PORT
    print(
        f"{world:4} ranks: {seconds:7.1f} s to send to rank 0, "
        "and as long to send the sum, in every step"
    )

# %% [markdown] id="why_questions"
# All messages pass through rank 0, and its traffic grows with the number of ranks. The other ranks wait. Two
# questions before you continue:
#
# - Rank 0 needs every byte of every rank to compute the sum. Must *one* rank compute the whole sum?
# - What is the least that a rank must send and receive? (Its own tensor must leave it, and the sum must reach
#   it.)

# %% [markdown] id="idea"
# ## The idea: cut the tensor, and use a ring
#
# Cut the tensor into N chunks; each rank is responsible for one. The partial sum of a chunk travels round a
# **ring**: each rank adds its share of the chunk and sends the partial sum to the next rank. All N partial
# sums travel at the same time, so every link is used in every step, and all ranks do the same work.
#
# The figure shows four ranks. A cell lists the ranks whose shares its partial sum contains, by number and not in
# the order of the additions. A frame marks what has just arrived. (Where there is little room, `3/6` stands for
# the shares of three of six ranks, and `Σ` for the sum.)
#
# After three steps each rank has *one complete chunk*: this is a **reduce-scatter**. After three more steps every
# rank has all complete chunks: this is an **all-gather**. Both together are an **all-reduce**. The slider changes
# the number of ranks.

# %% id="show_idea" tags=["demo"]
explore(figures.ring, ranks=[2, 3, 4, 5, 6])

# %% [markdown] id="idea_played"
# Press ▶ to play the steps one by one. In each step, which ranks send, and do two of them use the same link?

# %% id="play_idea" tags=["demo"]
explore(figures.ring_messages, ranks=[2, 3, 4, 5, 6], step=lambda ranks: range(2 * ranks - 1))

# %% [markdown] id="pi_text"
# ## 1 · First contact: π with many ranks
#
# **Core · 6 min · ●○○**
#
# Before you write collectives, use one by hand. `%%ranks 4` runs a cell on four ranks, whose variables stay for
# the next cell. Run the three cells below, then change the last one: reduce to one rank (`dist.reduce`; the
# other ranks keep what their part of the reduction left), or let rank 1 skip the call. The ranks survive a
# deadlock, so you can try anything.

# %% id="load_live" tags=["demo"]
# %load_ext dlo_lib.live_ranks

# %% id="play_live" tags=["demo"]
# %%ranks 4
x = torch.arange(3.0) + 10 * dist.get_rank()
x

# %% id="play_live_call" tags=["demo"]
# %%ranks
dist.broadcast(x, src=2)
x

# %% [markdown] id="pi_exercise"
# Draw random points in the unit square. The fraction of points with
# $x^2 + y^2 \leq 1$ estimates $\pi/4$. Each rank has drawn its own points; **all** ranks need the estimate from
# **all** points.
#
# `dist` is ready. `dist.all_reduce(tensor)` replaces a tensor by the sum over all ranks, in place, on every
# rank. Call it once, and send no more than you need. Ranks may have different numbers of points.

# %% nbgrader={"grade_id": "pi", "solution": true}
def estimate_pi(points: torch.Tensor) -> float:
    """Estimate π from the points of all ranks. points: (number, 2) of this rank, in [0, 1)."""
    ### BEGIN SOLUTION
    inside = (points.square().sum(dim=1) <= 1).sum()
    counts = torch.tensor([inside, len(points)], dtype=torch.float64)
    dist.all_reduce(counts)
    return float(4 * counts[0] / counts[1])
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_pi", "grade": true}
lab.check("pi")

# %% id="run_pi" tags=["demo"]
def throw(number: int) -> float:
    """Draw points on this rank; estimate π from the points of all ranks."""
    torch.manual_seed(10 + dist.get_rank())
    return estimate_pi(torch.rand(number, 2))


for world in (1, 2, 4):
    points = world * 200_000
    estimates = run_ranks(throw, world, 200_000)
    # one standard deviation: 4 * sqrt(p (1 - p) / points) with p = pi / 4
    spread = 1.64 / points**0.5
    same = "the same on all ranks"
    if len(set(estimates)) > 1:
        same = f"but not the same on all ranks: {estimates}"
    print(f"ranks {world}, points {points:7,}: {estimates[0]:.5f} ± {spread:.5f}; {same}")

# %% [markdown] id="exchange_text"
# ## 2 · Messages, and a deadlock
#
# **Core · 11 min · ●●○**
#
# From now on you use **only messages**: `dist.send(tensor, to)` and `dist.recv(tensor, source)`, which fills
# `tensor`. Both *block*: they return after the message has been transferred.
#
# In a ring, each rank sends a tensor to its right neighbour and receives one from its left neighbour. The
# first idea: send, then receive. **What do you expect?**

# %% id="run_dead_lock" tags=["demo", "read"]
from dlo_lib.launch import DeadLock


def everyone_sends_first() -> float:
    """Send this rank's number to the right; return the number that arrives from the left."""
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    mine, other = torch.tensor([float(rank)]), torch.zeros(1)
    dist.send(mine, right)
    dist.recv(other, left)
    return float(other)


try:
    print(run_ranks(everyone_sends_first, 3))
except DeadLock as lock:
    print(re.sub(r" Let [^.]*\.", "", str(lock)))  # without the cure: it is your next exercise

# %% [markdown] id="exchange_exercise"
# Read the table line by line. Each rank waits in a call, and the call that would release it comes *after* the
# call in which another rank waits. The waits form a cycle.
#
# This program may also **run**: a library may copy a small message into a buffer, so that `send` returns at
# once. Then the program hangs as soon as the tensors are larger. (This course reports the deadlock even
# where a buffer would hide it.)
#
# Some solutions fit some patterns only: "even ranks send first" works in a ring. Write one for **any** pattern:
# any rank may send to any other rank (no rank sends to itself), as long as each message has a sender and a
# receiver. `dist.isend` and `dist.irecv` return at once, with an object whose `wait()` blocks. The function
# returns when its send *and* its receive are done.

# %% nbgrader={"grade_id": "exchange", "solution": true}
def exchange(outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
    """Send `outgoing` to rank `to` and fill `incoming` from rank `source`.

    Return when both are done. Both tensors are contiguous.
    """
    ### BEGIN SOLUTION
    receive = dist.P2POp(dist.irecv, incoming, source)
    send = dist.P2POp(dist.isend, outgoing, to)
    for work in dist.batch_isend_irecv([receive, send]):  # both are started before the first wait
        work.wait()
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_exchange", "grade": true}
lab.check("exchange")

# %% [markdown] id="scatter_text"
# ## 3 · Reduce-scatter
#
# **Core · 22 min · ●●●**
#
# This is the upper row of the figure. With N ranks, `tensor.tensor_split(N)` cuts a tensor of *any* size into
# N chunks. If N does not divide the size, the first chunks have one element more, and some may be empty. At
# the end, rank *r* has chunk *r* of the sum.
#
# Follow one chunk in the figure. On which rank does the partial sum of chunk *c* start? Whose share is added
# last? Then look at one rank: which chunk does it send in the first step, which one arrives, which one does
# it send next?
#
# - Each rank sends **only to its right neighbour** (rank + 1), with your `exchange`, N - 1 chunks in total.
# - Any dtype: receive into a tensor of the dtype of the argument.
# - The argument stays unchanged.
# - The result must not keep the whole tensor in memory: it is the shard of a gradient, and the rest must be
#   freed.

# %% nbgrader={"grade_id": "scatter", "solution": true}
def ring_reduce_scatter(tensor: torch.Tensor) -> torch.Tensor:
    """Return chunk r of the sum over all ranks, on rank r.

    tensor: 1-D, of the same size and dtype on all ranks.
    """
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    partial = chunks[rank - 1].clone()  # the sum of chunk r - 1 sets out here
    for step in range(world - 1):
        share = chunks[(rank - step - 2) % world]
        arriving = torch.empty_like(share)
        exchange(partial, (rank + 1) % world, arriving, (rank - 1) % world)
        partial = arriving.add_(share)
    return partial
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_scatter", "grade": true}
lab.check("scatter")

# %% [markdown] id="gather_text"
# ## 4 · All-gather
#
# **Core · 7 min · ●●○**
#
# This is the lower row. Rank *r* has chunk *r* of a tensor of `size` elements, cut as above; at the end every
# rank has the whole tensor. There is no addition: in each step a rank sends the chunk that it received last,
# again only to its right neighbour, N - 1 chunks in total.
#
# `whole.tensor_split(N)` returns *views*: if you receive into one of them, the data are in `whole`.

# %% nbgrader={"grade_id": "gather", "solution": true}
def ring_all_gather(chunk: torch.Tensor, size: int) -> torch.Tensor:
    """Return the whole tensor of `size` elements, of which rank r has chunk r.

    It has the dtype of `chunk`.
    """
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = chunk.new_empty(size)
    chunks = whole.tensor_split(world)
    chunks[rank].copy_(chunk)
    for step in range(world - 1):
        exchange(chunks[(rank - step) % world], (rank + 1) % world, chunks[(rank - step - 1) % world], (rank - 1) % world)
    return whole
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_gather", "grade": true}
lab.check("gather")

# %% [markdown] id="ring_text"
# ## 5 · All-reduce
#
# **Core · 6 min · ●○○**
#
# Combine the two. This function accepts a tensor of **any shape, dtype and strides** (a transposed matrix is
# not contiguous) and of any size, for example one element on four ranks. The argument stays unchanged.

# %% nbgrader={"grade_id": "ring", "solution": true}
def ring_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, on every rank, in the shape of `tensor`."""
    ### BEGIN SOLUTION
    flat = tensor.reshape(-1)
    return ring_all_gather(ring_reduce_scatter(flat), flat.numel()).reshape(tensor.shape)
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_ring", "grade": true}
lab.check("ring")

# %% [markdown] id="predict_bytes_text"
# **Predict first.** A tensor has B bytes. How many times B does each rank *send* in your all-reduce, on 2
# ranks and on 6?

# %% id="predict_bytes" tags=["prediction"]
predicted_bytes = {"2 ranks": None, "6 ranks": None}  # in units of B

# %% id="show_bytes" tags=["demo", "nbval-check-output"]
require_numbers(predicted_bytes)
SIZE = 12_000  # elements: 2, 3, 4 and 6 divide it
sent = {}
for world in WORLDS:
    run = run_ranks(lambda: float(ring_all_reduce(torch.ones(SIZE)).sum()), world, trace=True)
    sent[world] = [run.trace.bytes(Kind.SEND, rank) / (4 * SIZE) for rank in range(world)]
# a rank receives what it sends
busiest["your ring"] = {world: 2 * max(shares) for world, shares in sent.items()}
print(compared(predicted_bytes, {f"{world} ranks": max(sent[world]) for world in (2, 6)}))
figures.bytes_sent(sent, busiest, predicted_bytes)

# %% [markdown] id="ring_after"
# With $B$ bytes and $N$ ranks, each rank sends $N - 1$ chunks in each half: $2\,\frac{N-1}{N}\,B$ in total. That is less
# than $2\,B$ *for any number of ranks*. As long as the ranks themselves add, no algorithm sends less from its
# busiest rank. In-network reduction (NVIDIA SHARP) does: the switches add, and each GPU sends only about $B$.
# The bars are your ring, counted by the tracer; the lines are the formula.

# %% [markdown] id="broadcast_text"
# ## 6 · Trees
#
# **Core · 18 min · ●●○**
#
# The ring has a cost: 2 (N-1) messages, one after the other. For one number on 512 ranks, moving four bytes
# takes 1022 times the latency of a message. There a **tree** is better: each rank that has the data sends it
# on, so the number of ranks that have it *doubles* in each round. (The order of the tree is your choice; the
# number of rounds is not.)

# %% id="show_tree" tags=["demo"]
explore(figures.tree, ranks=[2, 3, 4, 6, 8, 12])

# %% [markdown] id="broadcast_exercise"
# First the **broadcast**: all ranks receive the tensor of rank `root`, *in place*. It must work for any root,
# any number of ranks and any strides (messages need contiguous tensors).
#
# - No rank receives twice, so there are N - 1 messages in total, each with the whole tensor.
# - The number of rounds is the smallest possible: two with four ranks (the root sends two messages, not
#   three), three with five to eight.

# %% nbgrader={"grade_id": "broadcast", "solution": true}
def tree_broadcast(tensor: torch.Tensor, root: int) -> None:
    """Fill `tensor` on every rank with the tensor of rank `root`, in place."""
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    place = (rank - root) % world  # counted from the root
    data = tensor.contiguous()
    distance = 1
    while distance < world:  # places below `distance` have it
        if place < distance and place + distance < world:
            dist.send(data, (rank + distance) % world)
        elif distance <= place < 2 * distance:
            dist.recv(data, (rank - distance) % world)
        distance *= 2
    tensor.copy_(data)
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_broadcast", "grade": true}
lab.check("broadcast")

# %% [markdown] id="predict_messages_text"
# A **reduce** is the same tree in reverse: rank 0 receives the sum. (You can write it after the quiz; here the
# library's is used.) A reduce and a broadcast together are an all-reduce. **Predict first:** how many messages
# does rank 0 send in an all-reduce on six ranks?

# %% id="predict_messages" tags=["prediction"]
predicted_messages = {"by way of rank 0": None, "tree": None, "your ring": None}

# %% id="show_messages" tags=["demo", "nbval-check-output"]
from dlo_lib.comm.collectives import tree
from dlo_lib.labkit.predicted_bars import predicted_bars

require_numbers(predicted_messages)


def tree_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum on every rank: the library's reduce to rank 0, then its broadcast."""
    total = tensor.clone()
    tree.all_reduce(total)
    return total


three = {"by way of rank 0": star_all_reduce, "tree": tree_all_reduce, "your ring": ring_all_reduce}
traces = {name: run_ranks(lambda run=run: float(run(torch.ones(SIZE)).sum()), 6, trace=True).trace for name, run in three.items()}
of_rank_0 = {name: trace.count(Kind.SEND, 0) for name, trace in traces.items()}
print(compared(predicted_messages, of_rank_0, "{:g}".format))
print("\nmessages sent by each of 6 ranks, and their bytes in units of B")
for name, trace in traces.items():
    sends = [(trace.count(Kind.SEND, rank), trace.bytes(Kind.SEND, rank) / (4 * SIZE)) for rank in range(6)]
    print(f"{name:18}", "   ".join(f"{count:2}: {share:.2f} B" for count, share in sends))
predicted_bars(of_rank_0, predicted_messages, "messages", title="sent by rank 0 in an all-reduce on 6 ranks", text="{:g}".format)

# %% [markdown] id="cost_text"
# ## 7 · A model with two parameters
#
# **Core · 11 min · ●●○**
#
# How long does a message of $m$ bytes take? A good approximation is
#
# $$\alpha + \beta\, m$$
#
# $\alpha$ is the **latency** (the seconds that every message costs), $1/\beta$ the **bandwidth** of a link (bytes per
# second). The time of an algorithm is the time of the messages that *follow one another*. A rank sends one
# message at a time; messages of several ranks at the same time count once.
#
# Write the cost of an all-reduce of $B$ bytes (`size`) on $N$ ranks for your ring and for your tree (a reduce,
# then a broadcast). The number of ranks need not be a power of two; one rank costs nothing.

# %% nbgrader={"grade_id": "cost", "solution": true}
def predicted_seconds(algorithm: str, size: float, ranks: int, alpha: float, beta: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes. algorithm: "ring" or "tree"."""
    ### BEGIN SOLUTION
    if algorithm == "ring":
        return 2 * (ranks - 1) * (alpha + beta * size / ranks)
    rounds = (ranks - 1).bit_length()  # log2 N, rounded up
    return 2 * rounds * (alpha + beta * size)
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_cost", "grade": true}
lab.check("cost")

# %% [markdown] id="measure_text"
# ### Your ranks, measured
#
# The cell measures your two algorithms and the all-reduce of gloo, on 2 and on 4 ranks, from 64 bytes to a
# few MB. A collective is complete when its *slowest* rank is, so each measurement is the maximum over ranks.
# Of several tries we take the fastest, because other programs disturbed it least.
#
# **Predict first**, with your function if you like: how many times as long as the tree does your ring take, on
# two ranks for 1 MiB, and on four ranks for 64 bytes and for 1 MiB? (Say $\alpha = 100$ µs and $1/\beta = 1$ GB/s.) The model
# assumes that each rank has a core. On a machine with fewer than four cores, expect that on four ranks the ring
# takes several times as long as the model says.

# %% id="predict_ratio" tags=["prediction"]
# seconds of the ring / seconds of the tree
predicted_ratio = {"2 ranks, 1 MiB": None, "4 ranks, 64 bytes": None, "4 ranks, 1 MiB": None}

# %% id="run_measure" tags=["demo"]
require_numbers(predicted_ratio)
SIZES = [64 * 4**power for power in range(20) if 64 * 4**power <= LARGEST]


def gloo_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Call the all-reduce of torch.distributed."""
    dist.all_reduce(tensor)
    return tensor


ALGORITHMS = {"ring": ring_all_reduce, "tree": tree_all_reduce, "gloo": gloo_all_reduce}


def stopwatch(sizes: list[int], repeats: int) -> dict[tuple[str, int], list[float]]:
    """Return the seconds of each try on this rank, by algorithm and bytes."""
    torch.set_num_threads(1)
    seconds = {}
    for name, all_reduce in ALGORITHMS.items():
        for size in sizes:
            tensor, tries = torch.ones(size // 4), []
            for _ in range(repeats + 1):
                dist.barrier()
                began = time.perf_counter()
                all_reduce(tensor)
                tries.append(time.perf_counter() - began)
            seconds[name, size] = tries[1:]  # the first opens connections
    return seconds


timings = []  # (algorithm, bytes, ranks, seconds)
for world in (2, 4):
    by_rank = run_ranks(stopwatch, world, SIZES, REPEATS)
    for name, size in by_rank[0]:
        slowest = [max(tries) for tries in zip(*(seconds[name, size] for seconds in by_rank))]
        timings.append((name, size, world, min(slowest)))
measured = {(name, size, world): seconds for name, size, world, seconds in timings}
large = min(MIB, SIZES[-1])
points = {"2 ranks, 1 MiB": (large, 2), "4 ranks, 64 bytes": (64, 4), "4 ranks, 1 MiB": (large, 4)}
ratio = {words: measured["ring", *point] / measured["tree", *point] for words, point in points.items()}
print(compared(predicted_ratio, ratio), f"\n{os.cpu_count()} cores")
print(figures.what_timed_shows(timings, os.cpu_count()))
figures.timed(timings, points, predicted_ratio)

# %% [markdown] id="measure_lesson"
# Small tensors cost $\alpha$ for each message, so the tree wins; large tensors cost $\beta$ for each byte, so the ring wins.
# Two ranks on two cores come closest to the model. If four ranks share fewer cores, the messages of one step of
# the ring take turns, and the ring is slower than the model says: it may win only at the largest size, or not at
# all. The times are minima of several tries, and the lines above the figure say when the picture disagrees with this
# text. A single point far above its neighbours is another program at work: run the cell again. (A diamond is the time
# of your ring by your prediction, from the measured time of the tree.)
#
# ## 8 · The collectives of PyTorch, on groups of ranks
#
# **Core · 10 min · ●●○**
#
# From now on you use what PyTorch has. Your two halves are
#
# - `dist.reduce_scatter_tensor(chunk, tensor, group=group)`: fills `chunk`, which has 1/N of the elements of `tensor`;
# - `dist.all_gather_into_tensor(whole, chunk, group=group)`: fills `whole`, which has N times the elements of `chunk`.
#
# Each collective can run on a **group** of ranks. `dist.new_group(ranks)` makes one. *All* ranks of the job
# call it for *every* group, in the same order, even for groups that they do not belong to; otherwise they wait
# forever.
#
# Links inside a node are fast, links between nodes are slow. So an all-reduce on two levels sends as little as
# possible between the nodes: first it gives each rank of a node one chunk of the sum of the **node**, then it
# adds this chunk over the **nodes**, then the ranks of a node exchange their chunks. Use no messages. What a rank
# sends is counted, whatever the collective: between the nodes an all-reduce of one chunk, inside a node a
# reduce-scatter and an all-gather of the tensor are enough.

# %% id="groups"
# Given: run this cell. A later cell uses it.
def make_groups(inside: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the group of this rank's node, and that of the ranks with its place on every node.

    inside: the number of ranks of a node.
    """
    rank, world, own = dist.get_rank(), dist.get_world_size(), []
    nodes = [list(range(first, first + inside)) for first in range(0, world, inside)]
    places = [list(range(place, world, inside)) for place in range(inside)]
    for ranks in (*nodes, *places):
        group = dist.new_group(ranks)  # every rank makes every group
        if rank in ranks:
            own.append(group)
    return own[0], own[1]


# %% nbgrader={"grade_id": "levels", "solution": true}
def two_level_all_reduce(
    tensor: torch.Tensor, inside: dist.ProcessGroup, between: dist.ProcessGroup
) -> torch.Tensor:
    """Return the sum over all ranks.

    tensor: 1-D; the ranks of a node divide its size. It stays unchanged.
    """
    ### BEGIN SOLUTION
    chunk = tensor.new_empty(tensor.numel() // dist.get_world_size(inside))
    dist.reduce_scatter_tensor(chunk, tensor, group=inside)
    dist.all_reduce(chunk, group=between)
    whole = torch.empty_like(tensor)
    dist.all_gather_into_tensor(whole, chunk, group=inside)
    return whole
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_levels", "grade": true}
lab.check("levels")

# %% [markdown] id="predict_levels_text"
# **Predict first.** How many times B does each of four ranks add between the nodes, with one rank in a node and
# with two?

# %% id="predict_levels" tags=["prediction"]
predicted_between = {"1 rank in a node": None, "2 ranks in a node": None}  # in units of B

# %% id="run_levels" tags=["demo", "nbval-check-output"]
require_numbers(predicted_between)
def between_nodes(inside: int) -> float:
    """Return the first number of the sum over the ranks, by way of nodes of `inside` ranks."""
    return float(two_level_all_reduce(torch.ones(SIZE), *make_groups(inside))[0])


added = {}
for inside, words in ((1, "1 rank in a node"), (2, "2 ranks in a node")):
    trace = run_ranks(between_nodes, 4, inside, trace=True).trace
    added[words] = max(trace.bytes(Kind.ALL_REDUCE, rank) for rank in range(4)) / (4 * SIZE)
print(compared(predicted_between, added, "{:.2f} B".format))
title = "added between the nodes by each of 4 ranks"
predicted_bars(added, predicted_between, "bytes ÷ bytes of the tensor", title=title)

# %% [markdown] id="standard_text"
# ## 9 · The same with PyTorch
#
# `dist.all_reduce(tensor)` is what you will use. The checks of your ring refuse it, because they allow messages
# only. So the next cell compares its sums with yours, on three ranks: an odd size, fewer elements than ranks,
# integers, and a transposed matrix.

# %% id="run_standard" tags=["demo", "read"]
def standard_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def differences() -> dict[str, float]:
    """Return the largest difference between the sums of both all-reduces, by tensor."""
    ours = {
        "7 numbers": torch.randn(7),
        "2 numbers": torch.randn(2),
        "integers": torch.randint(-50, 50, (3, 5)),
        "transposed": torch.randn(3, 5).t(),
    }
    return {
        name: float((ring_all_reduce(tensor) - standard_all_reduce(tensor)).abs().max())
        for name, tensor in ours.items()
    }


found = run_ranks(differences, 3)
for name in found[0]:
    print(f"{name:<12}  largest difference {max(by_tensor[name] for by_tensor in found):.1e}")

# %% [markdown] id="standard_table_text"
# The table compares both on two ranks, for your largest tensor: the fastest of several tries, the memory that a rank
# needs during the call beyond its tensor, the bytes that it sends, and the lines of code. (Memory is measured on
# Linux only.)

# %% id="show_standard" tags=["demo", "read"]
from dlo_lib.labkit import side_by_side
from dlo_lib.labkit.process_memory import peak_bytes


def all_reduce_seconds(device: str, size: int, repeats: int, all_reduce=dist.all_reduce) -> float:
    """Return the seconds of the fastest of several tries on this rank."""
    torch.set_num_threads(1)
    where = torch.device("cpu") if device == "cpu" else torch.device(device, dist.get_rank())
    tensor, tries = torch.ones(size // 4, device=where), []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        tries.append(time.perf_counter() - began)
    return min(tries[1:])  # the first opens connections


def all_reduce_memory(all_reduce, size: int) -> int | None:
    """Return the bytes that this rank needs during the call, beyond its tensor.

    Return None if the system does not report them.
    """
    tensor = torch.ones(size // 4)
    all_reduce(tensor)
    return peak_bytes(lambda: all_reduce(tensor))


RING = (exchange, ring_reduce_scatter, ring_all_gather, ring_all_reduce)
FORMS = {
    "your ring": (ring_all_reduce, RING),
    "dist.all_reduce, gloo": (dist.all_reduce, ("dist.all_reduce(tensor)",)),
}
forms = []
for name, (all_reduce, code) in FORMS.items():
    seconds = max(run_ranks(all_reduce_seconds, 2, "cpu", LARGEST, REPEATS, all_reduce))
    memory = run_ranks(all_reduce_memory, 2, all_reduce, LARGEST)
    run = run_ranks(lambda form=all_reduce: form(torch.ones(LARGEST // 4)) is None, 2, trace=True)
    sent_bytes = run.trace.bytes(Kind.SEND, 0) or run.trace.ring_bytes(Kind.ALL_REDUCE, 0)
    most = None if None in memory else max(memory)
    forms.append(side_by_side.Form(name, side_by_side.lines_of(*code), seconds, sent_bytes, most))
print(f"all-reduce of {LARGEST // KIB} KiB on 2 ranks")
print(side_by_side.table(forms, measured="an all-reduce"))

# %% [markdown] id="standard_lesson"
# Both send the same bytes (those of `dist.all_reduce` by the formula of the ring, which gloo uses for large
# tensors). Yours has Python between the messages, and copies each chunk. It also needs more memory: a whole
# tensor for the result, which leaves the argument unchanged, and chunks on the way. `dist.all_reduce` writes the sum
# into its argument and needs only buffers for what arrives.

# %% [markdown] id="backends_text"
# ### Backends
#
# `dist.init_process_group(backend)` chooses the library that transfers the messages:
#
# | backend | where | used for |
# |---|---|---|
# | **gloo** | CPU tensors, over TCP | labs, tests, control messages |
# | **NCCL** | GPUs: NVLink inside a node; InfiniBand or Omni-Path between nodes | training; each rank needs a separate GPU |
# | **MPI** | where an MPI library is installed and PyTorch is built with it | rarely used |
#
# NCCL has rings *and* trees. It detects the links of the machine at the start, and chooses the algorithm for
# each size with a cost model like yours. The cell measures small and large tensors on two ranks, with each
# backend of *this* machine: the fastest of several tries.

# %% id="run_backends" tags=["demo"]
devices = {"gloo": "cpu"} | ({"NCCL": "cuda"} if torch.cuda.device_count() >= 2 else {})
for backend, device in devices.items():
    for size in sorted({64, LARGEST // 16, LARGEST}):
        seconds = max(run_ranks(all_reduce_seconds, 2, device, size, REPEATS))
        speed = 1e-9 * size / seconds
        print(f"{backend}: {size / KIB:9.2f} KiB {1e6 * seconds:9.0f} µs {speed:8.3f} GB/s")
if "NCCL" not in devices:
    print(f"NCCL: needs a GPU for each rank, this machine has {torch.cuda.device_count()}")
print("MPI: ", "available" if dist.is_mpi_available() else "this PyTorch is built without it")

# %% [markdown] id="quiz_text"
# ## 10 · Quiz
#
# **Core · 5 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests whether every question has an
# answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "b", "q2": "c", "q3": "a", "q4": "d", "q5": "a"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="reduce_text"
# ## 11 · The reduce, a tree in reverse
#
# **Optional · 12 min · ●●○**
#
# Rank 0 receives the sum. In each round, half of the ranks that still have a partial sum send it to the other
# half and are done: each rank except rank 0 sends one message, a tensor of this shape, and the number of rounds
# is again the smallest possible. It must work for any number of ranks. The return values of the other ranks do
# not matter. The argument stays unchanged.

# %% nbgrader={"grade_id": "reduce", "solution": true}
def tree_reduce(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the sum over all ranks, on rank 0.

    tensor: contiguous, of the same shape and dtype on all ranks.
    """
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    total, arriving = tensor.clone(), torch.empty_like(tensor)
    distance = 1
    while distance < world:
        if rank % (2 * distance) == distance:
            dist.send(total, rank - distance)
            return None
        if rank + distance < world:
            dist.recv(arriving, rank + distance)
            total += arriving
        distance *= 2
    return total
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_reduce", "grade": true}
lab.check("reduce")

# %% [markdown] id="everyone_text"
# ## 12 · All-to-all
#
# **Optional · 15 min · ●●○**
#
# In a mixture of experts each rank has tokens for the experts of every other rank. Here a rank cannot add or
# forward anything: part *r* goes **directly** to rank *r*. The parts have unequal sizes, and some are empty,
# because the load of the experts is not known in advance. (The ranks have already exchanged the sizes.)
#
# If all ranks send to rank 0 first, rank 0 is the bottleneck and the others wait. Find an order in which, in
# each step, every rank sends one part and receives one, for *any* number of ranks: that is N - 1 steps. (N steps,
# in which a rank pauses once, are right too.) A rank sends no message to itself.

# %% nbgrader={"grade_id": "everyone", "solution": true}
def everyone_to_everyone(parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    """Return the part that each rank has for this one, by rank.

    parts[r]: the part for rank r, 1-D.
    sizes[r]: the number of elements that rank r has for this rank.
    """
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    received = [parts[0].new_empty(size) for size in sizes]
    received[rank].copy_(parts[rank])
    for distance in range(1, world):
        to, source = (rank + distance) % world, (rank - distance) % world
        exchange(parts[to], to, received[source], source)
    return received
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_everyone", "grade": true}
lab.check("everyone")

# %% [markdown] id="fit_text"
# ## 13 · Which α and β, and where do the curves cross?
#
# **Optional · 25 min · ●●●**
#
# You have many measurements and two unknowns. `predicted_seconds` is *linear* in $\alpha$ and $\beta$, so each measurement
# is one equation. Solve them together by least squares (`torch.linalg.lstsq`).
#
# The times of the smallest and the largest tensor differ by a factor of a hundred. With *absolute* errors,
# the largest tensors alone would decide the fit, and $\alpha$ would be arbitrary. Use errors relative to the time:
# divide each equation by its measured seconds.

# %% nbgrader={"grade_id": "fit", "solution": true}
def fit_link(timings: list[tuple[str, int, int, float]]) -> tuple[float, float]:
    """Return (α, β), in seconds and seconds per byte, of the best fit to the timings.

    timings: a list of (algorithm, bytes, ranks, seconds), where algorithm is "ring" or "tree".
    """
    ### BEGIN SOLUTION
    rows = []
    for name, size, ranks, seconds in timings:
        messages, payload = predicted_seconds(name, size, ranks, 1, 0), predicted_seconds(name, size, ranks, 0, 1)
        rows.append([messages / seconds, payload / seconds])
    system = torch.tensor(rows, dtype=torch.float64)
    unknown = torch.linalg.lstsq(system, torch.ones(len(rows), 1, dtype=torch.float64)).solution
    return float(unknown[0]), float(unknown[1])
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_fit", "grade": true}
lab.check("fit")

# %% [markdown] id="crossover_text"
# ### Where do they cross?
#
# The tree has fewer messages, the ring sends fewer bytes. So the tree is faster for small tensors and the
# ring for large ones. At how many bytes do both cost the same? Return `None` if the tree saves no message:
# then the ring is never slower.

# %% nbgrader={"grade_id": "crossover", "solution": true}
def crossover_bytes(ranks: int, alpha: float, beta: float) -> float | None:
    """Return the bytes at which ring and tree cost the same; None if the tree saves no messages."""
    ### BEGIN SOLUTION
    rounds = (ranks - 1).bit_length()
    saved_messages = 2 * (ranks - 1) - 2 * rounds
    if saved_messages <= 0:
        return None
    more_bytes = 2 * rounds - 2 * (ranks - 1) / ranks  # in units of B
    return saved_messages * alpha / (more_bytes * beta)
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_crossover", "grade": true}
lab.check("crossover")

# %% [markdown] id="fit_after"
# Now fit your measurements, separately for each algorithm and each number of ranks. If the model were exact,
# the four rows would be the same: one link, one $\alpha$, one $\beta$. **Before you run it:** which rows will differ on
# *this* machine, and why? (How many cores and how many ranks are there? How many messages are sent at the
# same time in a ring, and in a tree?)

# %% id="show_fit" tags=["demo"]
print(f"{os.cpu_count()} cores")
links, lines = {}, {}
for name, world in [("tree", 2), ("ring", 2), ("tree", 4), ("ring", 4)]:
    chosen = [timing for timing in timings if timing[0] == name and timing[2] == world]
    alpha, beta = fit_link(chosen)
    links[name, world] = alpha, beta
    lines[name, world] = [predicted_seconds(name, size, world, alpha, beta) for size in SIZES]
    print(
        f"{name} on {world} ranks: α = {1e6 * alpha:5.0f} µs a message, "
        f"1/β = {1e-9 / beta:5.2f} GB/s"
    )
figures.fitted(timings, SIZES, lines, crossover_bytes(4, *links["tree", 2]))

# %% [markdown] id="fit_lesson"
# Lines are the fits, markers are your measurements. The dotted line is the crossover for four ranks,
# predicted from the link of the *first* row.
#
# - Two numbers describe each curve: it is flat where $\alpha$ dominates and rises where $\beta$ does. A point far from its
#   line has another cause: a cache, a copy, another busy process.
# - The rows need not agree. In a ring **all ranks send and receive at the same time**, and the model assumes
#   that this costs nothing extra. The assumption holds if every rank has its own processor and its own link.
#   If ranks share cores, the messages of one step take turns: the $\alpha$ of the ring is larger, and the crossover
#   is further to the right than predicted, or outside the figure. A model is as good as its assumptions.
# - The all-reduce of gloo is also a ring, with smaller pieces and without Python between the messages.

# %% [markdown] id="scale_text"
# ### At scale
#
# Your two functions, with the links of a real machine. A node of Jean Zay's A100 partition has 8 GPUs. Inside
# a node they communicate over NVLink (300 GB/s each way); four Omni-Path ports of 100 Gb/s connect the node
# to the network (50 GB/s together). For $\alpha$ we take the latencies of NCCL's own cost table: 3.4 µs per message
# over NVLink, 14 µs over the network.

# %% id="show_scale" tags=["demo"]
from dlo_lib.hardware import gpu

LINKS = {  # α in seconds, bytes/s
    "8 GPUs in a node, NVLink": (8, 3.4e-6, gpu("a100-80").nvlink_bandwidth),
    "64 nodes, four Omni-Path ports each": (64, 14e-6, 4 * PORT),
}
AT_SCALE = [4 * 4**power for power in range(17)]  # 4 bytes to 17 GB
curves, crossings = {}, {}
for link, (ranks, a, speed) in LINKS.items():
    curves[link] = {
        name: [predicted_seconds(name, size, ranks, a, 1 / speed) for size in AT_SCALE]
        for name in ("ring", "tree")
    }
    crossings[link] = crossover_bytes(ranks, a, 1 / speed)
marks = {
    "a gradient norm": 4,
    "a DDP bucket": 25 << 20,
    "gradients of a 3B model": GRADIENTS,
}
figures.at_scale(curves, AT_SCALE, crossings, marks)

# %% [markdown] id="scale_lesson"
# The figure shows three things.
#
# - For the **gradient norm** (one number) the tree is faster; for the **gradients** the ring is faster, on
#   either link. The crossover depends on the link and on the number of ranks: no fixed number of bytes is
#   right everywhere.
# - For large tensors the time of the ring hardly depends on the number of ranks, only on the slowest link. So
#   keep heavy traffic inside nodes, and send as little as possible between them: reduce-scatter inside,
#   all-reduce the chunks between nodes, all-gather inside.
# - DDP sends buckets of 25 MiB instead of one tensor after another, because every small message costs $\alpha$.
#
# NCCL's trees are better than yours: they cut the tensor into pieces that follow one another down the tree (a
# *pipeline*), and use two trees at once, so that no rank is a leaf in both. The latency is proportional to
# $\log N$, *and* the bandwidth is nearly that of the ring.
#
# On a cluster, the same measurement with NCCL is a job. `cluster.submit` with `dry_run` shows the script that
# SLURM would receive; it calls the function on every rank.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster
from dlo_lib.labkit import at_scale

arguments = {"device": "cuda", "size": 1 << 30, "repeats": 20}
script = cluster.submit(
    all_reduce_seconds, arguments, gpus=16, site="jean-zay-a100", account="abc", dry_run=True
)
print("For SLURM, 2 nodes of 8 GPUs:", at_scale.directives(script), sep="\n")

# %% [markdown] id="further"
# ## Go further
#
# - **Recursive halving and doubling**: exchange halves with the rank at distance $N/2$, quarters at $N/4$, and so
#   on, then back. It needs $2 \log_2 N$ rounds *and* only the bytes of the ring, on powers of two. Write it, and
#   add it to the figure. What do you do with six ranks?
# - Cut the tensor of your tree broadcast into pieces that follow one another. Which number of pieces is best,
#   according to $\alpha$ and $\beta$?
# - Sum 1e8, 1 and -1e8 in fp32 on three ranks, in all orders. Which of your algorithms gives every rank the
#   same bits? Which gives the same bits on another number of ranks?
# - Read `dlo_lib/comm/collectives/`: averages, maxima, groups of ranks, and the same cost model for six
#   algorithms.
#
# ## References
#
# - P. Patarasuk, X. Yuan, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations* (2009),
#   [doi:10.1016/j.jpdc.2008.09.002](https://doi.org/10.1016/j.jpdc.2008.09.002)
# - R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of Collective Communication Operations in MPICH*
#   (2005), [doi:10.1177/1094342005051521](https://doi.org/10.1177/1094342005051521)
# - R. Hockney, *The communication challenge for MPP* (1994),
#   [doi:10.1016/S0167-8191(06)80021-9](https://doi.org/10.1016/S0167-8191(06)80021-9)
# - P. Sanders, J. Speck, J. L. Träff, *Two-tree algorithms for full bandwidth broadcast, reduction and scan*
#   (2009), [doi:10.1016/j.parco.2009.09.001](https://doi.org/10.1016/j.parco.2009.09.001)
# - NCCL's latencies: `hwLat` in
#   [src/graph/tuning.cc](https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc) (ring, "Simple"
#   protocol)
# - NVLink: NVIDIA's A100 data sheet, 600 GB/s both ways. The node (8 A100, 4 Omni-Path links): BigScience,
#   *BLOOM* (2022), [arXiv:2211.05100](https://arxiv.org/abs/2211.05100)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 3
