# %% [markdown] id="title"
# # 18 · A pipeline on real ranks
#
# **What you will do.** Take a table of a schedule, as in lab 17, and make real processes carry it out. You cut a model into stages, write the
# forward and backward of one stage, the order of its messages and the loop of one rank. You meet a dead-lock on purpose. Then you split the
# backward, train without flushes, and run pipelines side by side. The judge is always the same: the gradients of all ranks must be **those of
# one process with the whole model and the whole batch**.
#
# You need no GPU: ranks are processes on this machine (gloo). The models are small, so that nothing hides a mistake.
#
# Builds on lab 17 (schedules). It takes about 90 minutes. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge,
# then a pointer, then a sketch. If a step stays stuck, `lab.use_reference("name")` lets you go on without its points.
#
# Words: pipeline parallelism (*parallélisme de pipeline*), stage (*étage*), micro-batch (*micro-lot*), dead-lock (*interblocage*),
# partition (*découpage*), weight stashing (*mise en réserve des poids*).

# %% id="setup"
import math
import os
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlo_lib.grading import Lab
from dlo_lib.parallel.pipeline.table import Action

STEPS = int(os.environ.get("DLO_STEPS", 60))  # of the training near the end
MILLISECONDS = int(os.environ.get("DLO_MILLISECONDS", 20))  # of a forward, where ranks sleep instead of computing
GPUS = int(os.environ.get("DLO_GPUS", 2))  # ranks of the small job near the end
lab = Lab(globals())


def parse(cell: str) -> tuple[int, str, int]:
    """Stage, kind and micro-batch of a cell: parse("2F5") is (2, "F", 5), parse("0SEND_F1") is (0, "SEND_F", 1)."""
    kind, stage, micro_batch = Action.parse(cell)
    return stage, kind.value, micro_batch


# %% [markdown] id="why"
# ## Why: the table is not the run
#
# In lab 17 a schedule was a picture: equal stages, free messages, nobody waits for anything but data. A machine keeps none of these promises.
#
# Begin with the first. Llama 3.2 1B has 16 equal blocks, so four stages of four blocks. But an embedding stands before the first block
# and an output projection after the last. The figure counts what each stage computes.

# %% id="show_why" tags=["demo"]
import figures

from dlo_lib.parallel.pipeline.partition import counted_costs

# embedding, 16 blocks, norm and head: GFLOPs for each token, forward
llama = [flops / 1e9 for flops in counted_costs("llama-3.2-1b", seq=2048)]
equal = [0, 5, 9, 13]
figures.stage_costs(llama, {"four blocks in each": equal})

# %% [markdown] id="why_questions"
# The head of this model costs as much as several blocks. A pipeline moves at the pace of its **slowest stage**: in the time that the last stage
# takes for one micro-batch, the others finish early and wait.
#
# - How would you cut, if a stage may have any number of blocks?
# - The first stage also has the embedding. Why does that not count here, and where would it count?

# %% [markdown] id="idea"
# ## The idea: five small parts
#
# 1. **Cut** the model so that the slowest stage is as fast as possible.
# 2. **Weigh** the loss of each micro-batch, so that their gradients add up to the gradient of the batch.
# 3. **One stage**: forward of a micro-batch, and later its backward, with a gradient that comes from elsewhere.
# 4. **The messages** between the cells of the table, in an order in which nobody waits for ever.
# 5. **The loop**: a rank goes through its row and does what the cells say. One loop for every schedule.

# %% id="show_idea" tags=["demo"]
figures.one_rank()

# %% [markdown] id="partition_text"
# ## 1 · Cut the model
#
# A model is a row of *pieces* with costs. A stage is a run of successive pieces, and no stage may be empty. Find the cut whose most costly stage
# costs least.
#
# Trying all cuts takes ages: 80 pieces can be cut into 16 stages in more than 10¹⁵ ways. Dynamic programming finds the best cut in about
# 50,000 steps. Call *C(k, n)* the cost of the slowest of *k* stages in the best cut of the first *n* pieces. The last of these stages begins
# somewhere, at piece *j*:
#
# $$C(k, n) = \min_{j} \max\big(C(k-1, j),\ \text{cost of pieces } j \ldots n-1\big)$$
#
# Costs may be fractions (seconds) as well as whole numbers.

