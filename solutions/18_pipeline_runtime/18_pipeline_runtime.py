# %% [markdown] id="title"
# # 18 · A pipeline on real ranks
#
# **What you will do.** You run the table of a schedule, as in lab 17, on real processes. You write the forward
# and backward of one stage, the order of its messages and the loop of one rank. You cause a deadlock on
# purpose. Then you do the same with PyTorch. Optional: pipelines side by side, a backward in two parts, the
# best cut of a model into stages, and PipeDream, which trains without flushes. The criterion is always the same:
# the gradients of all ranks must be **those of one process with the whole model and the whole batch**.
#
# You need no GPU: ranks are processes on this machine (gloo). The models are small, so that every gradient
# can be compared.
#
# This lab builds on lab 17 (schedules). You can skip labs 14 to 16 (ZeRO and FSDP), which divide the training state over ranks
# that compute every layer. Of lab 11 only the optional step 7 needs an idea: each rank computes the gradients of its samples, and an
# all-reduce combines them.
#
# The core exercises and predictions take about 100 minutes; with the text and the demos plan
# a little more than two hours. Each exercise has a check that answers at once; `lab.hint("name")` shows a nudge, then a pointer, then a sketch. If you are stuck at a step,
# `lab.use_reference("name")` lets you continue without its points.
#
# Words: pipeline parallelism (*parallélisme de pipeline*), stage (*étage*), micro-batch (*micro-lot*), deadlock (*interblocage*),
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
MILLISECONDS = int(os.environ.get("DLO_MILLISECONDS", 20))  # of a forward, where ranks sleep
lab = Lab(globals())


def parse(cell: str) -> tuple[int, str, int]:
    """Return stage, kind and micro-batch of a cell.

    They are (2, "F", 5) for "2F5" and (0, "SEND_F", 1) for "0SEND_F1".
    """
    kind, stage, micro_batch = Action.parse(cell)
    return stage, kind.value, micro_batch


# %% [markdown] id="why"
# ## Why: the table is not the run
#
# Lab 17 assumed equal stages, free messages, and ranks that wait only for data. On a machine none of this
# holds.
#
# Consider the first assumption. Llama 3.2 1B has 16 equal blocks, so you could take four stages of four
# blocks. But there is an embedding before the first block and an output projection after the last. The figure
# counts what each stage computes.

# %% id="show_why" tags=["demo"]
import figures

from dlo_lib.parallel.pipeline.partition import counted_costs

# embedding, 16 blocks, norm and head: GFLOPs for each token, forward
llama = [flops / 1e9 for flops in counted_costs("llama-3.2-1b", seq=2048)]
equal = [0, 5, 9, 13]
figures.stage_costs(llama, {"four blocks in each": equal})

# %% [markdown] id="why_questions"
# The head of this model costs as much as several blocks. The **slowest stage** sets the pace of a pipeline:
# while the last stage computes one micro-batch, the others finish early and wait.
#
# - How would you cut the model if a stage may have any number of blocks? (Exercise 10, optional, finds the best
#   cut. Until then the lab uses `dlo_lib.parallel.pipeline.partition`.)
# - The first stage also has the embedding. Why does that not count here, and where would it count?

# %% [markdown] id="idea"
# ## The idea: five small parts
#
# 1. **Cut** the model so that the slowest stage is as fast as possible (given, or exercise 10).
# 2. **Weigh** the loss of each micro-batch, so that their gradients add up to the gradient of the batch.
# 3. **One stage**: the forward of a micro-batch, and later its backward, with a gradient from the next rank.
# 4. **The messages** between the cells of the table, in an order without deadlock.
# 5. **The loop**: a rank runs the cells of its row. The same loop serves every schedule.

# %% id="show_idea" tags=["demo"]
figures.one_rank()

# %% [markdown] id="loss_text"
# ## 1 · The loss of a micro-batch
#
# **Core · 10 min · ●○○**
#
# Gradients **add up**: `backward()` of every micro-batch adds to `.grad`. So the losses on which backward is
# called must add up to the loss of the whole batch: the mean over all its valid targets (those that are not
# -100).
#
# This looks simple, yet widely used trainers had it wrong for years. The cell shows two mistakes, on equal
# micro-batches and on unequal ones.

# %% id="show_loss" tags=["demo"]
torch.manual_seed(0)
weight = torch.randn(5, 6)
samples, labels = torch.randn(18, 6), torch.randint(0, 5, (18,))


def gradient(parts) -> torch.Tensor:
    """Return the gradient of the weight after backward of each part: samples, labels and a divisor."""
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
# The second mistake is hard to find: the gradient is right when all micro-batches are equal, and slightly
# wrong when the last one is small or padding is unequal. No test with equal micro-batches finds it.
#
# The last rank computes the losses. It knows the targets of all micro-batches from the beginning.

# %% nbgrader={"grade_id": "loss", "solution": true}
def loss_part(
    output: torch.Tensor, target: torch.Tensor, targets: list[torch.Tensor]
) -> torch.Tensor:
    """Return what one micro-batch adds to the mean cross-entropy of the whole batch, a scalar.

    output: (samples, classes). target: (samples,) int64, -100 where a sample has no target.
    targets: those of all micro-batches.
    """
    ### BEGIN SOLUTION
    valid = sum((each != -100).sum() for each in targets)
    return F.cross_entropy(output, target, reduction="sum", ignore_index=-100) / valid
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_loss", "grade": true}
lab.check("loss")

# %% [markdown] id="stage_text"
# ## 2 · One stage
#
# **Core · 20 min · ●●○**
#
# In one process autograd runs backward through the whole model. Here the graph is cut at every rank. Each
# stage does its part, for micro-batch `i`:
#
# - **forward**: `x` comes from another rank and has no graph. Make a *leaf* of it that requires a gradient
#   (tokens cannot, because they are integers), run the stage, **keep** what backward needs, and return the
#   output *without* its graph. `x` belongs to the caller: make the leaf from `x.detach()`. On the last rank
#   `loss` is a function of the output: keep and return `loss(output)` in place of the output.
# - **backward**: `grad` is the gradient of the output, from the next rank (`None` on the last rank, where the
#   output is a scalar). Run backward through the stage; the gradients of the parameters add up in `.grad`.
#   Return the gradient of `x`.
#
# `kept` is a dict for your use. Several micro-batches are in flight at the same time, so use their numbers as
# keys. Remove what is no longer needed: activations are the main memory of a pipeline.

