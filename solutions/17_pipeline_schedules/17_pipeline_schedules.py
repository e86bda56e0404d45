# %% [markdown] id="title"
# # 17 · Pipeline schedules as tables
#
# **What you will do.** A model is cut into stages, one for each rank. You write the **order** in which each rank does its work. You begin with
# the naive order, which keeps one rank out of four busy, and go on to AFAB (GPipe), 1F1B, interleaved 1F1B and zero bubble. You derive what
# each costs in time and memory. Then you enter a small contest: the smallest bubble under a memory cap.
#
# You need no GPU and no ranks: a schedule is a **table**, and a simulator says when each of its cells happens. Lab 18 runs your tables.
#
# It takes about 90 minutes. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch.
# If a step stays stuck, `lab.use_reference("name")` lets you go on without its points.
#
# Words: pipeline parallelism (*parallélisme de pipeline*), stage (*étage*), micro-batch (*micro-lot*), schedule (*ordonnancement*), bubble
# (*bulle*, time in which a rank waits), warm-up (*amorçage*).

# %% id="setup"
import os

from dlo_lib.grading import Lab
from dlo_lib.parallel.pipeline.simulate import Costs, Simulation, simulate
from dlo_lib.parallel.pipeline.table import SENDS, read_csv, with_communication

RANKS = int(os.environ.get("DLO_RANKS", 4))
MICRO_BATCHES = int(os.environ.get("DLO_MICRO_BATCHES", 8))
LARGE = int(os.environ.get("DLO_LARGE_RANKS", 64))  # of the simulation near the end
GPUS = int(os.environ.get("DLO_GPUS", 2))  # ranks of the small job near the end
lab = Lab(globals())


def timed(
    rows: list[list[str]], forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0, send: float = 0.0
) -> Simulation:
    """The table in time. Costs are those of one micro-batch on all layers of a rank, whatever the number of its stages."""
    table = read_csv("\n".join(",".join(row) for row in rows))
    per_rank = table.stages // table.ranks
    return simulate(table, Costs(forward / per_rank, input_gradient / per_rank, weight_gradient / per_rank, send))


def most_held(rows: list[list[str]], for_weights: float = 0.0) -> float:
    """The most that a rank holds, in activations of one micro-batch on all layers of a rank."""
    run = timed(rows)
    per_rank = run.schedule.stages // run.schedule.ranks
    return max(run.peak_memory(1 / per_rank, for_weights / per_rank))


# %% [markdown] id="notation"
# ## Why: a model on four ranks, and three of them wait
#
# A model too large for one GPU can be cut: stage 0 holds the first layers and lies on rank 0, stage 1 the next ones, and so on. A stage's
# **forward** needs the output of the stage before. Its **backward** needs the gradient of the stage after, and what its own forward has kept.
#
# The batch is cut too, into **micro-batches**. A cell of the table says what is done, in PyTorch's notation: `2F5` is the forward of **stage 2**
# on **micro-batch 5**, `2B5` its backward. A row is what one rank does, in order; all numbers begin with 0.
#
# Here is one micro-batch on four ranks. A backward takes twice as long as a forward. Nothing in the table says *when*: a rank does its
# cells one after the other, and each begins as soon as what it needs is there. The simulator does just that.

# %% id="show_one" tags=["demo"]
import figures

one = [[f"{rank}F0", f"{rank}B0"] for rank in range(RANKS)]
for row in one:
    print(row)
figures.show(timed(one), "one micro-batch: down through the stages, and back up")

# %% [markdown] id="naive_text"
# ## 1 · The naive table
#
# Without a pipeline the micro-batches come **one after the other**: the forward and the backward of micro-batch 0, then those of micro-batch 1, ...
#
# Write the table, for any number of ranks and micro-batches.