# %% nbgrader={"grade_id": "partition", "solution": true}
def stage_starts(costs: list[float], stages: int) -> list[int]:
    """The number of the first piece of each stage: [0, ...], rising.

    The most costly stage costs as little as possible; no stage is empty.
    """
    ### BEGIN SOLUTION
    upto = [0.0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    best = {0: (0.0, [])}  # for each number of pieces: the slowest stage so far, and the starts
    for stage in range(stages):
        best = {
            end: min((max(best[start][0], upto[end] - upto[start]), [*best[start][1], start]) for start in best if start < end)
            for end in range(stage + 1, len(costs) + 1)
        }
    return best[len(costs)][1]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_partition", "grade": true, "points": 5}
lab.check("partition")

# %% id="show_partition" tags=["demo"]
print(f"80 pieces in 16 stages: {math.comb(79, 15):.1e} cuts")
figures.stage_costs(llama, {"four blocks in each": equal, "your cut": stage_starts(llama, 4)})

# %% [markdown] id="loss_text"
# ## 2 · The loss of a micro-batch
#
# Gradients **add up**: `backward()` of every micro-batch adds to `.grad`. So the losses on which backward is called must add up to the loss of
# the whole batch: the mean over all its valid targets (those that are not -100).
#
# This looks too simple to go wrong. It went wrong for years in trainers that thousands used. The cell shows two ways to be wrong, on
# equal micro-batches and on unequal ones.

# %% id="show_loss" tags=["demo"]
torch.manual_seed(0)
weight = torch.randn(5, 6)
samples, labels = torch.randn(18, 6), torch.randint(0, 5, (18,))


def gradient(parts) -> torch.Tensor:
    """The gradient of the weight after backward of each part; a part is samples, labels and a divisor."""
    own = weight.clone().requires_grad_()
    for x, y, divisor in parts:
        (F.cross_entropy(x @ own.T, y, reduction="sum") / divisor).backward()
    return own.grad


true = gradient([(samples, labels, 18)])
for sizes in ((6, 6, 6), (8, 8, 2)):
    parts = list(zip(samples.split(sizes), labels.split(sizes)))
    for name, by in {"means, added": 1, "means, added, divided by 3": 3}.items():
        got = gradient([(x, y, by * len(y)) for x, y in parts])
        cosine = F.cosine_similarity(got.flatten(), true.flatten(), dim=0)
        print(f"{sizes}  {name:27} {got.norm() / true.norm():.2f} times as long as the true gradient, cosine {cosine:.2f}")

# %% [markdown] id="loss_exercise"
# The second is the treacherous one: right when all micro-batches are equal, wrong by a little when the last one is small or padding is unequal.
# No test with equal micro-batches will find it.
#
# The last rank computes the losses. It knows the targets of all micro-batches from the beginning.

# %% nbgrader={"grade_id": "loss", "solution": true}
def loss_part(output: torch.Tensor, target: torch.Tensor, targets: list[torch.Tensor]) -> torch.Tensor:
    """What one micro-batch adds to the mean cross-entropy of the whole batch, a scalar.

    output: (samples, classes). target: (samples,) int64, -100 where there is nothing to learn.
    targets: those of all micro-batches.
    """
    ### BEGIN SOLUTION
    valid = sum((each != -100).sum() for each in targets)
    return F.cross_entropy(output, target, reduction="sum", ignore_index=-100) / valid
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_loss", "grade": true, "points": 6}
lab.check("loss")

# %% [markdown] id="stage_text"
# ## 3 · One stage
#
# In one process autograd goes back through the whole model. Here the graph is cut at every rank. Each stage does its part, for micro-batch `i`:
#
# - **forward**: `x` has come from another rank, numbers without history. Make it a *leaf* that requires a gradient (tokens cannot: they are whole
#   numbers), run the stage, **keep** what backward will need, and return the output *without* its graph. On the last rank `loss` is a
#   function: apply it to the output, and treat the loss as the output.
# - **backward**: `grad` is the gradient of the output, from the next rank (`None` on the last rank: the output is a scalar). Go back through the
#   stage; gradients of the parameters add up in `.grad`. Return the gradient of `x`.
#
# `kept` is a dict of yours. Several micro-batches are in flight at the same time, so keep by number. What is not needed any more must leave it:
# activations are the memory of a pipeline.

# %% nbgrader={"grade_id": "stage", "solution": true}
def stage_forward(stage: nn.Module, kept: dict, i: int, x: torch.Tensor, loss=None) -> torch.Tensor:
    """Forward of micro-batch i: the output, or loss(output) where `loss` is given, without its graph.

    Keeps in `kept` what backward needs.
    """
    ### BEGIN SOLUTION
    x = x.detach().requires_grad_(x.is_floating_point())
    output = stage(x)
    if loss is not None:
        output = loss(output)
    kept[i] = x, output
    return output.detach()
    ### END SOLUTION


def stage_backward(kept: dict, i: int, grad: torch.Tensor | None = None) -> torch.Tensor | None:
    """Backward of micro-batch i from the gradient of its output: the gradient of its input.

    The gradients of the parameters add up in .grad.
    """
    ### BEGIN SOLUTION
    x, output = kept.pop(i)
    output.backward(grad)
    return x.grad
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_stage", "grade": true, "points": 5}
lab.check("stage")

# %% [markdown] id="table_text"
# ## 4 · A table of your own
#
# The notation of lab 17: a row for each rank, a cell for each action, `"1F0"` is the forward of stage 1 on micro-batch 0, `"1B0"` its backward.
# Here each rank has one stage: stage `r` lies on rank `r`.
#
# Bring a table of yours. It must
#
# - take every micro-batch forward and back, once, on every rank. Also the last ones: at the end of a step the pipeline is **flushed**;
# - have no cell that waits for something that never comes;
# - hold at most *p - r* micro-batches on rank *r* (forwards done whose backward is not);
# - take no longer than *(m + p - 1)(F + B)*.
#
# That leaves you one schedule that you know. There may be fewer micro-batches than ranks.

# %% nbgrader={"grade_id": "table", "solution": true}
def my_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """For each rank, its cells in order."""
    ### BEGIN SOLUTION
    rows = []
    for rank in range(ranks):
        ahead = min(micro_batches, ranks - 1 - rank)
        row = [f"{rank}F{i}" for i in range(ahead)]
        for i in range(micro_batches):
            if i + ahead < micro_batches:
                row.append(f"{rank}F{i + ahead}")
            row.append(f"{rank}B{i}")
        rows.append(row)
    return rows
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_table", "grade": true, "points": 5}
lab.check("table")

# %% id="show_table" tags=["demo"]
figures.planned(my_rows(4, 8), forward=1, backward=2)

# %% [markdown] id="order_text"
# ## 5 · Messages, and a dead-lock
#
# Between the cells data must travel. Four kinds of cells more:
#
# | cell | what rank 1 does |
# |---|---|
# | `"1RECV_F3"` | receives the activations of micro-batch 3 from rank 0, before `"1F3"` |
# | `"1SEND_F3"` | sends its output to rank 2, after `"1F3"` |
# | `"1RECV_B3"` | receives the gradient of that output from rank 2, before `"1B3"` |
# | `"1SEND_B3"` | sends the gradient of its input to rank 0, after `"1B3"` |
#
# The first rank receives no activations, the last one sends none; gradients go the other way.
#
# The obvious place: receive just before use, send right after computing. `dist.send` and `dist.recv` *block*: they return when the message
# has passed. The next cell writes messages in this way and lets real ranks carry them out, for AFAB and for your table. **What do you
# expect?**

# %% id="run_dead_lock" tags=["demo"]
from dlo_lib.launch import DeadLock, run_ranks


def as_they_come(rows: list[list[str]]) -> list[list[str]]:
    """Receive just before, send just after."""
    written, last = [], len(rows) - 1
    for rank, row in enumerate(rows):
        cells = []
        for cell in row:
            _, kind, i = parse(cell)
            from_rank, to_rank = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
            cells += [f"{rank}RECV_{kind}{i}"] if 0 <= from_rank <= last else []
            cells += [cell]
            cells += [f"{rank}SEND_{kind}{i}"] if 0 <= to_rank <= last else []
        written.append(cells)
    return written


def messages_only(rows: list[list[str]]) -> int:
    """Send and receive one number for each message of this rank's row; how many."""
    rank, number, passed = dist.get_rank(), torch.zeros(1), 0
    for cell in rows[rank]:
        _, kind, _ = parse(cell)
        above, below = rank - 1, rank + 1
        if kind == "SEND_F":
            dist.send(number, below)
        elif kind == "RECV_F":
            dist.recv(number, above)
        elif kind == "SEND_B":
            dist.send(number, above)
        elif kind == "RECV_B":
            dist.recv(number, below)
        passed += "_" in kind
    return passed


afab = [[f"{rank}F{i}" for i in range(4)] + [f"{rank}B{i}" for i in range(4)] for rank in range(3)]
for name, rows in {"AFAB": afab, "your table": my_rows(3, 4)}.items():
    try:
        print(f"{name}: messages of each rank", run_ranks(messages_only, 3, as_they_come(rows)))
    except DeadLock as lock:
        print(f"{name}:", lock)

# %% [markdown] id="order_exercise"
# Read the explanation. Which two ranks wait, in which calls? Write the two rows side by side: after some warm-up, rank 0 wants to *send* the
# activations of the next micro-batch, while rank 1 wants to *send* a gradient. Both sends wait for a receive that comes after the other
# send. AFAB has all its forwards first, so messages never cross.
#
# Warning: with small messages and another backend, this program **may run**: a library may copy a small message into a buffer and return from
# `send` at once. Then it hangs on the day when the model grows. (This course reports a dead-lock even where a buffer would hide it.)
#
# Write the messages in an order that can always be carried out. There are cures that belong to one schedule ("odd ranks receive first"). Find
# one for **every table** that can be carried out at all. Keep the computations of each rank in their order.

# %% nbgrader={"grade_id": "order", "solution": true}
def with_messages(rows: list[list[str]]) -> list[list[str]]:
    """The rows with SEND_F, RECV_F, SEND_B and RECV_B added, so that blocking messages never dead-lock."""
    ### BEGIN SOLUTION
    # One order for all: whenever a message arises, both of its ranks note it down.
    last, done = len(rows) - 1, set()
    position, written = [0] * len(rows), [[] for _ in rows]
    while any(at < len(row) for at, row in zip(position, rows)):
        for rank, row in enumerate(rows):
            if position[rank] == len(row):
                continue
            cell = row[position[rank]]
            _, kind, i = parse(cell)
            from_rank, to_rank = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
            if 0 <= from_rank <= last and f"{from_rank}{kind}{i}" not in done:
                continue
            position[rank] += 1
            done.add(cell)
            written[rank].append(cell)
            if 0 <= to_rank <= last:
                written[rank].append(f"{rank}SEND_{kind}{i}")
                written[to_rank].append(f"{to_rank}RECV_{kind}{i}")
    return written
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_order", "grade": true, "points": 6}
lab.check("order")

# %% id="show_order" tags=["demo"]
print("messages of each rank:", run_ranks(messages_only, 3, with_messages(my_rows(3, 4))))
for row in with_messages(my_rows(2, 3)):
    print(" ".join(row))

# %% [markdown] id="loop_text"
# ## 6 · The loop
#
# Now the loop of one rank. It knows nothing of models: `forward(i, x)` and `backward(i, grad)` do the work, as in step 3. It goes through
# its row, cell by cell, and sees to it that each gets what it needs.
#
# - `forward(i, x)` returns the output to send, on the last rank the micro-batch's part of the loss. `backward(i, grad)` returns the gradient
#   to send; on the last rank `grad` is `None`.
# - `inputs` are the batch's micro-batches on the first rank, `None` elsewhere. There `shapes[i]` is the shape of what arrives for micro-batch
#   `i`. Micro-batches may have different sizes, and stages different widths. A gradient has the shape of the output that it belongs to.
# - `before` and `after` are the ranks to talk to, `None` where there is none.
# - Return the sum of the losses on the last rank, 0 elsewhere.
#
# Hold a tensor only as long as something needs it.

# %% nbgrader={"grade_id": "loop", "solution": true}
def run_row(row: list[str], forward, backward, inputs, shapes, before: int | None, after: int | None):
    """Carry out this rank's row, with its messages; the sum of the losses on the last rank."""
    ### BEGIN SOLUTION
    arrived, gradients, outputs, input_gradients, shape_out, loss = {}, {}, {}, {}, {}, 0.0
    for cell in row:
        _, kind, i = parse(cell)
        if kind == "RECV_F":
            arrived[i] = torch.empty(shapes[i])
            dist.recv(arrived[i], before)
        elif kind == "F":
            output = forward(i, inputs[i] if before is None else arrived.pop(i))
            if after is None:
                loss = loss + output
            else:
                outputs[i], shape_out[i] = output, output.shape
        elif kind == "SEND_F":
            dist.send(outputs.pop(i), after)
        elif kind == "RECV_B":
            gradients[i] = torch.empty(shape_out.pop(i))
            dist.recv(gradients[i], after)
        elif kind == "B":
            gradient = backward(i, None if after is None else gradients.pop(i))
            if before is not None:
                input_gradients[i] = gradient
        elif kind == "SEND_B":
            dist.send(input_gradients.pop(i), before)
    return loss
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_loop", "grade": true, "points": 10}
lab.check("loop")

# %% [markdown] id="loop_after"
# All of your parts together: an MLP of nine uneven layers, cut by you into 4 stages, on 4 ranks, 6 micro-batches of which the last is small.
# Below, for each rank, the largest difference to the gradients of one process with the whole batch.

# %% id="run_pipeline" tags=["demo"]
torch.manual_seed(1)
WIDTHS = (12, 40, 9, 33, 17, 24, 8, 30, 11, 10)
pieces = [nn.Sequential(nn.Linear(a, b, dtype=torch.float64), nn.Tanh()) for a, b in pairwise(WIDTHS)]
samples, labels = torch.randn(44, WIDTHS[0], dtype=torch.float64), torch.randint(0, WIDTHS[-1], (44,))
micro_inputs, micro_targets = samples.split(8), labels.split(8)


def stages_of(ranks: int) -> list[nn.Sequential]:
    """The model cut by stage_starts, by the number of weights of each piece."""
    starts = stage_starts([float(a * b) for a, b in pairwise(WIDTHS)], ranks)
    return [nn.Sequential(*pieces[start:end]) for start, end in pairwise([*starts, len(pieces)])]


def on_one_rank(stage: nn.Sequential, rows: list[list[str]], inputs, targets, place: int, before: int | None, after: int | None) -> float:
    """A step on rank `place` of a pipeline; the loss. The stage has its gradients afterwards."""
    torch.set_default_dtype(torch.float64)
    kept = {}

    def forward(i, x):
        loss = (lambda output: loss_part(output, targets[i], micro_targets)) if after is None else None
        return stage_forward(stage, kept, i, x, loss)

    def backward(i, grad):
        return stage_backward(kept, i, grad)

    shapes = [(len(x), stage[0][0].in_features) for x in inputs]
    return float(run_row(with_messages(rows)[place], forward, backward, inputs if before is None else None, shapes, before, after))


def one_step(ranks: int) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of this rank."""
    rank = dist.get_rank()
    before, after = (rank - 1 if rank else None), (rank + 1 if rank < ranks - 1 else None)
    stage = stages_of(ranks)[rank]
    loss = on_one_rank(stage, my_rows(ranks, len(micro_inputs)), micro_inputs, micro_targets, rank, before, after)
    return loss, [parameter.grad for parameter in stage.parameters()]


def in_one_process() -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of the whole model and batch."""
    model = nn.Sequential(*pieces)
    model.zero_grad()
    loss = F.cross_entropy(model(samples), labels)
    loss.backward()
    return float(loss.detach()), [parameter.grad.clone() for parameter in model.parameters()]


def largest_difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Between two lists of tensors."""
    return max(float((one - other).abs().max()) for one, other in zip(some, others))


true_loss, true_grads = in_one_process()
nn.Sequential(*pieces).zero_grad()
results = run_ranks(one_step, 4, 4)
print(f"loss: {true_loss:.12f} in one process, {results[-1][0]:.12f} on the last rank")
first = 0
for rank, (_, grads) in enumerate(results):
    print(f"rank {rank}: {len(grads)} gradients, largest difference {largest_difference(grads, true_grads[first:]):.1e}")
    first += len(grads)

# %% [markdown] id="measure_text"
# ### Planned and measured
#
# Is the run the one that you drew? To see the schedule and not your processor, the ranks *sleep* instead of computing: one unit for a forward,
# two for a backward. The lower drawing is made from the clock of each rank. **What do you expect:** the same picture, or wider bubbles?

# %% id="run_measured" tags=["demo"]
import time


def asleep(rows: list[list[str]], unit: float) -> list[tuple[float, float]]:
    """When each F and B of this rank began and ended."""
    rank, spans, something = dist.get_rank(), [], [torch.zeros(4)] * 64

    def nap(units: int):
        began = time.monotonic()
        time.sleep(units * unit)
        spans.append((began, time.monotonic()))
        return torch.zeros(4)

    before, after = (rank - 1 if rank else None), (rank + 1 if rank < len(rows) - 1 else None)
    dist.barrier()
    run_row(with_messages(rows)[rank], lambda i, x: nap(1), lambda i, grad: nap(2), something, [(4,)] * 64, before, after)
    return spans


rows = my_rows(4, 8)
spans = run_ranks(asleep, 4, rows, MILLISECONDS / 1000)
figures.planned_and_measured(rows, {"planned": None, "your loop, measured": spans}, MILLISECONDS / 1000)

# %% [markdown] id="measure_lesson"
# The order is the same, as a rank does its row. But the bubbles are wider than planned. Your messages *block*: a sender waits until the receiver
# has come to its receive, and the order that saves you from the dead-lock makes ranks wait for messages that they do not need yet.
#
# A production runtime pays less. It does not wait for its sends (`dist.isend`; the tensor must live until it has gone), and it posts receives
# *before* they are needed, so that data moves while the rank computes. `dlo_lib.parallel.pipeline.runtime` does this with the same table. The
# next cell measures it on the same sleeping ranks.

# %% id="run_overlapped" tags=["demo"]
from dlo_lib.optim import train_step
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.pipeline.schedules import one_f_one_b


class Sleep(torch.autograd.Function):
    """Sleeps one unit forward, two units backward."""

    @staticmethod
    def forward(ctx, x, unit):
        ctx.unit = unit
        time.sleep(unit)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.unit)
        return grad, None


class Sleepy(nn.Module):
    """A layer that takes its time."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.scale, self.unit = nn.Parameter(torch.ones(8)), unit

    def forward(self, x):
        return Sleep.apply(x * self.scale, self.unit)


def by_the_library(ranks: int, micro_batches: int, unit: float):
    """The measured spans of all ranks of a second step; the first one also tells the shapes."""
    pipeline = Pipeline({dist.get_rank(): Sleepy(unit)}, one_f_one_b(ranks, micro_batches))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    batch = [(torch.ones(1, 2, 8), torch.ones(1, 2, dtype=torch.int64)) for _ in range(micro_batches)]
    with pipeline.recording():
        for _ in range(2):
            train_step(pipeline, optimizer, batch)
        return [list(spans) for spans in pipeline.measured().spans]


overlapped = run_ranks(by_the_library, 4, 4, 8, MILLISECONDS / 1000)[0]
figures.planned_and_measured(rows, {"planned": None, "dlo_lib, messages overlapped": overlapped}, MILLISECONDS / 1000)

# %% [markdown] id="split_text"
# ## 7 · The backward in two parts
#
# Zero-bubble schedules (lab 17) cut the backward in two. For a linear layer *y = x Wᵀ + b*:
#
# $$\frac{\partial L}{\partial x} = \frac{\partial L}{\partial y}\, W \qquad\qquad \frac{\partial L}{\partial W} = \Big(\frac{\partial L}{\partial y}\Big)^{\!T} x, \quad \frac{\partial L}{\partial b} = \sum \frac{\partial L}{\partial y}$$
#
# The stage before waits for the left one (cell `I`). Nobody waits for the right ones (cell `W`): they can fill a bubble. Write the backward of a
# layer that returns the gradient of its input at once, and leaves the rest in the list `later`, as functions without arguments.
#
# Tensors are (batch, seq, features): the gradients of weight and bias sum over everything but features. They *add* to `.grad`, which may be
# `None` at first.

# %% nbgrader={"grade_id": "split", "solution": true}
def linear_backward(grad_y: torch.Tensor, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter, later: list) -> torch.Tensor:
    """The gradient of x, now; `later` gets the work that adds the gradients of weight and bias to their .grad."""
    ### BEGIN SOLUTION

    def weight_part():
        rows = grad_y.flatten(0, -2)  # (batch * seq, out)
        for parameter, grad in ((weight, rows.T @ x.flatten(0, -2)), (bias, rows.sum(0))):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    later.append(weight_part)
    return grad_y @ weight.detach()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_split", "grade": true, "points": 5}
lab.check("split")

# %% [markdown] id="split_after"
# Inside autograd: a layer whose backward is yours. There are two layers in one graph, and no weight gradients until the list is worked off. The
# figure shows what that buys: 1F1B, and ZB-H1 with the same memory, for *F = I = W*.

# %% id="show_split" tags=["demo"]
from dlo_lib.parallel.pipeline.schedules import zb_h1
from dlo_lib.parallel.pipeline.simulate import simulate

later: list = []


class SplitLinear(torch.autograd.Function):
    """A linear layer whose weight part waits in `later`."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x)
        ctx.parameters = weight, bias
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_y):
        return linear_backward(grad_y, *ctx.saved_tensors, *ctx.parameters, later), None, None


def two_layers(linear, x: torch.Tensor, first: nn.Linear, second: nn.Linear) -> torch.Tensor:
    """A loss of two layers that are computed by `linear`."""
    return linear(torch.tanh(linear(x, first.weight, first.bias)), second.weight, second.bias).square().sum()


layers = nn.ModuleList([nn.Linear(6, 9, dtype=torch.float64), nn.Linear(9, 4, dtype=torch.float64)])
x = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
true_x, *true = torch.autograd.grad(two_layers(F.linear, x, *layers), [x, *layers.parameters()])

two_layers(SplitLinear.apply, x, *layers).backward()
print(f"input part: differs from autograd by {largest_difference([x.grad], [true_x]):.1e}")
print("gradients of weights so far:", [parameter.grad for parameter in layers.parameters()])
with torch.no_grad():  # outside of backward() autograd would record this work
    while later:
        later.pop()()
print(f"weight part: differs from autograd by {largest_difference([parameter.grad for parameter in layers.parameters()], true):.1e}")
figures.schedules([one_f_one_b(4, 8), zb_h1(4, 8)])

# %% [markdown] id="delayed_text"
# ## 8 · Without flush: gradients that come late
#
# A flush costs the bubble at every step. **PipeDream** does without: batch after batch goes in, every backward is followed by an update of that
# stage. No bubble at all. But look at the row of rank 0 of *p*: between the forward of a batch and its backward, *p - 1* other backwards have
# updated the weights. So the gradient that arrives belongs to weights of the past:
#
# $$w_s(t+1) = w_s(t) - \eta\ \nabla_s f\big(w_0(t-\tau_0),\ \ldots,\ w_{p-1}(t-\tau_{p-1})\big), \qquad w(t) = w(0)\ \text{for}\ t < 0$$
#
# | scheme | delay of stage *s* of *p* | versions kept |
# |---|---|---|
# | with flush (GPipe, 1F1B) | 0 | 1 |
# | PipeDream, weight stashing | *p - 1 - s* | up to *p - s* |
# | 2BW: gradients of several micro-batches are added up before an update | 1 for every stage | 2 |
#
# An asynchronous pipeline is *not* equal to synchronous training, and no patience in debugging will make it so. Its twin is this formula. Write it.

# %% nbgrader={"grade_id": "delayed", "solution": true}
def delayed_training(weights: list[torch.Tensor], gradients_of, lr: float, delays: list[int], steps: int) -> list[torch.Tensor]:
    """The weights after `steps` updates; weights[s] and delays[s] belong to stage s.

    gradients_of(weights, t) gives the gradients of batch t = 0, 1, ... at these weights, one tensor a stage.
    """
    ### BEGIN SOLUTION
    versions = [weights]
    for t in range(steps):
        old = [versions[max(0, t - delay)][stage] for stage, delay in enumerate(delays)]
        versions.append([weight - lr * grad for weight, grad in zip(versions[-1], gradients_of(old, t))])
    return versions[-1]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_delayed", "grade": true, "points": 3}
lab.check("delayed")

# %% [markdown] id="delayed_after"
# What does the delay cost? An MLP of eight layers in eight stages, three schemes, two learning rates. (The batch is always the same, so that the
# curves are smooth.) The axis is **time**: with flush and 8 micro-batches an update also pays for the bubble of 1F1B. **Before you run it:**
# which learning rate will forgive the delays?

# %% id="run_delayed" tags=["demo"]
def chain(seed: int, stages: int = 8, width: int = 16) -> list[torch.Tensor]:
    """One matrix for each stage."""
    generator = torch.Generator().manual_seed(seed)
    return [1.3 * torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5 for _ in range(stages)]


torch.manual_seed(2)
samples_in = torch.randn(64, 16, dtype=torch.float64)
goals = torch.tanh(samples_in @ chain(seed=5, stages=1)[0].T)


def gradients_of_chain(weights: list[torch.Tensor], losses: list[float]) -> list[torch.Tensor]:
    """The gradients of all stages at these weights; the loss goes into `losses`."""
    own = [weight.detach().clone().requires_grad_() for weight in weights]
    x = samples_in
    for weight in own:
        x = torch.tanh(x @ weight.T)
    loss = F.mse_loss(x, goals)
    loss.backward()
    losses.append(float(loss.detach()))
    return [weight.grad for weight in own]


def curve(delays: list[int], lr: float, update: float) -> list[tuple[float, float]]:
    """Time and loss of each forward, where an update takes `update`."""
    losses = []
    delayed_training(chain(seed=3), lambda weights, t: gradients_of_chain(weights, losses), lr, delays, STEPS)
    return [(t * update, loss) for t, loss in enumerate(losses) if t * update <= STEPS]


flush = 1 + simulate(one_f_one_b(8, 8)).bubble_ratio
SCHEMES = {"with flush": ([0] * 8, flush), "2BW": ([1] * 8, 1.0), "PipeDream": (list(range(7, -1, -1)), 1.0)}
print(f"an update takes {flush:.2f} with flush, 1 without")
figures.losses({lr: {name: curve(delays, lr, update) for name, (delays, update) in SCHEMES.items()} for lr in (0.3, 2.0)})

# %% [markdown] id="delayed_lesson"
# With a small learning rate the weights of a few updates ago are nearly those of now. Each delayed update is a little worse, but there are more of
# them: by the clock, the schemes without bubble are no slower, and 2BW is ahead. With a large one, old gradients push in directions that are no
# longer right, and the delay costs more than the bubble did. Large language models are trained with a flush, as a rule.

# %% [markdown] id="stash_text"
# ## 9 · PipeDream for real: weight stashing
#
# Now on ranks. Your table for many batches, without a flush between them, is PipeDream's: only an update follows each backward. And your loop
# stays as it is! What changes is the stage.
#
# Backward multiplies by weights. They must be **those that the forward of this batch has read**, else the result is the gradient of nothing.
# (If you update weights in place between the two, PyTorch notices and refuses. If you run the forward again with the new weights, nobody notices.) So
# the forward works on a copy of the newest weights, and keeps it: *weight stashing*.
#
# - `stash_forward`: as `stage_forward`, but with copies of the parameters as they are now, that require gradients.
#   `torch.func.functional_call(stage, {name: tensor, ...}, (x,))` runs a module with other parameters; names are those of
#   `stage.named_parameters()`.
# - `stash_backward`: as `stage_backward`, then update the **newest** parameters, in place: `parameter -= lr * gradient`, under
#   `torch.no_grad()`.

# %% nbgrader={"grade_id": "stash", "solution": true}
def stash_forward(stage: nn.Module, kept: dict, i: int, x: torch.Tensor, loss=None) -> torch.Tensor:
    """Forward of batch i with the newest weights, of which a copy is kept until its backward."""
    ### BEGIN SOLUTION
    version = {name: parameter.detach().clone().requires_grad_() for name, parameter in stage.named_parameters()}
    x = x.detach().requires_grad_(x.is_floating_point())
    output = torch.func.functional_call(stage, version, (x,))
    if loss is not None:
        output = loss(output)
    kept[i] = version, x, output
    return output.detach()
    ### END SOLUTION


def stash_backward(stage: nn.Module, kept: dict, i: int, grad: torch.Tensor | None, lr: float) -> torch.Tensor | None:
    """Backward of batch i with the weights of its forward; then the stage's parameters take a step of gradient descent."""
    ### BEGIN SOLUTION
    version, x, output = kept.pop(i)
    output.backward(grad)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter -= lr * version[name].grad
    return x.grad
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_stash", "grade": true, "points": 5}
lab.check("stash")

# %% [markdown] id="stash_after"
# Your ranks against your formula: PipeDream on four processes, and `delayed_training` in this one.

# %% id="run_pipedream" tags=["demo"]
class Layer(nn.Module):
    """One matrix of the chain."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x):
        return torch.tanh(x @ self.weight.T)


def pipedream(ranks: int, lr: float) -> torch.Tensor:
    """The weights of this rank's stage after all batches."""
    torch.set_default_dtype(torch.float64)
    rank, kept = dist.get_rank(), {}
    stage = Layer(chain(seed=3, stages=ranks)[rank])

    def forward(i, x):
        return stash_forward(stage, kept, i, x, (lambda y: F.mse_loss(y, goals)) if rank == ranks - 1 else None)

    before, after = (rank - 1 if rank else None), (rank + 1 if rank < ranks - 1 else None)
    row = with_messages(my_rows(ranks, STEPS))[rank]
    run_row(row, forward, lambda i, grad: stash_backward(stage, kept, i, grad, lr), [samples_in] * STEPS, [(64, 16)] * STEPS, before, after)
    return stage.weight.detach()


on_ranks = run_ranks(pipedream, 4, 4, 0.3)
for name, delays in {"delays 3, 2, 1, 0": [3, 2, 1, 0], "delays 1, 1, 1, 1": [1] * 4, "synchronous": [0] * 4}.items():
    twin = delayed_training(chain(seed=3, stages=4), lambda weights, t: gradients_of_chain(weights, []), 0.3, delays, STEPS)
    print(f"{name:18} differs from the ranks by", ", ".join(f"{(a - b).abs().max():.1e}" for a, b in zip(on_ranks, twin)))

# %% [markdown] id="hybrid_text"
# ## 10 · With data parallelism
#
# Draw the ranks as a grid: 2 × 2 ranks are two pipelines of two stages.
#
# | | stage 0 | stage 1 |
# |---|---|---|
# | pipeline 0 | rank 0 | rank 1 |
# | pipeline 1 | rank 2 | rank 3 |
#
# Each pipeline takes half of the micro-batches. Activations and gradients of activations pass along a **row**. After the last backward of the
# step the ranks of a **column**, which hold the same stage, add their gradients.
#
# `step(before, after)` does the work of this rank's row, with the neighbours that you give. The loss is divided by the valid targets of *all*
# pipelines (step 2), so gradients are added, not averaged. Every rank must call `dist.new_group` for **every** group, in the same order, also
# for those in which it is not.

# %% nbgrader={"grade_id": "hybrid", "solution": true}
def hybrid_step(step, parameters: list[nn.Parameter], rank: int, world: int, stages: int) -> None:
    """A step of world / stages pipelines, on this rank; then each .grad is that of the micro-batches of all pipelines."""
    ### BEGIN SOLUTION
    place = rank % stages
    step(rank - 1 if place > 0 else None, rank + 1 if place < stages - 1 else None)
    groups = [dist.new_group(list(range(each, world, stages))) for each in range(stages)]
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=groups[place])
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_hybrid", "grade": true, "points": 3}
lab.check("hybrid")