# %% nbgrader={"grade_id": "stage", "solution": true}
def stage_forward(stage: nn.Module, kept: dict, i: int, x: torch.Tensor, loss=None) -> torch.Tensor:
    """Run the forward of micro-batch i.

    Return the output, or loss(output) if `loss` is given, without its graph.
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
    """Run the backward of micro-batch i from the gradient of its output.

    Return the gradient of its input. The gradients of the parameters add up in .grad.
    """
    ### BEGIN SOLUTION
    x, output = kept.pop(i)
    output.backward(grad)
    return x.grad
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_stage", "grade": true}
lab.check("stage")

# %% [markdown] id="table_text"
# ## 3 · Your table
#
# **Core · 3 min · ●○○**
#
# The notation is that of lab 17: a row for each rank, a cell for each action; `"1F0"` is the forward of stage
# 1 on micro-batch 0, and `"1B0"` is its backward. Here each rank has one stage: stage `r` is on rank `r`.
#
# Bring a table from lab 17: copy the body of the function that satisfies all four rules, also for fewer
# micro-batches than ranks. The table must
#
# - run the forward and the backward of every micro-batch once on every rank, also of the last ones: at the
#   end of a step the pipeline is **flushed**;
# - have no cell that waits for something that never comes;
# - hold at most $p - r$ micro-batches on rank $r$ (forward done, backward not);
# - take no longer than $(m + p - 1)(F + B)$.

# %% nbgrader={"grade_id": "table", "solution": true}
def my_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """Return the cells of each rank, in order."""
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


# %% nbgrader={"grade_id": "test_table", "grade": true}
lab.check("table")

# %% id="show_table" tags=["demo"]
figures.planned(my_rows(4, 8), forward=1, backward=2)

# %% [markdown] id="order_text"
# ## 4 · Messages, and a deadlock
#
# **Core · 28 min · ●●●**
#
# Data must pass between the cells. There are four more kinds of cells:
#
# | cell | what rank 1 does |
# |---|---|
# | `"1RECV_F3"` | receives the activations of micro-batch 3 from rank 0, before `"1F3"` |
# | `"1SEND_F3"` | sends its output to rank 2, after `"1F3"` |
# | `"1RECV_B3"` | receives the gradient of that output from rank 2, before `"1B3"` |
# | `"1SEND_B3"` | sends the gradient of its input to rank 0, after `"1B3"` |
#
# The first rank receives no activations, and the last one sends none; gradients pass in the other direction.
#
# The obvious order is to receive just before use and to send right after computing. `dist.send` and
# `dist.recv` *block*: they return when the message has passed. The next cell writes the messages in this
# order and runs them on real ranks, for AFAB and for your table. **What do you expect?**

# %% id="run_dead_lock" tags=["demo", "read"]
import re

from dlo_lib.launch import DeadLock, run_ranks


def as_they_come(rows: list[list[str]]) -> list[list[str]]:
    """Add a receive just before each computation, and a send just after it."""
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
    """Send and receive one number for each message of this rank's row; return how many."""
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
        # Without the cure, because it serves one table only.
        print(f"{name}:", re.sub(r" Let [^.]*\.", "", str(lock)))

# %% [markdown] id="order_exercise"
# Read the explanation. Which two ranks wait *for each other*? (A third one only waits behind them.) Write the two
# rows side by side: after the
# warm-up, rank 0 *sends* the activations of the next micro-batch, while rank 1 *sends* a gradient. Each send
# waits for a receive that comes after the other send. AFAB has all its forwards first, so messages never
# cross.
#
# Warning: with small messages and another backend, this program **may run**, because a library may copy a
# small message into a buffer and return from `send` at once. It then hangs as soon as the model is larger.
# (This course reports a deadlock even where a buffer would hide it.)
#
# Write the messages in an order that never deadlocks. Some rules work for one schedule only ("odd ranks
# receive first"). Find a rule for **every table** that can run at all. Keep the computations of each rank in
# their order.
#
# Begin with this thought: one process could run all cells of all ranks, one after the other. It takes any rank
# whose next cell has its input. What do both ranks of a message know about this order?

# %% nbgrader={"grade_id": "order", "solution": true}
def with_messages(rows: list[list[str]]) -> list[list[str]]:
    """Add SEND_F, RECV_F, SEND_B and RECV_B to the rows.

    Blocking messages must never deadlock.
    """
    ### BEGIN SOLUTION
    # One order for all ranks: add each message to the rows of both of its ranks at the same time.
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


# %% nbgrader={"grade_id": "test_order", "grade": true}
lab.check("order")

# %% id="show_order" tags=["demo"]
print("messages of each rank:", run_ranks(messages_only, 3, with_messages(my_rows(3, 4))))
for row in with_messages(my_rows(2, 3)):
    print(" ".join(row))

# %% [markdown] id="loop_text"
# ## 5 · The loop
#
# **Core · 18 min · ●●○**
#
# Now the loop of one rank. It is independent of the model: `forward(i, x)` and `backward(i, grad)` do the work,
# as in step 2. The loop runs the cells of its row one by one, and passes each its input. The three kinds of
# cells of a forward are given. Write those of a backward.
#
# - `forward(i, x)` returns the output to send; on the last rank it returns the part of the loss of the
#   micro-batch. `backward(i, grad)` returns the gradient to send; on the last rank `grad` is `None`.
# - `inputs` are the micro-batches on the first rank, and `None` on the others. There `shapes[i]` is the shape
#   of what arrives for micro-batch `i`. Micro-batches may have different sizes, and stages different widths.
#   A gradient has the shape of its output. All of them have the default dtype.
# - `before` and `after` are the neighbouring ranks, `None` where there is none.
# - Return the sum of the losses on the last rank, and 0 on the others.
#
# Hold a tensor only as long as it is needed. This includes received gradients, and the gradient of the inputs on
# the first rank, which no rank receives.

