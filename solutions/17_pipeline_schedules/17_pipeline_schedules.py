# %% [markdown] id="title"
# # 17 · Pipeline schedules as tables
#
# **What you will do.** A model is cut into stages, one for each rank. You write the **order** in which each
# rank does its work. You begin with the naive order, which keeps one rank out of four busy, and continue with
# AFAB (GPipe), 1F1B, interleaved 1F1B and zero bubble. You derive the cost of each in time and memory, and
# compare with PyTorch's own schedules on real ranks. Optional: the rule by which a scheduler makes such tables, and
# a contest for the smallest bubble under a memory cap.
#
# You need no GPU: a schedule is a **table**, and a simulator computes when each of its cells runs. Lab 18
# runs your tables on real ranks.
#
# This lab builds on lab 13 (what a rank holds). You can skip labs 14 to 16: ZeRO and FSDP divide the training state over ranks that
# all compute every layer. A pipeline divides the layers, and nothing of those labs is needed here.
#
# The core exercises and predictions take about 100 minutes; with the text and the demos plan two hours. The optional exercises take 40
# minutes more. Each exercise has a check that answers at once; `lab.hint("name")` shows a nudge, then a pointer, then a sketch. If you are stuck at a step, `lab.use_reference("name")` lets you
# continue without its points.
#
# Words: pipeline parallelism (*parallélisme de pipeline*), stage (*étage*), micro-batch (*micro-lot*), schedule (*ordonnancement*), bubble
# (*bulle*, time in which a rank waits), warm-up (*amorçage*).

# %% id="setup"
import math
import os
from collections.abc import Callable
from functools import partial

from dlo_lib.grading import Lab
from dlo_lib.parallel.pipeline.simulate import Costs, Simulation, simulate
from dlo_lib.parallel.pipeline.table import SENDS, read_csv, with_communication

RANKS = int(os.environ.get("DLO_RANKS", 4))
MICRO_BATCHES = int(os.environ.get("DLO_MICRO_BATCHES", 8))
LARGE = int(os.environ.get("DLO_LARGE_RANKS", 64))  # of the simulation near the end
GPUS = int(os.environ.get("DLO_GPUS", 2))  # ranks of the small job near the end
MILLISECONDS = int(os.environ.get("DLO_MILLISECONDS", 10))  # of a forward, where ranks sleep
lab = Lab(globals())


def timed(
    rows: list[list[str]],
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
    send: float = 0.0,
) -> Simulation:
    """Simulate the table.

    Costs are for one micro-batch on all layers of a rank, for any number of stages.
    """
    table = read_csv("\n".join(",".join(row) for row in rows))
    per_rank = table.stages // table.ranks
    parts = (forward / per_rank, input_gradient / per_rank, weight_gradient / per_rank)
    return simulate(table, Costs(*parts, send))


def most_held(rows: list[list[str]], for_weights: float = 0.0) -> float:
    """Return the peak over the ranks, in activations of one micro-batch on all layers of a rank."""
    run = timed(rows)
    per_rank = run.schedule.stages // run.schedule.ranks
    return max(run.peak_memory(1 / per_rank, for_weights / per_rank))


# %% [markdown] id="notation"
# ## Why: on four ranks, three of them wait
#
# A model too large for one GPU can be cut: stage 0 holds the first layers and is on rank 0, stage 1 holds the
# next layers, and so on. The **forward** of a stage needs the output of the previous stage. Its **backward**
# needs the gradient from the next stage, and the activations that its forward has kept.
#
# The batch is cut too, into **micro-batches**. A cell of the table is one action, in PyTorch's notation:
# `2F5` is the forward of **stage 2** on **micro-batch 5**, and `2B5` is its backward. A row lists the actions
# of one rank, in order. Stages, micro-batches, ranks and the cells of a row are counted from 0. In formulas, *p* is
# the number of ranks, *m* that of micro-batches, *v* that of stages per rank, and *r* is one of the ranks.
#
# Here is one micro-batch on four ranks. A backward takes twice as long as a forward. The table has no times:
# a rank runs its cells one after the other, and each cell begins as soon as its inputs are there. The
# simulator applies this rule.

# %% id="show_one" tags=["demo"]
import figures

one = [[f"{rank}F0", f"{rank}B0"] for rank in range(RANKS)]
for row in one:
    print(row)
figures.show(timed(one), "one micro-batch: forward through the stages, then backward")

# %% [markdown] id="naive_text"
# ## 1 · The naive table
#
# **Core · 7 min · ●○○**
#
# Without a pipeline the micro-batches run **one after the other**: the forward and the backward of
# micro-batch 0, then those of micro-batch 1, ...
#
# Write the table, for any number of ranks and micro-batches.