# %% [markdown] id="hybrid_after"
# The six micro-batches of the MLP of step 6, on two pipelines of two stages, against one process.

# %% id="run_hybrid" tags=["demo"]
def two_by_two() -> list[torch.Tensor]:
    """The gradients of this rank."""
    rank, stages = dist.get_rank(), 2
    pipeline, place = divmod(rank, stages)
    mine = slice(pipeline * 3, pipeline * 3 + 3)
    stage = stages_of(stages)[place]

    def step(before, after):
        on_one_rank(stage, my_rows(stages, 3), micro_inputs[mine], micro_targets[mine], place, before, after)

    hybrid_step(step, list(stage.parameters()), rank, 4, stages)
    return [parameter.grad for parameter in stage.parameters()]


for rank, grads in enumerate(run_ranks(two_by_two, 4)):
    expected = true_grads[: len(grads)] if rank % 2 == 0 else true_grads[-len(grads) :]
    print(f"rank {rank}: largest difference to one process {largest_difference(grads, expected):.1e}")

# %% [markdown] id="hybrid_lesson"
# `DistributedDataParallel` around each stage does the same, with two differences to mind. It divides by the number of replicas, so multiply the
# loss by that number. And it would all-reduce after every micro-batch: all but the last one belong under `no_sync()`.