# %% nbgrader={"grade_id": "loop", "solution": true}
def run_row(
    row: list[str], forward, backward, inputs, shapes, before: int | None, after: int | None
):
    """Run the row of this rank, with its messages; return the sum of losses on the last rank."""
    arrived, outputs, loss = {}, {}, 0.0  # what waits for its F, and for its SEND_F
    gradients, input_gradients, shape_out = {}, {}, {}  # what waits for its B, and for its SEND_B
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
        ### BEGIN SOLUTION
        elif kind == "RECV_B":
            gradients[i] = torch.empty(shape_out.pop(i))
            dist.recv(gradients[i], after)
        elif kind == "B":
            gradient = backward(i, None if after is None else gradients.pop(i))
            if before is not None:
                input_gradients[i] = gradient
        elif kind == "SEND_B":
            dist.send(input_gradients.pop(i), before)
        ### END SOLUTION
    return loss


# %% nbgrader={"grade_id": "test_loop", "grade": true}
lab.check("loop")

# %% [markdown] id="step_text"
# ## 6 · A step
#
# **Core · 12 min · ●●○**
#
# Put the parts together: a step of this rank, from the micro-batches to the gradients of its stage.
#
# - `row` is the row of this rank, with its messages.
# - Every rank is given `inputs` and `targets`, the micro-batches of this pipeline. Only the first rank uses the
#   inputs, and only the last one the targets.
# - `every_target` has the targets of the whole batch. Where several pipelines share a batch (step 7), it also has
#   those of the others. The loss is divided by all of them.

# %% nbgrader={"grade_id": "step", "solution": true}
def pipeline_step(
    stage: nn.Module,
    row: list[str],
    inputs: list,
    targets: list,
    every_target: list,
    shapes: list,
    before: int | None,
    after: int | None,
) -> float:
    """Run a step of this rank, which sets the gradients of `stage`.

    Returns what these micro-batches add to the loss of the batch on the last rank, 0 on the others.
    """
    ### BEGIN SOLUTION
    kept = {}

    def forward(i, x):
        loss = (lambda output: loss_part(output, targets[i], every_target)) if after is None else None
        return stage_forward(stage, kept, i, x, loss)

    def backward(i, grad):
        return stage_backward(kept, i, grad)

    return float(run_row(row, forward, backward, inputs if before is None else None, shapes, before, after))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_step", "grade": true}
lab.check("step")

# %% [markdown] id="loop_after"
# The next cell runs your step: an MLP of nine uneven layers, in 4 stages, on 4 ranks, with 6 micro-batches of
# which the last is small. It prints, for each rank, the largest difference to the gradients of one process with
# the whole batch. It also writes all messages to a file, which <https://ui.perfetto.dev> shows as a timeline.

# %% id="run_pipeline" tags=["demo"]
from dlo_lib.parallel.pipeline.partition import partition

torch.manual_seed(1)
WIDTHS = (12, 40, 9, 33, 17, 24, 8, 30, 11, 10)
pieces = [nn.Sequential(nn.Linear(a, b, dtype=torch.float64), nn.Tanh()) for a, b in pairwise(WIDTHS)]
samples, labels = torch.randn(44, WIDTHS[0], dtype=torch.float64), torch.randint(0, WIDTHS[-1], (44,))
micro_inputs, micro_targets = samples.split(8), labels.split(8)


def stages_of(ranks: int) -> list[nn.Sequential]:
    """Return the model in stages. The cost of a piece is its number of weights."""
    return [nn.Sequential(*(pieces[at] for at in stage)) for stage in partition([float(a * b) for a, b in pairwise(WIDTHS)], ranks)]


def shapes_into(stage: nn.Sequential, inputs: tuple[torch.Tensor, ...]) -> list[tuple[int, int]]:
    """Return the shapes of what arrives at a stage."""
    return [(len(x), stage[0][0].in_features) for x in inputs]


def neighbours(place: int, ranks: int, rank: int) -> tuple[int | None, int | None]:
    """Return the ranks before and after the one at this place of a pipeline."""
    return (rank - 1 if place > 0 else None), (rank + 1 if place < ranks - 1 else None)


def one_step(ranks: int) -> tuple[float, list[torch.Tensor]]:
    """Return loss and gradients of this rank."""
    torch.set_default_dtype(torch.float64)
    rank, rows = dist.get_rank(), with_messages(my_rows(ranks, len(micro_inputs)))
    stage = stages_of(ranks)[rank]
    shapes = shapes_into(stage, micro_inputs)
    loss = pipeline_step(stage, rows[rank], micro_inputs, micro_targets, micro_targets, shapes, *neighbours(rank, ranks, rank))
    return loss, [parameter.grad for parameter in stage.parameters()]


def in_one_process() -> tuple[float, list[torch.Tensor]]:
    """Return loss and gradients of the whole model and batch."""
    model = nn.Sequential(*pieces)
    model.zero_grad()
    loss = F.cross_entropy(model(samples), labels)
    loss.backward()
    return float(loss.detach()), [parameter.grad.clone() for parameter in model.parameters()]