# %% nbgrader={"grade_id": "naive", "solution": true}
def naive_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """Return the cells of each rank, in order.

    A micro-batch ends its backward before the next begins.
    """
    ### BEGIN SOLUTION
    return [[f"{rank}{kind}{i}" for i in range(micro_batches) for kind in "FB"] for rank in range(ranks)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_naive", "grade": true}
lab.check("naive")

# %% id="show_naive" tags=["demo", "nbval-check-output"]
run = timed(naive_rows(RANKS, 3))
share = 100 * run.busy[0] / run.makespan
print(f"each rank computes {run.busy[0]:g} of {run.makespan:g} units of time: {share:.0f} %")
figures.show(run, "naive: in the white areas a rank waits")

# %% [markdown] id="naive_after"
# In the white areas a rank waits: this is the **bubble**. The title of the figure gives it in percent of the *ideal
# time*, the time that a rank computes: a rank that works a quarter of the time waits three times as long, 300 %.
# Four GPUs are no faster than one; they only add memory.
#
# - Which cell could begin earlier if the row allowed it?
# - What would rank 0 have to keep in memory meanwhile?

# %% [markdown] id="afab_text"
# ## 2 · AFAB: all forwards, all backwards
#
# **Core · 5 min · ●○○**
#
# In GPipe, rank 0 does not wait for the gradient of micro-batch 0. It runs all its forwards, one after the
# other; then all backwards follow. After the last backward the optimiser makes one step for all
# micro-batches: the pipeline is **flushed**, so that all gradients belong to the same weights.

# %% nbgrader={"grade_id": "afab", "solution": true}
def afab_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """Return the cells of each rank, in order: all forwards, then all backwards."""
    ### BEGIN SOLUTION
    return [[f"{rank}{kind}{i}" for kind in "FB" for i in range(micro_batches)] for rank in range(ranks)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_afab", "grade": true}
lab.check("afab")

# %% id="show_afab" tags=["demo"]
figures.show(timed(afab_rows(RANKS, MICRO_BATCHES)), "AFAB", memory=True)

# %% [markdown] id="afab_after"
# The plot below the table shows what each rank **holds**. A forward keeps its activations until the backward
# of the same micro-batch has used them.
#
# The bubble has two parts, filling and draining, and does not grow with the number of micro-batches. The
# memory does: at the peak of its curve a rank holds all of them.
#
# With more micro-batches the ideal time grows and the bubble does not, so its *share* of the ideal time falls. In
# the drawing above you can count it.
#
# **Predict:** how large is the bubble of AFAB on 4 ranks, in percent of the ideal time, with 2, 8 and 32
# micro-batches? Replace `None` by numbers; the cell is not graded.

# %% id="predict_law" tags=["prediction"]
# Percent, on 4 ranks
bubble_predicted = {"2 micro-batches": None, "8 micro-batches": None, "32 micro-batches": None}

# %% id="show_law" tags=["demo"]
from dlo_lib.labkit import predictions

predictions.require_numbers(bubble_predicted)

numbers = (1, 2, 4, 8, 16, 32, 64)
ratios = {p: {m: timed(afab_rows(p, m)).bubble_ratio for m in numbers} for p in (2, 4, 8)}
measured = {f"{m} micro-batches": 100 * ratios[4][m] for m in (2, 8, 32)}
print(predictions.compared(bubble_predicted, measured, "{:.0f} %".format))
figures.bubble_law(ratios, bubble_predicted)

# %% [markdown] id="one_f_one_b_text"
# ## 3 · 1F1B: each backward as early as possible
#
# **Core · 18 min · ●●○**
#
# A small bubble needs many micro-batches, and AFAB then holds many. PipeDream-Flush and DAPPLE change only
# the order:
#
# - **warm-up**: a rank runs one forward for each rank *after* it; its first backward cannot run earlier;
# - **steady state**: one forward, one backward, in turns;
# - **drain**: the remaining backwards.
#
# Begin with the last rank: its backward can follow its forward at once. The function must also be right for
# fewer micro-batches than ranks.

# %% nbgrader={"grade_id": "one_f_one_b", "solution": true}
def one_f_one_b_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """Return the cells of each rank, in order.

    Warm-up, one forward and one backward in turns, drain.
    """
    ### BEGIN SOLUTION
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, micro_batches)
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches):
            if done + ahead < micro_batches:
                row.append(f"{rank}F{done + ahead}")
            row.append(f"{rank}B{done}")
        rows.append(row)
    return rows
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_one_f_one_b", "grade": true}
lab.check("one_f_one_b")

# %% id="show_one_f_one_b" tags=["demo"]
figures.show(timed(one_f_one_b_rows(RANKS, MICRO_BATCHES)), "1F1B", memory=True)

# %% [markdown] id="play_text"
# Press ▶ to run both tables in time. When does rank 0 free its first activations with AFAB, and when with 1F1B?

# %% id="play" tags=["demo"]
from dlo_lib.labkit.explore import explore

ORDERS = {"AFAB": afab_rows, "1F1B": one_f_one_b_rows}
RUNS = {name: timed(rows(RANKS, MICRO_BATCHES)) for name, rows in ORDERS.items()}


def until(schedule: str = "1F1B", time: int = 0):
    """Draw what has run until this time."""
    return figures.until(RUNS[schedule], schedule, time)


explore(until, schedule=list(RUNS), time=range(int(max(run.makespan for run in RUNS.values())) + 1))

# %% [markdown] id="deadlock_text"
# The bubble is the same, and the memory no longer depends on the number of micro-batches. Rank 0 holds the
# most, because its micro-batches take longest to return.
#
# A table can also be **wrong**. Here the order of the cells of rank 1 looks harmless. What happens to rank 0?

# %% id="show_deadlock" tags=["demo"]
from dlo_lib.labkit import UserError

bad = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
try:
    timed(bad)
except UserError as error:
    print(error)

# %% [markdown] id="deadlock_after"
# No rank computes a wrong value, and no rank ever ends: this is a deadlock. On a cluster such a job hangs
# until its time limit. Read the message as a cycle: each cell waits for the next one.

# %% [markdown] id="interleaved_text"
# ## 4 · Interleaved 1F1B: several thinner stages per rank
#
# **Core · 22 min · ●●●**
#
# Filling takes $p - 1$ forwards *of one stage*. Thinner stages make it shorter: give each rank **$v$ stages**,
# each with $1/v$ of its layers. Stage $s$ is on rank $s$ mod $p$, so a micro-batch visits every rank $v$ times.
#
# Megatron-LM's order, for $m$ a multiple of $p$:
#
# - **forwards**: in groups of $p$ micro-batches. A group passes through the stages of the rank in ascending
#   order ($r$, then $r + p$, ...); then the next group follows;
# - **backwards**: the same groups, the stages of the rank in *descending* order;
# - **warm-up**: $(v-1)p + 2(p-r-1)$ forwards, at most all $mv$; then one forward and one backward in
#   turns, then the remaining backwards.
#
# The factor 2 is there for the messages. With $p-r-1$ the bubble would be the same if messages were free. In
# reality each message would be waited for.
#
# With one stage per rank, plain 1F1B needs half that warm-up: this function is for $v \geq 2$.
#
# The turns are those of 1F1B, so they are given: `in_turns` makes a row from the forwards of a rank in order,
# its backwards in order, and the length of the warm-up.

