# %% [markdown] id="title"
# # 04 · torch.compile: what it fuses, what breaks it, when it pays
#
# **What you will do.** Look at the code that a compiler writes for you, and count the bytes it saves. Take functions that it has to cut into
# pieces and write them so that they are one graph. Stop it from compiling the same thing again and again. Compile an optimiser, and a model by
# blocks. And find out after how many steps all of this has paid.
#
# You need no GPU. On a processor the compiler writes C++ and calls a C++ compiler (`apt-get install g++`, or `module load gcc`); where there is
# none, the lab runs all the same, and says what you will not see.
#
# It takes about 90 minutes. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch.
#
# Words: kernel (*noyau de calcul*), fusion of kernels (*fusion de noyaux*), graph break (*rupture de graphe*), just-in-time compilation
# (*compilation à la volée*), recompilation (*recompilation*), warm cache (*cache chaud*).

# %% id="setup"
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dlo_lib.profiling.compile_warm  # the compiler is loaded once, here
from dlo_lib.grading import Lab
from dlo_lib.profiling.compile_watch import CompileReport, watch_compilation

ROWS = int(os.environ.get("DLO_ROWS", 4096))  # of the tensors in the first measurement
DEPTH = int(os.environ.get("DLO_DEPTH", 3))  # of the model compiled near the end
DEEPEST = int(os.environ.get("DLO_DEEPEST", 8))  # of the models whose operations are counted
STEPS = int(os.environ.get("DLO_STEPS", 10))  # of each measurement of time
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch._logging.set_logs(dynamo=logging.ERROR)  # its warnings about graph breaks: the reports below say it better
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: the processor waits for memory
#
# Here is what stands between two matrix products of many networks: add a bias, an activation, a gate, a residual. Six small operations.
# Written like this PyTorch runs them one after the other.

# %% id="show_backend" tags=["demo"]
import figures

from dlo_lib.profiling.compile_code import generated_code, moved_eagerly
from dlo_lib.profiling.compile_time import Backend, compile_times, compiled_in_new_process, usable_backend

choice = usable_backend(DEVICE)
BACKEND = os.environ.get("DLO_BACKEND", choice.backend.value)
FUSES = Backend(BACKEND) is Backend.INDUCTOR
here = tempfile.TemporaryDirectory()  # the compiler's cache, empty: what is measured below is a cold start
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(here.name, "cache")
print(f"torch {torch.__version__} on {DEVICE}, {torch.get_num_threads()} threads, backend {BACKEND}: {choice.why}")
if not FUSES:
    print("!!! NOTHING IS FUSED ON THIS MACHINE. Graphs, breaks and recompilations are as they should be; times show no gain.")