# %% nbgrader={"grade_id": "naive", "solution": true}
def naive_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """For each rank its cells in order: a micro-batch goes down and back before the next begins."""
    ### BEGIN SOLUTION
    return [[f"{rank}{kind}{i}" for i in range(micro_batches) for kind in "FB"] for rank in range(ranks)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_naive", "grade": true, "points": 3}
lab.check("naive")

# %% id="show_naive" tags=["demo"]
run = timed(naive_rows(RANKS, 3))
print(f"each rank computes {run.busy[0]:g} of {run.makespan:g} units of time: {100 * run.busy[0] / run.makespan:.0f} %")
figures.show(run, "naive: white is waste")

# %% [markdown] id="naive_after"
# White is time in which a rank waits: the **bubble**. With p ranks each works one part in p of the time. Four GPUs do the work of one; all they
# bring is memory.
#
# - Which cell could begin earlier if the row allowed it?
# - What would rank 0 have to keep in memory meanwhile?

# %% [markdown] id="afab_text"
# ## 2 · AFAB: all forwards, all backwards
#
# GPipe's answer: rank 0 does not wait for micro-batch 0 to come back. It sends all its forwards off, one behind the other; then all backwards
# follow. After the last backward comes the optimiser's step, once for all micro-batches: the pipeline is **flushed**, so that all
# gradients belong to the same weights.

# %% nbgrader={"grade_id": "afab", "solution": true}
def afab_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """For each rank its cells in order: all forwards, then all backwards."""
    ### BEGIN SOLUTION
    return [[f"{rank}{kind}{i}" for kind in "FB" for i in range(micro_batches)] for rank in range(ranks)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_afab", "grade": true, "points": 4}
lab.check("afab")

# %% id="show_afab" tags=["demo"]
figures.show(timed(afab_rows(RANKS, MICRO_BATCHES)), "AFAB", memory=True)

# %% [markdown] id="afab_after"
# Below the table: what each rank **holds**. A forward keeps its activations until the backward of the same micro-batch has used them.
#
# Two things to see. The bubble is a corner at either side (filling and draining), and does not grow with the number of micro-batches. The memory
# does: at the top of its curve a rank holds all of them.
#
# More micro-batches make the bubble a smaller part of the step. The cell measures it, as part of the **ideal time** (the time that a rank computes).

# %% id="show_law" tags=["demo"]
figures.bubble_law({p: {m: timed(afab_rows(p, m)).bubble_ratio for m in (1, 2, 4, 8, 16, 32, 64)} for p in (2, 4, 8)})

# %% [markdown] id="one_f_one_b_text"
# ## 3 · 1F1B: go back as soon as you can
#
# To keep the bubble small we want many micro-batches; AFAB then holds many. PipeDream-Flush and DAPPLE change nothing but the order:
#
# - **warm-up**: a rank does only as many forwards as it must, before its first backward can come: one for each rank *after* it;
# - **steady state**: one forward, one backward, in turns;
# - **drain**: the backwards that are left.
#
# Think of the last rank first: it can go back at once. Mind the case of fewer micro-batches than ranks.

# %% nbgrader={"grade_id": "one_f_one_b", "solution": true}
def one_f_one_b_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """For each rank its cells in order: warm-up, then one forward and one backward in turns, then the drain."""
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


# %% nbgrader={"grade_id": "test_one_f_one_b", "grade": true, "points": 7}
lab.check("one_f_one_b")

# %% id="show_one_f_one_b" tags=["demo"]
figures.show(timed(one_f_one_b_rows(RANKS, MICRO_BATCHES)), "1F1B", memory=True)

# %% [markdown] id="deadlock_text"
# Same bubble, and the memory no longer depends on the number of micro-batches. Rank 0 holds most: its micro-batches have the longest way.
#
# A table can also be **wrong**. Here rank 1 does its cells in an order that looks harmless. What happens to rank 0?

# %% id="show_deadlock" tags=["demo"]
from dlo_lib.errors import UserError

bad = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
try:
    timed(bad)
except UserError as error:
    print(error)

# %% [markdown] id="deadlock_after"
# Nobody computes wrongly, and nobody ever ends. On a cluster that is a job which hangs until its time limit. Read the sentence as a circle: each
# cell waits for the next one.

# %% [markdown] id="interleaved_text"
# ## 4 · Interleaved 1F1B: several thinner stages a rank
#
# Filling takes p − 1 forwards *of one stage*. So make stages thinner: give each rank **v stages** of 1/v of its layers. Stage s lies on rank
# s mod p: a micro-batch goes round all ranks v times.
#
# Megatron-LM's order, for m a multiple of p:
#
# - **forwards**: micro-batches go in groups of p. A group passes the rank's stages upwards (r, then r + p, ...), then comes the next group;
# - **backwards**: the same groups, the rank's stages *downwards*;
# - **warm-up**: (v − 1)·p + 2·(p − r − 1) forwards, but at most all m·v; then one forward and one backward in turns, then the rest.
#
# With one stage a rank the plain 1F1B has half that warm-up: this function is for v ≥ 2.

# %% nbgrader={"grade_id": "interleaved", "solution": true}
def interleaved_rows(ranks: int, micro_batches: int, per_rank: int) -> list[list[str]]:
    """For each rank its cells in order. Rank r has the stages r, r + ranks, ...: `per_rank` of them.

    `ranks` divides `micro_batches`.
    """
    ### BEGIN SOLUTION
    rows = []
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    for rank in range(ranks):
        stages = range(rank, ranks * per_rank, ranks)
        forwards = [f"{stage}F{i}" for group in groups for stage in stages for i in group]
        backwards = [f"{stage}B{i}" for group in groups for stage in reversed(stages) for i in group]
        ahead = min(len(forwards), (per_rank - 1) * ranks + 2 * (ranks - rank - 1))
        row = forwards[:ahead]
        for done, backward in enumerate(backwards):
            row += [*forwards[done + ahead : done + ahead + 1], backward]
        rows.append(row)
    return rows
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_interleaved", "grade": true, "points": 7}
lab.check("interleaved")

# %% id="show_interleaved" tags=["demo"]
figures.show(timed(interleaved_rows(RANKS, 2 * RANKS, 2)), "interleaved 1F1B, 2 stages a rank", memory=True)

# %% id="show_send" tags=["demo"]
def messages(rows: list[list[str]]) -> int:
    """How many outputs and gradients go from one rank to another."""
    table = with_communication(read_csv("\n".join(",".join(row) for row in rows)))
    return sum(action.kind in SENDS for row in table.rows for action in row)


tables = {"1F1B": one_f_one_b_rows(4, 16), "v = 2": interleaved_rows(4, 16, 2), "v = 4": interleaved_rows(4, 16, 4)}
times = (0, 0.1, 0.2, 0.4, 0.8)
figures.sending(
    {f"{name}: {messages(rows)} messages": {send: timed(rows, send=send).bubble_ratio for send in times} for name, rows in tables.items()}
)

# %% [markdown] id="interleaved_after"
# Half the bubble, for more memory than 1F1B and **more than v times the messages** (the wave also returns from the last rank to the first).
# Where sending takes time, thin stages lose again: the second figure measures it. Here a receiver waits for every message; a runtime that
# receives ahead of time hides part of that.

# %% [markdown] id="memory_text"
# ## 5 · What a rank holds
#
# Now as a formula. Unit: the activations of one micro-batch on **all layers of a rank**; a stage that is one of v holds 1/v of it. You need
# no simulator: read a row from the left, +1 for a forward, −1 for a backward. Where is the count largest?

# %% nbgrader={"grade_id": "memory", "solution": true}
def held(schedule: str, ranks: int, micro_batches: int, per_rank: int, rank: int) -> float:
    """The most that `rank` holds.

    schedule: "naive", "AFAB", "1F1B", "ZB-H1" (as 1F1B: see step 6) or "interleaved".
    For "interleaved", per_rank >= 2 and micro_batches is a multiple of ranks.
    """
    ### BEGIN SOLUTION
    after = ranks - rank - 1
    if schedule == "interleaved":
        return min(micro_batches * per_rank, (per_rank - 1) * ranks + 2 * after + 1) / per_rank
    return {"naive": 1, "AFAB": micro_batches}.get(schedule, min(micro_batches, after + 1))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_memory", "grade": true, "points": 5}
lab.check("memory")

# %% id="show_memory" tags=["demo"]
names = ("naive", "AFAB", "1F1B", "interleaved")
figures.held_by_rank({name: [held(name, 8, 32, 2 if name == "interleaved" else 1, rank) for rank in range(8)] for name in names})

# %% [markdown] id="zb_text"
# ## 6 · ZB-H1: cut the backward in two
#
# The backward of a layer y = W x computes two things from the gradient of y:
#
# - `I`, the gradient of the **input** x: the stage before waits for it;
# - `W`, the gradient of the **weights**: nobody waits for it, only the optimiser's step at the end.
#
# Written as two cells, `2I5` and `2W5`, the second may come **later**. In the drain of 1F1B rank r waits between its last backwards. What if it
# had kept some weight parts for then?
#
# ZB-H1 keeps the forwards where 1F1B has them, so it holds the same activations. After `I` of a micro-batch, rank r does the `W` of the
# micro-batch that is **r earlier**: r of them stay open, and fill the drain. First see what happens without that delay: each W right after its I.

# %% id="show_split" tags=["demo"]
def split(row):
    return [part for cell in row for part in ([cell] if "F" in cell else [cell.replace("B", "I"), cell.replace("B", "W")])]


together = [split(row) for row in one_f_one_b_rows(RANKS, 6)]
figures.show(timed(together), "1F1B with a split backward: the bubble is smaller already, but not small")

# %% nbgrader={"grade_id": "zb_h1", "solution": true}
def zb_h1_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """For each rank its cells in order: 1F1B's forwards, I as early as can be, W with a delay of `rank` micro-batches."""
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


# %% nbgrader={"grade_id": "test_zb_h1", "grade": true, "points": 7}
lab.check("zb_h1")

# %% id="show_zb_h1" tags=["demo"]
figures.show(timed(zb_h1_rows(RANKS, 6)), "ZB-H1: weight parts fill the drain", memory=True, for_weights=0.5)

# %% [markdown] id="zb_after"
# The yellow cells have moved into the white. Memory here counts half of a micro-batch's activations until its weight part is done (the inputs of
# the matrices are needed for it; the rest is not).
#
# **ZB-H2** spends memory to go further: twice the warm-up, and weight parts put off twice as long.

# %% id="show_zb_h2" tags=["demo"]
from dlo_lib.parallel.pipeline import schedules

zb_h1, zb_h2 = timed(zb_h1_rows(RANKS, MICRO_BATCHES)), simulate(schedules.zb_h2(RANKS, MICRO_BATCHES))
for name, run in {"ZB-H1": zb_h1, "ZB-H2": zb_h2}.items():
    print(f"{name}: time {run.makespan:g}; each rank waits between its first cell and its last:", *run.idle)
figures.show(zb_h2, "ZB-H2: a parallelogram", memory=True, for_weights=0.5)

# %% [markdown] id="zb_h2_after"
# No white is left *inside* a row. Yet the step is no shorter than with ZB-H1: ranks begin and end one after the other. ZB-H2 pays only if rank 0
# may begin the **next step** while rank 3 still works, so the optimiser must not wait for all ranks (the paper checks the gradient norm
# afterwards, and takes a step back where it was too large).

# %% [markdown] id="bubble_text"
# ## 7 · The bubble, on paper
#
# How long does a rank wait in one step? Costs are those of one micro-batch on all layers of a rank: F, I, W; a whole backward takes I + W; sending
# is free. Take a drawing and add up the white of **rank 0**, or of the **last rank**; it is the same. For interleaved, `ranks` divides
# `micro_batches`; for ZB-H1, there are at least as many micro-batches as ranks, and W is no longer than F or I.

# %% nbgrader={"grade_id": "bubble", "solution": true}
def waiting(
    schedule: str, ranks: int, micro_batches: int, per_rank: int, forward: float, input_gradient: float, weight_gradient: float
) -> float:
    """How long a rank waits in a step. `schedule` is "naive", "AFAB", "1F1B", "interleaved" (`per_rank` >= 2) or "ZB-H1"."""
    ### BEGIN SOLUTION
    others, both = ranks - 1, forward + input_gradient + weight_gradient
    if schedule == "naive":
        return micro_batches * others * both
    if schedule == "ZB-H1":
        return others * (forward + input_gradient - weight_gradient)
    return others * both / per_rank
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_bubble", "grade": true, "points": 6}
lab.check("bubble")

# %% id="show_bubble" tags=["demo"]
tables = {
    "naive": (naive_rows(4, 16), 1),
    "AFAB": (afab_rows(4, 16), 1),
    "1F1B": (one_f_one_b_rows(4, 16), 1),
    "interleaved": (interleaved_rows(4, 16, 2), 2),
    "ZB-H1": (zb_h1_rows(4, 16), 1),
}
print(f"{'4 ranks, 16 micro-batches':26}{'your formula':>14}{'simulator':>12}{'held, formula':>15}{'simulator':>12}")
for name, (rows, per_rank) in tables.items():
    formula, measured = waiting(name, 4, 16, per_rank, 1, 1.1, 0.9), max(timed(rows, 1, 1.1, 0.9).bubble)
    most = max(held(name, 4, 16, per_rank, rank) for rank in range(4))
    print(f"{name:26}{formula:14.2f}{measured:12.2f}{most:15.2f}{most_held(rows):12.2f}")

# %% [markdown] id="v_text"
# ## 8 · A pipeline folded into a V
#
# The latest schedules give each rank two stages, not in a loop but in a **V**. Rank 0 has the first stage *and the last*. The wave of forwards
# comes back to the rank that it started from, and the loss is known there.
#
# - **ZB-V** leaves no white inside a row if F, I and W cost the same. It holds no more than the first rank of 1F1B, and all ranks hold the same.
# - **DualPipe-V** (DeepSeek's DualPipe cut in half) puts each forward beside a backward of the *other* stage, so that one can hide the
#   messages of the other.

# %% id="show_zb_v" tags=["demo"]
half = Costs(0.5, 0.5, 0.5)
figures.show(simulate(schedules.zb_v(4, 8), half), "ZB-V", memory=True)

# %% id="show_dualpipe_v" tags=["demo"]
figures.show(simulate(schedules.dualpipe_v(4, 8), half), "DualPipe-V", memory=True)

# %% [markdown] id="compare_text"
# All of them side by side, with 8 ranks and 32 micro-batches: bubble against memory. The best corner is at the bottom left. Open weight parts count
# half.

# %% id="show_compare" tags=["demo"]
p, m = 8, 32
makers = {"AFAB": schedules.afab, "1F1B": schedules.one_f_one_b, "ZB-H1": schedules.zb_h1, "ZB-H2": schedules.zb_h2}
runs = {name: simulate(make(p, m)) for name, make in makers.items()}
runs["interleaved, v = 2"] = simulate(schedules.interleaved(p, m, 2), half)
runs["interleaved, v = 4"] = simulate(schedules.interleaved(p, m, 4), Costs(0.25, 0.25, 0.25))
runs["ZB-V"] = simulate(schedules.zb_v(p, m), half)
runs["DualPipe-V"] = simulate(schedules.dualpipe_v(p, m), half)
figures.trade(runs, for_weights=0.5)

# %% [markdown] id="contest_text"
# ## 9 · The contest: the smallest bubble under a memory cap
#
# Write a function that makes a table for any pipeline, and is told what it may hold:
#
# - `cap`: no rank may hold more, in the unit of step 5, where an **open weight part counts half**. It may be below p, and as low as 1; then it is
#   a whole number or a half.
# - `costs`: a dict with `forward`, `input_gradient`, `weight_gradient` and `send`; `timed(rows, **costs)` is the measure, its `bubble_ratio` the score.
# - You choose the stages: one or several on each rank, the same number everywhere, placed as you like (a stage lies where its forward is). A table has whole
#   backwards `B`, or `I` and `W`, not both.
#
# | points | target |
# |---|---|
# | 2 | runs, under every cap |
# | 1 | fewer micro-batches than ranks, cap = p: no slower than 1F1B |
# | 2 | cap = p: at least as good as ZB-H1 |
# | 2 | cap = p − 1: half the bubble of a 1F1B whose warm-up is cut to fit |
# | 2 | cap = 2p: a quarter less bubble than ZB-H2 |
#
# The last three are measured in grading, on sizes and costs that you have not seen, with F, I and W within a tenth of each other. You have the simulator:
# a function may make several tables, measure them, and return the best. Your tables so far are good candidates; the hints say more.

# %% nbgrader={"grade_id": "contest", "solution": true}
def contest_rows(ranks: int, micro_batches: int, cap: float, costs: dict[str, float]) -> list[list[str]]:
    """A table with as small a bubble as you can, no rank of which holds more than `cap`."""
    ### BEGIN SOLUTION
    line, vee = list(range(ranks)), [*range(ranks), *reversed(range(ranks))]
    candidates = [zb_h1_rows(ranks, micro_batches)]
    candidates += [play_the_clock(placement, ranks, micro_batches, cap, costs) for placement in (line, vee)]
    legal = [rows for rows in candidates if most_held(rows, for_weights=0.5) <= cap]
    return min(legal, key=lambda rows: timed(rows, **costs).bubble_ratio)


def play_the_clock(placement: list[int], ranks: int, micro_batches: int, cap: float, costs: dict[str, float]) -> list[list[str]]:
    """Whoever can begin first does; at equal times I before F before W. A forward must leave room for the rank's later stages."""
    stages, per_rank = len(placement), len(placement) // ranks
    time = {kind: cost / per_rank for kind, cost in zip("FIW", (costs["forward"], costs["input_gradient"], costs["weight_gradient"]))}
    change = {"F": 1 / per_rank, "I": -0.5 / per_rank, "W": -0.5 / per_rank}
    rows, clock, now_held = [[] for _ in range(ranks)], [0.0] * ranks, [0.0] * ranks
    upcoming = {(kind, stage): 0 for kind in "FIW" for stage in range(stages)}
    end = {}

    def begin(kind, stage):
        """When the next action of that kind could begin, None if it cannot."""
        i, rank = upcoming[kind, stage], placement[stage]
        needs = {
            "F": [("F", stage - 1, i)] if stage else [],
            "I": [("F", stage, i)] + ([("I", stage + 1, i)] if stage < stages - 1 else []),
            "W": [("I", stage, i)],
        }[kind]
        later = placement[stage:].count(rank)  # this stage, and those of the rank that come after it
        if i == micro_batches or any(need not in end for need in needs):
            return None
        if kind == "F" and now_held[rank] + later / per_rank > cap:
            return None
        return max([clock[rank], *(end[need] + (costs["send"] if placement[need[1]] != rank else 0.0) for need in needs)])

    for _ in range(3 * stages * micro_batches):
        possible = [(begin(kind, stage), "IFW".index(kind), -stage, kind, stage) for kind, stage in upcoming]
        start, _, _, kind, stage = min(action for action in possible if action[0] is not None)
        rank, i = placement[stage], upcoming[kind, stage]
        upcoming[kind, stage] += 1
        end[kind, stage, i] = clock[rank] = start + time[kind]
        now_held[rank] += change[kind]
        rows[rank].append(f"{stage}{kind}{i}")
    return rows
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_contest", "grade": true, "points": 9}
lab.check("contest")

# %% [markdown] id="contest_board"
# Where your tables stand for one size, with three of the targets as crosses: on or below a cross is reached.

# %% id="show_contest" tags=["demo"]
def cut_to_fit(ranks: int, micro_batches: int, cap: int) -> list[list[str]]:
    """1F1B with as short a warm-up as the cap asks for."""
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, cap - 1, micro_batches)
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches):
            row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}B{done}"]
        rows.append(row)
    return rows