# %% id="in_turns"
def in_turns(forwards: list[str], backwards: list[str], warm_up: int) -> list[str]:
    """Return the row: warm-up, one forward and one backward in turns, the remaining backwards."""
    row = forwards[:warm_up]
    for done, backward in enumerate(backwards):
        row += [*forwards[done + warm_up : done + warm_up + 1], backward]
    return row


# %% nbgrader={"grade_id": "interleaved", "solution": true}
def interleaved_rows(ranks: int, micro_batches: int, per_rank: int) -> list[list[str]]:
    """Return the cells of each rank, in order. Rank r has `per_rank` stages: r, r + ranks, ...

    `ranks` divides `micro_batches`.
    """
    ### BEGIN SOLUTION
    rows = []
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    for rank in range(ranks):
        stages = range(rank, ranks * per_rank, ranks)
        forwards = [f"{stage}F{i}" for group in groups for stage in stages for i in group]
        backwards = [f"{stage}B{i}" for group in groups for stage in reversed(stages) for i in group]
        warm_up = min(len(forwards), (per_rank - 1) * ranks + 2 * (ranks - rank - 1))
        rows.append(in_turns(forwards, backwards, warm_up))
    return rows
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_interleaved", "grade": true}
lab.check("interleaved")

# %% id="show_interleaved" tags=["demo"]
run = timed(interleaved_rows(RANKS, 2 * RANKS, 2))
figures.show(run, "interleaved 1F1B, 2 stages per rank", memory=True)

# %% [markdown] id="send_text"
# **Predict:** how many times the messages of 1F1B does the interleaved table send, on 4 ranks with $v = 2$ and
# with $v = 4$? Count the boundaries between ranks that a micro-batch crosses.

# %% id="predict_send" tags=["prediction"]
messages_predicted = {"v = 2": None, "v = 4": None}  # times the messages of 1F1B

# %% id="show_send" tags=["demo", "nbval-check-output"]
predictions.require_numbers(messages_predicted)
def messages(rows: list[list[str]]) -> int:
    """Count the outputs and gradients that go from one rank to another."""
    table = with_communication(read_csv("\n".join(",".join(row) for row in rows)))
    return sum(action.kind in SENDS for row in table.rows for action in row)


tables = {"1F1B": one_f_one_b_rows(4, 16), "v = 2": interleaved_rows(4, 16, 2), "v = 4": interleaved_rows(4, 16, 4)}
times = (0, 0.1, 0.2, 0.4, 0.8)
sent = {name: messages(rows) / messages(tables["1F1B"]) for name, rows in tables.items() if name != "1F1B"}
print(predictions.compared(messages_predicted, sent))
figures.sending(
    {f"{name}: {messages(rows)} messages": {send: timed(rows, send=send).bubble_ratio for send in times} for name, rows in tables.items()},
)

# %% id="show_messages" tags=["demo"]
from dlo_lib.labkit.predicted_bars import predicted_bars

predicted_bars(sent, messages_predicted, "times the messages of 1F1B")

# %% [markdown] id="interleaved_after"
# The bubble is halved. The price is more memory than 1F1B (its longer warm-up hides the messages) and **more than $v$
# times the messages**: $2m(vp-1)$ instead of $2m(p-1)$, so $(vp-1)/(p-1)$ times as many. The part above $v$ is the way from the last rank to
# the first. Where sending takes time, thin stages lose a part of the gain: the second figure measures it.
# Here a receiver waits for every message; a runtime that receives ahead of time hides part of that.

# %% [markdown] id="memory_text"
# ## 5 · What a rank holds
#
# **Core · 11 min · ●●○**
#
# Now write it as a formula. The unit is the activations of one micro-batch on **all layers of a rank**; with
# v stages per rank, a stage holds 1/v of it. You need no simulator: read a row from the left, +1 for a
# forward, −1 for a backward. Where is the count largest?

# %% nbgrader={"grade_id": "memory", "solution": true}
def held(schedule: str, ranks: int, micro_batches: int, per_rank: int, rank: int) -> float:
    """Return the peak of what `rank` holds, for any number of micro-batches, also for one.

    schedule: "naive", "AFAB", "1F1B", "ZB-H1" (as 1F1B: see step 6) or "interleaved".
    For "interleaved", per_rank >= 2 and micro_batches is a multiple of ranks.
    """
    ### BEGIN SOLUTION
    after = ranks - rank - 1
    if schedule == "interleaved":
        return min(micro_batches * per_rank, (per_rank - 1) * ranks + 2 * after + 1) / per_rank
    return {"naive": 1, "AFAB": micro_batches}.get(schedule, min(micro_batches, after + 1))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_memory", "grade": true}
lab.check("memory")

# %% id="show_memory" tags=["demo"]
names = ("naive", "AFAB", "1F1B", "interleaved")
per_rank = {name: 2 if name == "interleaved" else 1 for name in names}
held_by = {name: [held(name, 8, 32, per_rank[name], r) for r in range(8)] for name in names}
figures.held_by_rank(held_by)

# %% [markdown] id="zb_text"
# ## 6 · ZB-H1: cut the backward in two
#
# **Core · 15 min · ●●○**
#
# The backward of a layer $y = Wx$ computes two things from the gradient of $y$:
#
# - `I`, the gradient of the **input** x: the previous stage waits for it;
# - `W`, the gradient of the **weights**: no stage waits for it, only the optimiser's step at the end.
#
# Written as two cells, `2I5` and `2W5`, the second may run **later**. In the drain of 1F1B, rank r waits
# between its last backwards. It can run delayed weight parts in that time.
#
# ZB-H1 keeps the forwards where 1F1B has them, so it holds the same activations. After the `I` of a
# micro-batch, rank r runs the `W` of the micro-batch that is **r earlier**: r weight parts stay open, and
# fill the drain. The next cell shows the table without that delay: each W follows its I.