# %% [markdown] id="scale_text"
# ## 11 · At scale
#
# The library's pipeline trains a Llama with any of these schedules, on a cluster with one process for each GPU. `cluster.submit` is one call for a
# cluster and for here: with `dry_run` it shows the script that SLURM would get; without SLURM it runs the *same options* here, on two processes
# and a small model. The same call made again finds the same job.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster

flags = ["--parallel", "pp", "--schedule", "zb-h1", "--micro-batches", "8", "--batch", "1"]
large = ["--model", "llama-3.2-3b", "--seq", "2048", "--precision", "bf16", "--steps", "100"]
little = ["--model", "tiny", "--seq", "32", "--steps", "4", "--log-every", "2"]

script = cluster.submit("dlo_lib.train", [*large, *flags], gpus=4, site="jean-zay-h100", account="abc", dry_run=True)
print("For SLURM, a node of 4 GPUs:", *(line for line in script.splitlines() if line.startswith(("#SBATCH", "srun"))), sep="\n  ")
job = cluster.submit("dlo_lib.train", [*little, *flags], gpus=GPUS).wait()
print("Here, 2 ranks of the small model:")
for line in job.metrics():
    print(f"  step {line.step}: loss {line.loss:.3f}, {line.tokens_per_second:,.0f} tokens/s")