# %% id="show_why" tags=["demo"]
def gated(x: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    """What stands between two matrix products."""
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
if code:
    kernel = code.kernels[0]
    print(f"compiled: {len(code.kernels)} kernel, which reads {kernel.reads} tensors and writes {kernel.writes}; {first_seconds:.1f} s until it ran")
figures.chain(chain.eager, chain.compiled, moved.bytes, once if FUSES else moved.bytes, compiled_with=BACKEND)

# %% [markdown] id="why_questions"
# The arithmetic is the same. Before you go on:
#
# - What did the six operations move that the one kernel does not?
# - Would the gain be the same for a large matrix product? (How many operations does it do on each number it reads?)
# - The very first call took seconds (the first compilation of all sets up the C++ compiler too). Who pays for that, and when is it paid back?

# %% [markdown] id="idea"
# ## The idea: read once, write once
#
# `torch.compile` watches Python while your function runs once (**Dynamo**), and writes down the operations on tensors: a *graph*. A *backend*
# (**Inductor**) turns the graph into kernels. Neighbouring pointwise operations become **one** loop: each number is read once, goes through
# all of them in registers, and is written once.

# %% id="show_idea" tags=["demo"]
figures.idea()

# %% [markdown] id="code_text"
# This is the inside of the loop that it wrote for `gated`. Find the loads (one for each input) and the one store.

# %% id="show_code" tags=["demo"]
if code:
    inside = [line.strip() for line in code.kernels[0].source.splitlines() if "tmp" in line]
    print(code.kernels[0].name)
    print("\n".join(line.replace("static_cast<int64_t>", "") for line in inside))
else:
    print("No C++ compiler here, so no code. With one there are 3 loads, some 15 operations on registers, and 1 store.")

# %% [markdown] id="traffic_text"
# ## 1 · Count the bytes
#
# Operations are a list of `(result, operands)`, in order: `[("a", ["x", "bias"]), ("b", ["a", "y"])]` is `a = x + bias; b = a * y`. `sizes` has
# the number of elements of each tensor (a bias has fewer), `itemsize` the bytes of one element. What has no operation of its own is an input.
#
# - **One by one**, each operation reads its *different* operands from memory and writes its result.
# - **Fused** into one kernel, each input that is used is read once; `outputs` are written once; everything else stays in registers. (In
#   training, what backward needs is an output too.)

# %% nbgrader={"grade_id": "traffic", "solution": true}
def eager_bytes(operations: list[tuple[str, list[str]]], sizes: dict[str, int], itemsize: int) -> int:
    """Bytes moved when each operation runs by itself."""
    ### BEGIN SOLUTION
    return itemsize * sum(sizes[name] for result, operands in operations for name in {result, *operands})
    ### END SOLUTION


def fused_bytes(operations: list[tuple[str, list[str]]], sizes: dict[str, int], outputs: list[str], itemsize: int) -> int:
    """Bytes moved when one kernel does all of them and writes `outputs`."""
    ### BEGIN SOLUTION
    read = {name for _, operands in operations for name in operands} - {result for result, _ in operations}
    return itemsize * sum(sizes[name] for name in read | set(outputs))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_traffic", "grade": true, "points": 5}
lab.check("traffic")

# %% [markdown] id="traffic_after"
# Your two numbers for `gated`, against what was counted while it ran:

# %% id="show_traffic" tags=["demo"]
steps = [("a", ["x", "bias"]), ("b", ["a"]), ("c", ["y"]), ("d", ["b", "c"]), ("e", ["d"]), ("f", ["e", "y"])]
sizes = dict.fromkeys("xyabcdef", x.numel()) | {"bias": bias.numel()}
one_by_one, at_once = eager_bytes(steps, sizes, 4), fused_bytes(steps, sizes, ["f"], 4)
print(f"one by one: yours {one_by_one / 2**20:.1f} MiB, counted {moved.bytes / 2**20:.1f} MiB")
print(f"fused:      yours {at_once / 2**20:.1f} MiB, so at most {one_by_one / at_once:.1f} times faster where memory is the limit")
print(f"measured:   × {chain.speedup:.1f}")

# %% [markdown] id="breaks_text"
# ## What cuts a graph
#
# A graph holds operations on tensors, not Python. When Python needs to *know a value* to go on, the graph ends, Python runs, and a new graph
# begins: a **graph break**. The results stay right. What is lost is everything that could have been fused across it, and time in Python.
#
# `explain` compiles a function, calls it once, and tells what happened: each break with its line, its reason, and a cure. (Its backend runs the
# graphs as they are: what Dynamo does is the same, and nothing needs to be generated.)

# %% id="explain"
def explain(function, *args) -> CompileReport:
    """Compile `function`, call it on `args`, print what happened, and return the report."""
    torch.compiler.reset()
    with watch_compilation() as watch, torch.no_grad():
        torch.compile(function, backend="eager")(*args)
    print(watch.report)
    return watch.report


# %% id="show_breaks" tags=["demo"]
def given_clip(gradient: Tensor, limit: Tensor) -> Tensor:
    """The gradient, scaled down to the norm `limit` if it is longer."""
    norm = gradient.norm().item()
    if norm > limit:
        return gradient * (limit / norm)
    return gradient


def given_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """The mean of the losses where the mask is true, 0 if it is nowhere."""
    kept = losses[mask]
    if kept.numel() == 0:
        return losses.new_zeros(())
    return kept.mean()


def given_route(tokens: Tensor, experts: Tensor, choice: Tensor) -> Tensor:
    """Each token times the matrix of the expert chosen for it."""
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
# ## 2 · Gradient clipping without looking
#
# Write `given_clip` so that it is **one graph** with the same values. `limit` is a tensor of shape (). The check runs the graph that the compiler
# made of your function on gradients that it has not seen, shorter and longer than the limit.
#
# Both sides of a branch can be computed and one chosen: that is a few operations in registers, and cheap. But think of a gradient of zeros.

# %% nbgrader={"grade_id": "clip", "solution": true}
def clip(gradient: Tensor, limit: Tensor) -> Tensor:
    """The gradient, scaled down to the norm `limit` if it is longer; one graph."""
    ### BEGIN SOLUTION
    norm = gradient.norm()
    return gradient * torch.where(norm > limit, limit / norm, 1.0)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_clip", "grade": true, "points": 3}
lab.check("clip")

# %% [markdown] id="mean_text"
# ## 3 · A mean over a mask
#
# `losses[mask]` has a *shape* that depends on values. Write `masked_mean` as one graph: the mean over the places where `mask` is true, 0 if there
# are none. What is masked out is padding, and may hold anything, infinity too.

# %% nbgrader={"grade_id": "mean", "solution": true}
def masked_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """The mean of `losses` (float, any shape) where `mask` (bool, same shape) is true, 0 if it is nowhere; one graph, a tensor of shape ()."""
    ### BEGIN SOLUTION
    return torch.where(mask, losses, 0.0).sum() / mask.sum().clamp(min=1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_mean", "grade": true, "points": 4}
lab.check("mean")

# %% [markdown] id="route_text"
# ## 4 · To each token its expert
#
# A mixture of experts sends each token to one of several matrices. The loop of `given_route` asks for each expert *which* tokens are its own: again
# a shape that depends on values. Write it as one graph.

# %% nbgrader={"grade_id": "route", "solution": true}
def route(tokens: Tensor, experts: Tensor, choice: Tensor) -> Tensor:
    """Each token times the matrix of its expert; one graph.

    tokens: (number, width). experts: (experts, width, out). choice: (number,) int64. Returns (number, out).
    """
    ### BEGIN SOLUTION
    return torch.einsum("nd,ndh->nh", tokens, experts[choice])
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_route", "grade": true, "points": 3}
lab.check("route")

# %% [markdown] id="breaks_after"
# Before and after. Blue is a graph, grey is Python in between.

# %% id="show_pieces" tags=["demo"]
after = {name: explain(globals()[name], *args) for name, (_, args) in examples.items()}
figures.pieces(
    {name: (len(report.graphs), len(report.breaks) + len(report.left)) for name, report in before.items()},
    {name: (len(report.graphs), len(report.breaks) + len(report.left)) for name, report in after.items()},
)

# %% [markdown] id="break_cost_text"
# What does a break cost? `gated` again, with one in its middle (`graph_break()` asks for it):

# %% id="show_break_cost" tags=["demo"]
def gated_in_two(x: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    """`gated`, cut in two."""
    activated = F.gelu(x + bias)
    torch._dynamo.graph_break()
    return activated * torch.sigmoid(y) * 0.5 + y


compiled_whole, compiled_in_two = torch.compile(gated, backend=BACKEND), torch.compile(gated_in_two, backend=BACKEND)
compiled_whole(x, bias, y)
cut = compile_times(lambda: compiled_whole(x, bias, y), lambda: compiled_in_two(x, bias, y), STEPS)
print(f"one graph {1e3 * cut.eager:.1f} ms, cut in two {1e3 * cut.compiled:.1f} ms: `activated` goes to memory and back")

# %% [markdown] id="breaks_lesson"
# A break costs what could have been fused across it. Where nothing could be, as between two large matrix products, it is hardly worth a fight.
# `torch.compile(..., fullgraph=True)` makes a break an error: use it for what must be one graph.

# %% [markdown] id="state_text"
# ## 5 · Python numbers that change
#
# A graph is only valid as long as what it was made for still holds: shapes, dtypes, and **Python numbers, which are constants in it**. Before each
# call *guards* check that. When one fails, the function is compiled again. Here is a block that knows its depth and counts its calls:

# %% id="show_state" tags=["demo"]
class GivenBlock(nn.Module):
    """x + tanh(x W) / (1 + index); counts how often it was called."""

    def __init__(self, weight: Tensor, index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.index = index
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(x @ self.weight) / (1 + self.index)


def many_calls(kind: type, blocks: int = 3, calls: int = 2) -> CompileReport:
    """What is compiled when `blocks` blocks are called `calls` times each."""
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
# A graph for each block and each call. And it gets worse: after the eighth graph of the same code (`recompile_limit`) the compiler gives up, and
# the block runs eagerly from then on, with no more than a warning.
#
# Write `Block` so that all blocks share **one** graph at every step. `block.calls` must still count (`int(block.calls)` is the number of calls).

# %% nbgrader={"grade_id": "state", "solution": true}
class Block(nn.Module):
    """x + tanh(x W) / (1 + index); `calls` counts how often it was called. All blocks share one graph."""

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


# %% nbgrader={"grade_id": "test_state", "grade": true, "points": 4}
lab.check("state")

# %% [markdown] id="dynamic_text"
# ## 6 · Lengths that change
#
# Sentences have many lengths. By default the first length is a constant of the first graph; when a second one comes, a second graph is made
# that leaves it open, and serves the third. `dynamic=False` makes a graph for each:

# %% id="show_dynamic" tags=["demo"]
def pooled(x: Tensor) -> Tensor:
    """The mean over the sequence of (batch, seq, width)."""
    return x.sum(1) / x.shape[1]


LENGTHS = (5, 9, 12, 17, 23, 31)
for dynamic in (None, False):
    torch.compiler.reset()
    compiled = torch.compile(pooled, backend="eager", dynamic=dynamic)
    with watch_compilation() as watch:
        for length in LENGTHS:
            compiled(torch.randn(2, length, 4))
    print(f"dynamic={dynamic}: {len(watch.report.graphs)} graphs for {len(LENGTHS)} lengths")
print(watch.report.recompilations[0].guard)

# %% [markdown] id="dynamic_exercise"
# If you know what will change, say so before the first call: `torch._dynamo.mark_dynamic(tensor, dim)` leaves one dimension open from the
# beginning. (It has an underscore and is documented all the same. It complains if the code cannot do without the constant.)
#
# Write `mark_length`: the compiled function gets what it returns. **One** graph for all lengths, and the batch stays a constant.

# %% nbgrader={"grade_id": "dynamic", "solution": true}
def mark_length(batch: Tensor) -> Tensor:
    """The batch (batch, seq, width), with the sequence length left open to the compiler."""
    ### BEGIN SOLUTION
    torch._dynamo.mark_dynamic(batch, 1)
    return batch
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_dynamic", "grade": true, "points": 3}
lab.check("dynamic")

# %% [markdown] id="pad_text"
# ## 7 · Padding to buckets
#
# An open length is not free: a kernel that knows its sizes can be unrolled and vectorised better, CUDA graphs want fixed shapes, and so do
# compilers that know no open sizes at all. The other way is to round lengths up to a few **buckets**, one graph each.
#
# Pad a batch to the smallest bucket that holds it: tokens with any token, targets with -100, which `F.cross_entropy` ignores. Some bucket is
# always large enough. They come in no particular order.

# %% nbgrader={"grade_id": "pad", "solution": true}
def pad_to_bucket(tokens: Tensor, targets: Tensor, buckets: list[int]) -> tuple[Tensor, Tensor]:
    """tokens and targets (batch, length) int64, both padded at the end to (batch, bucket)."""
    ### BEGIN SOLUTION
    length = tokens.shape[1]
    missing = min(bucket for bucket in buckets if bucket >= length) - length
    return F.pad(tokens, (0, missing), value=0), F.pad(targets, (0, missing), value=-100)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_pad", "grade": true, "points": 3}
lab.check("pad")

# %% [markdown] id="buckets_text"
# ## 8 · Which buckets?
#
# Few buckets: much padding. Many buckets: much compiling. Each bucket costs `compile_seconds` once; a sequence in bucket b costs
# `b · token_seconds`. You know how many sequences there are of each length.
#
# Choose the buckets that make the **sum of both** the least. There may be hundreds of lengths: trying all choices takes forever.

# %% nbgrader={"grade_id": "buckets", "solution": true}
def choose_buckets(counts: dict[int, int], compile_seconds: float, token_seconds: float) -> list[int]:
    """The cheapest buckets. counts: number of sequences of each length."""
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


# %% nbgrader={"grade_id": "test_buckets", "grade": true, "points": 6}
lab.check("buckets")

# %% [markdown] id="buckets_after"
# Your buckets for a text: the words in each paragraph of some of Python's own modules. The price of a compilation decides.

# %% id="show_buckets" tags=["demo"]
import argparse
import collections
import decimal
import inspect
import subprocess
import typing

modules = (argparse, collections, decimal, logging, subprocess, tempfile, typing)
paragraphs = [text.split() for module in modules for text in inspect.getsource(module).split("\n\n")]
found = collections.Counter(min(len(words), 256) for words in paragraphs if words)
figures.buckets(found, {price: choose_buckets(dict(found), price, 2e-4) for price in (0.05, 0.5, 5.0)})

# %% [markdown] id="optimizer_text"
# ## 9 · Compile the optimiser
#
# An optimiser's step is nothing but pointwise operations, on all parameters: the best case there is. Its trap is the **step count** and the
# **learning rate**, which change at every step: as Python numbers they would be constants of the graph.
#
# Write one step of AdamW for one parameter. `step` (1 for the first step) and `lr` are tensors of shape (). Return new tensors. With g the gradient:
#
# $$\theta \leftarrow \theta\,(1 - \eta\lambda),\quad m \leftarrow \beta_1 m + (1-\beta_1)\,g,\quad v \leftarrow \beta_2 v + (1-\beta_2)\,g^2,\quad
# \theta \leftarrow \theta - \eta\,\frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)}+\epsilon}$$

# %% id="settings"
BETA1, BETA2, EPS, DECAY = 0.9, 0.95, 1e-8, 0.1

# %% nbgrader={"grade_id": "optimizer", "solution": true}
def adamw(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, lr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of AdamW: the new (parameter, first, second). One graph for every step and every learning rate."""
    ### BEGIN SOLUTION
    first = BETA1 * first + (1 - BETA1) * gradient
    second = BETA2 * second + (1 - BETA2) * gradient * gradient
    denominator = (second / (1 - BETA2**step)).sqrt() + EPS
    update = first / (1 - BETA1**step) / denominator
    return parameter * (1 - lr * DECAY) - lr * update, first, second
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_optimizer", "grade": true, "points": 5}
lab.check("optimizer")

# %% [markdown] id="optimizer_after"
# Your function, eager and compiled, beside PyTorch's own on the same parameters. `foreach` is one kernel per operation over all parameters, `fused`
# a kernel that somebody wrote by hand. The compiler gets yours, twelve lines of plain Python.

# %% id="show_optimizer" tags=["demo"]
shapes = [(ROWS // 4, 512)] * 4


def fresh() -> list[list[Tensor]]:
    """Parameters, gradients and moments."""
    torch.manual_seed(0)
    return [[torch.rand(*shape, device=DEVICE) for shape in shapes] for _ in range(4)]


def all_steps(parameters, gradients, firsts, seconds, step, lr):
    """One step for all parameters, in place."""
    for parameter, gradient, first, second in zip(parameters, gradients, firsts, seconds):
        for old, new in zip((parameter, first, second), adamw(parameter, gradient, first, second, step, lr)):
            old.copy_(new)


def torchs(**kind) -> Callable[[], object]:
    """A step of torch's AdamW of that kind."""
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
    per_step[f"torch's {name}"] = compile_times(torchs(**kind), lambda: None, STEPS).eager  # nothing to compare with in turns
figures.optimizers(per_step)

# %% [markdown] id="blocks_text"
# ## 10 · Block by block
#
# Compiled as a whole, a model of 48 blocks is one graph with 48 times the same operations. The compiler works on all of them. But equal blocks run
# the same *code*: compiled one by one, the second finds the graph of the first, with its own weights as inputs.
#
# Compile the blocks of a Llama (`model.layers`), in place. `options` go to `torch.compile`. A checkpoint must still fit: the names in
# `state_dict()` are to stay as they are.

# %% nbgrader={"grade_id": "blocks", "solution": true}
def compile_each_block(model: nn.Module, **options) -> None:
    """Compile each of `model.layers`, in place; all of them share one graph."""
    ### BEGIN SOLUTION
    for block in model.layers:
        block.forward = torch.compile(block.forward, **options)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_blocks", "grade": true, "points": 4}
lab.check("blocks")

# %% [markdown] id="blocks_after"
# The size of the graphs against depth, as a whole and block by block; and for one depth the seconds that it takes to turn them into code.

# %% id="show_depth" tags=["demo"]
from dlo_lib.models import Llama, LlamaConfig


def llama(depth: int) -> Llama:
    """A small Llama of that depth."""
    torch.manual_seed(0)
    return Llama(LlamaConfig(512, hidden=128, intermediate=256, num_layers=depth, num_heads=4, num_kv_heads=4, head_dim=32)).to(DEVICE)


def compiled_llama(depth: int, backend: str, as_a_whole: bool, seq: int) -> CompileReport:
    """What is compiled in one forward. No two calls below have the same `seq`: a graph that was seen before would come from the cache."""
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
# ## 11 · When has it paid?
#
# Write two functions.
#
# - `break_even`: the fewest steps (0 or more) after which the compiled run, with its compilation, has taken **no longer** than the eager one. `None` if
#   no number of steps is enough.
# - `best_mode`: of several modes, each with its seconds of compiling and its seconds per step, the name of the one that takes least for a number of
#   steps. (`torch.compile` has modes: `"max-autotune"` tries many kernels for each operation and takes minutes for it.)

# %% nbgrader={"grade_id": "break_even", "solution": true}
def break_even(compile_seconds: float, eager_seconds: float, compiled_seconds: float) -> int | None:
    """The fewest steps after which compiling has paid, None if it never does. The last two are seconds of one step."""
    ### BEGIN SOLUTION
    if compile_seconds == 0 and compiled_seconds <= eager_seconds:
        return 0
    if compiled_seconds >= eager_seconds:
        return None
    return math.ceil(compile_seconds / (eager_seconds - compiled_seconds))
    ### END SOLUTION


def best_mode(modes: dict[str, tuple[float, float]], steps: int) -> str:
    """The name of the mode that takes least for `steps` steps. modes: name → (seconds of compiling, seconds of a step)."""
    ### BEGIN SOLUTION
    return min(modes, key=lambda name: modes[name][0] + steps * modes[name][1])
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_break_even", "grade": true, "points": 5}
lab.check("break_even")

# %% [markdown] id="break_even_after"
# A real training step (forward, loss, backward) of the small Llama, its blocks compiled by *your* function: measured, and drawn with your
# `break_even`.

# %% id="show_race" tags=["demo"]
def training_step(model: Llama) -> Callable[[], object]:
    """Forward, loss and backward of one batch."""

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
print(f"paid after {paid} steps" if paid is not None else "on this machine, for this model, it never pays")
figures.race(times.compile, times.eager, times.compiled, paid)

# %% [markdown] id="cache_text"
# ## 12 · The second start
#
# On a cluster a job is started again and again: after its time limit, after a failure, on 512 processes at once. Inductor keeps what it has
# generated in a folder (`TORCHINDUCTOR_CACHE_DIR`; by default below /tmp, which does not outlive a job). The cell starts two new processes, one
# after the other, with one folder for both.

# %% id="show_cache" tags=["demo"]
def job() -> None:
    """What a job compiles when it starts."""
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
    print("Nothing is generated on this machine, so there is nothing to keep.")
figures.starts([report.seconds for report in starts]) if starts else None

# %% [markdown] id="scale_text"
# ## 13 · At scale
#
# - **GPUs gain more.** There Inductor writes Triton, each eager operation also costs a kernel launch of some microseconds, and memory is further away
#   from the arithmetic.
# - **With FSDP compile by blocks**: graphs begin after the hook that gathers a block's parameters, and end before they are freed (lab 16).
# - **Every rank compiles.** With 512 of them, share the cache through a folder that all can read, or let one rank fill it first.
# - **Keep an eye on it**: `TORCH_LOGS=graph_breaks,recompiles` in the job's environment writes what you have read here into its log.

# %% id="show_scale" tags=["demo"]
restarts, steps_a_start = 20, 3000
modes = {"eager": (0.0, times.eager), "compiled, cold each time": (restarts * times.compile, times.compiled)}
if starts:
    modes["compiled, warm cache"] = (times.compile * (1 + (restarts - 1) * starts[1].seconds / starts[0].seconds), times.compiled)
for name, (compiling, step) in modes.items():
    print(f"{name:26} {compiling + restarts * steps_a_start * step:8.0f} s, of them {compiling:6.0f} s of compiling")
print(f"{restarts} starts of {steps_a_start} steps: {best_mode(modes, restarts * steps_a_start)}")

# %% [markdown] id="quiz_text"
# ## 14 · Quiz
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here says whether every question has an answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": "", "q6": "", "q7": "", "q8": ""}
quiz = {"q1": "b", "q2": "a", "q3": "d", "q4": "c", "q5": "a", "q6": "b", "q7": "d", "q8": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true, "points": 9}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - `torch._dynamo.config.capture_scalar_outputs = True` lets `.item()` stay in a graph. Try it on `given_clip`: what does the report say then, and
#   why is the branch still a break? (`torch.cond` puts both sides of a branch into the graph.)
# - `torch.compiler.set_stance("fail_on_recompile")` makes a recompilation an error. Where in a training loop would you switch it on?
# - Compile the training step of lab 13's Llama with activation checkpointing. How many graphs are there, and what does backward recompute?
# - On a GPU: `mode="reduce-overhead"` records CUDA graphs. For which sizes of `gated` does it help?
# - Write `gated` as a Triton kernel of your own (lab 05) and compare it with the one that Inductor wrote.
#
# ## References
#
# - J. Ansel et al., *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation* (ASPLOS 2024), [doi:10.1145/3620665.3640366](https://doi.org/10.1145/3620665.3640366)
# - PyTorch documentation: [torch.compile programming model](https://docs.pytorch.org/docs/stable/compile/programming_model.html) (graph breaks, recompilations), [dynamic shapes](https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html)
# - PyTorch recipes: [regional compilation](https://docs.pytorch.org/tutorials/recipes/regional_compilation.html), [compile-time caching](https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html), [compiling the optimiser](https://docs.pytorch.org/tutorials/recipes/compiling_optimizer.html)
# - Z. Jiang et al., *Optimizer Fusion: Efficient Training with Better Locality and Parallelism* (2021), [arXiv:2104.00237](https://arxiv.org/abs/2104.00237)
# - S. Williams, A. Waterman, D. Patterson, *Roofline: An Insightful Visual Performance Model for Multicore Architectures* (2009), [doi:10.1145/1498765.1498785](https://doi.org/10.1145/1498765.1498785)
# - I. Loshchilov, F. Hutter, *Decoupled Weight Decay Regularization* (2019), [arXiv:1711.05101](https://arxiv.org/abs/1711.05101)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