def largest_difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Return the largest difference between two lists of tensors."""
    return max(float((one - other).abs().max()) for one, other in zip(some, others))


true_loss, true_grads = in_one_process()
nn.Sequential(*pieces).zero_grad()
results = run_ranks(one_step, 4, 4, trace=True)
print(f"loss: {true_loss:.12f} in one process, {results[-1][0]:.12f} on the last rank")
first = 0
for rank, (_, grads) in enumerate(results):
    print(f"rank {rank}: {len(grads)} gradients, largest difference {largest_difference(grads, true_grads[first:]):.1e}")
    first += len(grads)
print("messages of all ranks:", results.trace.to_perfetto("pipeline_trace.json").name)

# %% [markdown] id="measure_text"
# ### Planned and measured
#
# Does the run match the plan? To measure the schedule and not your processor, the ranks *sleep* instead of
# computing: one unit for a forward, two for a backward. The lower drawing shows the times that each rank
# measures.
#
# **Predict:** how long does the step take, in milliseconds, by the plan and in your loop? A forward sleeps
# `MILLISECONDS`, a backward twice as long; there are 4 ranks and 8 micro-batches. You can compute the plan. For
# your loop there is no rule yet: guess.

# %% id="predict_measured" tags=["prediction"]
step_predicted = {"planned": None, "your loop": None}  # milliseconds

# %% id="run_measured" tags=["demo"]
import time

from dlo_lib.labkit import predictions

predictions.require_numbers(step_predicted)


def asleep(rows: list[list[str]], unit: float) -> list[tuple[float, float]]:
    """Return when each F and B of this rank began and ended."""
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
spans = min((run_ranks(asleep, 4, rows, MILLISECONDS / 1000) for _ in range(2)), key=figures.seconds)  # the faster of two runs
times = {"planned": MILLISECONDS * (8 + 4 - 1) * 3, "your loop": 1000 * figures.seconds(spans)}
print(predictions.compared(step_predicted, times, "{:.0f} ms".format))
figures.planned_and_measured(rows, {"planned": None, "your loop": spans}, MILLISECONDS / 1000, step_predicted)

# %% [markdown] id="measure_lesson"
# The order is the same, because a rank runs its row. But the bubbles are wider than planned. Your messages
# *block*: a sender waits until the receiver reaches its receive, and the order that prevents the deadlock
# makes ranks wait for messages that they do not need yet.
#
# A production runtime waits less. It does not wait for its sends (`dist.isend`; the tensor must live until
# the send is complete), and it posts receives *before* they are needed, so that data moves while the rank
# computes. `dlo_lib.parallel.pipeline.runtime` does this with the same table. The next cell measures it on
# the same sleeping ranks. (On a busy machine all ranks wait for processor time, and the picture can show the opposite: run the
# cell again.)
#
# **Predict:** how long does its step take? Your loop and the plan above are the bounds.

# %% id="predict_overlapped" tags=["prediction"]
overlapped_predicted = {"dlo_lib, messages overlapped": None}  # milliseconds

# %% id="run_overlapped" tags=["demo", "read"]
from dlo_lib.optim import train_step
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.pipeline.schedules import one_f_one_b

predictions.require_numbers(overlapped_predicted)


class Sleep(torch.autograd.Function):
    """Sleep one unit in forward, two units in backward."""

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
    """A layer that sleeps."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.scale, self.unit = nn.Parameter(torch.ones(8)), unit

    def forward(self, x):
        return Sleep.apply(x * self.scale, self.unit)


def by_the_library(ranks: int, micro_batches: int, unit: float):
    """Return the measured spans of all ranks in the second step.

    The first step also sends the shapes.
    """
    pipeline = Pipeline({dist.get_rank(): Sleepy(unit)}, one_f_one_b(ranks, micro_batches))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    batch = [
        (torch.ones(1, 2, 8), torch.ones(1, 2, dtype=torch.int64)) for _ in range(micro_batches)
    ]
    with pipeline.recording():
        for _ in range(2):
            train_step(pipeline, optimizer, batch)
        return [list(spans) for spans in pipeline.measured().spans]


unit, name = MILLISECONDS / 1000, "dlo_lib, messages overlapped"
two_runs = [run_ranks(by_the_library, 4, 4, 8, unit)[0] for _ in range(2)]
overlapped = min(two_runs, key=figures.seconds)
measured = {name: 1000 * figures.seconds(overlapped)}
print(predictions.compared(overlapped_predicted, measured, "{:.0f} ms".format))
spans = {"planned": None, name: overlapped}
figures.planned_and_measured(rows, spans, unit, overlapped_predicted)

# %% [markdown] id="hybrid_text"
# ## 7 · With data parallelism
#
# **Optional · 14 min · ●●○**
#
# You can continue with step 8: only the cell with the `DeviceMesh` in step 13 needs this code. But read the text,
# because the quiz asks about it.
#
# The ranks form a grid: 2 × 2 ranks are two pipelines of two stages.
#
# | | stage 0 | stage 1 |
# |---|---|---|
# | pipeline 0 | rank 0 | rank 1 |
# | pipeline 1 | rank 2 | rank 3 |
#
# Each pipeline takes half of the micro-batches. Activations and gradients of activations pass along a
# **row**. After the last backward of the step, the ranks of a **column**, which hold the same stage, add
# their gradients.
#
# - `stage_group` returns the process group of the column of this rank. `dist.new_group` is collective: every
#   rank must call it for **every** group, in the same order, also for those in which it is not. It is slow
#   too, so a program creates its groups once, before the first step, and never inside `hybrid_step`.
# - `hybrid_step` runs in every step. `step(before, after)` does the work of the row of this rank, with the
#   neighbours that you pass (numbers of ranks, not of stages). The loss is divided by the valid targets of *all* pipelines (`every_target` of
#   step 6), so add the gradients; do not average them.

# %% nbgrader={"grade_id": "hybrid", "solution": true}
def stage_group(rank: int, world: int, stages: int) -> dist.ProcessGroup:
    """Return the group of the ranks that hold the same stage as this rank.

    There are world / stages pipelines.
    """
    ### BEGIN SOLUTION
    groups = [dist.new_group(list(range(each, world, stages))) for each in range(stages)]
    return groups[rank % stages]
    ### END SOLUTION


def hybrid_step(
    step, parameters: list[nn.Parameter], rank: int, stages: int, group: dist.ProcessGroup
) -> None:
    """Run a step on this rank; then each .grad is that of the micro-batches of all pipelines.

    group: that of stage_group.
    """
    ### BEGIN SOLUTION
    place = rank % stages
    step(rank - 1 if place > 0 else None, rank + 1 if place < stages - 1 else None)
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_hybrid", "grade": true}
lab.check("hybrid")

# %% [markdown] id="hybrid_after"
# The next cell runs the six micro-batches of the MLP of step 6 on two pipelines of two stages, and compares
# with one process.

