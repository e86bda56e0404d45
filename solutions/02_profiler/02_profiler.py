# %% [markdown] id="title"
# # 02 · The profiler
#
# **What you will do.** A training program is several times slower than it needs to be, and nothing in its code looks wrong. You record a trace of its
# steps, read it as a drawing and with functions that you write, and find three bottlenecks that such programs often have. Before you correct each of them, you predict the gain; then you measure
# it. At the end you compute how much of the machine the program uses (MFU), place its step on the roofline, find the bottleneck of a program that you do not know, and do the same with PyTorch's tools, Perfetto and TensorBoard.
#
# You should have trained a small model with PyTorch before. Lab 01 helps: it explains how a time is measured.
#
# You need no GPU. The three bottlenecks cost time on a CPU and on a GPU, and the same cells show them. (The numbers in the text are from a CPU; this lab
# has not been measured on a GPU yet.) The core exercises, their predictions and the quiz take about 96 minutes; with the optional exercise, the text and the demos plan two hours and a quarter. Each exercise
# has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you are stuck, `lab.use_reference("name")` lets you continue
# without the points of that step.
#
# Words: profiler (*profileur*), trace (*trace d'exécution*), bottleneck (*goulot d'étranglement*), self time (*temps propre*), roofline (*modèle du toit*), arithmetic intensity (*intensité arithmétique*),
# MFU (*taux d'utilisation des FLOPs*).

# %% id="setup"
import json
import math
import os
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dlo_lib.grading import Lab
from dlo_lib.labkit.predictions import compared, require_numbers

STEPS = int(os.environ.get("DLO_STEPS", 12))  # of a measured program
ACTIVE = int(os.environ.get("DLO_ACTIVE", 2))  # steps in a trace
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
lab = Lab(globals())

# %% [markdown] id="why_text"
# ## Why: a slow program that looks right
#
# The program classifies small images with a network of three blocks. It has four parts, and each was written by a careful person: a stream of standardised
# batches, a block that scales its inputs, a meter of the accuracy of each class, and the training step. Read them, but do not search yet.

# %% id="slow" tags=["demo", "read"]
from torch.profiler import record_function

from dlo_lib.data import generated
from dlo_lib.profiling import Chronometer

torch.set_num_threads(1)  # tensors of this size are slower with more
SIZES, BATCH, CLASSES = [768, 256, 256, 10], 256, 10
TRAIN = generated(train=1024, test=1).train
IMAGES, LABELS = F.avg_pool2d(TRAIN.images, 2).flatten(1), TRAIN.labels
GAINS = [np.linspace(0.5, 1.5, size) for size in SIZES[:-1]]


class SlowBatches:
    """Batches of standardised images, in a random order."""

    def __init__(self, images, labels, size, seed):
        self.images, self.labels, self.size, self.seed = images, labels, size, seed

    def __iter__(self):
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(self.seed))
        for chosen in order.split(self.size):
            standardised = (self.images - self.images.mean(0)) / self.images.std(0)
            yield standardised[chosen], self.labels[chosen]


class SlowBlock(nn.Module):
    """A linear layer whose inputs are scaled by constants."""

    def __init__(self, inputs, outputs, gain):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.register_buffer("gain", torch.from_numpy(gain))

    def forward(self, x):
        x = x * self.gain
        return F.linear(x, self.linear.weight.to(x.dtype), self.linear.bias.to(x.dtype)).float()


class SlowAccuracy:
    """Counts the images of each class, and those that the model classifies right."""

    def __init__(self, classes, device):
        self.counted = torch.zeros(2, classes, dtype=torch.int64, device=device)

    def update(self, logits, labels):
        for row, label in zip(logits, labels):
            self.counted[1, label.item()] += 1
            if row.argmax().item() == label.item():
                self.counted[0, label.item()] += 1

    def counts(self):
        return self.counted


def forever(batches):
    """Repeat the epochs."""
    while True:
        yield from batches


@contextmanager
def phase(chronometer, name):
    """A named part of a step, for the trace and for the clock.

    The clock waits for the device at both ends.
    """
    with record_function(name), chronometer.phase(name):
        yield


PHASES = ("load", "forward", "backward", "optimizer", "metrics")


