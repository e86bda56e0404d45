# %% [markdown] id="title"
# # 04 · torch.compile: what it fuses, what breaks it, when it pays
#
# **What you will do.** Read the code that a compiler writes for you, and count the bytes that it saves.
# Rewrite functions that it must cut into pieces, so that each is one graph. Use its switches: `fullgraph`,
# `mode`, and the log `TORCH_LOGS`. Prevent repeated compilation of the same code. Compile a model block by block, and
# optionally an optimiser. Then compute after how many steps the compilation has paid.
#
# You need no GPU. On a CPU the compiler writes C++ and calls a C++ compiler (`apt-get install g++`, or
# `module load gcc`); without one the lab still runs, and reports what you will not see.
#
# You can skip labs 01 to 03 (mixed precision, the profiler, data loading). You need one fact of lab 02: many operations are limited not by
# arithmetic but by the bytes that they read and write.
#
# The core exercises and predictions take about 98 minutes; with the text and the demos plan two hours. The three optional exercises
# (an optimiser, padding to buckets) take 42 minutes more. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch.
#
# Words: kernel (*noyau de calcul*), fusion of kernels (*fusion de noyaux*), graph break (*rupture de
# graphe*), just-in-time compilation (*compilation à la volée*), recompilation (*recompilation*), warm cache
# (*cache chaud*).

# %% id="setup"
import contextlib
import io
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dlo_lib.profiling.compile_warm  # the compiler is loaded once, here
from dlo_lib.grading import Lab
from dlo_lib.labkit.predictions import compared, require_numbers
from dlo_lib.profiling.compile_watch import CompileReport, watch_compilation

ROWS = int(os.environ.get("DLO_ROWS", 4096))  # of the tensors in the first measurement
DEPTH = int(os.environ.get("DLO_DEPTH", 3))  # of the model compiled near the end
DEEPEST = int(os.environ.get("DLO_DEEPEST", 8))  # of the models whose operations are counted
STEPS = int(os.environ.get("DLO_STEPS", 10))  # of each measurement of time
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# hide its warnings about graph breaks: the reports below are clearer
torch._logging.set_logs(dynamo=logging.ERROR)
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: the processor waits for memory
#
# Between two matrix products many networks add a bias, apply an activation and a gate, and add a residual:
# six small operations. PyTorch runs them one after the other.

# %% id="show_backend" tags=["demo"]
import figures

from dlo_lib.profiling.compile_code import generated_code, moved_eagerly
from dlo_lib.profiling.compile_time import Backend, compile_times, compiled_in_new_process, usable_backend

choice = usable_backend(DEVICE)
BACKEND = os.environ.get("DLO_BACKEND", choice.backend.value)
FUSES = Backend(BACKEND) is Backend.INDUCTOR
here = tempfile.TemporaryDirectory()  # an empty cache for the compiler: the measurements below are of a cold start
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(here.name, "cache")
print(f"torch {torch.__version__} on {DEVICE}, {torch.get_num_threads()} threads, backend {BACKEND}: {choice.why}")
if not FUSES:
    print("!!! NOTHING IS FUSED ON THIS MACHINE. Graphs, breaks and recompilations are correct; the times show no gain.")

# %% [markdown] id="predict_why_text"
# **Predict.** `gated` below has six operations on two large tensors and a bias. How many times faster is it, compiled
# into one loop? Replace `None` by a number. Predictions are not graded; the next cells show them beside the
# measurement.

# %% id="predict_why" tags=["prediction"]
predicted_gain = {"times faster": None}