# %% id="run_hybrid" tags=["demo"]
def two_by_two() -> list[torch.Tensor]:
    """Return the gradients of this rank."""
    torch.set_default_dtype(torch.float64)
    rank, stages = dist.get_rank(), 2
    pipeline, place = divmod(rank, stages)
    mine = slice(pipeline * 3, pipeline * 3 + 3)
    stage = stages_of(stages)[place]

    rows, shapes = with_messages(my_rows(stages, 3)), shapes_into(stage, micro_inputs[mine])

    def step(before, after):
        pipeline_step(stage, rows[place], micro_inputs[mine], micro_targets[mine], micro_targets, shapes, before, after)

    group = stage_group(rank, 4, stages)  # once, before the first step
    hybrid_step(step, list(stage.parameters()), rank, stages, group)
    return [parameter.grad for parameter in stage.parameters()]


for rank, grads in enumerate(run_ranks(two_by_two, 4)):
    expected = true_grads[: len(grads)] if rank % 2 == 0 else true_grads[-len(grads) :]
    difference = largest_difference(grads, expected)
    verdict = "right" if difference < 1e-12 else "not the gradients of one process: is the loss divided by every_target?"
    print(f"rank {rank}: largest difference to one process {difference:.1e}, {verdict}")

# %% [markdown] id="hybrid_lesson"
# `DistributedDataParallel` around each stage does the same, with two differences. It divides by the number of
# replicas, so multiply the loss by that number. And it all-reduces after every micro-batch, so run all
# micro-batches except the last under `no_sync()`.

# %% [markdown] id="scale_text"
# ## 8 · At scale
#
# The pipeline of the library trains a Llama with any of these schedules, on a cluster with one process for
# each GPU. The cell shows the script that `cluster.submit` writes for SLURM. (Lab 17 runs the same options on this
# machine, with a small model.)

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster
from dlo_lib.labkit import at_scale

flags = ["--parallel", "pp", "--schedule", "zb-h1", "--micro-batches", "8", "--batch", "1"]
large = ["--model", "llama-3.2-3b", "--seq", "2048", "--precision", "bf16", "--steps", "100"]
where = {"gpus": 4, "site": "jean-zay-h100", "account": "abc"}
script = cluster.submit("dlo_lib.train", [*large, *flags], **where, dry_run=True)
print("For SLURM, a node of 4 GPUs:", at_scale.directives(script), sep="\n")

# %% [markdown] id="scale_lesson"
# Which links should a pipeline use? Count what a rank sends for each token, forward and backward. A pipeline
# sends the activations and their gradients, at the cuts. Tensor parallelism cuts every layer over $t$ ranks, and
# adds their results: a rank sends $8(t-1)/t$ times the hidden size in *every block* (lab 19 derives this).
#
# **Predict:** how many numbers for each token does an *inner* rank send in a pipeline of 4 ranks, and how many a
# rank with tensor parallelism over 4 ranks? The model is Llama 3.2 3B: hidden size 3,072, 28 blocks.

# %% id="predict_wire" tags=["prediction"]
wire_predicted = {"pipeline": None, "tensor parallelism": None}  # numbers for each token

# %% id="show_wire" tags=["demo", "nbval-check-output"]
from dlo_lib.labkit.predicted_bars import predicted_bars
from dlo_lib.models import model_config

predictions.require_numbers(wire_predicted)

config, ranks = model_config("llama-3.2-3b"), 4
by_layers = 8 * config.hidden * (ranks - 1) // ranks * config.num_layers
sent, number = {"pipeline": 2 * config.hidden, "tensor parallelism": by_layers}, "{:,.0f}".format
text = predictions.compared(wire_predicted, sent, number).replace("measured", "counted ", 1)
print(text.replace("measured", "counted"))
predicted_bars(sent, wire_predicted, "numbers for each token,\ncounted", text=number, log=True)

# %% [markdown] id="wire_lesson"
# So use pipeline parallelism *between* nodes, where links are slow, and tensor parallelism inside a node.

# %% [markdown] id="optional_text"
# The four exercises below (9 to 12) are optional: no later part needs them, and you can continue with 13. Exercise
# 12 is compared with exercise 11. Exercise 11 answers the opening question in another way: a pipeline without a
# bubble.

# %% [markdown] id="split_text"
# ## 9 · The backward in two parts
#
# **Optional · 12 min · ●●○**
#
# Zero-bubble schedules (lab 17) cut the backward in two. For a linear layer $y = x W^T + b$:
#
# $$\frac{\partial L}{\partial x} = \frac{\partial L}{\partial y}\, W \qquad\qquad \frac{\partial L}{\partial W} = \left(\frac{\partial L}{\partial y}\right)^{T} x, \quad \frac{\partial L}{\partial b} = \sum \frac{\partial L}{\partial y}$$
#
# The previous stage waits for the left gradient (cell `I`). No stage waits for the right ones (cell `W`):
# they can fill a bubble. Write the backward of a layer that returns the gradient of its input at once, and
# puts the rest into the list `later`, as functions without arguments.
#
# Tensors are (batch, seq, features): the gradients of weight and bias are sums over batch and seq. They *add*
# to `.grad`, which may be `None` at first.

# %% nbgrader={"grade_id": "split", "solution": true}
def linear_backward(
    grad_y: torch.Tensor, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter, later: list
) -> torch.Tensor:
    """Return the gradient of x.

    Append to `later` the work that adds to the .grad of weight and bias.
    """
    ### BEGIN SOLUTION

    def weight_part():
        rows = grad_y.flatten(0, -2)  # (batch * seq, out)
        for parameter, grad in ((weight, rows.T @ x.flatten(0, -2)), (bias, rows.sum(0))):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    later.append(weight_part)
    return grad_y @ weight.detach()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_split", "grade": true}
lab.check("split")

# %% [markdown] id="split_after"
# The next cell uses your backward inside autograd. Two layers are in one graph, and there are no weight
# gradients until the functions in the list have run. The figure shows the gain: 1F1B, and ZB-H1 with the same
# memory, for $F = I = W$.

# %% id="show_split" tags=["demo"]
from dlo_lib.parallel.pipeline.schedules import zb_h1
from dlo_lib.parallel.pipeline.simulate import simulate