equal = {"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 1.0, "send": 0.0}
caps = (1, 1.5, 2, 3, 4, 5, 6, 8)
entered = {cap: timed(contest_rows(4, 12, cap, equal)).bubble_ratio for cap in caps}
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
figures.show(timed(contest_rows(4, 8, 3, equal)), "your table under a cap of 3", memory=True, for_weights=0.5)

# %% [markdown] id="contest_after"
# A table need not be a formula: playing the clock, with the costs of *this* model and the memory of *this* GPU, finds tables that no paper has
# drawn. That is how zero-bubble schedules are made in practice.

# %% [markdown] id="scale_text"
# ## 10 · At scale
#
# On a cluster the same tables run, with one process for each GPU. With 64 ranks, plain 1F1B needs a thousand micro-batches for a bubble of 6 %,
# and the global batch cannot grow like that. What do the schedules make of 256 micro-batches? The cell simulates them.

# %% id="show_scale" tags=["demo"]
p, m = LARGE, 4 * LARGE
large = {
    "1F1B, many": timed(one_f_one_b_rows(p, 16 * p)),
    "1F1B": timed(one_f_one_b_rows(p, m)),
    "interleaved, v = 4": timed(interleaved_rows(p, m, 4)),
    "ZB-H1": timed(zb_h1_rows(p, m)),
}
for name, run in large.items():
    count, percent, wasted = run.schedule.micro_batches, 100 * run.bubble_ratio, p * run.bubble_ratio / (1 + run.bubble_ratio)
    print(f"{name:20}{count:6,} micro-batches: bubble {percent:5.1f} % of the ideal time, as {wasted:4.1f} of {p} GPUs that never work")

# %% [markdown] id="job_text"
# `cluster.submit` is one call for a cluster and for here: with `dry_run` it shows the script that SLURM would get, for a pipeline on each of two nodes; without
# SLURM it runs the same options here, on two processes and a small model. The same call made again finds the same job.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster

flags = ["--parallel", "pp", "--schedule", "zb-h1", "--micro-batches", "8", "--batch", "1"]
full = ["--model", "llama-3.2-3b", "--seq", "2048", "--precision", "bf16", "--steps", "100"]
little = ["--model", "tiny", "--seq", "32", "--steps", "4", "--log-every", "2"]

script = cluster.submit("dlo_lib.train", [*full, *flags], gpus=8, site="jean-zay-h100", account="abc", dry_run=True)
print("For SLURM, 2 nodes of 4 GPUs:", *(line for line in script.splitlines() if line.startswith(("#SBATCH", "srun"))), sep="\n  ")
job = cluster.submit("dlo_lib.train", [*little, *flags], gpus=GPUS).wait()
print("Here, a pipeline of 2 ranks:")
for line in job.metrics():
    print(f"  step {line.step}: loss {line.loss:.3f}, {line.tokens_per_second:,.0f} tokens/s")

# %% [markdown] id="quiz_text"
# ## 11 · Quiz
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here says whether every question has an answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "a", "q2": "c", "q3": "b", "q4": "d", "q5": "a"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true, "points": 6}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Real stages are not equal: the last one also computes the loss over the vocabulary. Give `simulate` a list of costs, `Costs(forward=[1, 1, 1, 1.5], ...)`. Which
#   schedule suffers most?
# - Write ZB-H2. How much warm-up does each rank need, so that nothing inside its row waits?
# - With m not a multiple of p, interleaving loses its gain: try `timed` with a version of yours that makes the last group smaller.
# - A cap of p/2 with a small bubble: the paper on controllable memory below calls it V-Half. How near does your table come?
#
# **What comes next.** Lab 18 runs your tables on real ranks, meets the dead-lock on purpose, and lays the measured drawing above the planned one.
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
