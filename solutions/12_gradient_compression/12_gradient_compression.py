# %% [markdown] id="title"
# # 12 · Gradient compression
#
# **What you will do.** On slow links the sum of gradients takes longer than the computation that it belongs to. You send
# less: the largest elements (top-k), one bit for each element, or two thin matrices (PowerSGD). You count every byte, see
# trainings that diverge or end elsewhere, and repair them with a few lines called *error feedback*. Then you write 1-bit
# Adam, with the rule that says when it may compress, and find out on which links compression loses.
#
# Builds on lab 10 (collectives, $\alpha$ and $\beta$) and lab 11 (DDP, buckets, overlap). You need no GPU: ranks are
# processes on this machine (gloo). The core exercises, predictions and the quiz take about 93 minutes; with the text and
# the demos plan 1 h 50. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer,
# then a sketch. If you are stuck, `lab.use_reference("name")` lets you continue without its points.
#
# Words: gradient compression (*compression de gradient*), sparsification (*parcimonie*), quantisation to one bit
# (*quantification sur un bit*), error feedback (*rétroaction d'erreur*), low-rank approximation (*approximation de rang faible*), warm start (*démarrage à chaud*).

# %% id="setup"
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from dlo_lib.grading import Lab
from dlo_lib.labkit.predictions import compared, require_numbers

STEPS = int(os.environ.get("DLO_STEPS", 200))  # of each training below
torch.set_num_threads(1)  # of small matrices: more threads would wait for each other
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: the links are slower than the GPUs
#
# Lab 10 gave the time of a ring all-reduce: $2\,(N-1)\,(\alpha + \beta B / N)$. Here are the gradients of Llama 3.2 1B in
# fp32, on 64 GPUs of an A100 cluster, each with 16,384 tokens in a step. The backward pass needs 4 operations for each
# parameter and token; say that a GPU reaches 40 % of its peak.

# %% id="show_why" tags=["demo", "read"]
import figures

from dlo_lib.hardware import gpu
from dlo_lib.models import Llama, model_config

MODEL, RANKS, TOKENS = "llama-3.2-1b", 64, 16_384
PARAMETERS = sum(p.numel() for p in Llama(model_config(MODEL), device="meta").parameters())
A100 = gpu("a100-80")
BACKWARD = 4 * PARAMETERS * TOKENS / (0.4 * A100.peak_flops["bf16"])
LINKS = {  # α in seconds, bytes/s of one GPU, one way
    "NVLink in a node": (3.4e-6, A100.nvlink_bandwidth),
    "Omni-Path, 100 Gb/s": (14e-6, 100e9 / 8),
    "Ethernet, 25 Gb/s": (30e-6, 25e9 / 8),
    "Ethernet, 10 Gb/s": (30e-6, 10e9 / 8),
}


def ring_seconds(nbytes: float, ranks: int, alpha: float, bandwidth: float) -> float:
    """Return the seconds of a ring all-reduce, as in lab 10."""
    return 2 * (ranks - 1) * (alpha + nbytes / ranks / bandwidth)


of_links = {name: ring_seconds(4 * PARAMETERS, RANKS, *link) for name, link in LINKS.items()}
for name, seconds in of_links.items():
    print(f"{name:20} {seconds:6.2f} s to add the gradients, {BACKWARD:.2f} s of backward")
figures.links(of_links, BACKWARD)

# %% [markdown] id="why_questions"
# On the slowest link, GPUs compute for a tenth of the time and wait for nine tenths. Overlap (lab 11) hides at most
# one backward pass. More GPUs do not help, because a ring sends nearly twice the gradients for any number of ranks.
#
# - Which of these links hide the sum behind backward completely?
# - Must every rank receive the *exact* sum? Each rank's gradient is itself an estimate from a few samples.

# %% [markdown] id="idea"
# ## The idea: send an approximation
#
# The figure shows the gradient of one layer of a small network, and what is left of it after four compressions. Look at
# the last two: one bit keeps all places and forgets the sizes, low rank keeps the common directions. (Red is negative, blue positive. The
# error is the norm of what is lost, divided by that of the gradient.)

# %% id="show_idea" tags=["demo"]
import torch.nn.functional as F

torch.manual_seed(0)