later: list = []


class SplitLinear(torch.autograd.Function):
    """A linear layer that puts its weight part into `later`."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x)
        ctx.parameters = weight, bias
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_y):
        return linear_backward(grad_y, *ctx.saved_tensors, *ctx.parameters, later), None, None


def two_layers(linear, x: torch.Tensor, first: nn.Linear, second: nn.Linear) -> torch.Tensor:
    """Return a loss of two layers that `linear` computes."""
    return linear(torch.tanh(linear(x, first.weight, first.bias)), second.weight, second.bias).square().sum()


layers = nn.ModuleList([nn.Linear(6, 9, dtype=torch.float64), nn.Linear(9, 4, dtype=torch.float64)])
x = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
true_x, *true = torch.autograd.grad(two_layers(F.linear, x, *layers), [x, *layers.parameters()])

two_layers(SplitLinear.apply, x, *layers).backward()
print(f"input part: differs from autograd by {largest_difference([x.grad], [true_x]):.1e}")
print("gradients of weights so far:", [parameter.grad for parameter in layers.parameters()])
with torch.no_grad():  # outside backward(), autograd would record this work
    while later:
        later.pop()()
print(f"weight part: differs from autograd by {largest_difference([parameter.grad for parameter in layers.parameters()], true):.1e}")
figures.schedules([one_f_one_b(4, 8), zb_h1(4, 8)])

# %% [markdown] id="partition_text"
# ## 10 · Cut the model
#
# **Optional · 15 min · ●●●**
#
# A model is a sequence of *pieces* with costs. A stage is a run of successive pieces, and no stage may be
# empty. Find the cut whose most costly stage has the least cost.
#
# You cannot try all cuts: 80 pieces can be cut into 16 stages in more than 10¹⁵ ways. Dynamic programming
# finds the best cut in about 50,000 steps. Let *C(k, n)* be the cost of the slowest of *k* stages in the best
# cut of the first *n* pieces. The last of these stages begins at some piece *j*:
#
# $$C(k, n) = \min_{j} \max(C(k-1, j),\ \text{cost of pieces } j \ldots n-1)$$
#
# Costs may be fractions (seconds) as well as whole numbers.

# %% nbgrader={"grade_id": "partition", "solution": true}
def stage_starts(costs: list[float], stages: int) -> list[int]:
    """Return the number of the first piece of each stage: [0, ...], in ascending order.

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


# %% nbgrader={"grade_id": "test_partition", "grade": true}
lab.check("partition")

# %% id="show_partition" tags=["demo", "nbval-check-output"]
print(f"80 pieces in 16 stages: {math.comb(79, 15):.1e} cuts")
figures.stage_costs(llama, {"four blocks in each": equal, "your cut": stage_starts(llama, 4)})

# %% [markdown] id="delayed_text"
# ## 11 · Without flush: delayed gradients
#
# **Optional · 12 min · ●●○**
#
# A flush costs the bubble in every step. **PipeDream** has no flush: batches follow each other without a
# pause, and a stage is updated after each of its backwards. There is no bubble. But look at the row of rank 0
# of $p$: between the forward of a batch and its backward, $p - 1$ other backwards have updated the weights.
# So the gradient belongs to older weights:
#
# $$w_s(t+1) = w_s(t) - \eta\ \nabla_s f(w_0(t-\tau_0),\ \ldots,\ w_{p-1}(t-\tau_{p-1})), \qquad w(t) = w(0)\ \text{for}\ t < 0$$
#
# | scheme | delay of stage $s$ of $p$ | versions kept |
# |---|---|---|
# | with flush (GPipe, 1F1B) | 0 | 1 |
# | PipeDream, weight stashing | $p - 1 - s$ | up to $p - s$ |
# | 2BW: gradients of several micro-batches are added up before an update | 1 for every stage | 2 |
#
# An asynchronous pipeline is *not* equal to synchronous training; the difference is not a bug. Its twin is
# this formula. Write it.

# %% nbgrader={"grade_id": "delayed", "solution": true}
def delayed_training(
    weights: list[torch.Tensor], gradients_of, lr: float, delays: list[int], steps: int
) -> list[torch.Tensor]:
    """Return the weights after `steps` updates; weights[s] and delays[s] belong to stage s.

    gradients_of(weights, t) returns the gradients of batch t = 0, 1, ... at these weights,
    one tensor per stage.
    """
    ### BEGIN SOLUTION
    versions = [weights]
    for t in range(steps):
        old = [versions[max(0, t - delay)][stage] for stage, delay in enumerate(delays)]
        versions.append([weight - lr * grad for weight, grad in zip(versions[-1], gradients_of(old, t))])
    return versions[-1]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_delayed", "grade": true}
lab.check("delayed")

# %% [markdown] id="delayed_after"
# What does the delay cost? The next cell trains an MLP of eight layers in eight stages, with three schemes
# and two learning rates. (The batch is always the same, so that the curves are smooth.) The axis is **time**:
# with flush and 8 micro-batches an update also includes the bubble of 1F1B.
#
# **Predict:** at the end of the time, how many times the loss of training with flush is that of PipeDream, at each learning rate?

# %% id="predict_delayed" tags=["prediction"]
# Loss of PipeDream, divided by the loss with flush, at the end
loss_predicted = {"learning rate 0.3": None, "learning rate 2": None}

# %% id="run_delayed" tags=["demo"]
from dlo_lib.parallel.pipeline.simulate import simulate

predictions.require_numbers(loss_predicted)


def chain(seed: int, stages: int = 8, width: int = 16) -> list[torch.Tensor]:
    """Return one matrix for each stage."""
    generator = torch.Generator().manual_seed(seed)
    return [1.3 * torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5 for _ in range(stages)]


torch.manual_seed(2)
samples_in = torch.randn(64, 16, dtype=torch.float64)
goals = torch.tanh(samples_in @ chain(seed=5, stages=1)[0].T)