# %% [markdown] id="scale_lesson"
# Where does a pipeline belong on a machine? Count what a rank sends for each token, forward and backward: a pipeline its activations and their
# gradients, at the cuts; tensor parallelism (lab 19) about eight times the hidden size in *every block*.

# %% id="show_wire" tags=["demo"]
from dlo_lib.models import model_config

config, ranks = model_config("llama-3.2-3b"), 4
print(f"pipeline, {ranks} ranks: {2 * config.hidden:,} numbers for each token")
print(f"tensor parallelism: {8 * config.hidden * (ranks - 1) // ranks * config.num_layers:,} numbers for each token")

# %% [markdown] id="wire_lesson"
# So the pipeline is the model parallelism to take *between* nodes, where links are slow; tensor parallelism stays inside a node.

# %% [markdown] id="quiz_text"
# ## 12 · Quiz
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here says whether every question has an answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": "", "q6": ""}
quiz = {"q1": "c", "q2": "c", "q3": "a", "q4": "b", "q5": "c", "q6": "d"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true, "points": 7}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Make your loop faster: `dist.isend` for every send (keep the tensor until the work is done), receives posted one cell ahead. Draw it again.
# - Your `with_messages` goes round the ranks. Choose instead the rank that is earliest in *time*, with B = 2F. Does the measured drawing change?
# - Read `dlo_lib/parallel/pipeline/runtime.py`: which cells does it know that your loop does not? What would two stages a rank need?
# - A tied embedding lies on the first and on the last rank. Whose gradient is right? (`dlo_lib/parallel/pipeline/tied.py`.)
# - Give `stash_backward` momentum. Which weights and which velocity belong together?
#
# ## References
#
# - Y. Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism* (2019), [arXiv:1811.06965](https://arxiv.org/abs/1811.06965)
# - D. Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training* (2019), SOSP; A. Harlap et al., [arXiv:1806.03377](https://arxiv.org/abs/1806.03377)
# - D. Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training* (PipeDream-2BW, PipeDream-Flush; 2021), [arXiv:2006.09503](https://arxiv.org/abs/2006.09503)
# - S. Fan et al., *DAPPLE: A Pipelined Data Parallel Approach for Training Large Models* (2021), [arXiv:2007.01045](https://arxiv.org/abs/2007.01045)
# - P. Qi et al., *Zero Bubble Pipeline Parallelism* (2024), [arXiv:2401.10241](https://arxiv.org/abs/2401.10241)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