# %% id="show_split" tags=["demo"]
def split(row):
    cells = []
    for cell in row:
        cells += [cell] if "F" in cell else [cell.replace("B", part) for part in "IW"]
    return cells


together = timed([split(row) for row in one_f_one_b_rows(RANKS, 6)])
figures.show(together, "1F1B with a split backward: the bubble is smaller already, but not small")

# %% nbgrader={"grade_id": "zb_h1", "solution": true}
def zb_h1_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """Return the cells of each rank, in order.

    Forwards as in 1F1B, I as early as possible, W `rank` later.
    """
    ### BEGIN SOLUTION
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, micro_batches)
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches):
            if done + ahead < micro_batches:
                row.append(f"{rank}F{done + ahead}")
            row.append(f"{rank}I{done}")
            if done >= rank:
                row.append(f"{rank}W{done - rank}")
        row += [f"{rank}W{i}" for i in range(max(0, micro_batches - rank), micro_batches)]
        rows.append(row)
    return rows
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_zb_h1", "grade": true}
lab.check("zb_h1")

# %% id="show_zb_h1" tags=["demo"]
run = timed(zb_h1_rows(RANKS, 6))
figures.show(run, "ZB-H1: weight parts fill the drain", memory=True, for_weights=0.5)

# %% [markdown] id="zb_after"
# The yellow cells have moved into the bubble. Here a micro-batch counts as half of its activations until its
# weight part is done: the weight part needs the inputs of the matrices, and not the rest.
#
# **ZB-H2** uses more memory to fill the whole row: it doubles the warm-up and the delay of the weight parts.

# %% id="show_zb_h2" tags=["demo", "nbval-check-output"]
from dlo_lib.parallel.pipeline import schedules

zb_h1 = timed(zb_h1_rows(RANKS, MICRO_BATCHES))
zb_h2 = simulate(schedules.zb_h2(RANKS, MICRO_BATCHES))
for name, run in {"ZB-H1": zb_h1, "ZB-H2": zb_h2}.items():
    title = f"{name}: time {run.makespan:g}; each rank waits between its first cell and its last:"
    print(title, *run.idle)
figures.show(zb_h2, "ZB-H2: a parallelogram", memory=True, for_weights=0.5)

# %% [markdown] id="zb_h2_after"
# No rank waits *inside* its row. Yet the step is no shorter than with ZB-H1: ranks begin and end one after
# the other. ZB-H2 is faster only if rank 0 may begin the **next step** while rank 3 still works, so the
# optimiser must not wait for all ranks. (The authors of ZB-H2, Qi et al. 2023, check the gradient norm afterwards,
# and undo a step whose norm was too large.)

# %% [markdown] id="bubble_text"
# ## 7 · The bubble, on paper
#
# **Core · 14 min · ●●○**
#
# How long does a rank wait in one step? $F$, $I$ and $W$ are the costs of one micro-batch on all layers of a rank;
# a whole backward takes $I + W$; sending is free. Take a drawing and add up the white of **rank 0**, or of the
# **last rank**: the sum is the same. For ZB-H1 draw a table in which the three parts differ:
# `figures.show(timed(zb_h1_rows(4, 8), 1, 1.5, 0.5), "")`. For interleaved, `ranks` divides `micro_batches`; for ZB-H1, there are
# at least as many micro-batches as ranks, and $W$ is no longer than $F$ or $I$.

# %% nbgrader={"grade_id": "bubble", "solution": true}
def waiting(
    schedule: str,
    ranks: int,
    micro_batches: int,
    per_rank: int,
    forward: float,
    input_gradient: float,
    weight_gradient: float,
) -> float:
    """Return how long a rank waits in a step.

    schedule: "naive", "AFAB", "1F1B", "interleaved" (per_rank >= 2) or "ZB-H1".
    """
    ### BEGIN SOLUTION
    others, both = ranks - 1, forward + input_gradient + weight_gradient
    if schedule == "naive":
        return micro_batches * others * both
    if schedule == "ZB-H1":
        return others * (forward + input_gradient - weight_gradient)
    return others * both / per_rank
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_bubble", "grade": true}
lab.check("bubble")

# %% id="show_bubble" tags=["demo", "nbval-check-output"]
tables = {
    "naive": (naive_rows(4, 16), 1),
    "AFAB": (afab_rows(4, 16), 1),
    "1F1B": (one_f_one_b_rows(4, 16), 1),
    "interleaved": (interleaved_rows(4, 16, 2), 2),
    "ZB-H1": (zb_h1_rows(4, 16), 1),
}
print("4 ranks, 16 micro-batches   your formula   simulator  held, formula   simulator")
for name, (rows, per_rank) in tables.items():
    formula = waiting(name, 4, 16, per_rank, 1, 1.1, 0.9)
    measured = max(timed(rows, 1, 1.1, 0.9).bubble)
    most = max(held(name, 4, 16, per_rank, rank) for rank in range(4))
    print(f"{name:26}{formula:14.2f}{measured:12.2f}{most:15.2f}{most_held(rows):12.2f}")

# %% [markdown] id="v_text"
# ## 8 · A pipeline folded into a V
#
# The latest schedules place the two stages of each rank in a **V**, not in a loop. Rank 0 has the first stage
# *and the last*: the forwards return to rank 0, which computes the loss.
#
# - **ZB-V** has no bubble inside a row if F, I and W cost the same. No rank holds more than the first rank of
#   1F1B, and all ranks hold the same.
# - **DualPipe-V** (DeepSeek's DualPipe cut in half) pairs each forward with a backward of the *other* stage,
#   so that one can hide the messages of the other.

