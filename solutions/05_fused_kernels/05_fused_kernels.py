# %% [markdown] id="title"
# # 05 · Fused kernels, from vector add to FlashAttention
#
# **What you will do.** You write the kernels that a compiler cannot find for you, in Triton's language: vector add, softmax, RMSNorm with its
# backward, a cross-entropy that keeps no softmax, a linear layer with cross-entropy that never stores its logits, and FlashAttention. You count
# the bytes that each of them moves, and compare them with PyTorch's forms.
#
# You need no GPU, and Triton need not be installed: the course has an interpreter for the part of its language that you need. It runs the
# programs of a kernel one after another, counts bytes, and stops at an access outside of a tensor. It says nothing about speed. The same text
# runs on a GPU with Triton.
#
# Builds on lab 04 (what fusion saves). The core exercises, predictions and the quiz take about 88 minutes; with the text and the demos plan 110. One optional
# exercise takes 18 minutes more. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch.
#
# Words: block of a kernel (*bloc*), arithmetic intensity (*intensité arithmétique*), lane (*voie*), online softmax (*softmax en ligne*),
# tile (*tuile*).

# %% id="setup"
import os
import time

import torch
import torch.nn.functional as F

import dlo_lib.tiles as triton
import dlo_lib.tiles.language as tl
from dlo_lib.grading import Lab

ROWS = int(os.environ.get("DLO_ROWS", 2048))  # of the tensors whose time is measured
TOKENS = int(os.environ.get("DLO_TOKENS", 8192))  # of a sequence at true size
REPEATS = int(os.environ.get("DLO_REPEATS", 7))  # of a measured operation
COMPILE = bool(int(os.environ.get("DLO_COMPILE", 1)))  # compare with torch.compile at the end
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: memory is slow
#
# The softmax of a row is $e^{x-m} / \sum e^{x-m}$, with the maximum m. Written in PyTorch this is a chain of five operations, and each reads its
# operands from memory and writes its result to memory. `torch.softmax` is one kernel.
#
# **Predict** how many bytes the chain moves for each byte of x, and how many the single kernel moves. Replace `None` by your numbers; they are
# not graded.

# %% id="predict_chain" tags=["prediction"]
chain_guess = {"chain, bytes for each byte of x": None, "one kernel": None}

# %% id="show_chain" tags=["demo", "nbval-check-output"]
import figures

from dlo_lib.labkit.predictions import compared, require_numbers
from dlo_lib.profiling.compile_code import moved_eagerly
from dlo_lib.profiling.roofline import Ceilings, MeasuredOperation, measure_ceilings

require_numbers(chain_guess)


def softmax_chain(x: torch.Tensor) -> torch.Tensor:
    """Softmax as separate operations."""
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def fastest(function, *inputs) -> float:
    """The shortest of several times, in seconds."""
    times = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        function(*inputs)
        times.append(time.perf_counter() - began)
    return min(times[1:])


x = torch.randn(ROWS, 2048)
moved = moved_eagerly(softmax_chain, x).bytes / x.nbytes
once = moved_eagerly(torch.softmax, x, -1).bytes / x.nbytes
seconds = {"chain": fastest(softmax_chain, x), "one kernel": fastest(torch.softmax, x, -1)}
print(compared(chain_guess, {"chain, bytes for each byte of x": moved, "one kernel": once}))
print(f"chain {1e3 * seconds['chain']:.1f} ms, one kernel {1e3 * seconds['one kernel']:.1f} ms: {seconds['chain'] / seconds['one kernel']:.1f} times")

# %% [markdown] id="roofline_text"
# The chain has five operations. The maximum and the sum read x and write one number for each row, which is nearly nothing. The difference, the
# exponential and the quotient read and write a tensor of the size of x. So 5 reads and 3 writes give 8. The chain can be slower than its bytes
# say, because each operation also allocates its result, and the system has to provide and clear new pages of memory.
#
# Is memory the limit? The **arithmetic intensity** of an operation is its number of floating-point operations for each byte that it moves. A device
# that computes $F$ operations in a second and moves $B$ bytes reaches at most $\min(F, \mathrm{intensity} \cdot B)$: the *roofline*. The next cell measures both
# ceilings of this machine, and places the chain, the single kernel and a matrix product below them. A ceiling is the best value of all measurements of
# the cell: a shared machine is slower for a while, and a tensor that stays in the cache moves faster than one that does not.

# %% id="show_roofline" tags=["demo"]
size = min(1024, ROWS)
measured = measure_ceilings(size=size, repeats=3)
a = torch.randn(size, size)
operations = {
    "chain": MeasuredOperation(5 * x.numel(), int(moved * x.nbytes), seconds["chain"]),
    "one kernel": MeasuredOperation(5 * x.numel(), int(once * x.nbytes), seconds["one kernel"]),
    "matrix product": MeasuredOperation(2 * size**3, 3 * a.nbytes, fastest(torch.mm, a, a)),
}
ceilings = Ceilings(
    max(measured.flops, *(each.rate for each in operations.values())),
    max(measured.bandwidth, *(each.bytes / each.seconds for each in operations.values())),
)
print(f"{ceilings.flops / 1e9:.0f} GFLOP/s, {ceilings.bandwidth / 1e9:.0f} GB/s: below {ceilings.ridge:.0f} operations a byte, memory is the limit")
figures.roofline(ceilings, operations)