def program(batches=SlowBatches, block=SlowBlock, accuracy=SlowAccuracy, size=BATCH):
    """Return a function that trains one step of the program with these parts."""
    torch.manual_seed(0)
    blocks = [block(*shape) for shape in zip(SIZES, SIZES[1:], GAINS)]
    model = nn.Sequential(blocks[0], nn.ReLU(), blocks[1], nn.ReLU(), blocks[2]).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    meter = accuracy(CLASSES, DEVICE)
    stream = forever(batches(IMAGES, LABELS, size, seed=0))

    def step(chronometer):
        with phase(chronometer, "load"):
            images, labels = (tensor.to(DEVICE) for tensor in next(stream))
        with phase(chronometer, "forward"):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        with phase(chronometer, "backward"):
            loss.backward()
        with phase(chronometer, "optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        with phase(chronometer, "metrics"):
            meter.update(logits.detach(), labels)
        return loss.detach()

    return step


def measured(programs):
    """Train steps of the programs in turns.

    Return, for each program, the median ms of each phase, by the clock, and the last loss.
    """
    clocks, losses = {name: Chronometer(DEVICE) for name in programs}, {}
    for _ in range(STEPS):
        for name, step in programs.items():
            with clocks[name].step(samples=BATCH):
                losses[name] = step(clocks[name])
    times = {
        name: {phase: 1e3 * found.median for phase, found in clock.phases().items()}
        for name, clock in clocks.items()
    }
    return times, {name: loss.item() for name, loss in losses.items()}


times, losses = measured({"before": program()})
before, loss_before = times["before"], losses["before"]
total = sum(before.values())
print(f"a step takes {total:.1f} ms: {1e3 * BATCH / total:.0f} images/s; loss {loss_before:.4f}")

# %% [markdown] id="why_after"
# Is that fast or slow? The next cell measures what the three matrix products of the forward and their backward take alone.

# %% id="alone" tags=["demo"]
def products_alone():
    """Run the matrix products of one step on prepared tensors; return the shortest time in ms."""
    x = torch.randn(BATCH, SIZES[0], device=DEVICE)
    weights = [torch.randn(size, into, device=DEVICE, requires_grad=True) for into, size in pairwise(SIZES)]
    times = []
    for _ in range(STEPS):
        begin, y = time.perf_counter(), x
        for weight in weights:
            y = y @ weight.T
        y.sum().backward()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return min(times)


alone = products_alone()
print(f"the matrix products alone take {alone:.1f} ms, {100 * alone / sum(before.values()):.0f} % of the step. The rest of the time does something else.")

# %% [markdown] id="record_text"
# ## 1 · Record a trace
#
# `torch.profiler.profile` writes down when each operator begins and ends, and on which thread. Three habits make a trace useful:
#
# - **Few steps.** Every operator is an entry, and a step has thousands. A `schedule` skips the first steps (they allocate memory and choose kernels), warms the profiler up, and records two or three.
# - **Named phases.** `record_function("forward")` marks a region. Without names you see `aten::mul` and do not know whose it is.
# - **A mark after each step.** `profiler.step()` ends a step, and the trace has a region `ProfilerStep#n` for each.

# %% id="record" tags=["demo"]
from torch.profiler import ProfilerActivity, profile, schedule

os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler reports its start on stderr otherwise


def recorded(step, file):
    """Record ACTIVE steps and write their trace; return the profiler."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    chronometer = Chronometer(DEVICE)
    with profile(activities=activities, schedule=schedule(wait=1, warmup=1, active=ACTIVE, repeat=1), acc_events=True) as profiler:
        for _ in range(2 + ACTIVE):
            with chronometer.step():
                step(chronometer)
            profiler.step()
    profiler.export_chrome_trace(file)
    return profiler


profiler = recorded(program(), "trace_before.json")
size = Path("trace_before.json").stat().st_size / 2**20
print(f"trace_before.json: {size:.1f} MiB for {ACTIVE} steps")

# %% [markdown] id="perfetto_text"
# **Look at it now.** The file is in the folder of this notebook: right-click it in the file list of JupyterLab, *Download*, open <https://ui.perfetto.dev> in Chrome or Firefox, and choose *Open trace file*. The file stays on
# your computer. `W` and `S` zoom, `A` and `D` move, a click shows name and duration, and a box drawn with the mouse sums up what lies in it. Find one step, its five phases, and the
# long row of tiny operators in `metrics`.
#
# Perfetto shows; it does not decide. To compare programs you need numbers, so you read the file yourself.

# %% [markdown] id="spans_text"
# ### Read the events
#
# **Core · 7 min · ●○○**
#
# A trace is a dict with a list `"traceEvents"`. Each entry is a dict, and `"ph"` is its kind. `"X"` is a *complete* event: it has a `"name"`, a start `"ts"` and a duration `"dur"` in microseconds, a thread `"tid"`, and a
# category `"cat"`. The others (names of threads, arrows) take no time, and some have no `"ts"`. Two categories of complete events are no work: `"Trace"` is the profiler itself, and `"gpu_user_annotation"` repeats your regions on the tracks of a GPU.
#
# Write `read_spans(trace)`. It returns a list of dicts, one for each complete event of another category, with the keys `name`, `track` (the `tid`), `begin` and `end` in **milliseconds**; the earliest span begins at 0. The
# list is sorted by `begin`. Of spans that begin together, the longer one is first: it contains the other.

# %% nbgrader={"grade_id": "spans", "solution": true}
def read_spans(trace: dict) -> list[dict]:
    """Return the complete events, sorted: {"name": ..., "track": ..., "begin": ms, "end": ms}."""
    ### BEGIN SOLUTION
    skipped = ("Trace", "gpu_user_annotation")
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] not in skipped]
    first = min((event["ts"] for event in events), default=0)
    found = []
    for event in events:
        begin = (event["ts"] - first) / 1000
        found.append({"name": event["name"], "track": event["tid"], "begin": begin, "end": begin + event["dur"] / 1000})
    return sorted(found, key=lambda span: (span["begin"], -span["end"]))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_spans", "grade": true}
lab.check("spans")

# %% id="show_spans" tags=["demo"]
import figures

BEFORE = read_spans(json.loads(Path("trace_before.json").read_text()))
steps = [span for span in BEFORE if span["name"].startswith("ProfilerStep")]
MAIN = [span for span in BEFORE if span["track"] == steps[0]["track"]]


def shortest_step(spans):
    """Return the spans of the shortest step: other programs disturb it least."""
    step = min((span for span in spans if span["name"].startswith("ProfilerStep")), key=lambda span: span["end"] - span["begin"])
    return [span for span in spans if step["begin"] <= span["begin"] < step["end"]]


print(f"{len(BEFORE)} spans, {len(MAIN)} on the thread of the steps, {len(steps)} steps")
figures.timeline(shortest_step(MAIN), PHASES)

# %% [markdown] id="nesting_text"
# ## 2 · Whose time is it?
#
# **Core · 12 min · ●●○**
#
# The rows of the figure are nested: `aten::linear` calls `aten::addmm`, which calls `aten::copy_`. The duration of a span includes all that it calls, so durations do not add up. The **self time** does: the duration without the spans that are *directly* within.
#
# - `parents(spans)` returns, for each span of the sorted list, the index of the span that directly contains it, or None. A span contains another one of the **same track** that begins not before it and ends not after it. A span that begins when another one ends is its
#   neighbour.
# - `self_times(spans)` returns the self time of each span in ms.
#
# Go through the list once and keep a stack of the spans that are open on each track. A loop over all pairs would take minutes for this trace.

# %% nbgrader={"grade_id": "nesting", "solution": true}
def parents(spans: list[dict]) -> list[int | None]:
    """Return for each span the index of the span that directly contains it, or None."""
    ### BEGIN SOLUTION
    found, stacks = [], {}
    for number, span in enumerate(spans):
        stack = stacks.setdefault(span["track"], [])
        while stack and spans[stack[-1]]["end"] <= span["begin"]:
            stack.pop()
        found.append(stack[-1] if stack else None)
        stack.append(number)
    return found
    ### END SOLUTION


def self_times(spans: list[dict]) -> list[float]:
    """Return the self time of each span in ms."""
    ### BEGIN SOLUTION
    own = [span["end"] - span["begin"] for span in spans]
    for span, parent in zip(spans, parents(spans)):
        if parent is not None:
            own[parent] -= span["end"] - span["begin"]
    return own
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_nesting", "grade": true}
lab.check("nesting")

# %% [markdown] id="show_nesting_text"
# With self times, the trace becomes a table: which operator, in which phase, how often, how long in total?

# %% id="show_nesting" tags=["demo"]
def phase_of(spans):
    """Return the name of the phase around each span, or its own name if it is one."""
    found = []
    for span, parent in zip(spans, parents(spans)):
        found.append(span["name"] if span["name"] in PHASES else found[parent] if parent is not None else "")
    return found


def largest(spans, count=12):
    """Print the operators with the largest self time."""
    rows = {}
    for span, own, within in zip(spans, self_times(spans), phase_of(spans)):
        name = span["name"].split("#")[0]
        calls, total = rows.get((within, name), (0, 0.0))
        rows[within, name] = calls + 1, total + own
    print(f"{'phase':10} {'operator':36} {'calls/step':>10} {'self ms/step':>13}")
    for (within, name), (calls, total) in sorted(rows.items(), key=lambda row: -row[1][1])[:count]:
        print(f"{within:10} {name[:36]:36} {calls / ACTIVE:10.0f} {total / ACTIVE:13.2f}")


largest(MAIN)

# %% [markdown] id="phases_text"
# ## 3 · The phases of a step
#
# **Core · 8 min · ●○○**
#
# Now the same from above. `phase_times(spans, phases)` returns a dict: for each name in `phases`, the **mean ms in a step**, and `"other"`, the rest of the step. The values add up to the mean duration of a step.
#
# - Steps are the spans whose name begins with `ProfilerStep`. Only spans of their track count.
# - A phase may occur several times in a step; its times add up. It may occur outside of the steps (a validation, for example); that does not count. Phases do not contain each other.

# %% nbgrader={"grade_id": "phases", "solution": true}
def phase_times(spans: list[dict], phases: list[str]) -> dict[str, float]:
    """Return the mean ms in a step of each phase, and of "other"."""
    ### BEGIN SOLUTION
    steps = [span for span in spans if span["name"].startswith("ProfilerStep")]
    total = sum(step["end"] - step["begin"] for step in steps)
    sums = dict.fromkeys(phases, 0.0)
    for span in spans:
        inside = any(step["track"] == span["track"] and step["begin"] <= span["begin"] < step["end"] for step in steps)
        if span["name"] in sums and inside:
            sums[span["name"]] += span["end"] - span["begin"]
    sums["other"] = total - sum(sums.values())
    return {name: value / len(steps) for name, value in sums.items()}
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_phases", "grade": true}
lab.check("phases")

# %% [markdown] id="predict_phases_text"
# **Predict.** Which share of the step, in percent, does each phase take? You have seen the drawing and the table. Replace each `None` that you want to predict by a number. Predictions are not graded.

# %% id="predict_phases" tags=["prediction"]
predicted_shares = {
    "load": None,
    "forward": None,
    "backward": None,
    "optimizer": None,
    "metrics": None,
}

# %% id="show_phases" tags=["demo"]
from dlo_lib.labkit.predicted_bars import predicted_bars

require_numbers(predicted_shares)
in_trace = phase_times(BEFORE, PHASES)
shares = {name: 100 * in_trace[name] / sum(in_trace.values()) for name in PHASES}
print(compared(predicted_shares, shares))
print(
    f"by the clock, without the profiler, metrics takes {before['metrics']:.1f} ms; "
    f"in the trace it takes {in_trace['metrics']:.1f} ms"
)
predicted_bars(shares, predicted_shares, "share of a step (%)", text="{:.0f} %".format)

# %% [markdown] id="phases_after"
# The last printed line is a warning. **The profiler costs time itself**, a few microseconds for each operator. `metrics` starts thousands of tiny operators, so a trace exaggerates it. Use the trace to find causes, and the clock to measure gains.

# %% [markdown] id="kinds_text"
# ## 4 · What kind of work?
#
# **Core · 10 min · ●●○**
#
# A phase says *where* the time is; the kind of work says *what to do*. Four kinds:
#
# - `"conversion"`: copying tensors between dtypes, layouts or devices;
# - `"read"`: bringing a number to Python. On a GPU this is the hidden **synchronisation**: Python waits until the device has finished all work in its queue;
# - `"operator"`: all other operators, whose names begin with `aten::`;
# - `"python"`: everything else. The self time of a region or a step is Python code, and the cost of starting operators.
#
# `kind_times(spans, kinds)` returns the mean ms **in a step** of each of the four. `kinds` maps the names of operators to `"conversion"` or `"read"`. What such a span calls belongs to it, whatever its name is: all spans within a
# conversion are conversion, because `aten::to` calls `aten::empty_strided` and `aten::copy_`. The time of a span is its self time. As before, only spans of the steps and within them count, on their track, and the four add up to the duration of a step.
# Your `parents` and `self_times` are there to be used.

# %% nbgrader={"grade_id": "kinds", "solution": true}
def kind_times(spans: list[dict], kinds: dict[str, str]) -> dict[str, float]:
    """Return {"conversion": ms, "read": ms, "operator": ms, "python": ms}, means of a step."""
    ### BEGIN SOLUTION
    sums = dict.fromkeys(("conversion", "read", "operator", "python"), 0.0)
    steps, of_span = 0, []  # the kind of each span, or None outside of the steps
    for span, parent, own in zip(spans, parents(spans), self_times(spans)):
        above = None if parent is None else of_span[parent]
        if span["name"].startswith("ProfilerStep"):
            steps += 1
            kind = "python"
        elif above in (None, "conversion", "read"):
            kind = above
        else:
            kind = kinds.get(span["name"], "operator" if span["name"].startswith("aten::") else "python")
        of_span.append(kind)
        if kind is not None:
            sums[kind] += own
    return {kind: total / steps for kind, total in sums.items()}
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_kinds", "grade": true}
lab.check("kinds")

# %% id="show_kinds" tags=["demo"]
CONVERSIONS = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::contiguous", "aten::clone")
READS = (
    "aten::item",
    "aten::_local_scalar_dense",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
)
KINDS = dict.fromkeys(CONVERSIONS, "conversion") | dict.fromkeys(READS, "read")

in_phase = {}
for name in PHASES:  # each phase is treated as if it were the step
    renamed = []
    for span in MAIN:
        if span["name"] == name:
            span = dict(span, name=f"ProfilerStep {name}")
        elif span["name"].startswith("ProfilerStep"):
            span = dict(span, name="step")
        renamed.append(span)
    in_phase[name] = kind_times(renamed, KINDS)
figures.kinds(in_phase)

# %% [markdown] id="find_text"
# **Three suspects.** Each phase that is too long has another signature:
#
# - `load` computes: large operators, hardly any Python, in a phase that should only pick rows. The table of section 2 names them. What do they compute, and how often does it change?
# - `forward` has **conversions**, and `backward` too. Which dtype do the matrix products have? The time of `aten::addmm` and `aten::mm` says that it is not the one that you think.
# - `metrics` is a swarm: thousands of operators of a few microseconds, and **reads** between them.
#
# The optimiser is innocent. Before you correct anything: what is it worth?

# %% [markdown] id="amdahl_text"
# ## 5 · What a correction is worth
#
# **Core · 5 min · ●○○**
#
# If one part of a step becomes `s` times as fast, only that part shrinks: **Amdahl's law**. The new step is the sum of the old times, each divided by its own factor.
#
# `predicted_step(times, faster)` returns the new ms. `times` maps the parts of a step to their ms; `faster` maps some of them to their factors. A part that is not in `faster` stays as it is; the factor `math.inf` removes a part.

# %% nbgrader={"grade_id": "amdahl", "solution": true}
def predicted_step(times: dict[str, float], faster: dict[str, float]) -> float:
    """Return the ms of a step of which some parts are faster by a factor."""
    ### BEGIN SOLUTION
    return sum(value / faster.get(name, 1) for name, value in times.items())
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_amdahl", "grade": true}
lab.check("amdahl")

# %% id="show_amdahl" tags=["demo"]
total = sum(before.values())
for name in PHASES:
    without, twice = (predicted_step(before, {name: factor}) for factor in (math.inf, 2))
    print(
        f"{name:10} {before[name]:6.2f} ms. "
        f"Removed: the step is {total / without:.2f} times as fast. "
        f"Twice as fast: {total / twice:.2f} times"
    )

# %% [markdown] id="predict_gains_text"
# **Predict.** You will now correct `load`, then `forward` and `backward`, then `metrics`, one after another. How many ms does a step take after each? By the clock it takes the time that the first cell printed. Assume for example
# that a corrected `load` takes almost nothing, and that `forward` and `backward` become twice as fast; `predicted_step` computes the rest.

# %% id="predict_gains" tags=["prediction"]
predicted_steps = {"load": None, "forward, backward": None, "metrics": None}

# %% [markdown] id="batches_text"
# ## 6 · First correction: work that does not change
#
# **Core · 6 min · ●○○**
#
# `SlowBatches` standardises **all** images for each batch, and computes mean and standard deviation again, although they never change. Write `Batches` with the same arguments and the same batches, in the same order. Compute what does not change once, in `__init__`. Then a
# batch only handles its own images. Do not change `images`: the caller still uses them.

# %% nbgrader={"grade_id": "batches", "solution": true}
class Batches:
    """Batches of standardised images, in a random order."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, size: int, seed: int):
        ### BEGIN SOLUTION
        self.images = (images - images.mean(0)) / images.std(0)
        self.labels, self.size, self.seed = labels, size, seed
        ### END SOLUTION

    def __iter__(self):
        """Yield (images, labels) of each batch."""
        ### BEGIN SOLUTION
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(self.seed))
        for chosen in order.split(self.size):
            yield self.images[chosen], self.labels[chosen]
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_batches", "grade": true}
lab.check("batches")