def gradients_of_chain(weights: list[torch.Tensor], losses: list[float]) -> list[torch.Tensor]:
    """Return the gradients of all stages at these weights; append the loss to `losses`."""
    own = [weight.detach().clone().requires_grad_() for weight in weights]
    x = samples_in
    for weight in own:
        x = torch.tanh(x @ weight.T)
    loss = F.mse_loss(x, goals)
    loss.backward()
    losses.append(float(loss.detach()))
    return [weight.grad for weight in own]


def curve(delays: list[int], lr: float, update: float) -> list[tuple[float, float]]:
    """Return time and loss of each forward, where an update takes `update`."""
    losses = []
    delayed_training(chain(seed=3), lambda weights, t: gradients_of_chain(weights, losses), lr, delays, STEPS)
    return [(t * update, loss) for t, loss in enumerate(losses) if t * update <= STEPS]


flush = 1 + simulate(one_f_one_b(8, 8)).bubble_ratio
SCHEMES = {"with flush": ([0] * 8, flush), "2BW": ([1] * 8, 1.0), "PipeDream": (list(range(7, -1, -1)), 1.0)}
print(f"an update takes {flush:.2f} with flush, 1 without")
trained = {lr: {name: curve(delays, lr, update) for name, (delays, update) in SCHEMES.items()} for lr in (0.3, 2.0)}
at_end = {f"learning rate {lr:g}": lines["PipeDream"][-1][1] / lines["with flush"][-1][1] for lr, lines in trained.items()}
print(predictions.compared(loss_predicted, at_end, "{:.2f}".format))
figures.losses(trained, loss_predicted)

# %% [markdown] id="delayed_lesson"
# With a small learning rate, the weights of a few updates ago are nearly the current ones. Each delayed
# update is a little worse, but there are more of them: in the same time, the schemes without bubble are no
# slower, and 2BW is ahead. With a large learning rate, the directions of old gradients are no longer right,
# and the delay costs more than the bubble. Large language models are usually trained with a flush.

# %% [markdown] id="stash_text"
# ## 12 · PipeDream on ranks: weight stashing
#
# **Optional · 20 min · ●●●**
#
# Your table for many batches, without a flush between them, is that of PipeDream: only an update follows each
# backward. Your loop does not change; the stage does.
#
# Backward multiplies by weights. They must be **those that the forward of this batch has read**, otherwise
# the result is not the gradient of any loss. (If you update weights in place between the two, PyTorch raises
# an error. If you run the forward again with the new weights, there is no error.) So the forward uses a copy
# of the newest weights, and keeps it: *weight stashing*.
#
# - `stash_forward`: as `stage_forward`, but with copies of the current parameters, that require gradients.
#   `torch.func.functional_call(stage, {name: tensor, ...}, (x,))` runs a module with other parameters; the
#   names are those of `stage.named_parameters()`.
# - `stash_backward`: as `stage_backward`, then update the **newest** parameters, in place: `parameter -= lr * gradient`, under
#   `torch.no_grad()`.

# %% nbgrader={"grade_id": "stash", "solution": true}
def stash_forward(stage: nn.Module, kept: dict, i: int, x: torch.Tensor, loss=None) -> torch.Tensor:
    """Run the forward of batch i with the newest weights; keep a copy until its backward."""
    ### BEGIN SOLUTION
    version = {name: parameter.detach().clone().requires_grad_() for name, parameter in stage.named_parameters()}
    x = x.detach().requires_grad_(x.is_floating_point())
    output = torch.func.functional_call(stage, version, (x,))
    if loss is not None:
        output = loss(output)
    kept[i] = version, x, output
    return output.detach()
    ### END SOLUTION


def stash_backward(
    stage: nn.Module, kept: dict, i: int, grad: torch.Tensor | None, lr: float
) -> torch.Tensor | None:
    """Run the backward of batch i with the weights of its forward.

    Then make a step of gradient descent.
    """
    ### BEGIN SOLUTION
    version, x, output = kept.pop(i)
    output.backward(grad)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter -= lr * version[name].grad
    return x.grad
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_stash", "grade": true}
lab.check("stash")

# %% [markdown] id="stash_after"
# The next cell compares your ranks with your formula: PipeDream on four processes, and `delayed_training` in
# this one.