# %% id="show_zb_v" tags=["demo"]
half = Costs(forward=0.5, input_gradient=0.5, weight_gradient=0.5)  # of one stage: a rank has two
figures.show(simulate(schedules.zb_v(4, 8), half), "ZB-V", memory=True)

# %% id="show_dualpipe_v" tags=["demo"]
figures.show(simulate(schedules.dualpipe_v(4, 8), half), "DualPipe-V", memory=True)

# %% [markdown] id="compare_text"
# The figure compares all schedules, with 8 ranks and 32 micro-batches: bubble against memory. The best place
# is the bottom left. Open weight parts count half.

# %% id="show_compare" tags=["demo"]
p, m = 8, 32
ONE_CHUNK = {"AFAB": schedules.afab, "1F1B": schedules.one_f_one_b}
ONE_CHUNK |= {"ZB-H1": schedules.zb_h1, "ZB-H2": schedules.zb_h2}
runs = {name: simulate(make(p, m)) for name, make in ONE_CHUNK.items()}
runs["interleaved, v = 2"] = simulate(schedules.interleaved(p, m, 2), half)
runs["interleaved, v = 4"] = simulate(schedules.interleaved(p, m, 4), Costs(0.25, 0.25, 0.25))
runs["ZB-V"] = simulate(schedules.zb_v(p, m), half)
runs["DualPipe-V"] = simulate(schedules.dualpipe_v(p, m), half)
figures.trade(runs, for_weights=0.5)

# %% [markdown] id="cap_text"
# Which of them is best for *your* pipeline and *your* memory? The sliders choose, of the library's tables with this number
# of chunks (stages per rank), the one with the smallest bubble that fits under the memory cap. The unit of the cap is that of step 5.
#
# - With one chunk, which table is the best at a cap of 4? Which one is left at 3, and why?
# - At a cap of 4, what do two chunks gain? From which cap on is there a table with four?
# - At a cap of 4, how many micro-batches make the bubble smaller than 5 %, with one chunk and with two?

# %% id="show_cap" tags=["demo"]
def best_under_cap(ranks: int = 4, micro_batches: int = 8, chunks: int = 1, memory_cap: float = 4):
    """Draw the table of the library with the smallest bubble that fits under the cap."""
    tables = {"naive": schedules.naive, **ONE_CHUNK} if chunks == 1 else {"interleaved": partial(schedules.interleaved, per_rank=chunks)}
    tables |= {"ZB-V": schedules.zb_v, "DualPipe-V": schedules.dualpipe_v} if chunks == 2 else {}
    share, fitting, least = 1 / chunks, [], math.inf
    for name, make in tables.items():
        run = simulate(make(ranks, micro_batches), Costs(share, share, share))
        most = max(run.peak_memory(share, share / 2))
        least = min(least, most)
        fitting += [(run.bubble_ratio, most, name, run)] if most <= memory_cap else []
    if not fitting:
        raise ValueError(f"With {chunks} chunks no table of the library fits under a cap of {memory_cap:g}: the smallest holds {least:g}.")
    _, _, name, run = min(fitting, key=lambda each: each[:3])
    return figures.show(run, f"{name}, the best under a cap of {memory_cap:g}", memory=True, for_weights=0.5)


explore(best_under_cap, ranks=[2, 4, 8], micro_batches=[8, 16, 32], chunks=[1, 2, 4], memory_cap=[1, 1.5, 2, 3, 4, 6, 8, 16])

# %% [markdown] id="start_text"
# ## 9 · From a table to a scheduler
#
# **Optional · 15 min · ●●○**
#
# Exercises 9 and 10 are optional: you can continue with 11.
#
# So far you copied the order of a table from a paper. A program can find an order too: it simulates the ranks,
# and at each step it runs the cell that **can start first**. For this it needs one rule: when can a cell
# start?
#
# - A cell starts when its rank is free and all its inputs are there.
# - `F` needs the `F` of the stage before; `I` needs the `F` of the same stage and the `I` of the stage after;
#   `W` needs the `I` of the same stage. All are of the same micro-batch. The first stage needs no stage before
#   it, and the last one none after it.
# - An input from another rank arrives `send` later than it was computed. Between two stages of the *same*
#   rank there is no message.

# %% nbgrader={"grade_id": "start", "solution": true}
def earliest_start(
    kind: str,
    stage: int,
    i: int,
    ended: dict[str, float],
    free: list[float],
    placement: list[int],
    send: float,
) -> float | None:
    """Return when the cell can start, or None if an input has not been computed.

    ended: the cells that have run, such as "2F5", and the time at which each ended.
    free: the time at which each rank is free. placement: the rank of each stage.
    """
    ### BEGIN SOLUTION
    needs = {"F": [(stage - 1, "F")], "I": [(stage, "F"), (stage + 1, "I")], "W": [(stage, "I")]}[kind]
    start = free[placement[stage]]
    for source, what in needs:
        if not 0 <= source < len(placement):
            continue
        cell = f"{source}{what}{i}"
        if cell not in ended:
            return None
        start = max(start, ended[cell] + (send if placement[source] != placement[stage] else 0.0))
    return start
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_start", "grade": true}
lab.check("start")

# %% [markdown] id="greedy_text"
# The scheduler below uses your rule. Its third rule is about memory: `may_begin(stage, held)` says whether a
# rank that holds `held` may begin a forward of that stage. At equal times it takes I before F before W.