# %% id="show_batches" tags=["demo"]
# in turns, because other programs use the machine, too
times, _ = measured({"before": program(), "now": program(Batches)})
print(f"load: {times['before']['load']:.2f} ms -> {times['now']['load']:.2f} ms", end="; ")
print(f"the step: {sum(times['before'].values()):.1f} -> {sum(times['now'].values()):.1f} ms")
step_ms = {f"the step {name}": sum(phases.values()) for name, phases in times.items()}
print(figures.what_times_show(step_ms))

# %% [markdown] id="block_text"
# ## 7 · Second correction: a dtype that spreads
#
# **Core · 6 min · ●●○**
#
# NumPy computes in float64, and `torch.from_numpy` keeps that. `x * self.gain` then returns float64, the weights have to follow (`.to(x.dtype)` in each step), and the products run in double precision: half as fast on a CPU, and 2 to 64 times slower on a
# GPU. The careful `.float()` at the end hides it from the rest of the program.
#
# Write `Block` with the same arguments, the attribute `linear` and the **buffer** `gain` (so that it moves to the device with the model, and is saved). All in float32, and without any conversion in `forward`.

# %% nbgrader={"grade_id": "block", "solution": true}
class Block(nn.Module):
    """A linear layer whose inputs are scaled by constants."""

    def __init__(self, inputs: int, outputs: int, gain: np.ndarray):
        super().__init__()
        ### BEGIN SOLUTION
        self.linear = nn.Linear(inputs, outputs)
        self.register_buffer("gain", torch.from_numpy(gain).float())
        ### END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, inputs) float32 -> (batch, outputs) float32."""
        ### BEGIN SOLUTION
        return self.linear(x * self.gain)
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_block", "grade": true}
lab.check("block")

