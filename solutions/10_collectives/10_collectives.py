# %% [markdown] id="title"
# # 10 · Collectives, from send and receive
#
# **What you will do.** Write the operations on which all of distributed training stands (broadcast, reduce-scatter, all-gather, all-reduce,
# all-to-all) from nothing but messages between two ranks. You meet a dead-lock on purpose, count every byte, measure your own algorithms, fit
# a model of two numbers to them, and say which algorithm wins for which tensor: here, and on a cluster.
#
# You need no GPU: ranks are processes on this machine (gloo).
#
# Builds on lab 01. It takes about 90 minutes. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a
# pointer, then a sketch. If a step stays stuck, `lab.use_reference("name")` lets you go on without its points.
#
# Words: rank (*rang*), collective operation (*opération collective*), broadcast (*diffusion*), reduction (*réduction*), dead-lock
# (*interblocage*), latency (*latence*), bandwidth (*bande passante*).

# %% id="setup"
import os
import time

import torch
import torch.distributed as dist

from dlo_lib.grading import Lab

REPEATS = int(os.environ.get("DLO_REPEATS", 20))  # of each measurement near the end
LARGEST = int(os.environ.get("DLO_LARGEST", 4 << 20))  # bytes of the largest tensor measured
PROCESSES = int(os.environ.get("DLO_PROCESSES", 2))  # of the job at the end
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: the obvious way
#
# In data parallelism every rank has gradients of its own, and all ranks need their **sum**. The obvious way: everybody sends to rank 0, which
# adds up and sends the sum back. A dozen lines, right results. It runs below on 2 to 6 real ranks; a tracer counts the bytes that pass.

# %% id="show_why" tags=["demo"]
import figures

from dlo_lib.comm.calls import Kind
from dlo_lib.launch import run_ranks


def star_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """The sum on every rank, by way of rank 0."""
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
    """Bytes sent and received by the busiest rank, in units of the tensor's bytes."""
    trace = run_ranks(lambda: all_reduce(torch.ones(size)).sum(), world, trace=True).trace
    return max(trace.bytes(Kind.SEND, rank) + trace.bytes(Kind.RECV, rank) for rank in range(world)) / (4 * size)


WORLDS = (2, 3, 4, 6)
busiest = {"by way of rank 0": {world: through_busiest(star_all_reduce, world) for world in WORLDS}}
figures.busiest(busiest)

# %% id="show_why_seconds" tags=["demo"]
GRADIENTS = 4 * 3.21e9  # bytes: Llama 3.2 3B in fp32
PORT = 100e9 / 8  # bytes/s, one way: an Omni-Path port of 100 Gb/s
for world in (4, 64, 512):
    print(f"{world:4} ranks: {(world - 1) * GRADIENTS / PORT:7.1f} s to reach rank 0, and as long for the way back, in every step")

# %% [markdown] id="why_questions"
# All links end at rank 0, and its share grows with the number of ranks. Every other rank waits. Two questions before you go on:
#
# - Rank 0 needs every byte of every rank to build the sum. Must *one* rank build all of it?
# - What is the least that a rank must send and receive, whatever the algorithm? (Its own share must leave it, the sum must reach it.)

# %% [markdown] id="idea"
# ## The idea: cut the tensor, and go round
#
# Cut the tensor into N chunks; make each rank responsible for one. The partial sum of a chunk travels round a **ring** and takes in the share
# of each rank that it visits. All N partial sums travel at the same time, so every link works in every step, and no rank is special.
#
# The figure shows four ranks. A cell says whose shares the rank has in its hands, for that chunk; framed cells have just arrived. After
# three steps each rank has *one complete chunk*: that is a **reduce-scatter**. Three steps more, and complete chunks are everywhere: an
# **all-gather**. Both together are an **all-reduce**.

# %% id="show_idea" tags=["demo"]
figures.ring(ranks=4)