# %% id="greedy"
EQUAL = {"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 1.0, "send": 0.0}


def greedy_rows(
    placement: list[int],
    micro_batches: int,
    costs: dict[str, float],
    may_begin: Callable[[int, float], bool],
) -> list[list[str]]:
    """Return a table: at each step the cell runs that can start first.

    An open weight part counts half.
    """
    ranks, stages = 1 + max(placement), len(placement)
    per_rank = stages // ranks
    time = dict(zip("FIW", (costs["forward"], costs["input_gradient"], costs["weight_gradient"])))
    change = {"F": 1.0, "I": -0.5, "W": -0.5}
    rows, free, held = [[] for _ in range(ranks)], [0.0] * ranks, [0.0] * ranks
    upcoming, ended = {(kind, stage): 0 for kind in "FIW" for stage in range(stages)}, {}
    for _ in range(3 * stages * micro_batches):
        possible = []
        for (kind, stage), i in upcoming.items():
            if i == micro_batches or (kind == "F" and not may_begin(stage, held[placement[stage]])):
                continue
            start = earliest_start(kind, stage, i, ended, free, placement, costs["send"])
            if start is not None:
                possible.append((start, "IFW".index(kind), -stage, kind, stage))
        if not possible:
            text = "No cell can start: each rank waits for memory that no other cell frees."
            raise ValueError(text)
        start, _, _, kind, stage = min(possible)
        rank, i = placement[stage], upcoming[kind, stage]
        upcoming[kind, stage] += 1
        ended[f"{stage}{kind}{i}"] = free[rank] = start + time[kind] / per_rank
        held[rank] += change[kind] / per_rank
        rows[rank].append(f"{stage}{kind}{i}")
    return rows


# %% [markdown] id="explore_text"
# Play with it, if you have written `earliest_start`: `chunks` is the number of stages per rank (stage $s$ is on rank $s$ mod $p$), and the rule for memory
# is the simplest one: a forward begins if it fits under the cap.
#
# - With one chunk, lower the cap from 8 to 1. At which cap does the bubble begin to grow?
# - With two chunks and a cap of 1, no table appears. Which cells wait for each other?
# - With one chunk and a cap of 4, what is the bubble beside that of ZB-H1, $(p-1)/(3m)$ of the ideal time?

# %% id="show_explore" tags=["demo"]
def scheduled(ranks: int = 4, micro_batches: int = 8, chunks: int = 1, memory_cap: float = 4):
    """Draw the table that the scheduler makes with the simplest rule for memory."""
    placement = [stage % ranks for stage in range(ranks * chunks)]
    rows = greedy_rows(placement, micro_batches, EQUAL, lambda stage, held: held + 1 / chunks <= memory_cap)
    return figures.show(timed(rows), f"scheduled: cap {memory_cap:g}, chunks {chunks}", memory=True, for_weights=0.5)


try:
    scheduled()
except NotImplementedError:
    print("This scheduler needs your `earliest_start` (exercise 9). The sliders of step 8 work without it.")
else:
    explore(scheduled, ranks=[2, 3, 4, 6, 8], micro_batches=[2, 4, 8, 16], chunks=[1, 2, 4], memory_cap=[1, 1.5, 2, 3, 4, 6, 8])

# %% [markdown] id="explore_after"
# With four ranks and one chunk the bubble grows below a cap of 4: 12 % of the ideal time at 4, 29 % at 3. At 4 it is
# that of ZB-H1: the scheduler finds this table by itself. With two chunks and a cap of 1, rank 0 fills its memory
# with forwards of its first stage. The forward of its second stage finds no memory, and no backward can run before
# it.

# %% [markdown] id="contest_text"
# ## 10 · The contest: the smallest bubble under a memory cap
#
# **Optional · 25 min · ●●●**
#
# Write a function that makes a table for any pipeline, under a memory cap:
#
# - `cap`: no rank may hold more, in the unit of step 5, where an **open weight part counts half**. The cap
#   may be below $p$, and as low as 1; then it is a whole number or a half.
# - `costs`: a dict with `forward`, `input_gradient`, `weight_gradient` and `send`. The score is the
#   `bubble_ratio` of `timed(rows, **costs)`. F, I and W are within a tenth of the cost of F.
# - You choose the stages: one or several per rank, the same number on every rank, placed as you like (a stage
#   is on the rank that runs its forward). A table has whole backwards `B`, or `I` and `W`, not both.
#
# | points | target |
# |---|---|
# | 2 | runs under every cap |
# | 1 | fewer micro-batches than ranks, cap $= p$: no slower than 1F1B |
# | 1 | cap $= p$: at least as good as ZB-H1 |
# | 2 | cap $= p - 1$: half the bubble of a 1F1B whose warm-up is cut to fit |
# | 2 | cap $= 2p$: a quarter less bubble than ZB-H2 |
#
# Your function can use `greedy_rows` and the simulator: it may make several tables, measure them, and return
# the best. You choose the placement and the rule for memory. Think of a rank with two stages whose memory is
# full of the first stage's activations.

# %% nbgrader={"grade_id": "contest", "solution": true}
def contest_rows(
    ranks: int, micro_batches: int, cap: float, costs: dict[str, float]
) -> list[list[str]]:
    """Return a table with a small bubble, in which no rank holds more than `cap`."""
    ### BEGIN SOLUTION
    line, vee = list(range(ranks)), [*range(ranks), *reversed(range(ranks))]
    candidates = [zb_h1_rows(ranks, micro_batches)]
    for placement in (line, vee):
        per_rank = len(placement) // ranks

        def may_begin(stage, now_held, placement=placement, per_rank=per_rank):
            """A forward must leave memory for the later stages of its rank."""
            return now_held + placement[stage:].count(placement[stage]) / per_rank <= cap

        candidates.append(greedy_rows(placement, micro_batches, costs, may_begin))
    legal = [rows for rows in candidates if most_held(rows, for_weights=0.5) <= cap]
    return min(legal, key=lambda rows: timed(rows, **costs).bubble_ratio)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_contest", "grade": true}
lab.check("contest")

# %% [markdown] id="contest_board"
# The figure shows your tables for one size, and three of the targets as crosses. A target is reached on or
# below its cross.

# %% id="show_contest" tags=["demo"]
def cut_to_fit(ranks: int, micro_batches: int, cap: int) -> list[list[str]]:
    """Return 1F1B with a warm-up cut to fit the cap."""
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, cap - 1, micro_batches)
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches):
            row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}B{done}"]
        rows.append(row)
    return rows