# %% id="show_block" tags=["demo"]
times, _ = measured({"before": program(Batches), "now": program(Batches, Block)})
for name in ("forward", "backward"):
    print(f"{name}: {times['before'][name]:.2f} ms -> {times['now'][name]:.2f} ms")
both_ms = {
    f"forward and backward {name}": found["forward"] + found["backward"]
    for name, found in times.items()
}
print(figures.what_times_show(both_ms))

# %% [markdown] id="accuracy_text"
# ## 8 · Third correction: a swarm of small operators, and reads
#
# **Core · 8 min · ●●○**
#
# `SlowAccuracy.update` starts some operators for each image of the batch, and reads numbers with `.item()`. On a GPU each read waits for all work in the queue, and while Python waits, it queues nothing new.
#
# Write `Accuracy`: `update(logits, labels)` counts a batch, and `counts()` returns a tensor (2, classes), int64, on `device`: in row 0 the images of each class that are classified right, in row 1 all images of each class. `update` starts a
# number of operators that does not depend on the batch, and nothing in it needs a value on the CPU: no `.item()`, `.tolist()` or `if` on a tensor, and no operator whose **size of the result depends on values** (`x[mask]`, `nonzero`, `bincount`, `unique`),
# because PyTorch has to know this size to allocate the result. `F.one_hot` is not allowed either: on a CPU it reads values, to check the labels.
#
# `counts.index_add_(0, index, values)` adds `values[i]` at the place `index[i]`.