# %% [markdown] id="pi_text"
# ## 1 · First contact: π by many ranks
#
# Before you write collectives, use one. Throw points into the unit square. The share of them with *x² + y² ≤ 1* estimates π/4. Each rank has
# thrown its own points; **all** ranks want the estimate of **all** points.
#
# `dist` is ready. `dist.all_reduce(tensor)` replaces a tensor by the sum over all ranks, in place, on every rank. Use it once, and send no
# more than you need. Ranks may have thrown different numbers of points.

# %% nbgrader={"grade_id": "pi", "solution": true}
def estimate_pi(points: torch.Tensor) -> float:
    """π, estimated from the points of all ranks. points: those of this rank, (number, 2), in [0, 1)."""
    ### BEGIN SOLUTION
    inside = (points.square().sum(dim=1) <= 1).sum()
    counts = torch.tensor([inside, len(points)], dtype=torch.float64)
    dist.all_reduce(counts)
    return float(4 * counts[0] / counts[1])
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_pi", "grade": true, "points": 4}
lab.check("pi")

# %% id="run_pi" tags=["demo"]
def throw(number: int) -> float:
    """This rank throws, all ranks estimate."""
    torch.manual_seed(10 + dist.get_rank())
    return estimate_pi(torch.rand(number, 2))


for world in (1, 2, 4):
    points = world * 200_000
    estimates = run_ranks(throw, world, 200_000)
    spread = 1.64 / points**0.5  # one standard deviation: 4 * sqrt(p (1 - p) / points) with p = pi / 4
    same = "the same on all ranks" if len(set(estimates)) == 1 else f"but others on other ranks: {estimates}"
    print(f"ranks {world}, points {points:7,}: {estimates[0]:.5f}, give or take {spread:.5f}; {same}")

# %% [markdown] id="exchange_text"
# ## 2 · Messages, and a dead-lock
#
# From here on you use **only messages**: `dist.send(tensor, to)` and `dist.recv(tensor, source)`, which fills `tensor`. Both *block*: they
# return when the message has passed.
#
# In a ring everyone has something for the right neighbour and expects something from the left one. So: first send, then receive. **What do you
# expect?**

# %% id="run_dead_lock" tags=["demo"]
from dlo_lib.launch import DeadLock


def everyone_sends_first() -> float:
    """This rank's number goes to the right; the number that comes from the left."""
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    mine, other = torch.tensor([float(rank)]), torch.zeros(1)
    dist.send(mine, right)
    dist.recv(other, left)
    return float(other)


try:
    print(run_ranks(everyone_sends_first, 3))
except DeadLock as lock:
    print(lock)

# %% [markdown] id="exchange_exercise"
# Read the table, line by line: each rank stands in a call, and the call that would free it comes *after* the one in which another rank stands.
# A ring of waits.
#
# On another day this program may **run**: a library may copy a small message into a buffer and return from `send` at once. Then it hangs when
# the tensors grow. (This course reports the dead-lock even where a buffer would hide it.)
#
# There are cures that fit one pattern: "even ranks send first" works round a ring. Write one for **any** pattern: who sends to whom may
# be anything, as long as each message has a sender and a receiver. `dist.isend` and `dist.irecv` return at once, with an object whose
# `wait()` blocks.