# %% id="show_why" tags=["demo"]
require_numbers(predicted_gain)
def gated(x: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    """Apply the operations between two matrix products."""
    return F.gelu(x + bias) * torch.sigmoid(y) * 0.5 + y


torch.manual_seed(0)
x, bias, y = (torch.randn(*shape, device=DEVICE) for shape in ((ROWS, 1024), (1024,), (ROWS, 1024)))
moved = moved_eagerly(gated, x, bias, y)
begin = time.perf_counter()
code = generated_code(gated, x, bias, y) if FUSES else None
first_seconds = time.perf_counter() - begin
compiled_gated = torch.compile(gated, backend=BACKEND)
chain = compile_times(lambda: gated(x, bias, y), lambda: compiled_gated(x, bias, y), STEPS)
once = 4 * (3 * x.numel() + bias.numel())  # bytes: x, y and the result, and the bias
print(f"{moved.kernels} operations move {moved.bytes / 2**20:.0f} MiB; the three tensors and the result are {once / 2**20:.0f} MiB")
print(compared(predicted_gain, {"times faster": chain.speedup}))
if code:
    kernel = code.kernels[0]
    print(f"compiled: {len(code.kernels)} kernel, which reads {kernel.reads} tensors and writes {kernel.writes}; first run after {first_seconds:.1f} s")
figures.chain(chain.eager, chain.compiled, moved.bytes, once if FUSES else moved.bytes, compiled_with=BACKEND)

# %% [markdown] id="why_questions"
# The arithmetic is the same. Before you continue:
#
# - Which data do the six operations move that the one kernel does not?
# - Would the gain be the same for a large matrix product? (How many operations does it perform on each number
#   it reads?)
# - The very first call took seconds (the first compilation also sets up the C++ compiler). After how many
#   calls is this time paid back?

# %% [markdown] id="idea"
# ## The idea: read once, write once
#
# At the first call of your function, `torch.compile` analyses its Python bytecode (**Dynamo**) and records
# the operations on tensors: a *graph*. A *backend* (**Inductor**) turns the graph into kernels. Neighbouring
# pointwise operations become **one** loop: it reads each number once, applies all operations in registers,
# and writes each result once.

# %% id="show_idea" tags=["demo"]
figures.idea()

# %% [markdown] id="code_text"
# This is the inside of the loop that it wrote for `gated`. Find the loads (one per input) and the one store.

# %% id="show_code" tags=["demo"]
if code:
    inside = [line.strip() for line in code.kernels[0].source.splitlines() if "tmp" in line]
    print(code.kernels[0].name)
    print("\n".join(line.replace("static_cast<int64_t>", "") for line in inside))
else:
    print(
        "No C++ compiler here, so no code. "
        "With one there are 3 loads, some 15 operations on registers, and 1 store."
    )

# %% [markdown] id="traffic_text"
# ## 1 · Count the bytes
#
# **Core · 10 min · ●●○**
#
# Operations are an ordered list of `(result, operands)`: `[("a", ["x", "bias"]), ("b", ["a", "y"])]` is
# `a = x + bias; b = a * y`. `sizes` has the number of elements of each tensor (a bias has fewer), `itemsize`
# the bytes of one element. A tensor that is no operation's result is an input.
#
# - **One by one**, each operation reads its *different* operands from memory and writes its result.
# - **Fused** into one kernel, each used input is read once and each of `outputs` is written once; the other
#   results stay in registers. (In training, what backward needs is an output too.)

# %% nbgrader={"grade_id": "traffic", "solution": true}
def eager_bytes(
    operations: list[tuple[str, list[str]]], sizes: dict[str, int], itemsize: int
) -> int:
    """Return the bytes moved when each operation runs separately."""
    ### BEGIN SOLUTION
    return itemsize * sum(sizes[name] for result, operands in operations for name in {result, *operands})
    ### END SOLUTION


def fused_bytes(
    operations: list[tuple[str, list[str]]],
    sizes: dict[str, int],
    outputs: list[str],
    itemsize: int,
) -> int:
    """Return the bytes moved when one kernel runs all of them and writes `outputs`."""
    ### BEGIN SOLUTION
    read = {name for _, operands in operations for name in operands} - {result for result, _ in operations}
    return itemsize * sum(sizes[name] for name in read | set(outputs))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_traffic", "grade": true}
lab.check("traffic")

# %% [markdown] id="traffic_after"
# Your two numbers for `gated`, and the bytes counted while it ran:

# %% id="show_traffic" tags=["demo"]
steps = [("a", ["x", "bias"]), ("b", ["a"]), ("c", ["y"])]
steps += [("d", ["b", "c"]), ("e", ["d"]), ("f", ["e", "y"])]
sizes = dict.fromkeys("xyabcdef", x.numel()) | {"bias": bias.numel()}
one_by_one, at_once = eager_bytes(steps, sizes, 4), fused_bytes(steps, sizes, ["f"], 4)
print(f"one by one: yours {one_by_one / 2**20:.1f} MiB, counted {moved.bytes / 2**20:.1f} MiB")
print(
    f"fused:      yours {at_once / 2**20:.1f} MiB, "
    f"so at most {one_by_one / at_once:.1f} times faster where memory is the limit"
)
print(f"measured:   × {chain.speedup:.1f}")

# %% [markdown] id="breaks_text"
# ## What cuts a graph
#
# A graph holds operations on tensors, not Python. When Python needs to *know a value* to continue, the graph
# ends, Python runs, and a new graph begins: a **graph break**. The results stay right. The losses are the
# fusion across the break and the time in Python.
#
# `explain` compiles a function, calls it once, and reports each break with its line, its reason and a cure.
# (Its backend runs the graphs unchanged: Dynamo does the same work, and no code is generated.)

# %% id="explain"
def explain(function, *args) -> CompileReport:
    """Compile `function`, call it on `args`, print what happened, and return the report."""
    torch.compiler.reset()
    with watch_compilation() as watch, torch.no_grad():
        torch.compile(function, backend="eager")(*args)
    print(watch.report)
    return watch.report


# %% id="show_breaks" tags=["demo", "read"]
def given_clip(gradient: Tensor, limit: Tensor) -> Tensor:
    """Return the gradient, scaled down to the norm `limit` if its norm is larger."""
    norm = gradient.norm().item()
    if norm > limit:
        return gradient * (limit / norm)
    return gradient


def given_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the losses where the mask is true, 0 if it is true nowhere."""
    kept = losses[mask]
    if kept.numel() == 0:
        return losses.new_zeros(())
    return kept.mean()


def given_route(tokens: Tensor, experts: Tensor, choice: Tensor) -> Tensor:
    """Return each token times the matrix of the expert chosen for it."""
    out = tokens.new_zeros(len(tokens), experts.shape[2])
    for expert in range(len(experts)):
        rows = (choice == expert).nonzero().flatten()
        if len(rows) > 0:
            out[rows] = tokens[rows] @ experts[expert]
    return out


examples = {
    "clip": (given_clip, (torch.randn(4, 4), torch.tensor(1.0))),
    "masked_mean": (given_mean, (torch.rand(3, 5), torch.rand(3, 5) > 0.5)),
    "route": (given_route, (torch.randn(6, 4), torch.randn(3, 4, 4), torch.randint(0, 3, (6,)))),
}
before = {}
for name, (function, args) in examples.items():
    print(f"--- {name}")
    before[name] = explain(function, *args)

# %% [markdown] id="clip_text"
# ## 2 · Gradient clipping without reading a value
#
# **Core · 6 min · ●●○**
#
# Rewrite `given_clip` as **one graph** with the same values (a relative difference of 1e-4 is accepted). `limit` is a tensor of shape (). The check runs
# the compiled graph of your function on new gradients, with norms below and above the limit.
#
# You can compute both sides of a branch and select one: this costs only a few operations in registers. A side that
# is not selected may be infinite: for a gradient of zeros, `limit / norm` is. It must not reach the result, because
# $0 \cdot \infty$ and $0 / 0$ are NaN.

# %% nbgrader={"grade_id": "clip", "solution": true}
def clip(gradient: Tensor, limit: Tensor) -> Tensor:
    """Return the gradient, scaled down to the norm `limit` if its norm is larger; one graph."""
    ### BEGIN SOLUTION
    norm = gradient.norm()
    return gradient * torch.where(norm > limit, limit / norm, 1.0)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_clip", "grade": true}
lab.check("clip")

# %% [markdown] id="mean_text"
# ## 3 · A mean over a mask
#
# **Core · 4 min · ●○○**
#
# `losses[mask]` has a *shape* that depends on values. Write `masked_mean` as one graph: the mean over the
# elements where `mask` is true, 0 if there are none. The other elements are padding and may have any value,
# including infinity.

# %% nbgrader={"grade_id": "mean", "solution": true}
def masked_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `losses` where `mask` is true, else 0; one graph, a tensor of shape ().

    losses: float, any shape. mask: bool, the same shape.
    """
    ### BEGIN SOLUTION
    return torch.where(mask, losses, 0.0).sum() / mask.sum().clamp(min=1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_mean", "grade": true}
lab.check("mean")

# %% [markdown] id="route_text"
# ## 4 · Each token to its expert
#
# **Core · 14 min · ●●●**
#
# A mixture of experts multiplies each token with one of several matrices. The loop of `given_route` finds,
# for each expert, *which* tokens it has: again a shape that depends on values. Write it as one graph.
#
# An index such as `experts[choice]` has fixed shapes, but it **copies one weight matrix per token**: number ×
# width × out elements. The check judges the bytes: no tensor of your graph may have more than number × experts ×
# max(width, out) elements (or more than `experts`, which you have anyway). There are few experts, so you may
# compute more products than are needed.

# %% nbgrader={"grade_id": "route", "solution": true}
def route(tokens: Tensor, experts: Tensor, choice: Tensor) -> Tensor:
    """Return each token times the matrix of its expert; one graph.

    tokens: (number, width). experts: (experts, width, out). choice: (number,) int64.
    Returns (number, out).
    """
    ### BEGIN SOLUTION
    every = torch.einsum("nd,edh->neh", tokens, experts)
    return every.take_along_dim(choice[:, None, None], dim=1).squeeze(1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_route", "grade": true}
lab.check("route")

# %% [markdown] id="predict_route_text"
# **Predict.** 512 tokens of width 64, 8 experts with matrices of 64 × 64, fp32: how many MiB do both versions move?

# %% id="predict_route" tags=["prediction"]
predicted_mib = {"a matrix per token": None, "yours": None}

# %% id="show_route" tags=["demo"]
require_numbers(predicted_mib)
def copied_route(tokens: Tensor, experts: Tensor, choice: Tensor) -> Tensor:
    """Return the same as `route`, with a copy of a weight matrix for each token."""
    return torch.einsum("nd,ndh->nh", tokens, experts[choice])


routed = torch.randn(512, 64), torch.randn(8, 64, 64), torch.randint(0, 8, (512,))
both = {"a matrix per token": copied_route, "yours": route}
mib = {name: moved_eagerly(function, *routed).bytes / 2**20 for name, function in both.items()}
print(compared(predicted_mib, mib))

# %% [markdown] id="breaks_after"
# All experts for all tokens is the price of fixed shapes: here 8 times the arithmetic. Layers with many experts avoid
# both: they sort the tokens by expert and use a grouped matrix product.
#
# The figure shows your functions before and after. Blue is a graph, grey is Python in between.

# %% id="show_pieces" tags=["demo", "nbval-check-output"]
def graphs_and_breaks(report):
    return len(report.graphs), len(report.breaks) + len(report.left)


after = {}
for name, (_, args) in examples.items():
    print(f"--- {name}, yours")
    after[name] = explain(globals()[name], *args)
figures.pieces(
    {name: graphs_and_breaks(report) for name, report in before.items()},
    {name: graphs_and_breaks(report) for name, report in after.items()},
)

# %% [markdown] id="break_cost_text"
# What does a break cost? This is `gated` with one in its middle (`graph_break()` causes it). Your `fused_bytes`
# computes what it should cost where memory is the limit:

# %% id="show_break_cost" tags=["demo"]
def gated_in_two(x: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    """`gated` with a graph break."""
    activated = F.gelu(x + bias)
    torch._dynamo.graph_break()
    return activated * torch.sigmoid(y) * 0.5 + y


compiled_whole, compiled_in_two = torch.compile(gated, backend=BACKEND), torch.compile(gated_in_two, backend=BACKEND)
compiled_whole(x, bias, y)
cut = compile_times(lambda: compiled_whole(x, bias, y), lambda: compiled_in_two(x, bias, y), STEPS)
halves = fused_bytes(steps[:2], sizes, ["b"], 4) + fused_bytes(steps[2:], sizes, ["f"], 4)  # `activated` is written and read again
print(f"one graph: {at_once / 2**20:.0f} MiB, {1e3 * cut.eager:.1f} ms; cut in two: {halves / 2**20:.0f} MiB, {1e3 * cut.compiled:.1f} ms")
print(f"× {halves / at_once:.1f} by the bytes, × {cut.compiled / cut.eager:.1f} measured (if the machine has other work, trust the bytes)")

# %% [markdown] id="breaks_lesson"
# A break costs the fusion across it. Where nothing could be fused, as between two large matrix products,
# removing it is hardly worth the effort.

# %% [markdown] id="options_text"
# ## 5 · The switches: fullgraph, mode, TORCH_LOGS
#
# **Core · 20 min · ●●○**
#
# The reports above are of this course. In a project PyTorch itself answers, if you set the right switch.
#
# - **`fullgraph=True`** makes a graph break an error: `torch._dynamo.exc.Unsupported`, or
#   `torch._dynamo.exc.UserError` where a *size* depends on values. Its first line is the reason. Use it for code
#   that must be one graph: a later change cannot cut it silently.
# - **`TORCH_LOGS`**, in the environment of the job, names what is logged: `graph_breaks` (where and why),
#   `recompiles` (which guard failed), `output_code` (the generated kernels). Several names are separated by commas.
# - **`mode`** chooses between compile time and speed. A *CUDA graph* records the kernel launches of a graph, so that
#   the CPU starts them all at once; it needs a GPU and fixed shapes.
#
# | mode | what it adds | price |
# |---|---|---|
# | `default` | | |
# | `reduce-overhead` | CUDA graphs: helps where launches take longer than the kernels | memory |
# | `max-autotune-no-cudagraphs` | tries many kernels for each matrix product | minutes |
# | `max-autotune` | both | minutes, memory |
#
# Write three functions:
#
# 1. `why_broken` compiles with `fullgraph=True` and `backend="eager"` (no code is generated) and calls the function
#    once. It returns None if there is no break, else the first line of the error. Other errors, such as wrong
#    shapes, are not caught.
# 2. `job_environment` returns the variables for a job: an empty dict if nothing is to be logged.
# 3. `mode_for` returns a mode by the table. `patient` means that minutes of compilation do not matter: then many
#    kernels are tried. CUDA graphs work on a GPU with fixed shapes only. Without patience, use them there only if
#    launches are the limit (`launches_limit`). With patience, use them wherever they work.

# %% nbgrader={"grade_id": "options", "solution": true}
def why_broken(function, *args) -> str | None:
    """Return the reason of the first graph break of `function(*args)`, one line.

    Return None if it is one graph.
    """
    ### BEGIN SOLUTION
    try:
        torch.compile(function, backend="eager", fullgraph=True)(*args)
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
        return str(error).splitlines()[0]
    return None
    ### END SOLUTION


def job_environment(breaks: bool, recompilations: bool, code: bool) -> dict[str, str]:
    """Return the variables of a job that logs graph breaks, recompilations, and generated code."""
    ### BEGIN SOLUTION
    wanted = {"graph_breaks": breaks, "recompiles": recompilations, "output_code": code}
    names = [name for name, is_wanted in wanted.items() if is_wanted]
    return {"TORCH_LOGS": ",".join(names)} if names else {}
    ### END SOLUTION


def mode_for(gpu: bool, fixed_shapes: bool, launches_limit: bool, patient: bool) -> str:
    """Return the mode of torch.compile."""
    ### BEGIN SOLUTION
    cuda_graphs = gpu and fixed_shapes
    if patient:
        return "max-autotune" if cuda_graphs else "max-autotune-no-cudagraphs"
    return "reduce-overhead" if cuda_graphs and launches_limit else "default"
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_options", "grade": true}
lab.check("options")

# %% [markdown] id="options_after"
# `fullgraph` on the given functions and on yours; then what a job with your environment writes to its log for
# `given_clip`. `set_logs` does in a notebook what `TORCH_LOGS` does for a job. (The log is shortened: each line
# begins with date, process and file, and the stack of Jupyter is left out.)
#
# `fullgraph` can name another line than `explain`: it traces values and sizes that it does not know (`.item()`, or
# `losses[mask]` with a size `u0`), and fails only where Python must decide, at `if norm > limit`, at
# `kept.numel() == 0`, and at `len(rows) > 0`.

# %% id="show_options" tags=["demo", "read"]
for name, (function, args) in examples.items():
    torch.compiler.reset()
    own = globals()[name]
    print(f"{name:12} given: {why_broken(function, *args)}; yours: {why_broken(own, *args)}")
chosen = job_environment(breaks=True, recompilations=True, code=False)
print(chosen)


def shortened(log: str) -> str:
    """Return the log without the beginnings of its lines; of a stack only the last frame."""
    kept, frame = [], None
    for line in re.findall(r"\[__\w+\] ?(.*)", log):
        if line.startswith("Graph break in"):
            kept, frame = kept + (frame or []) + [""], None
        next_frame = frame is not None and line.startswith("  File")
        if line.startswith("User code traceback") or next_frame:
            frame = []
        elif line.strip():
            (kept if frame is None else frame).append(line)
    return "\n".join(kept + (frame or []))


with contextlib.redirect_stderr(io.StringIO()) as log:
    torch._logging.set_logs(**dict.fromkeys(chosen["TORCH_LOGS"].split(","), True))
    torch.compiler.reset()
    torch.compile(given_clip, backend="eager")(*examples["clip"][1])
torch._logging.set_logs(dynamo=logging.ERROR)
print(shortened(log.getvalue()).strip())
set_by = torch._inductor.list_mode_options().items()
print("\nwhat the modes set:", {name: options for name, options in set_by if "lite" not in name})

# %% [markdown] id="state_text"
# ## 6 · Python numbers that change
#
# A graph is valid only as long as the properties it was compiled for still hold: shapes, dtypes, and **Python
# numbers, which are constants in it**. *Guards* check this before each call. If no compiled graph passes its
# guards, the function is compiled again. Here is a block that knows its index and counts its calls:

# %% id="show_state" tags=["demo"]
class GivenBlock(nn.Module):
    """x + tanh(x W) / (1 + index); counts its calls."""

    def __init__(self, weight: Tensor, index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.index = index
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(x @ self.weight) / (1 + self.index)


def many_calls(kind: type, blocks: int = 3, calls: int = 2) -> CompileReport:
    """Report what is compiled when `blocks` blocks are called `calls` times each."""
    torch.compiler.reset()
    compiled = [torch.compile(kind(torch.randn(4, 4), index), backend="eager") for index in range(blocks)]
    with watch_compilation() as watch, torch.no_grad():
        for _ in range(calls):
            for block in compiled:
                block(torch.randn(2, 4))
    return watch.report


report = many_calls(GivenBlock)
print(f"{len(report.graphs)} graphs, {len(report.recompilations)} recompilations")
for again in report.recompilations:
    print(f"  failed: {again.guard.split('#')[0]}")
print(f"why: {again.cause.explanation}\ncure: {again.cause.cure}")

# %% [markdown] id="state_exercise"
# There is one graph for each block and each call. It gets worse: after the eighth graph of the same code
# (`recompile_limit`) the compiler makes no more graphs. Inputs that match none of the eight run eagerly, with
# only a warning.
#
# **Core · 10 min · ●●○**
#
# Write `Block` so that all blocks share **one** graph at every step. `block.calls` must still count
# (`int(block.calls)` is the number of calls).

# %% nbgrader={"grade_id": "state", "solution": true}
class Block(nn.Module):
    """x + tanh(x W) / (1 + index); `calls` counts the calls. All blocks share one graph."""

    def __init__(self, weight: Tensor, index: int) -> None:
        ### BEGIN SOLUTION
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("depth", torch.tensor(1.0 + index))
        self.register_buffer("calls", torch.tensor(0))
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        self.calls += 1
        return x + torch.tanh(x @ self.weight) / self.depth
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_state", "grade": true}
lab.check("state")

# %% [markdown] id="dynamic_text"
# ## 7 · Lengths that change
#
# Sentences have many lengths. By default the first length is a constant of the first graph. For a second
# length the compiler makes a second graph in which the length is dynamic, and which also serves a third.
# `dynamic=False` makes one graph per length.
#
# **Predict.** How many graphs are compiled for six lengths?

# %% id="predict_dynamic" tags=["prediction"]
predicted_graphs = {"dynamic=None": None, "dynamic=False": None}

# %% id="show_dynamic" tags=["demo", "nbval-check-output"]
require_numbers(predicted_graphs)
def pooled(x: Tensor) -> Tensor:
    """Return the mean over the sequence of (batch, seq, width)."""
    return x.sum(1) / x.shape[1]


LENGTHS, graphs = (5, 9, 12, 17, 23, 31), {}
for dynamic in (None, False):
    torch.compiler.reset()
    compiled = torch.compile(pooled, backend="eager", dynamic=dynamic)
    with watch_compilation() as watch:
        for length in LENGTHS:
            compiled(torch.randn(2, length, 4))
    graphs[f"dynamic={dynamic}"] = len(watch.report.graphs)
print(compared(predicted_graphs, graphs))
print(watch.report.recompilations[0].guard)

# %% [markdown] id="dynamic_exercise"
# **Core · 6 min · ●○○**
#
# If you know which dimension will change, mark it before the first call:
# `torch._dynamo.mark_dynamic(tensor, dim)` makes one dimension dynamic from the first graph on. (The function
# is documented, in spite of the underscore. It raises an error if the code needs the constant.)
#
# Write `mark_length`: the compiled function receives its result. There must be **one** graph for all lengths,
# and the batch size stays a constant. (Lengths 0 and 1 are special: broadcasting depends on them, so the compiler
# makes a separate graph for each.)

# %% nbgrader={"grade_id": "dynamic", "solution": true}
def mark_length(batch: Tensor) -> Tensor:
    """Return the batch (batch, seq, width), with the sequence length marked as dynamic."""
    ### BEGIN SOLUTION
    torch._dynamo.mark_dynamic(batch, 1)
    return batch
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_dynamic", "grade": true}
lab.check("dynamic")

# %% [markdown] id="optimizer_text"
# ## 8 · Compile the optimiser
#
# **Optional · 12 min · ●●○**
#
# You can continue with 9: no later cell needs this code.
#
# An optimiser's step consists of pointwise operations on all parameters, which is the best case for a
# compiler. The difficulty: the **step count** and the **learning rate** change at every step, and as Python
# numbers they would be constants of the graph.
#
# Write one step of AdamW for one parameter. `step` (1 for the first step) and `lr` are tensors of shape ().
# Return new tensors. With g the gradient:
#
# $$\theta \leftarrow \theta\,(1 - \eta\lambda),\quad m \leftarrow \beta_1 m + (1-\beta_1)\,g,\quad v \leftarrow \beta_2 v + (1-\beta_2)\,g^2,\quad
# \theta \leftarrow \theta - \eta\,\frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)}+\epsilon}$$

# %% id="settings"
BETA1, BETA2, EPS, DECAY = 0.9, 0.95, 1e-8, 0.1

# %% nbgrader={"grade_id": "optimizer", "solution": true}
def adamw(
    parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, lr: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new (parameter, first, second) after one step of AdamW.

    One graph for all steps and learning rates.
    """
    ### BEGIN SOLUTION
    first = BETA1 * first + (1 - BETA1) * gradient
    second = BETA2 * second + (1 - BETA2) * gradient * gradient
    denominator = (second / (1 - BETA2**step)).sqrt() + EPS
    update = first / (1 - BETA1**step) / denominator
    return parameter * (1 - lr * DECAY) - lr * update, first, second
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_optimizer", "grade": true}
lab.check("optimizer")

# %% [markdown] id="optimizer_after"
# The cell compares your function, eager and compiled, with PyTorch's optimisers on the same parameters.
# `foreach` is one kernel per operation over all parameters, `fused` is a hand-written kernel. The compiler
# starts from your few lines of plain Python. On a CPU the order of PyTorch's three kinds depends on the machine and on
# what else runs; compare your two.

# %% id="show_optimizer" tags=["demo"]
shapes = [(ROWS // 4, 512)] * 4


def fresh() -> list[list[Tensor]]:
    """Return new parameters, gradients and moments."""
    torch.manual_seed(0)
    return [[torch.rand(*shape, device=DEVICE) for shape in shapes] for _ in range(4)]


def all_steps(parameters, gradients, firsts, seconds, step, lr):
    """Take one step for all parameters, in place."""
    for parameter, gradient, first, second in zip(parameters, gradients, firsts, seconds):
        for old, new in zip((parameter, first, second), adamw(parameter, gradient, first, second, step, lr)):
            old.copy_(new)


def torchs(**kind) -> Callable[[], object]:
    """Return the step function of torch's AdamW of this kind."""
    parameters, gradients, *_ = fresh()
    weights = [nn.Parameter(parameter) for parameter in parameters]
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient
    return torch.optim.AdamW(weights, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, **kind).step


state, rate = fresh(), torch.tensor(1e-3, device=DEVICE)
torch.compiler.reset()
compiled_step = torch.compile(all_steps, backend=BACKEND)
with torch.no_grad(), watch_compilation() as watch:
    mine = compile_times(
        lambda: all_steps(*state, torch.tensor(3.0, device=DEVICE), rate), lambda: compiled_step(*state, torch.tensor(3.0, device=DEVICE), rate), STEPS
    )
    for number in range(4, 8):  # other steps, other rates
        compiled_step(*state, torch.tensor(float(number), device=DEVICE), rate / number)
print(f"{len(watch.report.graphs)} graph, {len(watch.report.recompilations)} recompilations, {watch.report.seconds:.1f} s of compiling")
per_step = {"yours, eager": mine.eager, "yours, compiled": mine.compiled}
for kind in ({"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}):
    name = next((key for key, is_on in kind.items() if is_on), "for-loop")
    per_step[f"torch's {name}"] = compile_times(torchs(**kind), lambda: None, STEPS).eager  # there is no second function to compare with
figures.optimizers(per_step)

# %% [markdown] id="blocks_text"
# ## 9 · Block by block
#
# **Core · 9 min · ●●○**
#
# Compiled as a whole, a model of 48 blocks is one graph with 48 times the same operations, and the compiler
# processes all of them. But equal blocks run the same *code*: if they are compiled one by one, the second
# block finds the graph of the first and passes its own weights as inputs.
#
# Compile the blocks of a Llama (`model.layers`), in place. `options` go to `torch.compile`. Checkpoints must
# still fit: the names in `state_dict()` must stay unchanged.

# %% nbgrader={"grade_id": "blocks", "solution": true}
def compile_each_block(model: nn.Module, **options) -> None:
    """Compile each of `model.layers` in place; all of them share one graph."""
    ### BEGIN SOLUTION
    for block in model.layers:
        block.forward = torch.compile(block.forward, **options)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_blocks", "grade": true}
lab.check("blocks")

# %% [markdown] id="blocks_after"
# The figure shows the size of the graphs against depth, as a whole and block by block, and the seconds of
# compilation for one depth. Three blocks do not take three times as long as one: each compilation also has a fixed
# part.

# %% id="show_depth" tags=["demo"]
from dlo_lib.models import Llama, LlamaConfig


def llama(depth: int) -> Llama:
    """Return a small Llama of this depth."""
    torch.manual_seed(0)
    return Llama(LlamaConfig(512, hidden=128, intermediate=256, num_layers=depth, num_heads=4, num_kv_heads=4, head_dim=32)).to(DEVICE)


def compiled_llama(depth: int, backend: str, as_a_whole: bool, seq: int) -> CompileReport:
    """Report what one forward compiles. The measured calls below differ in `seq`, because the cache would serve a graph that is known."""
    torch.compiler.reset()
    model, tokens = llama(depth), torch.randint(0, 512, (4, seq), device=DEVICE)
    run = torch.compile(model, backend=backend) if as_a_whole else model
    if not as_a_whole:
        compile_each_block(model, backend=backend)
    with torch.no_grad(), watch_compilation() as watch:
        run(tokens)
    return watch.report


NAMES = {"as a whole": True, "block by block": False}
operations = {
    name: {depth: sum(graph.operations for graph in compiled_llama(depth, "eager", whole, 64).graphs) for depth in (1, 2, 4, 8) if depth <= DEEPEST}
    for name, whole in NAMES.items()
}
seconds = {name: compiled_llama(DEPTH, BACKEND, whole, 64 + 8 * whole).seconds for name, whole in NAMES.items()}
figures.depth(operations, seconds, DEPTH, compiled_with=BACKEND)

# %% [markdown] id="break_even_text"
# ## 10 · When has it paid?
#
# **Core · 10 min · ●●○**
#
# Write two functions.
#
# - `break_even`: the fewest steps (0 or more) after which the compiled run, with its compilation, has taken
#   **no longer** than the eager one. `None` if no number of steps is enough.
# - `best_mode`: the mode with the shortest total time for a number of steps, given the seconds of compilation
#   and the seconds per step of each. (`torch.compile` has modes: `"max-autotune"` tries many kernels for each
#   operation and takes minutes.)

# %% nbgrader={"grade_id": "break_even", "solution": true}
def break_even(compile_seconds: float, eager_seconds: float, compiled_seconds: float) -> int | None:
    """Return the fewest steps after which compiling has paid, or None.

    The last two arguments are seconds per step.
    """
    ### BEGIN SOLUTION
    if compile_seconds == 0:
        return 0
    if compiled_seconds >= eager_seconds:
        return None
    return math.ceil(compile_seconds / (eager_seconds - compiled_seconds))
    ### END SOLUTION


def best_mode(modes: dict[str, tuple[float, float]], steps: int) -> str:
    """Return the mode with the shortest total time for `steps` steps.

    modes: name → (seconds of compiling, seconds per step).
    """
    ### BEGIN SOLUTION
    return min(modes, key=lambda name: modes[name][0] + steps * modes[name][1])
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_break_even", "grade": true}
lab.check("break_even")

# %% [markdown] id="break_even_after"
# The cell measures a real training step (forward, loss, backward) of the small Llama, with the blocks
# compiled by *your* function, and plots it with your `break_even`.
#
# **Predict.** After how many steps has the compilation paid? (Also guess the speed-up of a step.)

# %% id="predict_race" tags=["prediction"]
predicted_race = {"steps": None, "times faster": None}

# %% id="show_race" tags=["demo"]
require_numbers(predicted_race)
def training_step(model: Llama) -> Callable[[], object]:
    """Return a function that runs forward, loss and backward of one batch."""

    def step() -> None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


torch.compiler.reset()
eager_model, compiled_model = llama(DEPTH), llama(DEPTH)
tokens = torch.randint(0, 512, (4, 80), device=DEVICE)
compile_each_block(compiled_model, backend=BACKEND)
times = compile_times(training_step(eager_model), training_step(compiled_model), STEPS)
paid = break_even(times.compile, times.eager, times.compiled)
print(f"compiling {times.compile:.1f} s; a step {1e3 * times.eager:.1f} ms eager, {1e3 * times.compiled:.1f} ms compiled (× {times.speedup:.2f})")
print(f"paid after {paid} steps" if paid is not None else "on this machine, with this model, it never pays")
print(compared(predicted_race, {"steps": math.inf if paid is None else paid, "times faster": times.speedup}))
figures.race(times.compile, times.eager, times.compiled, paid)

# %% [markdown] id="cache_text"
# ## 11 · The second start
#
# On a cluster a job starts many times: after its time limit, after a failure, on 512 processes at once.
# Inductor stores the generated code in a folder (`TORCHINDUCTOR_CACHE_DIR`; by default below /tmp, which is
# deleted after a job). The cell starts two new processes, one after the other, with the same folder.

# %% id="show_cache" tags=["demo"]
def job() -> None:
    """Compile what a job compiles at its start."""
    import torch
    import torch.nn.functional as F

    def gate(x, weight, y):
        return F.gelu(F.layer_norm(x, x.shape[-1:]) @ weight) * torch.sigmoid(y)

    torch.compile(gate)(torch.randn(8, 16), torch.randn(16, 16), torch.randn(8, 16))


if FUSES:
    with tempfile.TemporaryDirectory() as folder:
        starts = [compiled_in_new_process(job, folder) for _ in ("cold", "warm")]
    for name, report in zip(("cold", "warm"), starts):
        print(f"{name} start: {report.seconds:5.1f} s of compiling, {report.hits} graphs from the cache, {report.misses} not")
else:
    starts = []
    print("No code is generated on this machine, so there is nothing to store.")
figures.starts([report.seconds for report in starts]) if starts else None

# %% [markdown] id="pad_text"
# ## 12 · Padding to buckets
#
# **Optional · 10 min · ●○○**
#
# A dynamic length has a cost: a kernel for known sizes can be unrolled and vectorised better, CUDA graphs
# need fixed shapes, and some compilers support no dynamic sizes at all. The alternative is to round lengths
# up to a few **buckets**, with one graph each.
#
# Pad a batch to the smallest bucket that is large enough: tokens with any token, targets with -100, which
# `F.cross_entropy` ignores. There is always a bucket that is large enough. The buckets are not sorted.

# %% nbgrader={"grade_id": "pad", "solution": true}
def pad_to_bucket(tokens: Tensor, targets: Tensor, buckets: list[int]) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (batch, length) int64, padded at the end to (batch, bucket)."""
    ### BEGIN SOLUTION
    length = tokens.shape[1]
    missing = min(bucket for bucket in buckets if bucket >= length) - length
    return F.pad(tokens, (0, missing), value=0), F.pad(targets, (0, missing), value=-100)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_pad", "grade": true}
lab.check("pad")

# %% [markdown] id="buckets_text"
# ## 13 · Which buckets?
#
# **Optional · 20 min · ●●●**
#
# Few buckets need much padding, many buckets much compilation. Each bucket costs `compile_seconds` once; a
# sequence in bucket $b$ costs `b * token_seconds`. You know the number of sequences of each length.
#
# Choose the buckets with the least **sum of both** costs. There may be hundreds of lengths, too many to try
# all choices.

# %% nbgrader={"grade_id": "buckets", "solution": true}
def choose_buckets(
    counts: dict[int, int], compile_seconds: float, token_seconds: float
) -> list[int]:
    """Return the cheapest buckets. counts: the number of sequences of each length."""
    ### BEGIN SOLUTION
    lengths = sorted(counts)
    best, came_from = [0.0], [0]  # of the first k lengths
    for end, bucket in enumerate(lengths, 1):
        inside, ways = 0, []
        for begin in range(end - 1, -1, -1):
            inside += counts[lengths[begin]]
            ways.append((best[begin] + compile_seconds + token_seconds * bucket * inside, begin))
        least, begin = min(ways)
        best.append(least)
        came_from.append(begin)
    buckets, end = [], len(lengths)
    while end:
        buckets.append(lengths[end - 1])
        end = came_from[end]
    return buckets[::-1]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_buckets", "grade": true}
lab.check("buckets")

# %% [markdown] id="buckets_after"
# These are your buckets for a text: the words in each paragraph of some of Python's modules. The result
# depends on the price of a compilation.

# %% id="show_buckets" tags=["demo"]
import argparse
import collections
import decimal
import inspect
import subprocess
import typing

modules = (argparse, collections, decimal, logging, subprocess, tempfile, typing)
sources = [inspect.getsource(module) for module in modules]
paragraphs = [text.split() for source in sources for text in source.split("\n\n")]
found = collections.Counter(min(len(words), 256) for words in paragraphs if words)
prices = (0.05, 0.5, 5.0)
figures.buckets(found, {price: choose_buckets(dict(found), price, 2e-4) for price in prices})

# %% [markdown] id="scale_text"
# ## 14 · At scale
#
# - **GPUs gain more.** There Inductor writes Triton, each eager operation also costs a kernel launch of some
#   microseconds, and the arithmetic is faster relative to the memory.
# - **With FSDP compile by blocks**: graphs begin after the hook that gathers a block's parameters, and end
#   before they are freed (lab 16).
# - **Every rank compiles.** With 512 ranks, share the cache through a folder that all can read, or let one
#   rank fill it first.
# - **Monitor it**: with your `job_environment` a job logs its graph breaks and recompilations.

# %% id="show_scale" tags=["demo"]
restarts, steps_a_start = 20, 3000
modes = {
    "eager": (0.0, times.eager),
    "compiled, cold each time": (restarts * times.compile, times.compiled),
}
if starts:
    compiling = times.compile * (1 + (restarts - 1) * starts[1].seconds / starts[0].seconds)
    modes["compiled, warm cache"] = (compiling, times.compiled)
for name, (compiling, step) in modes.items():
    total = compiling + restarts * steps_a_start * step
    print(f"{name:26} {total:8.0f} s, including {compiling:6.0f} s of compiling")
print(f"{restarts} starts of {steps_a_start} steps: {best_mode(modes, restarts * steps_a_start)}")

# %% [markdown] id="quiz_text"
# ## 15 · Quiz
#
# **Core · 5 min · ●●○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests whether every question has an
# answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": "", "q6": "", "q7": "", "q8": ""}
quiz = {"q1": "b", "q2": "a", "q3": "d", "q4": "c", "q5": "a", "q6": "b", "q7": "d", "q8": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - `torch._dynamo.config.capture_scalar_outputs = True` lets `.item()` stay in a graph. Try it on
#   `given_clip`: what does the report show, and why is the branch still a break? (`torch.cond` puts both
#   sides of a branch into the graph.)
# - `torch.compiler.set_stance("fail_on_recompile")` makes a recompilation an error. Where in a training loop
#   would you enable it?
# - Compile the training step of lab 13's Llama with activation checkpointing. How many graphs are there, and
#   what does backward recompute?
# - On a GPU: `mode="reduce-overhead"` records CUDA graphs. For which sizes of `gated` does it help?
# - Write `gated` as a Triton kernel (lab 05) and compare it with the one that Inductor wrote.
#
# ## References
#
# - J. Ansel et al., *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and
#   Graph Compilation* (ASPLOS 2024), [doi:10.1145/3620665.3640366](https://doi.org/10.1145/3620665.3640366)
# - PyTorch documentation: [torch.compile programming
#   model](https://docs.pytorch.org/docs/stable/compile/programming_model.html) (graph breaks,
#   recompilations), [dynamic shapes](https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html)
# - PyTorch recipes: [regional
#   compilation](https://docs.pytorch.org/tutorials/recipes/regional_compilation.html), [compile-time
#   caching](https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html), [compiling the
#   optimiser](https://docs.pytorch.org/tutorials/recipes/compiling_optimizer.html)
# - Z. Jiang et al., *Optimizer Fusion: Efficient Training with Better Locality and Parallelism* (2021),
#   [arXiv:2104.00237](https://arxiv.org/abs/2104.00237)
# - S. Williams, A. Waterman, D. Patterson, *Roofline: An Insightful Visual Performance Model for Multicore
#   Architectures* (2009), [doi:10.1145/1498765.1498785](https://doi.org/10.1145/1498765.1498785)
# - I. Loshchilov, F. Hutter, *Decoupled Weight Decay Regularization* (2019),
#   [arXiv:1711.05101](https://arxiv.org/abs/1711.05101)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