caps = (1, 1.5, 2, 3, 4, 5, 6, 8)
entered = {cap: timed(contest_rows(4, 12, cap, EQUAL)).bubble_ratio for cap in caps}
marks = {
    "1F1B": one_f_one_b_rows(4, 12),
    "ZB-H1": zb_h1_rows(4, 12),
    "interleaved, v = 2": interleaved_rows(4, 12, 2),
}
known = {name: (most_held(rows, 0.5), timed(rows).bubble_ratio) for name, rows in marks.items()}
for name, make in (("ZB-H2", schedules.zb_h2), ("ZB-V", schedules.zb_v)):
    rows = [[str(cell) for cell in row] for row in make(4, 12).rows]
    known[name] = (most_held(rows, 0.5), timed(rows).bubble_ratio)
targets = {3: timed(cut_to_fit(4, 12, 3)).bubble_ratio / 2, 4: known["ZB-H1"][1], 8: known["ZB-H2"][1] * 3 / 4}
figures.board(entered, known, targets)

# %% id="show_best" tags=["demo"]
run = timed(contest_rows(4, 8, 3, EQUAL))
figures.show(run, "your table under a cap of 3", memory=True, for_weights=0.5)

# %% [markdown] id="contest_after"
# A table need not come from a formula: a greedy simulation, with the costs of *this* model and the memory of
# *this* GPU, finds tables that are in no paper. Zero-bubble schedules are made this way in practice.

# %% [markdown] id="scale_text"
# ## 11 · At scale
#
# The same tables run on a cluster, with one process for each GPU. With 64 ranks, plain 1F1B needs a thousand
# micro-batches for a bubble of 6 %, and the global batch cannot grow that far. The cell simulates the
# schedules with 256 micro-batches.

# %% id="show_scale" tags=["demo", "nbval-check-output"]
p, m = LARGE, 4 * LARGE
large = {
    "1F1B, many": timed(one_f_one_b_rows(p, 16 * p)),
    "1F1B": timed(one_f_one_b_rows(p, m)),
    "interleaved, v = 4": timed(interleaved_rows(p, m, 4)),
    "ZB-H1": timed(zb_h1_rows(p, m)),
}
for name, run in large.items():
    wasted = f"{p * run.bubble_ratio / (1 + run.bubble_ratio):4.1f} of {p} GPUs that never work"
    bubble = f"bubble {100 * run.bubble_ratio:5.1f} % of the ideal time"
    print(f"{name:20}{run.schedule.micro_batches:6,} micro-batches: {bubble}, as {wasted}")

# %% [markdown] id="job_text"
# `cluster.submit` works on a cluster and on this machine. With `dry_run` it returns the script for SLURM,
# here with a pipeline on each of two nodes; its paths are those of this machine. Without SLURM it runs the same
# options on this machine, with two processes and a small model, in about 15 seconds. A second call with the same
# arguments finds the same job.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster

flags = ["--parallel", "pp", "--schedule", "zb-h1", "--micro-batches", "8", "--batch", "1"]
full = ["--model", "llama-3.2-3b", "--seq", "2048", "--precision", "bf16", "--steps", "100"]
little = ["--model", "tiny", "--seq", "32", "--steps", "4", "--log-every", "2"]
where = {"gpus": 8, "site": "jean-zay-h100", "account": "abc"}
script = cluster.submit("dlo_lib.train", [*full, *flags], **where, dry_run=True)
asked = [line for line in script.splitlines() if line.startswith(("#SBATCH", "srun"))]
print("For SLURM, 2 nodes of 4 GPUs:", *asked, sep="\n  ")
job = cluster.submit("dlo_lib.train", [*little, *flags], gpus=GPUS).wait()
steps = [f"  step {line.step}: {line.tokens_per_second:,.0f} tokens/s" for line in job.metrics()]
print("Here, a pipeline of 2 ranks:", *steps, sep="\n")

# %% [markdown] id="standard_text"
# ## 12 · The same with `torch.distributed.pipelining`
#
# On Monday you will not write tables: PyTorch has them as classes. `ScheduleInterleaved1F1B` computes its
# table, `pipeline_order`, in the cell notation of this lab. The next cell starts one process for each rank,
# reads the tables of 2, 3 and 4 ranks, and passes them to the check of your `interleaved_rows`.

# %% id="standard_table" tags=["demo", "read"]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from dlo_lib.launch import run_ranks


def torch_tables() -> dict[tuple[int, int], list[list[str]]]:
    """Return tables of ScheduleInterleaved1F1B, by micro-batches and stages per rank.

    Runs on every rank.
    """
    rank, ranks, tables = dist.get_rank(), dist.get_world_size(), {}
    for per_rank in (2, 3):
        count, device = ranks * per_rank, torch.device("cpu")
        own = range(rank, count, ranks)
        stages = [PipelineStage(nn.Identity(), stage, count, device) for stage in own]
        for micro_batches in range(2 * ranks, 7 * ranks + 1, ranks):
            schedule = ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=F.mse_loss)
            rows = schedule.pipeline_order.values()
            cells = [[str(action) for action in row if action is not None] for row in rows]
            tables[micro_batches, per_rank] = cells
    return tables


def rows_of_torch(ranks: int, micro_batches: int, per_rank: int) -> list[list[str]]:
    return of_torch[ranks][micro_batches, per_rank]


of_torch = {ranks: run_ranks(torch_tables, ranks)[0] for ranks in (2, 3, 4)}
print("rank 0 of 2:", *of_torch[2][4, 2][0])
lab.check("interleaved", instead={"interleaved_rows": rows_of_torch})