# %% [markdown] id="idea_text"
# Fusion does not change the arithmetic. It moves the point to the right, because the same operations need fewer bytes. On an H100 (67 TFLOP/s in
# fp32, 3.35 TB/s) the ridge is at 20 operations a byte; for matrix products in bf16 it is near 300. So there, everything that is not a large matrix
# product waits for memory.
#
# ## The idea: a program for each block
#
# In Triton you write what *one program* does with *one block* of the data. A launch starts a grid of programs. They run at the same time, in no
# order, and know their number: `tl.program_id(0)`. A program
#
# 1. computes which elements are its own: a tile of offsets, `tl.arange(0, BLOCK)`, moved by its number;
# 2. reads them: `tl.load(pointer + offsets, mask=..., other=...)`;
# 3. computes with whole tiles, in registers: `+ - * /`, `tl.exp`, `tl.where(condition, a, b)`, and along an axis `tl.sum(tile, axis)` and
#    `tl.max(tile, axis)`, with axis 0 for a tile of one dimension;
# 4. writes the result: `tl.store(pointer + offsets, tile, mask=...)`.
#
# An argument that is a tensor arrives as a pointer to its first element. A parameter with `tl.constexpr` is known when the kernel is compiled; sizes
# of tiles must be, and they are powers of two. The **mask** excludes lanes: where it is False, nothing is read or written.

# %% id="show_idea" tags=["demo"]
figures.programs(n=22, block=8)

# %% [markdown] id="example_text"
# A kernel and its launch. `triton.cdiv(n, BLOCK)` is $n / \mathrm{BLOCK}$, rounded up; inside a kernel it is `tl.cdiv`. In the interpreter a launch returns
# what it moved. The last line prints what a kernel can use, `tl.__doc__`.

# %% id="given_double"
@triton.jit
def double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out = 2 x."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, 2 * x, mask=mask)


# %% id="show_double" tags=["demo"]
x = torch.randn(1000)
out = torch.empty_like(x)
print(double_kernel[(triton.cdiv(1000, 64),)](x, out, 1000, BLOCK=64))
print("right:", torch.equal(out, 2 * x))
if not triton.has_triton():
    print(
        "Triton is not installed here; on a machine with a GPU install it by: "
        "pip install 'dlo-lib[kernels]'. The interpreter runs without it."
    )
print("\n" + tl.__doc__)

# %% [markdown] id="add_text"
# ## 1 · Vector add
#
# **Core · 5 min · ●○○**
#
# Write `add_kernel`: `out = x + y`, for any number $n$ of elements. Each element of `x` and `y` is read once.