# %% nbgrader={"grade_id": "accuracy", "solution": true}
class Accuracy:
    """Counts the images of each class, and those that the model classifies right."""

    def __init__(self, classes: int, device: torch.device):
        ### BEGIN SOLUTION
        self.counted = torch.zeros(2, classes, dtype=torch.int64, device=device)
        ### END SOLUTION

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: logits (batch, classes), labels (batch,) int64."""
        ### BEGIN SOLUTION
        right = logits.argmax(1) == labels
        self.counted.index_add_(1, labels, torch.stack([right.long(), torch.ones_like(labels)]))
        ### END SOLUTION

    def counts(self) -> torch.Tensor:
        """Return (2, classes) int64: the images that are right, and all images, of each class."""
        ### BEGIN SOLUTION
        return self.counted
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_accuracy", "grade": true}
lab.check("accuracy")

# %% [markdown] id="show_accuracy_text"
# Now the whole: each row of the figure is a step of the program after one more correction, by the clock, with your predictions. The four programs run
# in turns, a step of each, so that what else happens on the machine slows all of them. The line above the figure says if a correction saves nothing here.

# %% id="show_accuracy" tags=["demo"]
require_numbers(predicted_steps)
after, losses = measured(
    {
        "before": program(),
        "load": program(Batches),
        "forward, backward": program(Batches, Block),
        "metrics": program(Batches, Block, Accuracy),
    }
)
before = after.pop("before")
totals = {name: sum(times.values()) for name, times in after.items()}
print(compared(predicted_steps, totals, "{:.1f} ms".format))
print("last loss:", ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
at_start = sum(before.values())
print(f"the program is {at_start / totals['metrics']:.1f} times as fast as at the start")
corrected = {f"the step with {name} corrected": total for name, total in totals.items()}
print(figures.what_times_show({"the step before": at_start, **corrected}))
figures.corrections({"before": before, **after}, predicted_steps)

# %% [markdown] id="after_text"
# The losses agree: the program computes the same, up to the rounding of float32. Look at its trace: the same three cells as above, in one.

# %% id="trace_after" tags=["demo"]
recorded(program(Batches, Block, Accuracy), "trace_after.json")
AFTER = read_spans(json.loads(Path("trace_after.json").read_text()))
steps = [span for span in AFTER if span["name"].startswith("ProfilerStep")]
NOW = [span for span in AFTER if span["track"] == steps[0]["track"]]
print(f"{len(MAIN) / ACTIVE:.0f} spans in a step before, {len(NOW) / ACTIVE:.0f} now")
largest(NOW, 6)
figures.timeline(shortest_step(NOW), PHASES)

# %% [markdown] id="overlap_text"
# ## 9 · Two tracks at the same time
#
# **Optional · 11 min · ●●○**
#
# Nothing later needs this exercise. Some work cannot be removed, but it can be **hidden**: a thread loads the next batch while the model computes, a GPU computes while the CPU prepares, a gradient travels while the next one is computed. Then a trace has several tracks, and durations of different
# tracks do not add up. What counts is the time in which a track is busy, and the time in which two are busy together.
#
# - `covered(intervals)`: the length of the union of intervals `(begin, end)`. They come in any order, and may overlap, touch, or contain each other (a GPU runs kernels on several streams).
# - `overlap(a, b)`: the time in which an interval of `a` **and** one of `b` are active. Use `covered` three times: how much shorter is the union of both than the sum of their lengths?

# %% nbgrader={"grade_id": "overlap", "solution": true}
def covered(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals."""
    ### BEGIN SOLUTION
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
    ### END SOLUTION