def samples_of(
    rank: int, number: int = 256, wrong: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (number, 64) and labels of a rank. Each of 4 ranks has other classes: 2 of 8.

    wrong: the share of labels that are replaced by random ones.
    """
    prototypes = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + rank)
    labels = 2 * (rank % 4) + torch.randint(2, (number,), generator=generator)
    inputs = 0.4 * prototypes[labels] + torch.randn(number, 64, generator=generator)
    replaced = torch.rand(number, generator=generator) < wrong
    return inputs, torch.where(replaced, torch.randint(8, (number,), generator=generator), labels)


def network() -> list[torch.Tensor]:
    """Return the two weights of a network without biases: 4,608 parameters."""
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(64, 64, generator=generator) / 8,
        torch.randn(8, 64, generator=generator) / 8,
    ]


def loss_of(
    weights: list[torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy((inputs @ weights[0].T).relu() @ weights[1].T, labels)


def gradient_of(
    weights: list[torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the gradients of both weights as one tensor (4608,)."""
    weights = [weight.detach().requires_grad_() for weight in weights]
    return torch.cat(
        [grad.flatten() for grad in torch.autograd.grad(loss_of(weights, inputs, labels), weights)]
    )


first_layer = gradient_of(network(), *samples_of(0))[:4096].view(64, 64)
figures.compressed(first_layer)

# %% [markdown] id="bytes_text"
# ## 1 · Count before you send
#
# **Core · 8 min · ●○○**
#
# Every rank has the gradient of a layer, a matrix of `rows` × `columns` numbers in fp32. With $N$ ranks, a ring sends per
# rank, as in lab 10, $2\,B\,(N-1)/N$ bytes for an all-reduce of $B$ bytes. In an **all-gather** each rank sends *its own* $b$ bytes $N - 1$
# times. In an **all-to-all** of $B$ bytes it keeps its own part of $N$ and sends the others.
#
# | `scheme` | what passes |
# |---|---|
# | `"fp32"`, `"fp16"` | one all-reduce of all elements, 4 or 2 bytes each |
# | `"top-k"` | each rank gathers the `kept` largest elements of all: an fp32 value and an int64 position for each |
# | `"one-bit"` | an all-to-all of the bits of all elements (8 in a byte), then an all-gather of 1/N of the bits by each rank; beside each of the two, an all-gather of one fp32 scale of each rank |
# | `"low-rank"` | two all-reduces in fp32: factors of `rows` × `kept` and `columns` × `kept` |
#
# Ranks choose *different* positions in top-k, so it cannot be an all-reduce. Why can "one-bit" not be one either?


# %% nbgrader={"grade_id": "bytes", "solution": true}
def sent_bytes(scheme: str, rows: int, columns: int, ranks: int, kept: int = 1) -> float:
    """Return the bytes that one rank sends for the gradient of a layer, with the fractions."""
    ### BEGIN SOLUTION
    elements, share = rows * columns, (ranks - 1) / ranks
    if scheme == "top-k":
        return (ranks - 1) * kept * (4 + 8)
    if scheme == "one-bit":
        return 2 * share * elements / 8 + 2 * (ranks - 1) * 4
    if scheme == "low-rank":
        return 2 * share * 4 * kept * (rows + columns)
    return 2 * share * elements * {"fp32": 4, "fp16": 2}[scheme]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_bytes", "grade": true}
lab.check("bytes")

# %% [markdown] id="predict_bytes_text"
# **Predict first**, without your function: how many times *fewer* bytes than fp32 does a rank send for a layer of 2048 × 8192,
# on 8 ranks and on 64 ranks? (Top-k keeps one element of a hundred.)

# %% id="predict_bytes" tags=["prediction"]
predicted_times = {"one bit, 8": None, "rank 2, 8": None, "top 1 %, 8": None, "top 1 %, 64": None}

# %% id="show_bytes" tags=["demo", "nbval-check-output"]
from dlo_lib.labkit.predicted_bars import predicted_bars

require_numbers(predicted_times)
SHAPE = (2048, 8192)
chosen = {
    "one bit": ("one-bit", 1),
    "rank 2": ("low-rank", 2),
    "top 1 %": ("top-k", SHAPE[0] * SHAPE[1] // 100),
}
times = {}
for ranks in (8, 64):
    for name, (scheme, kept) in chosen.items():
        fewer = sent_bytes("fp32", *SHAPE, ranks) / sent_bytes(scheme, *SHAPE, ranks, kept)
        times[f"{name}, {ranks}"] = fewer
print(compared(predicted_times, {name: times[name] for name in predicted_times}))
predicted_bars(
    times,
    predicted_times,
    "times fewer bytes",
    title="compared with fp32, by number of ranks",
    log=True,
)

# %% [markdown] id="bytes_after"
# One bit and low rank keep their factor on any number of ranks. Top-k does not: every rank receives the elements of all ranks,
# so on 64 ranks keeping 1 % saves almost nothing. It is for few ranks, or for a very small $k$.

# %% [markdown] id="topk_text"
# ## 2 · The largest elements
#
# **Core · 10 min · ●●○**
#
# Write two functions. `largest` returns the `k` elements of a tensor with the largest *magnitudes*, with their signs, and their positions, in any
# order. `sparse_mean` runs on every rank: it returns the mean over the ranks of the tensors whose only non-zero elements
# are those pairs. Two ranks may choose the same position. Send the pairs, and nothing else; `gathered` is given. The dtype
# of the values stays.


# %% id="given"
# Given: run this cell. Later cells use it.
def gathered(part: torch.Tensor) -> torch.Tensor:
    """Return the parts of all ranks, one after the other. part: 1-D, of one size."""
    whole = part.new_empty(dist.get_world_size() * part.numel())
    dist.all_gather_into_tensor(whole, part.contiguous())
    return whole


# %% nbgrader={"grade_id": "topk", "solution": true}
def largest(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k elements of x (1-D) with the largest magnitudes, and their positions (int64)."""
    ### BEGIN SOLUTION
    positions = x.abs().topk(k).indices
    return x[positions], positions
    ### END SOLUTION


def sparse_mean(values: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mean (size,) over the ranks of tensors with `values` at `positions`, else 0."""
    ### BEGIN SOLUTION
    total = values.new_zeros(size).index_add_(0, gathered(positions), gathered(values))
    return total / dist.get_world_size()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_topk", "grade": true}
lab.check("topk")

# %% [markdown] id="diverges_text"
# ### It can diverge
#
# Three ranks minimise the mean of three convex functions of three numbers, $f_i(x) = (a_i \cdot x)^2 + \frac{1}{4} \|x\|^2$. Gradient
# descent moves towards the minimum, $x = 0$. Then each rank sends the *largest* element of its gradient only
# (in the figures, ranks are simulated in this process: that is fast, and the numbers are the same).

# %% id="show_diverges" tags=["demo", "read"]
A = torch.tensor([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]])  # a row a_i for each rank


def keep_largest(k: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a compression: the tensor in which only the k largest elements stay."""

    def compress(x: torch.Tensor) -> torch.Tensor:
        values, positions = largest(x, k)
        return torch.zeros_like(x).index_add_(0, positions, values)

    return compress


def descend(compressions: list, steps: int = 60, rate: float = 0.02) -> list[float]:
    """Return |x| after each step; a rank sends its gradient through its compression."""
    x, norms = torch.ones(3), []
    for _ in range(steps):
        gradients = [2 * (a @ x) * a + x / 2 for a in A]
        x = x - rate * sum(send(g) for send, g in zip(compressions, gradients)) / 3
        norms.append(float(x.norm()))
    return norms


def exact(x: torch.Tensor) -> torch.Tensor:
    return x


paths = {"exact": descend(3 * [exact]), "largest element": descend(3 * [keep_largest(1)])}
print(
    f"|x| after 60 steps: {paths['exact'][-1]:.3f} exact,"
    f" {paths['largest element'][-1]:.1f} with the largest element"
)
figures.curves(paths, "step", "|x|", "three convex functions, three ranks", log=True)

# %% [markdown] id="feedback_text"
# The norm *grows* in every step, and a smaller learning rate only makes it grow more slowly. At $x = (1, 1, 1)$ the gradient of rank 0 is
# $(-5.5, 4.5, 4.5)$: alone the largest element of each rank is negative, and the positive ones, which decide the mean, are never sent.
#
# ## 3 · Error feedback
#
# **Core · 9 min · ●●○**
#
# The repair has two lines. What a compression $C$ leaves out is not lost but kept on the rank, and added to what it sends next:
#
# $$\text{sent} = C(g + e) \qquad e \leftarrow (g + e) - \text{sent}$$
#
# Write it for any compression, a function from a tensor to a tensor of the same shape. Each object has its own $e$, which is zero at first.
# Call `compress` once for each tensor; do not change the argument, nor what you have returned before: each result and each state is a tensor that later calls leave alone. $e$ is part of the state of a
# training: `state_dict` returns it as plain data (a dict with tensors), `load_state_dict` continues from it in another process.


# %% nbgrader={"grade_id": "feedback", "solution": true}
class ErrorFeedback:
    """Compresses one tensor after the other; what one leaves out is added to the next."""

    def __init__(self, compress: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.compress = compress
        ### BEGIN SOLUTION
        self.error = torch.zeros(())
        ### END SOLUTION

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is sent instead of x."""
        ### BEGIN SOLUTION
        corrected = x + self.error
        sent = self.compress(corrected)
        self.error = corrected - sent
        return sent
        ### END SOLUTION

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a resumed training needs."""
        ### BEGIN SOLUTION
        return {"error": self.error}
        ### END SOLUTION

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a state."""
        ### BEGIN SOLUTION
        self.error = state["error"].clone()
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_feedback", "grade": true}
lab.check("feedback")

# %% [markdown] id="predict_feedback_text"
# Two trainings now: the three functions, and a small network on four ranks, each of which sees only two of eight classes. It is
# trained with top-k (1 % of the elements) and with **signs**: each element is replaced by its sign, times the mean magnitude of
# all, $C(x) = \frac{\|x\|_1}{\Psi}\,\mathrm{sign}(x)$ for $\Psi$ elements.
#
# **Predict**: how many times as large as with exact gradients is the loss at the end?

# %% id="predict_feedback" tags=["prediction"]
predicted_loss = {
    "top 1 %": None,
    "top 1 %, feedback": None,
    "signs": None,
    "signs, feedback": None,
}

# %% id="show_feedback" tags=["demo", "read"]
require_numbers(predicted_loss)


def signs(x: torch.Tensor) -> torch.Tensor:
    """Return the mean magnitude of x, with the sign of each element."""
    return torch.where(x >= 0, x.abs().mean(), -x.abs().mean())


def trained(
    make: Callable[[], Callable], steps: int = STEPS, rate: float = 0.3, ranks: int = 4
) -> list[float]:
    """Return the loss on all samples after each step; `make` returns the compression of a rank."""
    data, weights = [samples_of(rank) for rank in range(ranks)], network()
    send, everything = [make() for _ in data], [torch.cat(parts) for parts in zip(*data)]
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        chosen = [torch.randint(256, (32,), generator=generator) for _ in data]
        grads = [gradient_of(weights, x[some], y[some]) for (x, y), some in zip(data, chosen)]
        mean = sum(compress(grad) for compress, grad in zip(send, grads)) / ranks
        parts = zip(weights, mean.split([weight.numel() for weight in weights]))
        weights = [weight - rate * part.view_as(weight) for weight, part in parts]
        losses.append(float(loss_of(weights, *everything)))
    return losses


paths["with error feedback"] = descend([ErrorFeedback(keep_largest(1)) for _ in range(3)])
some = keep_largest(46)
losses = {
    "exact": trained(lambda: exact),
    "top 1 %": trained(lambda: some),
    "top 1 %, feedback": trained(lambda: ErrorFeedback(some)),
    "signs": trained(lambda: signs),
    "signs, feedback": trained(lambda: ErrorFeedback(signs)),
}
ratios = {name: losses[name][-1] / losses["exact"][-1] for name in predicted_loss}
print(compared(predicted_loss, ratios))
print(f"the three functions, with error feedback: |x| = {paths['with error feedback'][-1]:.3f}")
figures.feedback(paths, losses)

# %% [markdown] id="feedback_after"
# Without feedback, the small functions diverge and the network falls behind, although each message "points in the right direction". With it,
# both arrive where the exact training does, signs later. The sum of all that was sent differs from the sum of all gradients by *one* error, however
# many steps there are: nothing is lost, it arrives late.
#
# The price: one tensor as large as the gradients on every rank, which belongs to the checkpoint of *that rank*.

# %% [markdown] id="onebit_text"
# ## 4 · One bit for each element, over the ranks
#
# **Core · 13 min · ●●●**
#
# A sum of signs has no sign for each element (it has $N + 1$ values), so bits cannot be added by an all-reduce. 1-bit Adam sends them like this:
#
# 1. Each rank compresses its tensor, $C(x + e)$ with feedback $e$. It sends the $i$-th of $N$ parts of its bits to rank $i$ (all-to-all), and its scale to all.
# 2. Rank $i$ averages the $N$ parts that arrived, compresses this **mean** with a *second* feedback, and sends its bits and its scale to all (all-gather).
#
# The result is the same on all ranks, bit for bit. Without the second feedback, what the second compression leaves out is lost.
# `pack` and `unpack` are given: 8 signs in a byte, and the scale. The number of elements is a multiple of $8 N$. Send what exercise 1 counts, and no more.

# %% id="given_bits"
# Given: run this cell. Later cells use it.
PLACES = torch.arange(8, dtype=torch.uint8)


def pack(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the signs of x as bits, uint8 (elements / 8,), and the scale, (1,)."""
    bits = (x >= 0).to(torch.uint8).view(-1, 8) << PLACES
    return bits.sum(dim=1, dtype=torch.uint8), x.abs().mean().view(1)


def unpack(bits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the tensor of scale and -scale that `pack` made bits of."""
    return torch.where((bits.unsqueeze(1) >> PLACES & 1).flatten().bool(), scale, -scale)


def one_bit(x: torch.Tensor) -> torch.Tensor:
    """Return what is left of x after `pack`."""
    return unpack(*pack(x))


# %% nbgrader={"grade_id": "onebit", "solution": true}
class OneBitMean:
    """Computes the mean over the ranks of one tensor after the other, all of one size."""

    def __init__(self) -> None:
        ### BEGIN SOLUTION
        self.of_rank, self.of_part = ErrorFeedback(one_bit), ErrorFeedback(one_bit)
        ### END SOLUTION

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the approximate mean of x (1-D) over the ranks, the same on all of them."""
        ### BEGIN SOLUTION
        world = dist.get_world_size()
        bits, scale = pack(self.of_rank(x))
        arrived = torch.empty_like(bits)
        dist.all_to_all_single(arrived, bits)
        parts = zip(arrived.chunk(world), gathered(scale))
        mean = torch.stack([unpack(*part) for part in parts]).mean(dim=0)
        bits, scale = pack(self.of_part(mean))
        parts = zip(gathered(bits).chunk(world), gathered(scale))
        return torch.cat([unpack(*part) for part in parts])
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_onebit", "grade": true}
lab.check("onebit")

# %% [markdown] id="powersgd_text"
# ## 5 · PowerSGD: two thin matrices
#
# **Core · 15 min · ●●●**
#
# The gradient of a layer is a matrix $M$ with $n$ rows and $m$ columns. One step of a *power iteration* approximates the mean over ranks by a matrix of rank $r$:
#
# $$P = \mathrm{orthonormal}\left(\sum_{\text{ranks}} M Q\right) \qquad Q \leftarrow \mathrm{mean}_{\text{ranks}}(M^\top P) \qquad \text{result} = P Q^\top$$
#
# - $M$ is the gradient of the rank plus its error: error feedback again. What is sent for this rank is the *result*: $e \leftarrow M - P Q^\top$.
# - `orthonormal` makes the columns orthonormal; they span the same space. Gram–Schmidt: divide each column by its norm, after
#   you have subtracted its projections on the columns before it. (`torch.linalg.qr` is right too.)
# - $Q$ is the same on all ranks and comes from the step before (**warm start**), so that the steps of the training are steps of *one* power iteration. The first $Q$ is the argument `q`.
# - $P$ needs no mean, because its scale is normalised away. Two all-reduces, $n r$ and $m r$ elements. The arguments stay unchanged. `state_dict` and `load_state_dict` as before.


# %% nbgrader={"grade_id": "powersgd", "solution": true}
def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix (rows, r) with orthonormal columns, which span those of `matrix`."""
    ### BEGIN SOLUTION
    columns: list[torch.Tensor] = []
    for column in matrix.unbind(dim=1):
        for before in columns:
            column = column - (before @ column) * before
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)
    ### END SOLUTION


class PowerSGD:
    """Computes the mean over the ranks of one gradient after the other, with rank r."""

    def __init__(self, q: torch.Tensor) -> None:
        """q: (columns, r), the first factor, the same on all ranks."""
        ### BEGIN SOLUTION
        self.q, self.error = q, torch.zeros(())
        ### END SOLUTION

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the approximate mean (rows, columns) over the ranks, the same on all of them."""
        ### BEGIN SOLUTION
        matrix = gradient + self.error
        p = matrix @ self.q
        dist.all_reduce(p)
        p = orthonormal(p)
        q = matrix.T @ p
        dist.all_reduce(q)
        self.q = q / dist.get_world_size()
        mean = p @ self.q.T
        self.error = matrix - mean
        return mean
        ### END SOLUTION

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a resumed training needs."""
        ### BEGIN SOLUTION
        return {"q": self.q, "error": self.error}
        ### END SOLUTION

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a state."""
        ### BEGIN SOLUTION
        self.q, self.error = state["q"].clone(), state["error"].clone()
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_powersgd", "grade": true}
lab.check("powersgd")

# %% [markdown] id="predict_warm_text"
# Does the warm start pay? The next cell approximates *one* gradient of 64 × 64 with rank 2, twenty times without feedback: once with the $Q$ of the step
# before, once with a new random one. The best matrix of rank 2 comes from a singular value decomposition (SVD).
#
# **Predict** the mean error over the last ten steps, divided by that of the SVD.

# %% id="predict_warm" tags=["prediction"]
predicted_error = {"warm start": None, "new Q in each step": None}

# %% id="show_warm" tags=["demo", "read"]
from dlo_lib.launch import Explain, run_ranks

require_numbers(predicted_error)
RANK = 2


def errors_of(gradient: torch.Tensor, warm: bool, steps: int = 20) -> list[float]:
    """Return the relative error of each step, with the student's PowerSGD on this rank."""
    torch.manual_seed(4)
    found, step, sent = [], PowerSGD(torch.randn(gradient.shape[1], RANK)), gradient
    for _ in range(steps):
        if not warm and found:
            step, sent = PowerSGD(torch.randn(gradient.shape[1], RANK)), gradient
        sent = step(sent)  # what was sent, plus the error of it, is the same gradient again
        found.append(float((sent - gradient).norm() / gradient.norm()))
    return found


values = torch.linalg.svdvals(first_layer)
best = float(values[RANK:].norm() / values.norm())
by_start = {
    name: run_ranks(errors_of, 1, first_layer, name == "warm start")[0] for name in predicted_error
}
print(
    compared(
        predicted_error, {name: sum(found[10:]) / 10 / best for name, found in by_start.items()}
    )
)
figures.curves(
    by_start, "step", "relative error", f"rank {RANK} of a gradient of 64 × 64", level=("SVD", best)
)

# %% [markdown] id="warm_after"
# The columns of $P$ turn towards the directions of the largest singular values, as in a power iteration; here one more step is enough, because this gradient has nearly rank 2.
# In a training the gradient changes slowly, so the warm start is nearly as good as an SVD, for two thin products. The first steps of a training are the exception:
# PyTorch advises exact sums for about the first tenth (`start_powerSGD_iter`).

# %% [markdown] id="switch_text"
# ## 6 · When is Adam's variance stable?
#
# **Core · 6 min · ●●○**
#
# Error feedback repairs an update that is *linear* in what is sent: late parts add up. Adam divides by $\sqrt{v}$, and $v$ is quadratic in the gradient. 1-bit Adam
# has two phases. It begins as Adam with exact sums. When the variance is stable, it **freezes** $v$ and sends the momentum in one bit: with a constant $v$ the
# update is linear.
#
# The variance is stable when its norm hardly falls over $\Delta = 1 / (1 - \beta_2)$ steps (rounded):
#
# $$\frac{\|\hat v_t\|_1}{\|\hat v_{t - \Delta}\|_1} \geq 0.96, \qquad \hat v_t = \frac{v_t}{1 - \beta_2^t}$$
#
# after the warm-up of the learning rate: not before step `warmup`. With $\beta_2 = 0.999$, $\Delta$ is 1,000 steps; this lab takes a smaller $\beta_2$. BERT-Large
# switched after 22,173 steps by this rule, and after 23,000 by hand.
#
# (The text of the course prints $|v|/|v - \Delta|$: the $\Delta$ belongs into the index.)


# %% nbgrader={"grade_id": "switch", "solution": true}
def is_stable(norms: list[float], beta2: float, warmup: int, threshold: float = 0.96) -> bool:
    """Return whether the variance is stable after step t = len(norms).

    norms: the norm of the corrected variance after steps 1, 2, ..., t.
    False where there is no step t - Δ: it is at least 1.
    """
    ### BEGIN SOLUTION
    distance = round(1 / (1 - beta2))
    if len(norms) <= distance or len(norms) < warmup:
        return False
    return norms[-1] >= threshold * norms[-1 - distance]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_switch", "grade": true}
lab.check("switch")

# %% [markdown] id="raw_text"
# Why the *corrected* $\hat v$? Here are both norms in a training with Adam, and the first step at which your rule is true for each. From here on, 30 % of the labels are wrong: the gradients
# then do not vanish, as with data that a network cannot learn by heart.

# %% id="show_raw" tags=["demo", "read"]
BETAS, RATE, WARMUP, WRONG = (0.9, 0.95), 0.006, 10, 0.3


def norms_of_adam(steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Return the norms of v and of the corrected v after each step of Adam on four ranks."""
    data, x = (
        [samples_of(rank, 4096, WRONG) for rank in range(4)],
        torch.cat([w.flatten() for w in network()]),
    )
    m, v, generator = torch.zeros_like(x), torch.zeros_like(x), torch.Generator().manual_seed(3)
    raw, corrected = [], []
    for step in range(1, steps + 1):
        some = [torch.randint(4096, (32,), generator=generator) for _ in data]
        g = (
            sum(
                gradient_of(matrices(x), inputs[s], labels[s])
                for (inputs, labels), s in zip(data, some)
            )
            / 4
        )
        m, v = m.lerp(g, 1 - BETAS[0]), v.lerp(g.square(), 1 - BETAS[1])
        raw.append(float(v.sum()))
        corrected.append(raw[-1] / (1 - BETAS[1] ** step))
        direction = m / (1 - BETAS[0] ** step) / ((v / (1 - BETAS[1] ** step)).sqrt() + 1e-8)
        x = x - RATE * min(1, step / WARMUP) * direction
    return raw, corrected


def matrices(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the two weights of `network`, views of x (4608,)."""
    return [x[:4096].view(64, 64), x[4096:].view(8, 64)]


raw, corrected = norms_of_adam()
fires = {}
for name, norms in (("v", raw), ("corrected v", corrected)):
    so_far = (t for t in range(1, len(norms) + 1) if is_stable(norms[:t], BETAS[1], WARMUP))
    fires[name] = next(so_far, None)
    print(f"{name:12} the rule is true at step {fires[name]}")
figures.variance({"v": raw, "corrected v": corrected}, fires)

# %% [markdown] id="raw_after"
# The uncorrected $v$ starts at zero and grows, whatever the gradients are: its ratio is above 1, and the rule is true at the first step at which it can be.
#
# ## 7 · 1-bit Adam
#
# **Core · 13 min · ●●●**
#
# Write `step`. Every rank calls it with its gradient of the step, and all ranks keep the same `x`.
#
# - **Warm-up**: the gradient is the exact mean over the ranks (one all-reduce). $m \leftarrow \beta_1 m + (1-\beta_1)\, g$ and $v \leftarrow \beta_2 v + (1-\beta_2)\, g^2$.
# - **Compressed**: $m \leftarrow \beta_1 m + (1-\beta_1)\, g$ with the gradient of *this* rank; then $m$ becomes the one-bit mean of the ranks' $m$. $v$ stays.
# - **Both**: $x \leftarrow x - \text{lr} \cdot \frac{m}{1 - \beta_1^t} / (\sqrt{\hat v} + \epsilon)$, in place. The correction of $v$ is frozen with it: $\hat v$ keeps the value of the last warm-up step.
# - After each step of the warm-up, append $\|\hat v_t\|_1$ to `norms` and ask your `is_stable`. If it is true, `frozen_at` becomes $t$: the *next* step is compressed.


# %% nbgrader={"grade_id": "adam", "solution": true}
class OneBitAdam:
    """Adam on all ranks; after its variance is stable, the momentum is sent in one bit."""

    def __init__(
        self, x, lr: float, betas: tuple[float, float], eps: float = 1e-8, warmup: int = 0
    ):
        """x: the parameters, 1-D, the same on all ranks; a multiple of 8 N elements."""
        self.x, self.lr, self.eps, self.warmup = x, lr, eps, warmup
        self.beta1, self.beta2 = betas
        self.steps, self.frozen_at = 0, 0  # the last step of the warm-up, or 0
        self.momentum, self.variance = torch.zeros_like(x), torch.zeros_like(x)
        self.norms: list[float] = []
        self.mean = OneBitMean()

    def step(self, gradient: torch.Tensor) -> None:
        """Update x in place. gradient: of this rank; it stays unchanged."""
        ### BEGIN SOLUTION
        self.steps += 1
        if self.frozen_at:
            self.momentum = self.mean(self.momentum.lerp(gradient, 1 - self.beta1))
        else:
            mean = gradient.clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            self.momentum = self.momentum.lerp(mean, 1 - self.beta1)
            self.variance = self.variance.lerp(mean.square(), 1 - self.beta2)
        corrected = self.variance / (1 - self.beta2 ** (self.frozen_at or self.steps))
        if not self.frozen_at:
            self.norms.append(float(corrected.sum()))
            if is_stable(self.norms, self.beta2, self.warmup):
                self.frozen_at = self.steps
        direction = self.momentum / (1 - self.beta1**self.steps)
        self.x -= self.lr * direction / (corrected.sqrt() + self.eps)
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_adam", "grade": true}
lab.check("adam")

# %% [markdown] id="predict_adam_text"
# Now it trains the network on four real ranks. The loss is drawn over the steps and over the *bytes* that a rank has sent, counted by the tracer.
# A third form takes the idea of **0/1 Adam**: with $v$ frozen, the change of `x` is linear in the momentum. So a rank can take several steps alone and send the sum
# of its changes once: here every fourth step of the compressed phase.
#
# **Predict** the bytes of each training, as a share of those of Adam in fp32 without compression. (The switch comes some steps later than in the last figure, after step 104 of 200, because each rank draws other samples. The cell takes some seconds, or a minute where four ranks share a core.)

# %% id="predict_adam" tags=["prediction"]
predicted_share = {"1-bit Adam": None, "every fourth step": None}

# %% id="show_adam" tags=["demo", "read"]
from dlo_lib.comm.tracing.recorder import trace_collectives

require_numbers(predicted_share)


class SometimesAdam(OneBitAdam):
    """Sends every fourth compressed step; in between, a rank follows its own momentum."""

    def step(self, gradient: torch.Tensor) -> None:
        if not self.frozen_at:
            super().step(gradient)
            self.together = self.x.clone()  # after the last exchange
            self.sum, self.count = torch.zeros_like(self.x), 0
            return
        self.steps, self.count = self.steps + 1, self.count + 1
        self.momentum = self.momentum.lerp(gradient, 1 - self.beta1)
        self.sum += self.momentum
        root = (self.variance / (1 - self.beta2**self.frozen_at)).sqrt() + self.eps
        self.x -= self.lr * self.momentum / root
        if self.count == 4:
            mean = self.mean(self.sum)
            self.momentum = mean / self.count
            self.x.copy_(self.together - self.lr * mean / root)
            self.together, self.sum, self.count = self.x.clone(), torch.zeros_like(self.x), 0


def trained_by_adam(kind: str, steps: int) -> tuple[list[float], list[float], int]:
    """Return the loss after each step (on rank 0), the bytes sent until then, and `frozen_at`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = [samples_of(other, 4096, WRONG) for other in range(world)]
    everything, x = (
        [torch.cat([part[:512] for part in parts]) for parts in zip(*data)],
        torch.cat([w.flatten() for w in network()]),
    )
    make = SometimesAdam if kind == "every fourth step" else OneBitAdam
    adam = make(x, 0.0, BETAS, warmup=WARMUP if kind != "Adam" else steps + 1)
    generator, losses, sent = torch.Generator().manual_seed(10 + rank), [], []
    for step in range(1, steps + 1):
        some = torch.randint(4096, (32,), generator=generator)
        adam.lr = RATE * min(1, step / WARMUP)
        with trace_collectives() as trace:
            adam.step(gradient_of(matrices(x), *(part[some] for part in data[rank])))
        kinds = ("all_reduce", "all_gather", "all_to_all")
        sent.append(sum(trace.ring_bytes(kind, rank) for kind in kinds))
        if rank == 0:
            losses.append(float(loss_of(matrices(x), *everything)))
    return losses, torch.tensor(sent).cumsum(0).tolist(), adam.frozen_at


KINDS = ("Adam", "1-bit Adam", "every fourth step")
runs = {kind: run_ranks(trained_by_adam, 4, kind, STEPS)[0] for kind in KINDS}
total = {kind: sent[-1] / runs["Adam"][1][-1] for kind, (_, sent, _) in runs.items()}
print(compared(predicted_share, {kind: total[kind] for kind in predicted_share}))
for kind, (found, sent, frozen) in runs.items():
    print(
        f"{kind:18} loss {found[-1]:.3f}, {sent[-1] / 1e6:5.2f} MB by a rank, "
        f"frozen after step {frozen or '-'}"
    )
figures.by_bytes({kind: run[:2] for kind, run in runs.items()})

# %% [markdown] id="adam_after"
# Over steps the curves are nearly one; over bytes they are not. Beyond the switch, one bit sends 96.9 % less than fp32 (and 93.8 % less than fp16). What remains are the bytes of the
# *warm-up*: 0/1 Adam also shortens that, by freezing the variance from time to time. A rank that follows its own momentum between two exchanges
# has other parameters than the others for a few steps, and the loss above is that of rank 0.
#
# ## 8 · When does compression lose?
#
# **Core · 9 min · ●●○**
#
# Compression has a price that bytes do not show: it computes (*coding*), it may need more messages, and some forms cannot be **overlapped** with backward. Describe a scheme by
#
# | key | |
# |---|---|
# | `"messages"`, `"nbytes"` | messages that follow one another, and the bytes that a rank sends in all: $\alpha \cdot \text{messages} + \beta \cdot \text{nbytes}$ seconds |
# | `"coding"` | seconds in which the GPU compresses and decompresses: it computes nothing else |
# | `"hidden"` | whether communication runs during backward and coding. If it does, a step takes the longer of the two; if not, their sum |
#
# Write the seconds of backward with its communication, and the name of the fastest scheme (the first one, if several are equal).


# %% nbgrader={"grade_id": "pays", "solution": true}
def step_seconds(scheme: dict, alpha: float, beta: float, backward: float) -> float:
    """Return the seconds of backward, coding and communication. beta: seconds per byte."""
    ### BEGIN SOLUTION
    communication = alpha * scheme["messages"] + beta * scheme["nbytes"]
    computation = backward + scheme["coding"]
    return max(computation, communication) if scheme["hidden"] else computation + communication
    ### END SOLUTION


def fastest(schemes: dict[str, dict], alpha: float, beta: float, backward: float) -> str:
    """Return the name of the scheme with the shortest step."""
    ### BEGIN SOLUTION
    return min(schemes, key=lambda name: step_seconds(schemes[name], alpha, beta, backward))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_pays", "grade": true}
lab.check("pays")

# %% [markdown] id="predict_pays_text"
# Back to Llama 3.2 1B on 64 A100. Each coding reads and writes the gradients, the error and what is sent: we count ten passes over all gradients for one bit and
# for PowerSGD with rank 4, at the bandwidth of the GPU's memory. Exact sums and PowerSGD's first product are overlapped in DDP; one-bit exchanges come after backward.
#
# **Predict**: above which bandwidth, in Gb/s for each GPU, is the exact sum in fp32 the fastest?

# %% id="predict_pays" tags=["prediction"]
predicted_bandwidth = {"exact is fastest above": None}

# %% id="show_pays" tags=["demo", "read"]
require_numbers(predicted_bandwidth)
SHAPES = [tuple(p.shape) for p in Llama(model_config(MODEL), device="meta").parameters()]
PASSES = 10 * 4 * PARAMETERS / A100.bandwidth


def scheme_of(name: str, kept: int, exchanges: int, coding: float, hidden: bool) -> dict:
    """Describe a scheme for all layers of the model; vectors are sent exactly."""
    sent = sum(
        sent_bytes(
            name if len(shape) == 2 else "fp32",
            shape[0],
            shape[-1] if len(shape) == 2 else 1,
            RANKS,
            kept,
        )
        for shape in SHAPES
    )
    return {"messages": exchanges * (RANKS - 1), "nbytes": sent, "coding": coding, "hidden": hidden}


SCHEMES = {
    "fp32": scheme_of("fp32", 1, 2, 0.0, True),
    "fp32, not overlapped": scheme_of("fp32", 1, 2, 0.0, False),
    "fp16": scheme_of("fp16", 1, 2, 2 * PASSES / 10, True),
    "PowerSGD, rank 4": scheme_of("low-rank", 4, 4, PASSES, True),
    "one bit": scheme_of("one-bit", 1, 4, PASSES, False),
}
GBITS = [2 ** (power / 4) for power in range(0, 45)]  # 1 to 2048 Gb/s
seconds = {
    name: [step_seconds(scheme, 14e-6, 8 / (1e9 * speed), BACKWARD) for speed in GBITS]
    for name, scheme in SCHEMES.items()
}
winners = [fastest(SCHEMES, 14e-6, 8 / (1e9 * speed), BACKWARD) for speed in GBITS]
first_exact = next(speed for speed, name in zip(GBITS, winners) if name == "fp32")
print(compared(predicted_bandwidth, {"exact is fastest above": first_exact}, "{:.0f} Gb/s".format))
figures.at_scale(GBITS, seconds, predicted_bandwidth)

# %% [markdown] id="pays_after"
# On a fast link the exact sum is hidden behind backward, and any coding only adds time. On a slow one PowerSGD wins by far. Between them, look at the two exact lines:
# near 64 Gb/s *overlap* saves up to a whole backward pass, and costs nothing. So the first question is not "which compression?" but "**why is communication not overlapped?**": one bucket
# for everything, a wait in backward, gradients that are needed at once (clipping), or a network that is badly configured.
#
# ## 9 · A table of the course, counted
#
# The course has a table of five compression rates of PyTorch's hooks: fp16 2, PowerSGD 984, both 1,969, *batched* PowerSGD 1,946, both 3,892. It names neither model nor rank. Here they are counted
# for two named models with rank 1 and your `sent_bytes`. PowerSGD compresses each matrix (if that halves it); batched, all gradients are one square matrix.

# %% id="show_table" tags=["demo", "nbval-check-output"]
from dlo_lib.base.text import columns
from dlo_lib.models import ResNet


def rates(shapes: list[tuple[int, ...]], rank: int = 1) -> list[float]:
    """Return how many times fewer bytes than fp32 the five hooks send."""
    exact_bytes = layers = 0.0
    for shape in shapes:
        rows, others = shape[0], torch.Size(shape[1:]).numel()
        whole, low = (sent_bytes(name, rows, others, 8, rank) for name in ("fp32", "low-rank"))
        exact_bytes += whole
        layers += low if 2 * low < whole else whole
    side = int((sum(torch.Size(shape).numel() for shape in shapes) - 1) ** 0.5) + 1
    low_rank, batched = (
        exact_bytes / layers,
        exact_bytes / sent_bytes("low-rank", side, side, 8, rank),
    )
    return [2, low_rank, 2 * low_rank, batched, 2 * batched]


with torch.device("meta"):
    resnet = [tuple(p.shape) for p in ResNet().parameters()]
table = [("", "of the course", "Llama 3.2 1B, rank 1", "our ResNet, rank 1")]
names = ("fp16", "PowerSGD", "PowerSGD + fp16", "batched PowerSGD", "batched PowerSGD + fp16")
for name, course, *counted in zip(names, (2, 984, 1969, 1946, 3892), rates(SHAPES), rates(resnet)):
    table.append((name, f"{course:,}", *(f"{rate:,.0f}" for rate in counted)))
print(columns(table))

# %% [markdown] id="table_after"
# A rate means nothing without model and rank: the larger the matrices, the larger the rate. It is also not the speed-up. Of an hour of communication a rate of 984 leaves less than four seconds,
# and one of 1,969 less than two: the second factor of two saves two seconds, and the factors are rounded in addition.
#
# ## 10 · The same with PyTorch
#
# On Monday you write
#
#     state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=1000)
#     model.register_comm_hook(state, powerSGD_hook)
#
# and DDP calls the hook with each bucket. The next cell calls it with the gradient of one layer, in the form of your class. It passes your checks of PowerSGD, except
# “A resumed run continues”, because the adapter has no `state_dict` (PyTorch's state is saved whole, with its errors, by `pickle`).

# %% id="run_standard" tags=["demo", "read"]
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks


class Bucket:
    """What DDP passes to a hook: here the gradient of one layer."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self.flat, self.shape = gradient.flatten().clone(), gradient.shape

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return [self.flat.view(self.shape)]


class Standard:
    """PyTorch's hook, in the form of your class."""

    def __init__(self, q: torch.Tensor) -> None:
        rank = q.shape[1]
        self.state = hooks.PowerSGDState(None, rank, 2, min_compression_rate=0.01)
        self.state.iter = 2  # no exact steps, and the first factor is given
        self.state.q_memory_dict[0] = q.flatten().clone()

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        size = len(gradient) * self.state.matrix_approximation_rank
        self.state.p_memory_dict.setdefault(0, gradient.new_empty(size))
        return hooks.powerSGD_hook(self.state, Bucket(gradient)).wait().view(gradient.shape)


lab.check("powersgd", instead={"PowerSGD": Standard})

# %% [markdown] id="standard_table_text"
# Both, step by step on the same gradients of two ranks: a matrix of 512 × 512, rank 4. The error is that of the sum over six steps, against the exact sum; the lines of PyTorch are those of the adapter. PyTorch's `batched_powerSGD_hook` is no row of the table: in the releases 2.8 to 2.15 it raises an AssertionError. And with several buckets
# on gloo, `powerSGD_hook` starts its second all-reduces in another order on each rank; here there is one bucket.

# %% id="show_standard" tags=["demo", "read"]
import time

SIDE, FACTOR = 512, 4


def both_forms(steps: int = 6) -> tuple[float, dict[str, tuple[float, float, float]]]:
    """Return the largest difference, and for each form its bytes, error and seconds of a step."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    q, common = (torch.randn(SIDE, other, generator=generator) for other in (FACTOR, 8))
    noise = torch.Generator().manual_seed(1 + dist.get_rank())
    forms, seconds, sent, apart, errors = (
        {"yours": PowerSGD(q.clone()), "PyTorch": Standard(q.clone())},
        {},
        {},
        0.0,
        {},
    )
    sums = {name: torch.zeros(SIDE, SIDE) for name in ("exact", *forms)}
    for _ in range(steps):
        gradient = common @ common.T + torch.randn(SIDE, SIDE, generator=noise)
        mean, results = gradient.clone(), {}
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        sums["exact"] += mean
        for name, form in forms.items():
            with trace_collectives() as trace:
                began = time.perf_counter()
                results[name] = form(gradient)
                seconds[name] = min(seconds.get(name, 1e9), time.perf_counter() - began)
            sent[name] = trace.ring_bytes("all_reduce", dist.get_rank())
            sums[name] += results[name]
            errors[name] = float((sums[name] - sums["exact"]).norm() / sums["exact"].norm())
        apart = max(apart, float((results["yours"] - results["PyTorch"]).norm() / mean.norm()))
    return apart, {name: (sent[name], errors[name], seconds[name]) for name in forms}


apart, found = run_ranks(both_forms, 2, explain=Explain.OFF)[0]
rows = [("", "bytes, of fp32", "error of the sum", "time, of PyTorch's", "lines of code")]
whole, code = (
    sent_bytes("fp32", SIDE, SIDE, 2),
    {"yours": (orthonormal, PowerSGD), "PyTorch": (Bucket, Standard)},
)
from dlo_lib.labkit.side_by_side import lines_of

for name, (sent, error, seconds_) in found.items():
    ratio = seconds_ / found["PyTorch"][2]
    rows.append(
        (
            name,
            f"{sent / whole:.2%}",
            f"{error:.3f}",
            f"{ratio:.2f}",
            str(lines_of(*code[name]) or "-"),
        )
    )
print(columns(rows))
print(f"largest difference of the results: {apart:.1e} of the gradient")

# %% [markdown] id="standard_lesson"
# Same results, same bytes. PyTorch's hook does more for each call: it sorts the gradients of a bucket by shape, sends vectors exactly, and chains its exchanges so that they run during backward.
# For the DDP of this course, the hooks of `dlo_lib.parallel.ddp.compressed_sums` have the compressions of this lab, with `state_dict`.
#
# ## 11 · Quiz
#
# **Core · 5 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests only that every question has an answer; grading counts the right ones.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "c", "q2": "b", "q3": "a", "q4": "d", "q5": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Leave the second feedback out of `OneBitMean` and train again. How far is the loss from Adam's?
# - Train with $\beta_2 = 0.99$: when does the variance freeze, and which share of the bytes is left?
# - Give PowerSGD ranks 1, 2, 4 and 8 in the training of section 3. From which rank is the loss that of exact gradients?
# - Read `dlo_lib/comm/compression/` and `dlo_lib/optim/one_bit_adam.py`, with parts of any size, groups and all states.
#
# **What comes next.** Lab 13 asks what each rank holds, and lab 14 divides it.
#
# ## References
#
# - F. Seide et al., *1-Bit Stochastic Gradient Descent* (Interspeech 2014)
# - A. F. Aji, K. Heafield, *Sparse Communication for Distributed Gradient Descent* (2017), [arXiv:1704.05021](https://arxiv.org/abs/1704.05021)
# - S. P. Karimireddy et al., *Error Feedback Fixes SignSGD and other Gradient Compression Schemes* (2019), [arXiv:1901.09847](https://arxiv.org/abs/1901.09847)
# - A. Beznosikov et al., *On Biased Compression for Distributed Learning* (2020), [arXiv:2002.12410](https://arxiv.org/abs/2002.12410): the three functions
# - T. Vogels, S. P. Karimireddy, M. Jaggi, *PowerSGD* (2019), [arXiv:1905.13727](https://arxiv.org/abs/1905.13727)
# - H. Tang et al., *1-bit Adam* (2021), [arXiv:2102.02888](https://arxiv.org/abs/2102.02888); Y. Lu et al., *Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam* (2022), [arXiv:2202.06009](https://arxiv.org/abs/2202.06009)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