# %% nbgrader={"grade_id": "exchange", "solution": true}
def exchange(outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
    """Send `outgoing` to rank `to` and fill `incoming` from rank `source`; return when both are done. Both are contiguous."""
    ### BEGIN SOLUTION
    receive = dist.P2POp(dist.irecv, incoming, source)
    send = dist.P2POp(dist.isend, outgoing, to)
    for work in dist.batch_isend_irecv([receive, send]):  # both are under way before anybody waits
        work.wait()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_exchange", "grade": true, "points": 4}
lab.check("exchange")

# %% [markdown] id="scatter_text"
# ## 3 · Reduce-scatter
#
# The upper row of the figure. With N ranks, `tensor.tensor_split(N)` cuts a tensor of *any* size into N chunks: where N does not divide it,
# the first ones have one element more, and some may be empty. Rank *r* ends up with chunk *r* of the sum.
#
# Follow one chunk in the figure. Where does the partial sum of chunk *c* set out? Whose share does it take in last? Then look at one rank:
# which chunk does it send in the first step, which one arrives, which does it send next?
#
# - Each rank sends **only to its right neighbour** (rank + 1), with your `exchange`, N - 1 chunks in all.
# - The argument stays as it is.
# - What you return must not keep the whole tensor alive: it is a gradient's shard, and the rest is to be freed.

# %% nbgrader={"grade_id": "scatter", "solution": true}
def ring_reduce_scatter(tensor: torch.Tensor) -> torch.Tensor:
    """Chunk r of the sum over all ranks, on rank r. tensor: one dimension, of the same size and dtype on all ranks."""
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


# %% nbgrader={"grade_id": "test_scatter", "grade": true, "points": 9}
lab.check("scatter")

# %% [markdown] id="gather_text"
# ## 4 · All-gather
#
# The lower row. Rank *r* has chunk *r* of a tensor of `size` elements, cut as above; at the end everyone has the whole. Nothing is added: a rank
# passes on what it received last.
#
# `whole.tensor_split(N)` gives *views*: what you receive into one of them is in `whole`.

# %% nbgrader={"grade_id": "gather", "solution": true}
def ring_all_gather(chunk: torch.Tensor, size: int) -> torch.Tensor:
    """The whole tensor of `size` elements, of which this rank has chunk r."""
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = chunk.new_empty(size)
    chunks = whole.tensor_split(world)
    chunks[rank].copy_(chunk)
    for step in range(world - 1):
        exchange(chunks[(rank - step) % world], (rank + 1) % world, chunks[(rank - step - 1) % world], (rank - 1) % world)
    return whole
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_gather", "grade": true, "points": 5}
lab.check("gather")

# %% [markdown] id="ring_text"
# ## 5 · All-reduce
#
# Put the two together. This one takes a tensor of **any shape, dtype and strides** (a transposed matrix is not contiguous), of any size: also
# one element on four ranks. The argument stays as it is.

# %% nbgrader={"grade_id": "ring", "solution": true}
def ring_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, on every rank, in the shape of `tensor`."""
    ### BEGIN SOLUTION
    flat = tensor.reshape(-1)
    return ring_all_gather(ring_reduce_scatter(flat), flat.numel()).reshape(tensor.shape)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_ring", "grade": true, "points": 6}
lab.check("ring")

# %% [markdown] id="ring_after"
# Bytes on the wire. With B bytes and N ranks, each rank sends N - 1 chunks in each half: **2 (N-1)/N · B** in all. That is less than 2 B,
# *however many ranks there are*, and no algorithm sends less. The bars are your ring, counted by the tracer; the lines are the formula.

# %% id="show_bytes" tags=["demo"]
SIZE = 12_000  # elements: 2, 3, 4 and 6 divide it
sent = {}
for world in WORLDS:
    trace = run_ranks(lambda: float(ring_all_reduce(torch.ones(SIZE)).sum()), world, trace=True).trace
    sent[world] = [trace.bytes(Kind.SEND, rank) / (4 * SIZE) for rank in range(world)]
busiest["your ring"] = {world: 2 * max(shares) for world, shares in sent.items()}  # a rank receives what it sends
figures.bytes_sent(sent, busiest)

# %% [markdown] id="broadcast_text"
# ## 6 · Trees
#
# The ring has a price: 2 (N-1) messages that follow one another. For one number on 512 ranks that is 1022 times the latency of a message, to
# move four bytes. There a **tree** is better: whoever has the data passes it on, so the number of ranks that have it *doubles* in each round.
# Below, six ranks. (The order of the tree is your choice; the number of rounds is not.)

# %% id="show_tree" tags=["demo"]
figures.tree(ranks=6)

# %% [markdown] id="broadcast_exercise"
# First the **broadcast**: the tensor of rank `root` goes to all, *in place*. Any root, any number of ranks, any strides (messages need contiguous
# tensors).
#
# - No rank receives twice, so N - 1 messages pass in all.
# - With four ranks the root sends two of them, not three.

# %% nbgrader={"grade_id": "broadcast", "solution": true}
def tree_broadcast(tensor: torch.Tensor, root: int) -> None:
    """Fill `tensor` on every rank with that of rank `root`, in place."""
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


# %% nbgrader={"grade_id": "test_broadcast", "grade": true, "points": 8}
lab.check("broadcast")

# %% [markdown] id="reduce_text"
# Then the **reduce**, the same tree backwards: the sum arrives on rank 0. In each round half of the ranks that still have a partial sum send it
# to the other half, and are done. What other ranks than 0 return does not matter. The argument stays as it is.

# %% nbgrader={"grade_id": "reduce", "solution": true}
def tree_reduce(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sum over all ranks, on rank 0. tensor: contiguous, of the same shape and dtype on all ranks."""
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


# %% nbgrader={"grade_id": "test_reduce", "grade": true, "points": 6}
lab.check("reduce")

# %% id="show_messages" tags=["demo"]
def tree_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """The sum on every rank: reduce to rank 0, and broadcast."""
    total = tree_reduce(tensor)
    total = torch.empty_like(tensor) if total is None else total
    tree_broadcast(total, 0)
    return total


three = {"by way of rank 0": star_all_reduce, "your tree": tree_all_reduce, "your ring": ring_all_reduce}
print("6 ranks: messages sent by each rank, and their bytes in units of B")
for name, all_reduce in three.items():
    trace = run_ranks(lambda run=all_reduce: float(run(torch.ones(SIZE)).sum()), 6, trace=True).trace
    sends = [(trace.count(Kind.SEND, rank), trace.bytes(Kind.SEND, rank) / (4 * SIZE)) for rank in range(6)]
    print(f"{name:18}", "   ".join(f"{count:2}: {share:.2f} B" for count, share in sends))

# %% [markdown] id="everyone_text"
# ## 7 · All-to-all
#
# In a mixture of experts each rank has tokens for the experts of every other rank. Nothing can be added up or passed on: part *r* goes
# **straight** to rank *r*. The parts have unequal sizes, and some are empty: nobody knows beforehand which expert is popular. (The ranks have
# already told each other the sizes.)
#
# If everyone begins with rank 0, rank 0 is swamped while all others wait. Find an order in which, in each step, every rank sends one part and receives
# one, for *any* number of ranks. What a rank has for itself needs no message.

# %% nbgrader={"grade_id": "everyone", "solution": true}
def everyone_to_everyone(parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    """What each rank has for this one, by rank.

    parts[r]: what goes to rank r, one dimension. sizes[r]: how many elements rank r has for this one.
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


# %% nbgrader={"grade_id": "test_everyone", "grade": true, "points": 7}
lab.check("everyone")

# %% [markdown] id="cost_text"
# ## 8 · A model of two numbers
#
# How long does a message of *m* bytes take? In good approximation
#
# $$\alpha + \beta\, m$$
#
# α is the **latency** (seconds that any message costs), 1/β the **bandwidth** of a link (bytes a second). An algorithm takes as long as the
# messages that *follow one another*; messages at the same time count once.
#
# Write the cost of an all-reduce of B bytes (`size`) on N ranks by your ring, and by your tree (a reduce, then a broadcast). Ranks need not be a power of
# two; one rank costs nothing.

# %% nbgrader={"grade_id": "cost", "solution": true}
def predicted_seconds(algorithm: str, size: float, ranks: int, alpha: float, beta: float) -> float:
    """Seconds of an all-reduce of `size` bytes. algorithm: "ring" or "tree"."""
    ### BEGIN SOLUTION
    if algorithm == "ring":
        return 2 * (ranks - 1) * (alpha + beta * size / ranks)
    rounds = (ranks - 1).bit_length()  # log2 N, rounded up
    return 2 * rounds * (alpha + beta * size)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_cost", "grade": true, "points": 4}
lab.check("cost")

# %% [markdown] id="measure_text"
# ### Your ranks, measured
#
# Your two algorithms and gloo's own all-reduce, on 2 and on 4 ranks, from 64 bytes to some MB. A collective is done when its *slowest* rank is, so
# each measurement is the maximum over ranks. Of several tries we take the fastest: it is the one that other programs disturbed least.

# %% id="run_measure" tags=["demo"]
SIZES = [64 * 4**power for power in range(20) if 64 * 4**power <= LARGEST]


def gloo_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """What torch.distributed does with it."""
    dist.all_reduce(tensor)
    return tensor


ALGORITHMS = {"ring": ring_all_reduce, "tree": tree_all_reduce, "gloo": gloo_all_reduce}


def stopwatch(sizes: list[int], repeats: int) -> dict[tuple[str, int], list[float]]:
    """Seconds of each try on this rank, by algorithm and bytes."""
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
figures.timed(timings)

# %% [markdown] id="fit_text"
# ### Which α and β?
#
# You have many measurements and two unknowns. For each, `predicted_seconds` is *linear* in α and β: an equation. Solve them together by
# least squares (`torch.linalg.lstsq`).
#
# Take care: from the smallest to the largest tensor the times grow a hundredfold. Least squares of *absolute* errors would look at the largest only, and α
# would be chance. Errors should count relative to the time: divide each equation by its measured seconds.

# %% nbgrader={"grade_id": "fit", "solution": true}
def fit_link(timings: list[tuple[str, int, int, float]]) -> tuple[float, float]:
    """(α, β), in seconds and seconds a byte, that explain the timings best.

    timings: (algorithm, bytes, ranks, seconds) each, where algorithm is "ring" or "tree".
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


# %% nbgrader={"grade_id": "test_fit", "grade": true, "points": 4}
lab.check("fit")

# %% [markdown] id="crossover_text"
# ### Where do they cross?
#
# The tree has fewer messages, the ring sends fewer bytes. So the tree wins where tensors are small, the ring where they are large. At how many
# bytes do both cost the same? `None` where the tree saves no message: then the ring is never dearer.

# %% nbgrader={"grade_id": "crossover", "solution": true}
def crossover_bytes(ranks: int, alpha: float, beta: float) -> float | None:
    """The bytes at which ring and tree cost the same; None if the tree has no fewer messages."""
    ### BEGIN SOLUTION
    rounds = (ranks - 1).bit_length()
    saved_messages = 2 * (ranks - 1) - 2 * rounds
    if saved_messages <= 0:
        return None
    more_bytes = 2 * rounds - 2 * (ranks - 1) / ranks  # in units of B
    return saved_messages * alpha / (more_bytes * beta)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_crossover", "grade": true, "points": 3}
lab.check("crossover")

# %% [markdown] id="fit_after"
# Now your fit on your measurements, for each algorithm and each number of ranks by itself. If the model were the whole truth, the four rows would
# be the same: one link, one α, one β. **Before you run it:** which rows will differ on *this* machine, and why? (How many cores has it, how many
# ranks, and how many messages are under way at a time in a ring, in a tree?)

# %% id="show_fit" tags=["demo"]
print(f"{os.cpu_count()} cores")
links, lines = {}, {}
for name, world in [("tree", 2), ("ring", 2), ("tree", 4), ("ring", 4)]:
    alpha, beta = fit_link([timing for timing in timings if timing[0] == name and timing[2] == world])
    links[name, world] = alpha, beta
    lines[name, world] = [predicted_seconds(name, size, world, alpha, beta) for size in SIZES]
    print(f"{name} on {world} ranks: α = {1e6 * alpha:5.0f} µs a message, 1/β = {1e-9 / beta:5.2f} GB/s")
figures.fitted(timings, SIZES, lines, crossover_bytes(4, *links["tree", 2]))

# %% [markdown] id="fit_lesson"
# Lines are the fits, markers your measurements. The dotted line is the crossover that the link of the *first* row promises for four ranks.
#
# - Each curve is explained by two numbers: flat where α rules, rising where β does. A point far from its line tells you something: a cache, a
#   copy, a busy neighbour.
# - The rows need not agree. In a ring **all ranks send and receive at the same time**; the model says that this costs nothing extra. That holds
#   where every rank has its own processor and its own link. Where ranks share cores, the messages of one step take turns: the ring's α is
#   larger, and the crossover lies further to the right than promised, or outside the figure. A model is as good as its assumptions.
# - Gloo's own all-reduce is a ring as well, cut into smaller pieces, and without Python between the messages.

# %% [markdown] id="backends_text"
# ### Backends
#
# Who carries the messages? `dist.init_process_group(backend)`:
#
# | backend | where | who uses it |
# |---|---|---|
# | **gloo** | CPU tensors, over TCP | labs, tests, control messages |
# | **NCCL** | GPUs: NVLink inside a node, InfiniBand or Omni-Path between nodes, without the CPU | training; each rank needs a GPU of its own |
# | **MPI** | wherever the machine has one; PyTorch must be built with it | rarely |
#
# NCCL has rings *and* trees. It looks up the links of the machine at the start, and chooses for each size by costs like yours. The cell asks the
# backends of *this* machine for the time of your largest tensor on two ranks.

# %% id="run_backends" tags=["demo"]
def all_reduce_seconds(device: str, size: int, repeats: int) -> float:
    """The fastest of several tries on this rank."""
    where = torch.device("cpu") if device == "cpu" else torch.device(device, dist.get_rank())
    tensor, tries = torch.ones(size // 4, device=where), []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        tries.append(time.perf_counter() - began)
    return min(tries[1:])


print(f"gloo: {1e3 * max(run_ranks(all_reduce_seconds, 2, 'cpu', LARGEST, REPEATS)):8.3f} ms")
if torch.cuda.device_count() >= 2:
    print(f"NCCL: {1e3 * max(run_ranks(all_reduce_seconds, 2, 'cuda', LARGEST, REPEATS)):8.3f} ms")
else:
    print(f"NCCL: wants a GPU for each rank, this machine has {torch.cuda.device_count()}")
print("MPI: ", "available" if dist.is_mpi_available() else "this PyTorch is built without it")

# %% [markdown] id="scale_text"
# ## 9 · At scale
#
# Your two functions, with the links of a real machine. A node of Jean Zay's A100 partition has 8 GPUs; inside a node they speak over NVLink (300 GB/s each
# way), and four Omni-Path ports of 100 Gb/s lead out of it (50 GB/s together). For α we take the latencies of NCCL's own cost table: 3.4 µs a
# message over NVLink, 14 µs over the network.

# %% id="show_scale" tags=["demo"]
from dlo_lib.hardware import gpu

LINKS = {  # α in seconds, bytes/s
    "8 GPUs in a node, NVLink": (8, 3.4e-6, gpu("a100-80").nvlink_bandwidth),
    "64 nodes, four Omni-Path ports each": (64, 14e-6, 4 * PORT),
}
AT_SCALE = [4 * 4**power for power in range(17)]  # 4 bytes to 17 GB
curves, crossings = {}, {}
for link, (ranks, a, speed) in LINKS.items():
    curves[link] = {name: [predicted_seconds(name, size, ranks, a, 1 / speed) for size in AT_SCALE] for name in ("ring", "tree")}
    crossings[link] = crossover_bytes(ranks, a, 1 / speed)
figures.at_scale(curves, AT_SCALE, crossings, {"a gradient norm": 4, "a DDP bucket": 25 << 20, "gradients of a 3B model": GRADIENTS})

# %% [markdown] id="scale_lesson"
# Read three things from the figure.
#
# - The **gradient norm** (one number) takes the tree; the **gradients** take the ring, on either link. Where the two cross depends on the link
#   and on the number of ranks: no rule of thumb in bytes is right everywhere.
# - For large tensors the ring's time hardly depends on the number of ranks, only on the slowest link. So keep heavy traffic inside nodes,
#   and go out with as little as possible: reduce-scatter inside, all-reduce the chunks between nodes, all-gather inside.
# - DDP sends buckets of 25 MB and not one tensor after another: small messages pay α, again and again.
#
# NCCL's trees are better than yours: they cut the tensor into pieces that follow one another down the tree (a *pipeline*), and use two trees at once
# so that no rank is only a leaf. That gives log N latency *and* nearly the ring's bandwidth.
#
# On a cluster, the same measurement with NCCL is a job. `all_reduce_times.py` lies beside this notebook; `cluster.submit` with `dry_run` shows the
# script that SLURM would get for it. Without SLURM the same call runs it here, on two processes.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster

script = cluster.submit("all_reduce_times.py", [30], gpus=16, site="jean-zay-a100", account="abc", dry_run=True)
print("For SLURM, 2 nodes of 8 GPUs:", *(line for line in script.splitlines() if line.startswith(("#SBATCH", "srun"))), sep="\n  ")
job = cluster.submit("all_reduce_times.py", [22], gpus=PROCESSES).wait()
print(job.logs())

# %% [markdown] id="quiz_text"
# ## 10 · Quiz
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here says whether every question has an answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "b", "q2": "c", "q3": "a", "q4": "d", "q5": "a"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true, "points": 6}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - **Recursive halving and doubling**: exchange halves with the rank at distance N/2, quarters at N/4, and so on, then back. log₂ N rounds *and* the
#   bytes of the ring, on powers of two. Write it, and add it to the figure. What do you do with six ranks?
# - Cut your tree broadcast into pieces that follow one another. How many pieces are best, by α and β?
# - Two levels: 2 × 2 ranks as two "nodes". Reduce-scatter inside, all-reduce between, all-gather inside. Count the bytes that leave a node.
# - Sum 1e8, 1 and -1e8 in fp32 on three ranks, in all orders. Which of your algorithms gives every rank the same bits? Which gives the same bits again on
#   another number of ranks?
# - Read `dlo_lib/comm/collectives/`: averages, maxima, groups of ranks, and the same cost model for six algorithms.
#
# ## References
#
# - P. Patarasuk, X. Yuan, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations* (2009), [doi:10.1016/j.jpdc.2008.09.002](https://doi.org/10.1016/j.jpdc.2008.09.002)
# - R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of Collective Communication Operations in MPICH* (2005), [doi:10.1177/1094342005051521](https://doi.org/10.1177/1094342005051521)
# - R. Hockney, *The communication challenge for MPP* (1994), [doi:10.1016/S0167-8191(06)80021-9](https://doi.org/10.1016/S0167-8191(06)80021-9)
# - P. Sanders, J. Speck, J. L. Träff, *Two-tree algorithms for full bandwidth broadcast, reduction and scan* (2009), [doi:10.1016/j.parco.2009.09.001](https://doi.org/10.1016/j.parco.2009.09.001)
# - NCCL's latencies: `hwLat` in [src/graph/tuning.cc](https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc) (ring, "Simple" protocol)
# - NVLink: NVIDIA's A100 data sheet, 600 GB/s both ways. The node (8 A100, 4 Omni-Path links): BigScience, *BLOOM* (2022), [arXiv:2211.05100](https://arxiv.org/abs/2211.05100)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 3