def overlap(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Return the time that both cover."""
    ### BEGIN SOLUTION
    return covered(a) + covered(b) - covered([*a, *b])
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_overlap", "grade": true}
lab.check("overlap")

# %% [markdown] id="show_overlap_text"
# The cell takes the **corrected** program, with `Block` and `Accuracy`, and loads in a second thread: a step only waits for what is not ready. It does so for `Batches` with an augmentation (noise is added to each batch), and for `SlowBatches`. (`profile_all_threads` is an experimental
# option: without it the profiler records only the thread that starts it.)
#
# **Predict.** Which share of the loading, in percent, is hidden behind the training: with `Batches` and the noise, and with `SlowBatches`? The figure of section 8 shows how long
# `SlowBatches` loads (first row), and what it can hide behind: the other phases of the corrected program (last row).

# %% id="predict_hidden" tags=["prediction"]
predicted_hidden = {"Batches and noise": None, "SlowBatches": None}

# %% id="show_overlap" tags=["demo"]
require_numbers(predicted_hidden)
import queue
import threading

from torch._C._profiler import _ExperimentalConfig


class Noisy(Batches):
    """Augments each batch: adds noise."""

    def __iter__(self):
        for images, labels in super().__iter__():
            yield images + 0.1 * torch.randn_like(images), labels


def in_a_thread(batches):
    """Return a class like `batches` whose epochs are loaded by a thread, at most two batches ahead."""

    class Threaded(batches):
        def __iter__(self):
            ready = queue.Queue(maxsize=2)

            def load():
                source = super(Threaded, self).__iter__()
                while True:
                    with record_function("load in a thread"):
                        batch = next(source, None)
                    ready.put(batch)
                    if batch is None:
                        return

            threading.Thread(target=load, daemon=True).start()
            while (batch := ready.get()) is not None:
                yield batch

    return Threaded


def both_tracks(batches, file):
    """Record the spans of loading and of training in three epochs, as lists of intervals."""
    chronometer, step = Chronometer(DEVICE), program(in_a_thread(batches), Block, Accuracy)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler:
        for _ in range(3 * len(IMAGES) // BATCH):  # whole epochs, so that each thread ends
            with chronometer.step(), record_function("step"):
                step(chronometer)
    profiler.export_chrome_trace(file)
    found = read_spans(json.loads(Path(file).read_text()))
    loading = [(span["begin"], span["end"]) for span in found if span["name"] == "load in a thread"]
    training = [(span["begin"], span["end"]) for span in found if span["name"] in PHASES[1:]]
    return loading, training


def show_tracks():
    tracks = {"Batches and noise": both_tracks(Noisy, "trace_thread.json"), "SlowBatches": both_tracks(SlowBatches, "trace_slow_thread.json")}
    hidden = {name: 100 * overlap(loading, training) / covered(loading) for name, (loading, training) in tracks.items()}
    print(compared(predicted_hidden, hidden, "{:.0f} %".format))
    return figures.two_tracks(tracks)


try:
    every_thread = _ExperimentalConfig(profile_all_threads=True)
except TypeError:
    every_thread = None
    print("not measured: this version of PyTorch records only one thread; use a newer version")
show_tracks() if every_thread is not None else None

# %% [markdown] id="overlap_after"
# A thread hides at most as much loading as there is computation to hide it behind, so it does not save `SlowBatches`: **first remove, then hide**. (Both threads also share this machine: with few free cores each of them slows the other one down.)
#
# On a GPU the kernels are a track, and `overlap` answers the two questions that matter there. How long is the GPU idle in a step: its duration minus `covered(kernels)`. And how much of the communication is exposed:
# `covered(communication) - overlap(communication, compute)`. Labs 11 and 16 use the same formula.

# %% [markdown] id="flops_text"
# ## 10 · How good can it get?
#
# **Core · 8 min · ●●○**
#
# The program is faster. Is it fast? Count its arithmetic. A product of matrices $(m \times k)$ and $(k \times n)$ takes $2\,m\,k\,n$ FLOPs. A linear layer has three products in a training step: the output; in backward the gradient of its weight; and the gradient of its
# input. All three have the same three sizes. The first layer does not need the last one: no one asks for the gradient of the images.
#
# - `step_flops(sizes, batch)`: the FLOPs of the matrix products of a training step of linear layers `sizes[0]` → `sizes[1]` → … for a batch.
# - `mfu(flops, seconds, peak)`: the **model FLOPs utilisation**, the share of the peak (in FLOP/s) that a step of these FLOPs reaches if it takes `seconds`.

# %% nbgrader={"grade_id": "flops", "solution": true}
def step_flops(sizes: list[int], batch: int) -> int:
    """Return the FLOPs of the matrix products of a training step."""
    ### BEGIN SOLUTION
    layers = [2 * batch * inputs * outputs for inputs, outputs in pairwise(sizes)]
    return 3 * sum(layers) - layers[0]
    ### END SOLUTION


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Return the share of the peak FLOP/s that is used."""
    ### BEGIN SOLUTION
    return flops / seconds / peak
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_flops", "grade": true}
lab.check("flops")

# %% [markdown] id="predict_mfu_text"
# PyTorch counts too (`FlopCounterMode`), and the cell compares. The peak is measured: the FLOP/s of a product of square matrices on this machine, in float32.
#
# **Predict.** What is the MFU, in percent, of the program at the start and now?

# %% id="predict_mfu" tags=["prediction"]
predicted_mfu = {"at the start": None, "now": None}

# %% id="show_flops" tags=["demo"]
require_numbers(predicted_mfu)
from torch.utils.flop_counter import FlopCounterMode

from dlo_lib.profiling import Ceilings, measure_ceilings

peak = measure_ceilings(DEVICE, size=4096 if DEVICE.type == "cuda" else 512, repeats=20).flops
bandwidth = measure_ceilings(DEVICE, size=4096 if DEVICE.type == "cuda" else 1024).bandwidth  # of a copy that fits in no cache
ceilings = Ceilings(peak, bandwidth)
flops = step_flops(SIZES, BATCH)
step, silent = program(Batches, Block, Accuracy), Chronometer(DEVICE)
with FlopCounterMode(display=False) as counter, silent.step():
    step(silent)
print(f"FLOPs of a step: {flops:,} by your formula, {counter.get_total_flops():,} by PyTorch")
utilisation = {"at the start": sum(before.values()), "now": totals["metrics"]}
utilisation = {name: 100 * mfu(flops, 1e-3 * value, ceilings.flops) for name, value in utilisation.items()}
print(compared(predicted_mfu, utilisation, "{:.0f} %".format))
print(f"measured ceilings: {ceilings.flops / 1e9:.0f} GFLOP/s, {ceilings.bandwidth / 1e9:.1f} GB/s")

# %% [markdown] id="roofline_text"
# ## 11 · The roofline
#
# **Core · 5 min · ●○○**
#
# Not every operator can reach the peak. Before it can compute, its data must come from memory. Its **arithmetic intensity** is FLOPs divided by bytes moved, and it reaches at most $\mathrm{intensity} \times \mathrm{bandwidth}$, and at most the peak.
#
# `attainable(flops, nbytes, peak, bandwidth)` returns the FLOP/s that an operator can reach at best.

# %% nbgrader={"grade_id": "roofline", "solution": true}
def attainable(flops: float, nbytes: float, peak: float, bandwidth: float) -> float:
    """Return the FLOP/s that the two ceilings allow; peak in FLOP/s, bandwidth in bytes/s."""
    ### BEGIN SOLUTION
    return min(peak, flops / nbytes * bandwidth)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_roofline", "grade": true}
lab.check("roofline")

# %% id="show_roofline" tags=["demo"]
from dlo_lib.profiling import MeasuredOperation, measure_operation

x, weight = torch.randn(BATCH, SIZES[0], device=DEVICE), torch.randn(SIZES[0], SIZES[1], device=DEVICE)
points = {
    "product of block 1": measure_operation(torch.mm, x, weight),
    "product of block 3": measure_operation(torch.mm, torch.randn(BATCH, 256, device=DEVICE), torch.randn(256, 10, device=DEVICE)),
}
large = torch.randn(2**24 // SIZES[0], SIZES[0], device=DEVICE)  # 64 MiB: the tensors of the program fit in a cache
target = torch.empty_like(large)
points["x * gain"] = measure_operation(lambda x, gain: torch.mul(x, gain, out=target), large, large[0])
points["relu"] = measure_operation(lambda x: torch.clamp(x, min=0, out=target), large)
moved = sum(4 * 3 * (BATCH * (a + b) + a * b) for a, b in pairwise(SIZES))  # inputs, weights and outputs of the three products
points["the step, before"] = MeasuredOperation(flops, moved, 1e-3 * sum(before.values()))
points["the step, now"] = MeasuredOperation(flops, moved, 1e-3 * totals["metrics"])
for name, point in points.items():
    best = attainable(point.flops, point.bytes, ceilings.flops, ceilings.bandwidth)
    print(f"{name:20} {point.intensity:7.2f} FLOPs per byte: {point.rate / 1e9:7.2f} GFLOP/s, at best {best / 1e9:7.2f} ({point.limit(ceilings)})")
figures.roofline(ceilings, points)

# %% [markdown] id="roofline_after"
# The large product is near the roof; `x * gain` and `relu` are far below the peak, and **nothing is wrong with them**: memory limits them. (They are measured on tensors that do not fit in a cache. Those of
# `product of block 3` and of the step do. A cache delivers faster than the memory whose bandwidth the figure shows, so such a point may lie **above** the slope. The ceilings are measurements, too, and change if other programs use the machine.) Only fewer bytes make them faster, which means to fuse them with a neighbour: labs 04 and 05. The step has risen towards the roof. What is left between it and the roof are such operators, the optimiser, and Python.

# %% [markdown] id="page_text"
# ## 12 · The technical check
#
# Before a training gets many GPUs, put the answers on one page: the throughput (how much of what the step could do without waiting?), the parts of a step, and the memory against the batch with the limit of the card. The library measures and draws it:

# %% id="page" tags=["demo"]
import gc

from dlo_lib.hardware import gpu, recognise
from dlo_lib.profiling import largest_measured_batch, technical_check

card = recognise(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else gpu("h100-80")
LIMIT = 12 * 2**20  # bytes; so small that the limit shows: this model would need a batch of millions to fill a real card
LIMIT += torch.cuda.memory_allocated() if torch.cuda.is_available() else 0  # what this notebook holds there already


gc.freeze()  # each measurement of memory collects garbage: not among the thousands of spans of the traces


def make(size):
    return program(Batches, Block, Accuracy, size)


page = technical_check(make, BATCH, (64, 128, 256, 512, 1024), DEVICE, limit_bytes=LIMIT, steps=STEPS)
print(page.text())
figures.page(page)

# %% [markdown] id="page_after"
# With `card=gpu("h100-80")` in place of `limit_bytes`, the line is the usable memory of that card. The largest batch does not need a table: `largest_measured_batch` doubles and bisects, as you did in lab 01. On a GPU it tries until the allocator refuses; on a CPU it
# measures the tensors and compares with a limit.

# %% id="largest_batch" tags=["demo"]
class Repeated(Batches):
    """One batch of any size, of repeated images."""

    def __iter__(self):
        index = torch.arange(self.size) % len(self.images)
        yield self.images[index], self.labels[index]


def build(size):
    step, chronometer = program(Repeated, Block, Accuracy, size), Chronometer(DEVICE)

    def run():
        with chronometer.step():
            step(chronometer)

    return run


print("largest batch within", LIMIT // 2**20, "MiB:", largest_measured_batch(build, LIMIT, DEVICE))
print(f"usable on {card.title}: {card.usable_bytes / 2**30:.1f} GiB" if card else "this card is not in the table of the library")

# %% [markdown] id="unknown_text"
# ## 13 · A program that you do not know
#
# You knew the slow program, and this page named its causes. In your own project no page does. Here is another program, **drawn for your login**: your neighbour has a different one. Its trace comes from a model of a training on a GPU, because
# a bottleneck that is drawn cannot be recorded here. The model runs with `CUDA_LAUNCH_BLOCKING=1`: each operator waits for its kernel, so the thread of the steps shows all times. It also records dtypes and shapes (`profile(record_shapes=True)`): each span has
# two more keys, `dtype` and `shapes`. One cause costs most time, and a second one is beside it. Look at the table and the drawing. What is wrong?

# %% id="unknown" tags=["demo"]
from dlo_lib.labkit import drawn_programs

UNKNOWN = drawn_programs.unknown(drawn_programs.seed_of_login())


def of_steps(spans):
    """Return the mean ms of a step."""
    steps = [span for span in spans if span["name"].startswith("ProfilerStep")]
    return sum(span["end"] - span["begin"] for span in steps) / len(steps)


def with_dtypes(spans, count=14):
    """Print the largest self times, by phase, name, dtype and shapes."""
    number = sum(span["name"].startswith("ProfilerStep") for span in spans)
    rows = {}
    for span, own, within in zip(spans, self_times(spans), phase_of(spans)):
        row = within, span["name"][:24], span["dtype"], str(span["shapes"])[:28]
        calls, total = rows.get(row, (0, 0.0))
        rows[row] = calls + 1, total + own
    columns = "{:10} {:24} {:8} {:28} {:>6} {:>9}".format
    print(columns("phase", "span", "dtype", "shapes", "calls", "self ms"), "in a step")
    for row, (calls, total) in sorted(rows.items(), key=lambda row: -row[1][1])[:count]:
        print(columns(*row, f"{calls / number:.0f}", f"{total / number:.2f}"))


print(f"a step takes {of_steps(UNKNOWN.spans):.1f} ms")
with_dtypes(UNKNOWN.spans)
figures.timeline(shortest_step(UNKNOWN.spans), PHASES)

# %% [markdown] id="predict_unknown_text"
# **Predict.** How many ms does a step take without its bottleneck, if the rest stays? Name the bottleneck for yourself first, then add up its rows.

# %% id="predict_unknown" tags=["prediction"]
predicted_without = {"without the bottleneck": None}

# %% [markdown] id="diagnose_text"
# ### Write the diagnosis
#
# **Core · 12 min · ●●●**
#
# The next program has another bottleneck, so write down how you look. `diagnose(spans)` returns the cause with the most time in all steps, or `"healthy"` if no cause takes a fifth of the time of the steps. The time of a cause is the sum of the **self times** of its spans:
#
# | cause | its spans |
# |---|---|
# | `"read"` | `aten::item`, and all spans within it |
# | `"copy"` | `aten::to`, and all spans within it: a tensor travels between host and device, or to another dtype |
# | `"float64"` | operators (their names begin with `aten::`) whose `dtype` is `"float64"` |
# | `"repeated"` | operators outside of `forward` with the name, the `shapes` and the `dtype` of an operator of `forward`: the forward runs again |
# | `"small"` | operators that take less than 0.05 ms from begin to end |
# | `"loader"` | the phase `load` and the spans within it that are no operators: Python waits for the data |
#
# A span belongs to the first of these rows that fits. Only the steps count, and what is within them, on their track. The phases are `load`, `forward`, `backward`, `optimizer` and `metrics`, each directly within a step. In the list,
# the spans of `forward` come before those of the later phases. Use your `parents` and `self_times`, and no name of a demo.

# %% nbgrader={"grade_id": "diagnose", "solution": true}
def diagnose(spans: list[dict]) -> str:
    """Return the cause that takes most time, or "healthy"."""
    ### BEGIN SOLUTION
    total, sums, first = 0.0, {}, set()  # first: the operators of forward
    phases, causes = [], []  # of each span; "" outside of the steps, and for no cause
    for span, parent, own in zip(spans, parents(spans), self_times(spans)):
        name, length = span["name"], span["end"] - span["begin"]
        phase, cause = ("", "") if parent is None else (phases[parent], causes[parent])
        is_operator, what = name.startswith("aten::"), (name, span["dtype"], str(span["shapes"]))
        if name.startswith("ProfilerStep"):
            total += length
            phase = "step"
        elif phase == "step":
            phase = name
        if cause not in ("read", "copy"):
            cause = {"aten::item": "read", "aten::to": "copy"}.get(name, "")
            if not cause and is_operator:
                if span["dtype"] == "float64":
                    cause = "float64"
                elif phase != "forward" and what in first:
                    cause = "repeated"
                elif length < 0.05:
                    cause = "small"
            elif not cause and phase == "load":
                cause = "loader"
        if is_operator and phase == "forward":
            first.add(what)
        phases.append(phase)
        causes.append(cause)
        if phase and cause:
            sums[cause] = sums.get(cause, 0.0) + own
    most = max(sums, key=sums.get, default="healthy")
    return most if sums.get(most, 0.0) >= total / 5 else "healthy"
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_diagnose", "grade": true}
lab.check("diagnose")

# %% id="show_diagnose" tags=["demo"]
require_numbers(predicted_without)
print(f"your function says {diagnose(UNKNOWN.spans)!r}")
print(f"the bottleneck is {UNKNOWN.bottleneck!r}, the second fault is {UNKNOWN.second!r}")
left = {"without the bottleneck": of_steps(UNKNOWN.without)}
print(compared(predicted_without, left, "{:.1f} ms".format))
print(f"the next diagnosis, without this bottleneck: {diagnose(UNKNOWN.without)!r}")
figures.timeline(shortest_step(UNKNOWN.without), PHASES)

# %% [markdown] id="diagnose_after"
# The second fault often becomes the next bottleneck: **look again after each correction**. Real traces need other limits than 0.05 ms and a fifth, and more rows: whatever cost you time once can become one.

# %% [markdown] id="scale_text"
# ## 14 · At scale
#
# - **Many ranks.** Each rank writes its own trace; give the files the number of the rank. A step that is slow on one rank is slow on all, because they meet in the all-reduce: compare ranks first. [Holistic Trace Analysis](https://github.com/facebookresearch/HolisticTraceAnalysis) reads
#   the traces of all ranks and reports idle time, exposed communication and stragglers, with the formulas of sections 4 and 9.
# - **On a cluster** profile a few steps of the real job, and write to `$SCRATCH`. With `with_stack=True` each operator has its line of Python (and a larger cost); with `profile_memory=True` the trace has a curve of the memory.
# - **Below the operators**, NVIDIA's *Nsight Systems* (`nsys profile -t cuda,nvtx python train.py`) shows what happens outside of PyTorch, and *Nsight Compute* looks into one kernel. `torch.autograd.profiler.emit_nvtx()` gives Nsight the names of the operators.
# - **TensorBoard** had a plugin for traces (`torch-tb-profiler`, files of `tensorboard_trace_handler`). PyTorch has deprecated it and recommends Perfetto. Its version 0.4.3 still runs with TensorBoard 2.21, but is not part of this environment. What TensorBoard shows without a plugin is scalars: the library
#   writes the phases there, so that you can compare runs.

# %% [markdown] id="same_text"
# ## 15 · The same with PyTorch and the library
#
# `key_averages()` is your table of section 2 in one line of code. It has the totals of the recorded steps, not means of a step:

# %% id="averages" tags=["demo"]
averages = profiler.key_averages().table(
    sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=24
)
rows = averages.split("\nSelf CPU time total")[0]
print("\n".join(row[:96] for row in rows.splitlines()))  # the first columns

# %% [markdown] id="library_text"
# The library reads traces as you do, and its functions pass your checks:

# %% id="same" tags=["demo"]
from dlo_lib import profiling
from dlo_lib.profiling import TraceEvent


def as_events(spans):
    return [TraceEvent(span["name"], "", span["begin"], span["end"] - span["begin"], ("0", str(span["track"]))) for span in spans]


def library_self_times(spans):
    return profiling.self_times(as_events(spans))


def library_phase_times(spans, phases):
    return profiling.phase_times(as_events(spans), phases)


lab.check("nesting", instead={"self_times": library_self_times})
lab.check("phases", instead={"phase_times": library_phase_times})
lab.check("overlap", instead={"covered": profiling.covered, "overlap": profiling.overlap})

# %% [markdown] id="sentence_text"
# `profile_steps` does sections 1 to 4 in one call and ends with a sentence: the kind of work with the most time, the longest phase, and where to look next. Compare the longest phase from program
# to program. The sentence does not name the three causes that you found: an operator that repeats its work, or computes in float64, is an operator like the others. The table of section 2 shows them. Below the sentences, what you wrote for the trace beside what the library and PyTorch need from you.

# %% id="sentence" tags=["demo"]
from dlo_lib.labkit.side_by_side import Form, lines_of, table
from dlo_lib.profiling import profile_steps


def without_clock(step):
    silent = Chronometer(synchronise=False)

    def run():
        with silent.step():
            step(silent)

    return run


parts = {"before": (), "load corrected": (Batches,), "load and dtype corrected": (Batches, Block), "all corrected": (Batches, Block, Accuracy)}
for number, (name, chosen) in enumerate(parts.items()):
    found = profile_steps(without_clock(program(*chosen)), steps=ACTIVE)
    found.to_tensorboard("runs/profile", step=number)
    print(f"{name}: {found.explained()}")


def key_averages(step):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return profiler.key_averages().table(sort_by="self_cpu_time_total")


def in_one_call(step):
    return profile_steps(step).explained()


print()
print(table([Form("yours", lines=lines_of(read_spans, parents, self_times, phase_times, kind_times)), Form("PyTorch", lines=lines_of(key_averages)), Form("library", lines=lines_of(in_one_call))]))

# %% [markdown] id="board_text"
# The last cell has also written the parts and the phases of these four programs as scalars. TensorBoard shows how they shrink, from one correction to the next: open *Time Series*, and read the horizontal axis as the number of corrections. This kernel serves it, and it ends with the kernel.

# %% id="board" tags=["demo"]
from dlo_lib.train.board import serve_board

serve_board("runs")

# %% [markdown] id="quiz_text"
# ## 16 · Quiz
#
# **Core · 5 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests whether every question has an
# answer; right answers count in grading.

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
# - Put `optimizer.zero_grad()` at the wrong place: before `backward` of the next step is right, between `backward` and `step` is not. Does the trace show it? What does?
# - Replace SGD by `torch.optim.AdamW(..., foreach=False)`, then `fused=True`. How many operators does the phase `optimizer` start?
# - Read the accuracy once in 10 steps with `.item()`. What does it cost? And in each step?
# - Record with `with_stack=True` and find the line of Python of the largest operator in Perfetto.
# - Profile your own project: three steps, named phases, and the table of section 2.
#
# ## References
#
# - PyTorch, [*torch.profiler*](https://docs.pytorch.org/docs/stable/profiler.html): schedules, activities, `key_averages`, `export_chrome_trace`
# - [Perfetto](https://perfetto.dev/docs/visualization/perfetto-ui), and the [format of trace events](https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU)
# - G. Amdahl, *Validity of the single processor approach* (AFIPS 1967)
# - S. Williams, A. Waterman, D. Patterson, *Roofline* (Communications of the ACM 52(4), 2009)
# - A. Chowdhery et al., *PaLM* (2022), [arXiv:2204.02311](https://arxiv.org/abs/2204.02311), appendix B: the model FLOPs utilisation
# - The course this lab follows: FIDLE, sequence 16, and IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