# %% nbgrader={"grade_id": "add", "solution": true}
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out = x + y, each of n elements; program i has the elements from i BLOCK on."""
    ### BEGIN SOLUTION
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_add", "grade": true}
lab.check("add")

# %% [markdown] id="softmax_text"
# On a GPU a forgotten mask reads past the end of the tensor, and *overwrites* what is there. Often no error follows, only wrong numbers elsewhere. The
# interpreter stops.
#
# ## 2 · Softmax of a row
#
# **Core · 8 min · ●●○**
#
# Write `softmax_kernel`: program i computes the softmax of row i, which fits into one block of BLOCK lanes.
#
# - Subtract the maximum of the row before `tl.exp`: softmax does not change, and no exponential overflows. Then divide by the sum: `exp(x - lse)` with
#   the log-sum-exp is the same in exact arithmetic, but not in float32, as the cell after the check measures.
# - Lanes after the end of the row must not count, neither in the maximum nor in the sum, whatever the numbers of the row are. Which `other` is neutral for
#   both? (Infinity is `float("inf")` and `float("-inf")` in a kernel.)
# - Row i begins at `i * x_stride` in x, and at `i * y_stride` in y. A row need not follow directly on the previous one. Its elements are neighbours.
# - Rows may be float16 or bfloat16: compute in float32, `x.to(tl.float32)`. `tl.store` converts to the dtype of the tensor.
# - Each element is read once and written once.

# %% nbgrader={"grade_id": "softmax", "solution": true}
@triton.jit
def softmax_kernel(x_ptr, y_ptr, x_stride, y_stride, columns, BLOCK: tl.constexpr):
    """y (rows, columns) = softmax of each row of x (rows, columns); program i has row i."""
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * y_stride + offsets, weights / tl.sum(weights, 0), mask=mask)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_softmax", "grade": true}
lab.check("softmax")

# %% [markdown] id="softmax_after"
# The log-sum-exp of a row is about as large as its maximum, and float32 has 24 bits: near 60,000 its neighbours are 0.004 apart. This error of rounding stands in
# the exponent of `exp(x - lse)`, so it is the relative error of each probability. The differences $x - \max x$ are exact there. The table has the largest relative error of both
# forms, for rows of 32 numbers around a level.

# %% id="show_softmax_forms" tags=["demo"]
for level in (1.0, 1e3, 6e4, 1e30):
    x = torch.randn(1000, 32, generator=torch.Generator().manual_seed(0)) + level
    exact = torch.softmax(x.double(), 1)
    forms = {
        "exp(x - max) / sum": torch.softmax(x, 1),
        "exp(x - lse)": torch.exp(x - x.logsumexp(1, keepdim=True)),
    }
    errors = {name: ((form - exact).abs() / exact).max() for name, form in forms.items()}
    shown = ",  ".join(f"{name} {error:.0e}" for name, error in errors.items())
    print(f"around {level:7.0e}:", shown)

# %% [markdown] id="norm_text"
# ## 3 · RMSNorm, forward
#
# **Core · 6 min · ●●○**
#
# Write `rms_norm_kernel`: $\mathrm{rstd} = 1 / \sqrt{\mathrm{mean}(x^2) + \varepsilon}$ of the row, $y = x \cdot \mathrm{rstd} \cdot w$. Program i has row i; rows are contiguous, so row i begins at
# `i * columns`. Store rstd too, one float32 for each row (`tl.store(pointer + row, number)` writes one number, and `tl.load(pointer + row)` reads one): backward needs it, and it is much smaller than the row. Compute in float32, because
# float16 ends at 65504: the square of 256 is already too large.

# %% nbgrader={"grade_id": "norm", "solution": true}
@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, y_ptr, rstd_ptr, columns, eps, BLOCK: tl.constexpr):
    """y (rows, columns) = x rstd w, with x and y (rows, columns), w (columns), rstd (rows)."""
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    tl.store(y_ptr + row * columns + offsets, x * rstd * w, mask=mask)
    tl.store(rstd_ptr + row, rstd)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_norm", "grade": true}
lab.check("norm")

# %% [markdown] id="norm_backward_text"
# ## 4 · RMSNorm, backward
#
# With $\hat{x} = x \cdot \mathrm{rstd}$ and the gradient $g$ of $y$:
#
# $$dx = \mathrm{rstd} \cdot \left(w g - \hat{x} \cdot \mathrm{mean}(w g \hat{x})\right), \qquad dw = \sum_{\mathrm{rows}} g \hat{x}$$
#
# The second term of dx is there because rstd depends on x. The sum of dw runs over *all rows*, and so over all programs. Two programs must not
# write the same element. So each program adds up its rows, and writes one row of partial sums; PyTorch adds these afterwards.
#
# **Core · 12 min · ●●●**
#
# Write `rms_norm_backward_kernel`. Program $i$ has the rows from `i * ROWS` on, at most ROWS of them and none after the last one: a loop,
# `for row in range(first, end)`. It writes dx of each row, and row $i$ of `dw_ptr`. $g$ and $x$ are read once. (`tl.minimum(a, b)` is the smaller of two numbers.
# A variable that a loop changes keeps its shape and dtype: `tl.zeros((BLOCK,), tl.float32)` before it.)

# %% nbgrader={"grade_id": "norm_backward", "solution": true}
@triton.jit
def rms_norm_backward_kernel(
    grad_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    rows,
    columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx (rows, columns), and dw (programs, columns): for each program the sum over its rows."""
    ### BEGIN SOLUTION
    first = tl.program_id(0) * ROWS
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    w = tl.load(w_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, tl.minimum(first + ROWS, rows)):
        grad = tl.load(grad_ptr + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normed = x * rstd
        mean = tl.sum(w * grad * normed, 0) / columns
        tl.store(dx_ptr + row * columns + offsets, rstd * (w * grad - normed * mean), mask=mask)
        dw += grad * normed
    tl.store(dw_ptr + tl.program_id(0) * columns + offsets, dw, mask=mask)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_norm_backward", "grade": true}
lab.check("norm_backward")

# %% [markdown] id="function_text"
# An autograd function joins both kernels. Forward keeps x, w and rstd: one number for each row more than what exists anyway. Separate operations
# keep at least one more tensor of the size of x. `bytes_kept` asks PyTorch's hooks for saved tensors.

# %% id="run_function" tags=["demo", "read"]
def norm_chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """RMSNorm as separate operations."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w


class RMSNorm(torch.autograd.Function):
    """RMSNorm of x (rows, columns) by the two kernels."""

    @staticmethod
    def forward(ctx, x, w, eps):
        y, rstd = torch.empty_like(x), torch.empty(len(x), dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(x.shape[1])
        rms_norm_kernel[(len(x),)](x, w, y, rstd, x.shape[1], eps, BLOCK=block)
        ctx.save_for_backward(x, w, rstd)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, w, rstd = ctx.saved_tensors
        rows, columns = x.shape
        each, block = triton.cdiv(rows, 8), triton.next_power_of_2(columns)
        dx = torch.empty_like(x)
        dw = torch.empty(triton.cdiv(rows, each), columns, dtype=torch.float32, device=x.device)
        grid = (len(dw),)
        rms_norm_backward_kernel[grid](
            grad.contiguous(), x, w, rstd, dx, dw, rows, columns, ROWS=each, BLOCK=block
        )
        return dx, dw.sum(0).to(w.dtype), None


def bytes_kept(function, *inputs) -> int:
    """The bytes of all tensors that the forward of `function` keeps for backward, each once."""
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*inputs)
    return sum(kept.values())


x, w = torch.randn(64, 200, requires_grad=True), torch.randn(200, requires_grad=True)
loss = (RMSNorm.apply(x, w, 1e-5) ** 3).sum()
got = torch.autograd.grad(loss, (x, w))
want = torch.autograd.grad((norm_chain(x, w) ** 3).sum(), (x, w))
largest = max(float((a - b).abs().max()) for a, b in zip(got, want))
print("largest difference of the gradients:", largest)
for name, function in (("chain", norm_chain), ("yours", lambda x, w: RMSNorm.apply(x, w, 1e-5))):
    kept = bytes_kept(function, x, w) / x.nbytes
    print(f"{name}: keeps {kept:.2f} times the bytes of x for backward")

# %% [markdown] id="loss_text"
# ## 5 · Cross-entropy, block by block
#
# The row of logits of Llama 3 has 128,256 numbers, too many for one block. So a program reads it block after block. The maximum of the row is not
# known before the end. The **online softmax** keeps the maximum $m$ *so far*, and the sum $l$ of $e^{x - m}$ *so far*. For each new block of $x$:
#
# $$m' = \max(m, \max x), \qquad l' = l \cdot e^{m - m'} + \sum e^{x - m'}$$
#
# When the maximum grows, the old sum is rescaled. At the end, $\mathrm{lse} = m + \log l$ is the log-sum-exp of the row. The loss is `lse - x[target]`.

# %% id="show_online" tags=["demo"]
figures.online([1.0, 3.0, 2.0, 5.0, 4.0, 4.5, 9.0, 6.0], block=2)

# %% [markdown] id="loss_exercise"
# **Core · 10 min · ●●○**
#
# Write `loss_kernel`: program i reads row i of the logits (rows, vocab), contiguous, in blocks of BLOCK words, and writes its loss and its lse. The logits
# are read once, apart from the logit of the target, which `tl.load` can read by itself. Begin with the maximum `float("-inf")` and the sum `0.0`.

# %% nbgrader={"grade_id": "loss", "solution": true}
@triton.jit
def loss_kernel(logits_ptr, targets_ptr, loss_ptr, lse_ptr, vocab, BLOCK: tl.constexpr):
    """loss (rows) and lse (rows), float32, of logits (rows, vocab) and targets (rows), int64."""
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    largest = float("-inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        words = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * vocab + words, mask=words < vocab, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
        largest = new
    lse = largest + tl.log(total)
    own = tl.load(logits_ptr + row * vocab + tl.load(targets_ptr + row)).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, lse - own)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_loss", "grade": true}
lab.check("loss")

# %% [markdown] id="loss_backward_text"
# ## 6 · Its gradient, in the memory of the logits
#
# **Core · 6 min · ●●○**
#
# The gradient of the logits is $\mathrm{grad} \cdot (\mathrm{softmax}(x) - \mathrm{onehot}(\mathrm{target}))$. The softmax need not be kept: with lse it is $e^{x - \mathrm{lse}}$, element by element. And
# nothing else needs the logits after backward. So write the gradient **over them**: no tensor of their size is allocated at all.
#
# Write `loss_backward_kernel`. Program i has row i, `grad_ptr` has one number for each row. Each logit is read once and written once.

# %% nbgrader={"grade_id": "loss_backward", "solution": true}
@triton.jit
def loss_backward_kernel(grad_ptr, logits_ptr, targets_ptr, lse_ptr, vocab, BLOCK: tl.constexpr):
    """logits (rows, vocab) becomes its gradient; grad, targets and lse are (rows)."""
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    grad = tl.load(grad_ptr + row)
    lse = tl.load(lse_ptr + row)
    target = tl.load(targets_ptr + row)
    for start in range(0, vocab, BLOCK):
        words = start + tl.arange(0, BLOCK)
        mask = words < vocab
        x = tl.load(logits_ptr + row * vocab + words, mask=mask, other=0.0).to(tl.float32)
        at_target = tl.where(words == target, 1.0, 0.0)
        tl.store(logits_ptr + row * vocab + words, grad * (tl.exp(x - lse) - at_target), mask=mask)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_loss_backward", "grade": true}
lab.check("loss_backward")

# %% [markdown] id="true_size_text"
# **Predict, then measure.** The last layer of Llama 3.2 3B: 8192 tokens, hidden 3072, 128,256 words, with x and W in bf16. How many GiB does the step
# from x to the gradients of x and W need at its peak, with x and W?
#
# - *Logits in fp32*, as in most training loops. The peak is in the backward of the loss. Forward keeps the log-softmax. Backward makes its gradient, and from
#   both the gradient of the logits. These are three tensors of tokens × words. The gradient of W does not exist yet.
# - *In chunks of rows*. The library's form computes the logits of 2816 rows at a time, overwrites them with their gradient, and adds the gradient of W of
#   each chunk to a sum in fp32. Backward multiplies the sum by the gradient of the loss, and writes the result in bf16. The gradient of x is as large as x.
#
# The cell measures both on fake tensors, which have shapes and no memory. What a kernel keeps in registers does not count.

# %% id="predict_logits" tags=["prediction"]
logits_guess = {"logits in fp32": None, "in chunks of rows": None}  # GiB

# %% id="show_logits" tags=["demo", "nbval-check-output"]
from torch._subclasses.fake_tensor import FakeTensorMode

from dlo_lib.kernels import linear_cross_entropy
from dlo_lib.kernels.dispatch import around_twins
from dlo_lib.profiling.tracker import MemoryTracker

require_numbers(logits_guess)


def peak(function, *shapes: tuple[int, ...]) -> list[float]:
    """GiB of each tensor that exists at the peak of forward and backward of function(*tensors, targets), largest first.

    The tensors are in bf16 and have these shapes.
    """
    with FakeTensorMode() as fake, MemoryTracker(fake) as tracker, around_twins(tracker.one_kernel):
        tensors = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        function(*tensors, torch.zeros(shapes[0][0], dtype=torch.int64)).sum().backward()
    held, highest = [], []
    for event in tracker.events():
        held.append(event.bytes) if event.bytes > 0 else held.remove(-event.bytes)
        highest = max(highest, held.copy(), key=sum)
    return [nbytes / 2**30 for nbytes in sorted(highest, reverse=True)]


def with_logits(x, w, targets):
    return F.cross_entropy((x @ w.T).float(), targets)


shapes = (TOKENS, 3072), (128_256, 3072)
parts = {"logits in fp32": peak(with_logits, *shapes), "in chunks of rows": peak(linear_cross_entropy, *shapes)}
print(compared(logits_guess, {name: sum(each) for name, each in parts.items()}))
for name, each in parts.items():
    print(f"{name}: {' + '.join(f'{gib:.2f}' for gib in each if gib >= 0.005)} GiB")
figures.peaks(parts, logits_guess)

# %% [markdown] id="linear_loss_text"
# ## 7 · Linear layer and cross-entropy, without logits
#
# The parts of the first peak are three tensors of tokens × words in fp32, then W and x. The second peak is in backward: the sum of the gradients of W in
# fp32, the gradient of W in bf16, W, x and its gradient. The logits of a chunk, 0.67 GiB, no longer exist then.
#
# The library's form still stores the logits of a chunk of rows. A kernel can do better: it computes a **tile** of logits, 16 rows by 32 words, uses
# it for the online softmax, and forgets it. `tl.dot(a, b)` multiplies tiles (m, k) and (k, n), and gives float32; all three sizes are at least 16.
# On a GPU with tensor cores (from the A100 on), Triton multiplies tiles of *float32* as **TF32**, unless you write `input_precision="ieee"`: it rounds each factor to 11 significant bits, and
# adds the products in float32. The interpreter, and the check, multiply in float32. Tiles of bf16 or fp16 have at most 11 bits, and lose nothing. The cell rounds both factors as TF32 does:

# %% id="show_tf32" tags=["demo"]
def as_tf32(x: torch.Tensor) -> torch.Tensor:
    """x rounded to 11 significant bits: the 13 lowest of its 23 stored bits become 0."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


a, b = (torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
exact = a.double() @ b.double()
for name, product in {"float32": a @ b, "TF32": as_tf32(a) @ as_tf32(b)}.items():
    error = float((product - exact).norm() / exact.norm())
    print(f"{name}: relative error of the product {error:.0e}")
half = a.half()
print("fp16 is unchanged by TF32:", torch.equal(as_tf32(half.float()), half.float()))

# %% [markdown] id="linear_loss_exercise"
# **Core · 16 min · ●●●**
#
# Write `linear_loss_kernel`: loss and lse of the logits $x W^T$. Program $i$ has the rows from `i * BLOCK_M` on. It loops over blocks of BLOCK_V words, and inside
# of it over blocks of BLOCK_K columns, whose products it adds up. The first lines are given.
#
# - Offsets of a tile: `row[:, None] * hidden + column[None, :]`. `tl.trans` transposes a tile.
# - `&` joins two conditions, also a column with a row: `a[:, None] & b[None, :]`. `tl.full(shape, value, tl.float32)` is a tile of one value.
# - No size is a multiple of its block. Which lanes of x and W count as 0? Words after the end of the vocabulary need -inf *after* the product.
# - Maximum, sum and logit of the target are tiles (BLOCK_M,) now: `tl.max(logits, 1)`. The target is one of the words of some block: select it with
#   `tl.where`, and add up; W is read once.
# - x and W may be float16: sums are in float32.

# %% nbgrader={"grade_id": "linear_loss", "solution": true}
@triton.jit
def linear_loss_kernel(
    x_ptr, w_ptr, targets_ptr, loss_ptr, lse_ptr, rows, hidden, vocab,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """loss and lse (rows) of the logits of x (rows, hidden) and W (vocab, hidden), contiguous."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < rows
    target = tl.load(targets_ptr + row, mask=inside, other=0)
    ### BEGIN SOLUTION
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    own = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, vocab, BLOCK_V):
        word = start + tl.arange(0, BLOCK_V)
        logits = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        for k in range(0, hidden, BLOCK_K):
            column = k + tl.arange(0, BLOCK_K)
            exists = column < hidden
            x = tl.load(x_ptr + row[:, None] * hidden + column[None, :], mask=inside[:, None] & exists[None, :], other=0.0)
            w = tl.load(w_ptr + word[:, None] * hidden + column[None, :], mask=(word < vocab)[:, None] & exists[None, :], other=0.0)
            logits += tl.dot(x, tl.trans(w))
        logits = tl.where((word < vocab)[None, :], logits, float("-inf"))
        new = tl.maximum(largest, tl.max(logits, 1))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(logits - new[:, None]), 1)
        own += tl.sum(tl.where(word[None, :] == target[:, None], logits, 0.0), 1)
        largest = new
    lse = largest + tl.log(total)
    tl.store(lse_ptr + row, lse, mask=inside)
    tl.store(loss_ptr + row, lse - own, mask=inside)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_linear_loss", "grade": true}
lab.check("linear_loss")

# %% [markdown] id="linear_loss_after"
# What grows with the vocabulary? The cell launches your kernel for vocabularies of several sizes, and counts the bytes that it writes.

# %% id="show_written" tags=["demo"]
written, eager = {}, {}
for vocab in (64, 128, 256, 512):
    x, w, targets = torch.randn(32, 64), torch.randn(vocab, 64), torch.zeros(32, dtype=torch.int64)
    loss, lse = torch.empty(32), torch.empty(32)
    traffic = linear_loss_kernel[(2,)](
        x, w, targets, loss, lse, 32, 64, vocab, BLOCK_M=16, BLOCK_V=32, BLOCK_K=16
    )
    if traffic is not None:
        written[vocab] = sum(traffic.written.values())
        # the logits, their log-softmax, the losses
        eager[vocab] = (x @ w.T).nbytes * 2 + loss.nbytes
figures.written(written, eager)

# %% [markdown] id="attention_text"
# ## 8 · FlashAttention
#
# Attention is $o = \mathrm{softmax}(\mathrm{scale} \cdot q k^T)\, v$. The scores are a matrix of queries × keys: for one head with 8192 tokens 128 MiB in bf16, written and read several
# times. But o of a query is a *weighted mean* of rows of v, and a mean can be computed block by block. Beside m and l, a program keeps the weighted sum
# so far, and rescales it like l:
#
# $$m' = \max(m, \max s), \qquad l' = l \cdot e^{m - m'} + \sum e^{s - m'}, \qquad acc' = acc \cdot e^{m - m'} + e^{s - m'} v$$
#
# At the end $o = acc / l$, and $\mathrm{lse} = m + \log l$, which backward needs. The figure shows the grid for 6 blocks of queries and of keys: a program has a row.

# %% id="show_tiles" tags=["demo"]
from dlo_lib.labkit.explore import explore


def tiles(blocks: int = 6, causal: bool = True):
    return figures.tiles(blocks, causal)


explore(tiles, blocks=[4, 6, 8], causal=[True, False])

# %% [markdown] id="attention_exercise"
# **Core · 18 min · ●●●**
#
# Write `attention_kernel`. Program $(i, h)$ has the queries from `i * BLOCK_M` on of head $h$: `tl.program_id(0)` and `tl.program_id(1)`. The lines that
# read the queries are given.
#
# - Query row r of head h begins at `h * q_head + r * q_row`. Query head h uses head h // group of k and v, whose row c begins at
#   `(h // group) * kv_head + c * kv_row`. The D numbers of a row are neighbours. o (heads, queries, D) and lse (heads, queries) are contiguous.
# - Keys after the end get the score -inf. If `CAUSAL`, query r sees only keys $c \leq r$ (`if CAUSAL:` is decided when the kernel is compiled), and blocks of keys
#   that no query of the program sees are not read.
# - If there is no key at all (`keys` is 0), o is 0 and lse is -inf, without NaN.
# - Inputs may be float16. `tl.dot` wants two tiles of one dtype, and gives float32: convert the weights with `.to(v.dtype)`, and keep acc, m and l in float32.
# - No tile is larger than BLOCK_M × BLOCK_N, BLOCK_M × D or BLOCK_N × D. The two block sizes may differ. Queries are read once.

# %% nbgrader={"grade_id": "attention", "solution": true}
@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    q_head, q_row, kv_head, kv_row, queries, keys, group, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o and lse (heads, queries) of q (heads, queries, D), k and v (heads / group, keys, D).

    o has the shape of q.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    inside = row < queries
    q = tl.load(
        q_ptr + head * q_head + row[:, None] * q_row + d[None, :], mask=inside[:, None], other=0.0
    )
    ### BEGIN SOLUTION
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        exists = (column < keys)[:, None]
        place = head // group * kv_head + column[:, None] * kv_row + d[None, :]
        k = tl.load(k_ptr + place, mask=exists, other=0.0)
        v = tl.load(v_ptr + place, mask=exists, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where((column < keys)[None, :], scores, float("-inf"))
        if CAUSAL:
            scores = tl.where(column[None, :] <= row[:, None], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        largest = new
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(o_ptr + (head * queries + row)[:, None] * D + d[None, :], acc / divisor[:, None], mask=inside[:, None])
    tl.store(lse_ptr + head * queries + row, largest + tl.log(total), mask=inside)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_attention", "grade": true}
lab.check("attention")

# %% [markdown] id="bytes_text"
# **Predict, then measure.** One causal head with 256 tokens and D = 16 in fp32. How many KiB are written for it by your kernel, and how many by separate operations ($q k^T$, scale,
# mask, softmax, and the product with v)? Each of them writes its whole result.

# %% id="predict_scores" tags=["prediction"]
scores_guess = {"yours": None, "separate operations": None}  # KiB written

# %% id="show_scores" tags=["demo"]
require_numbers(scores_guess)
def flash(q, k, v, causal: bool):
    """Launch attention_kernel for q (heads, queries, D), k and v (kv_heads, keys, D); return o, lse and the traffic."""
    heads, queries, d = q.shape
    o, lse = torch.empty(heads, queries, d, dtype=q.dtype, device=q.device), torch.empty(heads, queries, device=q.device)
    block = 16 if q.device.type == "cpu" else 64
    traffic = attention_kernel[(triton.cdiv(queries, block), heads)](
        q, k, v, o, lse, q.stride(0), q.stride(1), k.stride(0), k.stride(1), queries, k.shape[1], heads // len(k), d**-0.5,
        CAUSAL=causal, D=d, BLOCK_M=block, BLOCK_N=block,
    )  # fmt: skip
    return o, lse, traffic


def separate(q, k, v):
    """Causal attention by separate operations."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


q, k, v = torch.randn(3, 1, 256, 16)
o, lse, traffic = flash(q, k, v, causal=True)
print("largest difference from PyTorch:", float((o - F.scaled_dot_product_attention(q, k, v, is_causal=True)).abs().max()))
scores = 256 * 256 * 4
found = {"yours": sum(traffic.written.values()) / 2**10, "separate operations": (4 * scores + o.nbytes) / 2**10}  # product, scale, mask, softmax
print(compared(scores_guess, found, "{:.0f}".format))
print(f"operations a byte: yours {traffic.intensity:.1f}, separate {traffic.flops / moved_eagerly(separate, q, k, v).bytes:.1f}")

# %% [markdown] id="keys_backward_text"
# ## 9 · FlashAttention, backward
#
# **Optional · 18 min · ●●●**
#
# Backward computes the weights again from lse, tile by tile: $P = e^{\mathrm{scale} \cdot q k^T - \mathrm{lse}}$. With the gradient $dO$ of $o$, and $\mathrm{delta} = \sum dO \cdot o$ of each query (one
# number, computed before):
#
# $$dV = P^T dO, \qquad dP = dO\, v^T, \qquad dS = P \odot (dP - \mathrm{delta}), \qquad dK = \mathrm{scale} \cdot dS^T q$$
#
# Write `keys_backward_kernel` for causal attention with as many queries as keys. Program $(i, h)$ has the *keys* from `i * BLOCK_N` on of head $h$. It loops over
# the blocks of queries that see one of them (the first is not always 0), and writes dK and dV. All tensors are contiguous float32. (dQ is a second kernel, whose programs have the
# queries; one that wrote all three would need atomic additions.)

# %% nbgrader={"grade_id": "keys_backward", "solution": true}
@triton.jit
def keys_backward_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, size, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv (heads, size, D); q, k, v, grad (heads, size, D), lse and delta (heads, size)."""
    ### BEGIN SOLUTION
    head = tl.program_id(1) * size
    first = tl.program_id(0) * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    place = (head + column)[:, None] * D + d[None, :]
    exists = (column < size)[:, None]
    k = tl.load(k_ptr + place, mask=exists, other=0.0)
    v = tl.load(v_ptr + place, mask=exists, other=0.0)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for start in range(first // BLOCK_M * BLOCK_M, size, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        inside = row < size
        rows = (head + row)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + rows, mask=inside[:, None], other=0.0)
        grad = tl.load(grad_ptr + rows, mask=inside[:, None], other=0.0)
        lse = tl.load(lse_ptr + head + row, mask=inside, other=0.0)
        delta = tl.load(delta_ptr + head + row, mask=inside, other=0.0)
        sees = (column[None, :] <= row[:, None]) & inside[:, None]
        weights = tl.where(sees, tl.exp(tl.dot(q, tl.trans(k)) * scale - lse[:, None]), 0.0)
        dv += tl.dot(tl.trans(weights), grad)
        dscores = weights * (tl.dot(grad, tl.trans(v)) - delta[:, None])
        dk += tl.dot(tl.trans(dscores), q) * scale
    tl.store(dk_ptr + place, dk, mask=exists)
    tl.store(dv_ptr + place, dv, mask=exists)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_keys_backward", "grade": true}
lab.check("keys_backward")

# %% [markdown] id="standard_text"
# ## The same with what you will use on Monday
#
# | your kernel | the standard form |
# |---|---|
# | softmax, RMSNorm | `torch.softmax`, `F.rms_norm`; or `torch.compile` of the separate operations, which writes such a Triton kernel on a GPU |
# | cross-entropy, linear + cross-entropy | Liger-Kernel's `LigerCrossEntropyLoss`, `LigerFusedLinearCrossEntropyLoss` (Triton) |
# | attention | `F.scaled_dot_product_attention`, which chooses FlashAttention where it can |
#
# The table compares them: time on this machine (the interpreter has none that means anything), the bytes that are kept for backward, and lines of code. The cell compiles a function, which takes
# half a minute the first time, and more on a busy machine.

# %% id="show_standard" tags=["demo", "read", "nbval-check-output"]
from dlo_lib.labkit.side_by_side import Form, lines_of, table

GPU = torch.cuda.is_available() and triton.has_triton()
device = "cuda" if GPU else "cpu"
heads, length = (16, 4096) if GPU else (4, min(1024, ROWS))
q, k, v = torch.randn(3, heads, length, 64, device=device, requires_grad=True).unbind()
x = torch.randn(ROWS, 2048, device=device, requires_grad=True)
w = torch.randn(2048, device=device, requires_grad=True)


def standard_norm(x, w):
    return F.rms_norm(x, (2048,), w, 1e-5)


def standard_attention(q, k, v):
    # the fused form takes four dimensions
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)


def timed(function, *inputs) -> float:
    """The shortest time of a forward."""

    def run(*inputs):
        function(*inputs)
        if GPU:
            torch.cuda.synchronize()

    with torch.no_grad():
        return fastest(run, *inputs)


def your_norm(x, w):
    return RMSNorm.apply(x, w, 1e-5)


def your_attention(q, k, v):
    return flash(q, k, v, causal=True)[0]


def form_of(name, function, *inputs) -> Form:
    """A form with its lines of code, its time and its memory."""
    seconds, memory = timed(function, *inputs), bytes_kept(function, *inputs)
    return Form(name, lines_of(function), seconds, memory=memory)


norm_lines = lines_of(rms_norm_kernel.source, rms_norm_backward_kernel.source)
norm_seconds = timed(your_norm, x, w) if GPU else None
norm_bytes = x.nbytes + w.nbytes + 4 * ROWS  # x, w and rstd
forms = [
    form_of("RMSNorm: separate operations", norm_chain, x, w),
    Form("RMSNorm: yours", norm_lines, norm_seconds, memory=norm_bytes),
    form_of("RMSNorm: F.rms_norm", standard_norm, x, w),
]
if COMPILE:
    compiled = torch.compile(norm_chain)
    seconds, memory = timed(compiled, x, w), bytes_kept(compiled, x, w)
    forms.append(Form("RMSNorm: torch.compile", lines_of(norm_chain), seconds, memory=memory))
attention_lines = lines_of(attention_kernel.source)
attention_seconds = timed(your_attention, q, k, v) if GPU else None
attention_bytes = 4 * q.nbytes + 4 * heads * length  # q, k, v, o and lse
forms += [
    form_of("attention: separate operations", separate, q, k, v),
    Form("attention: yours", attention_lines, attention_seconds, memory=attention_bytes),
    form_of("attention: SDPA", standard_attention, q, k, v),
]
print(table(forms, measured="forward"))

# %% [markdown] id="standard_lesson"
# `memory` is what forward keeps. SDPA keeps what your kernel keeps: q, k, v, o and one number for each query. On a CPU, this version of PyTorch composes
# `F.rms_norm` of separate operations, and it keeps as much as they do; the compiled chain keeps half. On a GPU a good FlashAttention is more
# than this kernel: tiles of 128 queries that travel to the tensor cores while the next ones are loaded, and one configuration for each card. In a project use
# the standard form, and write a kernel only for what no library has. Then you know how to test it: any size, any strides, 16 bits, and a count of its
# bytes.

# %% [markdown] id="quiz_text"
# ## Quiz
#
# **Core · 4 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests only that every question has an
# answer; grading counts the right ones.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "b", "q2": "c", "q3": "a", "q4": "d", "q5": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Write SwiGLU, $\mathrm{silu}(a) \cdot b$, forward and backward. What is the least that must be kept for backward?
# - Write dQ, and join three kernels in an autograd function. `torch.autograd.gradcheck` needs float64: what else can you compare?
# - One program can add up dw with `tl.atomic_add` instead of partial sums. Which of both gives the same bits in every run?
# - Split the keys of one query over several programs (as for the decoding of a single token). How are two results (o, lse) merged? Lab 20 needs the
#   same formula.
# - Read `dlo_lib/kernels/`: how do its kernels differ from yours, and why?
# - On a GPU, change the two import lines to `import triton` and `import triton.language as tl`. What else changes?
#
# ## References
#
# - P. Tillet, H. T. Kung, D. Cox, *Triton: An Intermediate Language and Compiler for Tiled Neural Network Computations* (MAPL 2019)
# - S. Williams, A. Waterman, D. Patterson, *Roofline: An Insightful Visual Performance Model for Multicore Architectures* (Communications of the ACM 52(4), 2009)
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax* (2018), [arXiv:1805.02867](https://arxiv.org/abs/1805.02867)
# - T. Dao et al., *FlashAttention* (2022), [arXiv:2205.14135](https://arxiv.org/abs/2205.14135); T. Dao, *FlashAttention-2* (2023), [arXiv:2307.08691](https://arxiv.org/abs/2307.08691)
# - P.-L. Hsu et al., *Liger Kernel* (2024), [arXiv:2410.10989](https://arxiv.org/abs/2410.10989); E. Wijmans et al., *Cut Your Losses in Large-Vocabulary Language Models* (2024), [arXiv:2411.09009](https://arxiv.org/abs/2411.09009)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 1