# %% id="run_pipedream" tags=["demo", "read"]
class Layer(nn.Module):
    """One matrix of the chain."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x):
        return torch.tanh(x @ self.weight.T)


def pipedream(ranks: int, lr: float) -> torch.Tensor:
    """Return the weights of the stage of this rank after all batches."""
    torch.set_default_dtype(torch.float64)
    rank, kept = dist.get_rank(), {}
    stage = Layer(chain(seed=3, stages=ranks)[rank])

    def forward(i, x):
        loss = (lambda y: F.mse_loss(y, goals)) if rank == ranks - 1 else None
        return stash_forward(stage, kept, i, x, loss)

    def backward(i, grad):
        return stash_backward(stage, kept, i, grad, lr)

    before, after = (rank - 1 if rank else None), (rank + 1 if rank < ranks - 1 else None)
    row = with_messages(my_rows(ranks, STEPS))[rank]
    inputs, shapes = [samples_in] * STEPS, [(64, 16)] * STEPS
    run_row(row, forward, backward, inputs, shapes, before, after)
    return stage.weight.detach()


def gradients_at(weights, t):
    return gradients_of_chain(weights, [])


on_ranks = run_ranks(pipedream, 4, 4, 0.3)
for name, delays in {
    "delays 3, 2, 1, 0": [3, 2, 1, 0],
    "delays 1, 1, 1, 1": [1, 1, 1, 1],
    "synchronous": [0, 0, 0, 0],
}.items():
    twin = delayed_training(chain(seed=3, stages=4), gradients_at, 0.3, delays, STEPS)
    apart = [f"{(a - b).abs().max():.1e}" for a, b in zip(on_ranks, twin)]
    print(f"{name:18} differs from the ranks by", ", ".join(apart))

# %% [markdown] id="standard_text"
# ## 13 · The same with `torch.distributed.pipelining`
#
# On Monday PyTorch runs the pipeline. `PipelineStage` is your step 2, `Schedule1F1B` is your steps 3 to 6. The
# same two rules remain yours: the loss of a micro-batch is divided by the targets of the whole batch, so
# `scale_grads=False`; and all micro-batches must have one shape. The next cell passes this form to the check of
# your `pipeline_step`.

# %% id="standard_step" tags=["demo", "read"]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def torch_schedule(
    stage: nn.Module, micro_batches: int, every_target: list, schedule_class=Schedule1F1B
):
    """Return the schedule of this rank."""
    part = PipelineStage(stage, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return schedule_class(
        part,
        micro_batches,
        loss_fn=lambda output, target: loss_part(output, target, every_target),
        scale_grads=False,
    )


def torch_step(stage, row, inputs, targets, every_target, shapes, before, after) -> float:
    """Run a step of this rank, as pipeline_step. PyTorch needs neither the row nor the shapes."""
    schedule, losses = torch_schedule(stage, len(inputs), every_target), []
    schedule.step(
        *([torch.cat(inputs)] if before is None else []),
        target=torch.cat(targets) if after is None else None,
        losses=losses,
    )
    return sum(loss.item() for loss in losses)


lab.check("step", instead={"pipeline_step": torch_step})

# %% [markdown] id="standard_mesh_text"
# The groups of step 7 (optional) come from a `DeviceMesh`, a grid of ranks with named dimensions. The check also runs
# your `hybrid_step`.

# %% id="standard_mesh" tags=["demo", "read"]
def mesh_group(rank: int, world: int, stages: int) -> dist.ProcessGroup:
    """Return the group of the ranks with the same stage."""
    mesh = init_device_mesh("cpu", (world // stages, stages), mesh_dim_names=("data", "pipeline"))
    return mesh.get_group("data")


lab.check("hybrid", instead={"stage_group": mesh_group})

# %% [markdown] id="standard_table_text"
# The table compares both on two ranks, with 8 equal micro-batches of the MLP. The time is the least of several
# steps on each rank, then the largest of the ranks. Memory is the most that the tensors of rank 0 take in a step: weights,
# gradients, the batch, and what is kept for backward. PyTorch's schedule is made once, as in a program. `ScheduleGPipe` is AFAB.
#
# **Predict:** how many times the memory of your pipeline does `ScheduleGPipe` take on rank 0, and `Schedule1F1B`?

# %% id="predict_standard" tags=["prediction"]
# Times the memory of your pipeline
memory_predicted = {"Schedule1F1B": None, "ScheduleGPipe": None}

# %% id="run_standard" tags=["demo", "read"]
from copy import deepcopy
from functools import partial

from torch.distributed.pipelining import ScheduleGPipe

from dlo_lib.labkit import side_by_side
from dlo_lib.labkit.measured_step import peak_of_a_step, sent_in_last_step

predictions.require_numbers(memory_predicted)

batch = torch.randn(256, WIDTHS[0], dtype=torch.float64)  # 8 micro-batches of 32
classes = torch.randint(0, WIDTHS[-1], (256,))


def step_of(schedule_class=None):
    """Return a function that runs a step of this rank: yours, or that of PyTorch's schedule."""
    torch.set_default_dtype(torch.float64)
    rank = dist.get_rank()
    stage, x, y = deepcopy(stages_of(2)[rank]), batch.split(32), classes.split(32)
    before, after = neighbours(rank, 2, rank)
    if schedule_class is None:
        row, shapes = with_messages(my_rows(2, 8))[rank], shapes_into(stage, x)
        return lambda: pipeline_step(stage, row, x, y, y, shapes, before, after)
    schedule = torch_schedule(stage, 8, y, schedule_class)
    inputs = [batch] if before is None else []
    return lambda: schedule.step(*inputs, target=classes if after is None else None)


def least_seconds(make, steps: int) -> float:
    """Return the time of the fastest of `steps` steps on this rank."""
    step, taken = make(), []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return min(taken)


yours = [my_rows, with_messages, run_row, stage_forward, stage_backward, loss_part, pipeline_step]
forms = []
for name, make, code in (
    ("your pipeline", step_of, yours),
    ("Schedule1F1B", partial(step_of, Schedule1F1B), (loss_part, torch_schedule, torch_step)),
    ("ScheduleGPipe", partial(step_of, ScheduleGPipe), (loss_part, torch_schedule, torch_step)),
):
    run = run_ranks(least_seconds, 2, make, 2 + STEPS // 10, trace=True)
    peak, sent = run_ranks(peak_of_a_step, 2, make)[0], sent_in_last_step(run.trace)
    forms.append(side_by_side.Form(name, side_by_side.lines_of(*code), max(run), sent, peak))
print(side_by_side.table(forms))
own, *others = forms
ratios = {form.name: form.memory / own.memory for form in others}
predicted_bars(ratios, memory_predicted, "memory of rank 0,\ntimes that of yours")

# %% [markdown] id="standard_lesson"
# "Communicated" is what rank 0 sends in a step. It sends the same activations in all forms; PyTorch's first
# step also sends their shape and dtype, so the last step is counted. 1F1B keeps at most $p - r$ micro-batches, GPipe all of
# them. `Schedule1F1B` receives with
# `irecv` and posts a send and a receive together (`batch_isend_irecv`), which is its answer to the deadlock of
# step 4. The models here are so small that the time is that of Python and of messages.

# %% [markdown] id="quiz_text"
# ## 14 · Quiz
#
# **Core · 5 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests only whether every question has
# an answer; grading counts the right ones.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": "", "q6": ""}
quiz = {"q1": "c", "q2": "c", "q3": "a", "q4": "b", "q5": "b", "q6": "c"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Make your loop faster: use `dist.isend` for every send (keep the tensor until the work is done), and post
#   receives one cell ahead. Draw the run again.
# - The reference `with_messages` takes the ranks in turn. Choose instead the rank that is earliest in *time*,
#   with B = 2F. Does the measured drawing change?
# - Read `dlo_lib/parallel/pipeline/step_runner.py`: which cells does it know that your loop does not? What would
#   two stages per rank need?
# - A tied embedding is on the first and on the last rank. What is its gradient?
#   (`dlo_lib/parallel/pipeline/tied_embeddings.py`.)
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