# %% [markdown] id="standard_run_text"
# Now it runs, on two ranks of this machine. A stage *sleeps* instead of computing, one unit in forward and two
# units in backward, so that the schedule is measured and not your processor. PyTorch's `ScheduleGPipe` and
# `Schedule1F1B` run the same stages as your 1F1B table, which `dlo_lib.parallel.pipeline.runtime` runs.
#
# **Predict:** how long does a step take, in milliseconds? A forward takes `MILLISECONDS`, there are 2 ranks
# and 8 micro-batches. Your formula of step 7 gives the time that a rank waits; add the time that it computes.

# %% id="predict_step" tags=["prediction"]
step_predicted = {  # milliseconds
    "your 1F1B, dlo_lib's runtime": None,
    "torch ScheduleGPipe": None,
    "torch Schedule1F1B": None,
}

# %% id="run_standard" tags=["demo", "read"]
from sleeping import Sleepy, fastest, measured_run, peak_memory, recorded, table_step

from dlo_lib.labkit import side_by_side
from dlo_lib.labkit.measured_step import sent_in_last_step

predictions.require_numbers(step_predicted)

BATCH, WIDTH = 8, 16384  # 8 micro-batches of one sample, 64 KiB each


def torch_step(schedule_class, unit: float):
    """Return the layer of this rank, and a function that runs a step by PyTorch's schedule."""
    rank, ranks, batch = dist.get_rank(), dist.get_world_size(), torch.ones(BATCH, WIDTH)
    layer = Sleepy(WIDTH, unit)
    stage = PipelineStage(layer, rank, ranks, torch.device("cpu"))
    schedule = schedule_class(stage, BATCH, loss_fn=F.mse_loss)
    inputs, target = [batch] if rank == 0 else [], batch if rank == ranks - 1 else None
    return layer, lambda: schedule.step(*inputs, target=target)


unit, table = MILLISECONDS / 1000, one_f_one_b_rows(2, BATCH)
own_lines = side_by_side.lines_of(one_f_one_b_rows, table_step)
torch_lines = side_by_side.lines_of(torch_step)
forms, runs = [], {}
for name, make, lines in (
    ("your 1F1B, dlo_lib's runtime", partial(table_step, table, WIDTH, unit), own_lines),
    ("torch ScheduleGPipe", partial(torch_step, ScheduleGPipe, unit), torch_lines),
    ("torch Schedule1F1B", partial(torch_step, Schedule1F1B, unit), torch_lines),
):
    ran, peaks = run_ranks(recorded, 2, make, trace=True), run_ranks(peak_memory, 2, make)
    runs[name] = measured_run(fastest(ran))
    seconds, sent = runs[name].makespan, sent_in_last_step(ran.trace)
    forms.append(side_by_side.Form(name, lines, seconds, sent, peaks[0]))
print(side_by_side.table(forms), "\n")
steps = {form.name: 1000 * form.seconds for form in forms}
print(predictions.compared(step_predicted, steps, "{:.0f} ms".format))
figures.planned_and_measured(timed(table, unit, unit, unit), runs, step_predicted)

# %% [markdown] id="standard_lesson"
# Memory is the most that the tensors of rank 0 take at the same time: weights, their gradients, the batch, and what is
# kept for the backwards. "Communicated" is what rank 0 sends, the activations of all micro-batches: the same in every form. The times are the
# fastest of three steps: the first step of PyTorch's schedules also sends the shapes.
#
# The measured steps are longer than the plan, because messages and Python take time. 1F1B is about as fast as
# GPipe, because the bubble is the same. What it saves is memory.
#
# PyTorch's classes have limits that your tables do not have. `Schedule1F1B` refuses fewer micro-batches than
# ranks, and all micro-batches need one shape. `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`,
# `ScheduleZBVZeroBubble` and `ScheduleDualPipeV` take a list of stages for each rank.

# %% [markdown] id="quiz_text"
# ## 13 · Quiz
#
# **Core · 5 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests only whether every question has
# an answer; grading counts the right ones.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "a", "q2": "c", "q3": "b", "q4": "d", "q5": "a"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Real stages are not equal: the last one also computes the loss over the vocabulary. Give `simulate` a list
#   of costs, `Costs(forward=[1, 1, 1, 1.5], ...)`. Which schedule loses most?
# - Write ZB-H2. How long must the warm-up of each rank be, so that no rank waits inside its row?
# - With m not a multiple of p, interleaving loses its gain: make the last group smaller in your function, and
#   try `timed`.
# - V-Half, in the paper on controllable memory below, has a small bubble under a cap of $p/2$. How near is your
#   table?
#
# **What comes next.** Lab 18 runs your tables on real ranks, causes a deadlock on purpose, and draws the
# measured schedule above the planned one.
#
# ## References
#
# - Y. Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism* (2018), [arXiv:1811.06965](https://arxiv.org/abs/1811.06965)
# - D. Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training* (PipeDream-Flush, 2BW; 2020), [arXiv:2006.09503](https://arxiv.org/abs/2006.09503)
# - S. Fan et al., *DAPPLE: A Pipelined Data Parallel Approach for Training Large Models* (2020), [arXiv:2007.01045](https://arxiv.org/abs/2007.01045)
# - D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM* (2021), [arXiv:2104.04473](https://arxiv.org/abs/2104.04473)
# - P. Qi et al., *Zero Bubble Pipeline Parallelism* (2023), [arXiv:2401.10241](https://arxiv.org/abs/2401.10241)
# - P. Qi et al., *Pipeline Parallelism with Controllable Memory* (2024), [arXiv:2405.15362](https://arxiv.org/abs/2405.15362)
# - DeepSeek-AI, *DeepSeek-V3 Technical Report* (DualPipe; 2024), [arXiv:2412.19437](https://arxiv.org/abs/2412.19437)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
