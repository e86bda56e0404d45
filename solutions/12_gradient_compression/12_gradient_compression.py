# %% [markdown] id="title"
# # 12 · Gradient compression
#
# **What you will do.** On slow links the sum of gradients takes longer than the computation that it belongs to. You send
# less: the largest elements (top-k), one bit for each element, or two thin matrices (PowerSGD). You count every byte, see
# trainings that diverge or end elsewhere, and repair them with a few lines called *error feedback*. Then you write 1-bit
# Adam, with the rule that says when it may compress, and find out on which links compression loses.
#
# Builds on lab 10 (collectives, $\alpha$ and $\beta$) and lab 11 (DDP, buckets, overlap). You need no GPU: ranks are
# processes on this machine (gloo). The core exercises, predictions and the quiz take about 99 minutes; with the text and
# the demos plan about two hours and a quarter. Each exercise has a check that answers at once; `lab.hint("name")` gives
# a nudge, then a pointer, then a sketch. If you are stuck, `lab.use_reference("name")` lets you continue without its points.
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
from dlo_lib.hardware import gpu
from dlo_lib.models import Llama, model_config

MODEL, RANKS, TOKENS = "llama-3.2-1b", 64, 16_384
PARAMETERS = sum(p.numel() for p in Llama(model_config(MODEL), device="meta").parameters())
A100 = gpu("a100-80")
BACKWARD = 4 * PARAMETERS * TOKENS / (0.4 * A100.peak_flops["bf16"])
LINKS = {  # α in seconds, bytes/s of one GPU, one way
    "NVLink for all GPUs": (3.4e-6, A100.nvlink_bandwidth),
    "Omni-Path, 100 Gb/s": (14e-6, 100e9 / 8),
    "Ethernet, 25 Gb/s": (30e-6, 25e9 / 8),
    "Ethernet, 10 Gb/s": (30e-6, 10e9 / 8),
}


def ring_seconds(nbytes: float, ranks: int, alpha: float, bandwidth: float) -> float:
    """Return the seconds of a ring all-reduce, as in lab 10."""
    return 2 * (ranks - 1) * (alpha + nbytes / ranks / bandwidth)


for name, link in LINKS.items():
    seconds = ring_seconds(4 * PARAMETERS, RANKS, *link)
    print(f"{name:20} {seconds:6.2f} s to add the gradients, {BACKWARD:.2f} s of backward")

# %% [markdown] id="idea"
# On the slowest link, GPUs compute for 8 % of this time and wait for the rest (NVLink, in truth, joins a node). Overlap (lab 11) hides
# at most one backward pass. More GPUs do not help, because a ring sends nearly twice the gradients for any number of ranks.
#
# - Which of these links hide the sum behind backward completely?
# - Must every rank receive the *exact* sum? Each rank's gradient is itself an estimate from a few samples.
#
# ## The idea: send an approximation
#
# The figure shows the gradient of one layer of a small network, and what is left of it after four compressions. Look at
# the last two: one bit keeps all places and forgets the sizes, low rank keeps the common directions. (Red is negative, blue positive. The
# error is the norm of what is lost, divided by that of the gradient.)

# %% id="show_idea" tags=["demo"]
import figures
import torch.nn.functional as F

torch.manual_seed(0)


def samples_of(rank: int, number: int = 256, wrong: float = 0.0):
    """Return inputs (number, 64) and labels of a rank: 2 of 8 classes; a share `wrong` is random."""
    prototypes = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + rank)
    labels = 2 * (rank % 4) + torch.randint(2, (number,), generator=generator)
    inputs = 0.4 * prototypes[labels] + torch.randn(number, 64, generator=generator)
    replaced = torch.rand(number, generator=generator) < wrong
    return inputs, torch.where(replaced, torch.randint(8, (number,), generator=generator), labels)


def network() -> torch.Tensor:
    """Return the 4,608 parameters of a network with two weights, without biases."""
    return torch.randn(4608, generator=torch.Generator().manual_seed(2)) / 8


def loss_of(x: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    first, second = x[:4096].view(64, 64), x[4096:].view(8, 64)
    return F.cross_entropy((inputs @ first.T).relu() @ second.T, labels)


def gradient_of(x: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss_of(x, inputs, labels), x)[0]


first_layer = gradient_of(network(), *samples_of(0))[:4096].view(64, 64)
figures.compressed(first_layer)

# %% [markdown] id="bytes_text"
# ## 1 · Count before you send
#
# **Core · 9 min · ●○○**
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
PERCENT = SHAPE[0] * SHAPE[1] // 100
chosen = {"one bit": ("one-bit", 1), "rank 2": ("low-rank", 2), "top 1 %": ("top-k", PERCENT)}
times = {}
for ranks in (8, 64):
    for name, (scheme, kept) in chosen.items():
        fewer = sent_bytes("fp32", *SHAPE, ranks) / sent_bytes(scheme, *SHAPE, ranks, kept)
        times[f"{name}, {ranks}"] = fewer
print(compared(predicted_times, {name: times[name] for name in predicted_times}))
title = "compared with fp32, by number of ranks"
predicted_bars(times, predicted_times, "times fewer bytes", title=title, log=True)

# %% [markdown] id="topk_text"
# One bit and low rank keep their factor on any number of ranks. Top-k does not: every rank receives the elements of all ranks,
# so on 64 ranks keeping 1 % saves almost nothing. It is for few ranks, or for a very small $k$.
#
# ## 2 · The largest elements
#
# **Core · 11 min · ●●○**
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
# (ranks are simulated in this process here: that is fast, and the numbers are the same).

# %% id="show_diverges" tags=["demo", "read"]
A = torch.tensor([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]])  # a row a_i for each rank


def keep_largest(x: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Return x with zeros, except its k largest elements."""
    values, positions = largest(x, k)
    return torch.zeros_like(x).index_add_(0, positions, values)


def descend(compressions: list, steps: int = 60, rate: float = 0.02) -> list[float]:
    """Return |x| after each step; a rank sends its gradient through its compression."""
    x, norms = torch.ones(3), []
    for _ in range(steps):
        gradients = [2 * (a @ x) * a + x / 2 for a in A]
        x = x - rate * sum(send(g) for send, g in zip(compressions, gradients)) / 3
        norms.append(float(x.norm()))
    return norms


paths = {"exact": descend(3 * [lambda x: x]), "largest element": descend(3 * [keep_largest])}
for name, norms in paths.items():
    print(f"{name:16}", *(f"|x| = {norms[at - 1]:5.2f} after step {at:2}" for at in (1, 30, 60)))

# %% [markdown] id="feedback_text"
# The norm *grows* in every step, and a smaller learning rate only makes it grow more slowly. At $x = (1, 1, 1)$ the gradient of rank 0 is
# $(-5.5, 4.5, 4.5)$: alone the largest element of each rank is negative, and the positive ones, which decide the mean, are never sent.
#
# ## 3 · Error feedback
#
# **Core · 11 min · ●●○**
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
predicted_loss = {"top 1 %": None, "top 1 %, feedback": None}
predicted_loss |= {"signs": None, "signs, feedback": None}

# %% id="show_feedback" tags=["demo", "read"]
require_numbers(predicted_loss)


def signs(x: torch.Tensor) -> torch.Tensor:
    """Return the mean magnitude of x, with the sign of each element."""
    return torch.where(x >= 0, x.abs().mean(), -x.abs().mean())


def trained(send: list[Callable], rate: float = 0.3) -> list[float]:
    """Return the loss on all samples after each step, with a compression for each of four ranks."""
    data, x = [samples_of(rank) for rank in range(4)], network()
    everything = [torch.cat(parts) for parts in zip(*data)]
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(STEPS):
        chosen = [torch.randint(256, (32,), generator=generator) for _ in data]
        grads = [gradient_of(x, own[s], labels[s]) for (own, labels), s in zip(data, chosen)]
        x = x - rate * sum(compress(grad) for compress, grad in zip(send, grads)) / 4
        losses.append(float(loss_of(x, *everything)))
    return losses


paths["with error feedback"] = descend([ErrorFeedback(keep_largest) for _ in range(3)])
losses = {"exact": trained(4 * [lambda x: x])}
for name, compress in (("top 1 %", lambda x: keep_largest(x, 46)), ("signs", signs)):
    losses[name] = trained(4 * [compress])
    losses[f"{name}, feedback"] = trained([ErrorFeedback(compress) for _ in range(4)])
ratios = {name: losses[name][-1] / losses["exact"][-1] for name in predicted_loss}
print(compared(predicted_loss, ratios))
print(f"the three functions, with error feedback: |x| = {paths['with error feedback'][-1]:.3f}")
figures.feedback(paths, losses)

# %% [markdown] id="onebit_text"
# Without feedback, the small functions diverge and the network falls behind, although each message "points in the right direction". With it,
# both arrive where the exact training does, signs later. The sum of all that was sent differs from the sum of all gradients by *one* error, however
# many steps there are: nothing is lost, it arrives late.
#
# The price: one tensor as large as the gradients on every rank, which belongs to the checkpoint of *that rank*.
#
# ## 4 · One bit for each element, over the ranks
#
# **Core · 15 min · ●●●**
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
# **Core · 13 min · ●●●**
#
# The gradient of a layer is a matrix $M$ with $n$ rows and $m$ columns. One step of a *power iteration* approximates the mean over ranks by a matrix of rank $r$:
#
# $$P = \mathrm{orthonormal}\left(\sum_{\text{ranks}} M Q\right) \qquad Q \leftarrow \mathrm{mean}_{\text{ranks}}(M^\top P) \qquad \text{result} = P Q^\top$$
#
# - $M$ is the gradient of the rank plus its error $e$ (error feedback). The new error is what the *result* leaves out of $M$: $e \leftarrow M - P Q^\top$.
# - `orthonormal` makes the columns orthonormal; they span the same space: `torch.linalg.qr(P).Q`.
# - $Q$ is the same on all ranks and comes from the step before (**warm start**), so that the steps of the training are steps of *one* power iteration. The first $Q$ is the argument `q`.
# - $P$ needs no mean, because its scale is normalised away. Two all-reduces, $n r$ and $m r$ elements. The arguments stay unchanged.


# %% nbgrader={"grade_id": "powersgd", "solution": true}
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
        p = torch.linalg.qr(p).Q
        q = matrix.T @ p
        dist.all_reduce(q)
        self.q = q / dist.get_world_size()
        mean = p @ self.q.T
        self.error = matrix - mean
        return mean
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_powersgd", "grade": true}
lab.check("powersgd")

# %% [markdown] id="switch_text"
# In a training the gradient changes slowly, so the columns of $P$ turn towards its largest singular values: the warm start is nearly as good as an SVD,
# for two thin products. The first steps are the exception: PyTorch advises exact sums for about the first tenth (`start_powerSGD_iter`).
#
# ## 6 · When is Adam's variance stable?
#
# **Core · 7 min · ●●○**
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

# %% [markdown] id="adam_text"
# ## 7 · 1-bit Adam
#
# **Core · 16 min · ●●●**
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
# Now it trains the network on four real ranks. The loss is drawn over the steps and over the *bytes* that a rank has sent, counted by the tracer. Of the labels, 30 % are wrong:
# the gradients then do not vanish, as with data that a network cannot learn by heart. A third form takes the idea of **0/1 Adam**: with $v$ frozen, the change of `x` is linear in the
# momentum. So a rank can take several steps alone and send the sum of its changes once: here every fourth step of the compressed phase.
#
# **Predict** the bytes of each training, as a share of those of Adam in fp32 without compression. (The switch comes after step 104 of 200. The cell takes some seconds, or a minute where four ranks share a core.)

# %% id="predict_adam" tags=["prediction"]
predicted_share = {"1-bit Adam": None, "every fourth step": None}

# %% id="show_adam" tags=["demo", "read"]
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import Explain, run_ranks

require_numbers(predicted_share)
BETAS, RATE, WARMUP = (0.9, 0.95), 0.006, 10
KINDS = ("Adam", "1-bit Adam", "every fourth step")


class SometimesAdam(OneBitAdam):
    """Sends every fourth compressed step; in between, a rank follows its own momentum."""

    def step(self, gradient: torch.Tensor) -> None:
        if not self.frozen_at:
            super().step(gradient)
            self.together, self.own = self.x.clone(), []  # after the last exchange
            return
        self.momentum = self.momentum.lerp(gradient, 1 - self.beta1)
        self.own.append(self.momentum)
        root = (self.variance / (1 - self.beta2**self.frozen_at)).sqrt() + self.eps
        self.x -= self.lr * self.momentum / root
        if len(self.own) == 4:
            self.momentum = self.mean(sum(self.own) / 4)
            self.x.copy_(self.together - 4 * self.lr * self.momentum / root)
            self.together, self.own = self.x.clone(), []


def trained_by_adam(kind: str, steps: int) -> tuple[list[float], list[float], int, list[float]]:
    """Return the losses (of rank 0), the bytes sent until each step, `frozen_at` and the norms."""
    rank, data = dist.get_rank(), [samples_of(other, 4096, wrong=0.3) for other in range(4)]
    everything, x = [torch.cat([part[:512] for part in parts]) for parts in zip(*data)], network()
    make = SometimesAdam if kind == "every fourth step" else OneBitAdam
    adam = make(x, 0.0, BETAS, warmup=WARMUP if kind != "Adam" else steps + 1)
    generator, losses, sent = torch.Generator().manual_seed(10 + rank), [], []
    for step in range(1, steps + 1):
        some = torch.randint(4096, (32,), generator=generator)
        adam.lr = RATE * min(1, step / WARMUP)
        with trace_collectives() as trace:
            adam.step(gradient_of(x, *(part[some] for part in data[rank])))
        sent.append(trace.ring_bytes(rank=rank))
        losses.append(float(loss_of(x, *everything)) if rank == 0 else 0.0)
    return losses, torch.tensor(sent).cumsum(0).tolist(), adam.frozen_at, adam.norms


runs = {kind: run_ranks(trained_by_adam, 4, kind, STEPS)[0] for kind in KINDS}
total = {kind: sent[-1] / runs["Adam"][1][-1] for kind, (_, sent, *_) in runs.items()}
print(compared(predicted_share, {kind: total[kind] for kind in predicted_share}))
for kind, (found, sent, frozen, _) in runs.items():
    megabytes = f"{sent[-1] / 1e6:5.2f} MB by a rank"
    print(f"{kind:18} loss {found[-1]:.3f}, {megabytes}, frozen after step {frozen or '-'}")
figures.by_bytes({kind: run[:2] for kind, run in runs.items()}, runs["1-bit Adam"][2])

# %% [markdown] id="raw_text"
# Why does the rule read the *corrected* $\hat v$? Here are both norms in the training with Adam, and the first step at which your rule is true for each.

# %% id="show_raw" tags=["demo", "read"]
corrected = runs["Adam"][3]
both = {"corrected v": corrected}
both["v"] = [norm * (1 - BETAS[1] ** step) for step, norm in enumerate(corrected, start=1)]
fires = {}
for name, norms in both.items():
    steps = (t for t in range(1, len(norms) + 1) if is_stable(norms[:t], BETAS[1], WARMUP))
    fires[name] = next(steps, None)
    print(f"{name:12} the rule is true at step {fires[name]}")
figures.variance(both, fires)

# %% [markdown] id="adam_after"
# Over steps the curves are nearly one; over bytes they part at the switch (the grey line). Beyond it, one bit sends 96.8 % less than fp32 (and 93.6 % less than fp16) for these 4,608 elements; in a large
# network the scales hardly count, and it is 96.9 % (and 93.8 %). What remains are the bytes of the *warm-up*: 0/1 Adam also shortens that, by freezing the variance from time to time. The uncorrected
# $v$ starts at zero and grows at first: compared with such an early step its ratio is above 1, and the rule is true at the first step at which it can be.
#
# ## 8 · When does compression lose?
#
# **Core · 8 min · ●●○**
#
# Compression has a price that bytes do not show: it computes (*coding*), it may need more messages, and some forms cannot be **overlapped** with backward. Describe a scheme by
#
# | key | |
# |---|---|
# | `"messages"`, `"nbytes"` | messages that follow one another, and the bytes that a rank sends in all: $\alpha \cdot \text{messages} + \beta \cdot \text{nbytes}$ seconds |
# | `"coding"` | seconds in which the GPU compresses and decompresses: it computes nothing else |
# | `"hidden"` | whether communication runs during backward and coding. If it does, a step takes the longer of the two; if not, their sum |
#
# Write the seconds of backward with its communication.


# %% nbgrader={"grade_id": "pays", "solution": true}
def step_seconds(scheme: dict, alpha: float, beta: float, backward: float) -> float:
    """Return the seconds of backward, coding and communication. beta: seconds per byte."""
    ### BEGIN SOLUTION
    communication = alpha * scheme["messages"] + beta * scheme["nbytes"]
    computation = backward + scheme["coding"]
    return max(computation, communication) if scheme["hidden"] else computation + communication
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
SHAPES = [p.shape for p in Llama(model_config(MODEL), device="meta").parameters()]
PASSES = 10 * 4 * PARAMETERS / A100.bandwidth


def scheme_of(name: str, kept: int, exchanges: int, coding: float, hidden: bool) -> dict:
    """Describe a scheme for all layers of the model; vectors are sent exactly."""
    layers = [shape for shape in SHAPES if len(shape) == 2]
    sent = sum(sent_bytes(name, *shape, RANKS, kept) for shape in layers)
    sent += sum(sent_bytes("fp32", *shape, 1, RANKS) for shape in SHAPES if len(shape) == 1)
    return {"messages": exchanges * (RANKS - 1), "nbytes": sent, "coding": coding, "hidden": hidden}


SCHEMES = {
    "fp32": scheme_of("fp32", 1, 2, 0.0, True),
    "fp32, not overlapped": scheme_of("fp32", 1, 2, 0.0, False),
    "fp16": scheme_of("fp16", 1, 2, 2 * PASSES / 10, True),
    "PowerSGD, rank 4": scheme_of("low-rank", 4, 4, PASSES, True),
    "one bit": scheme_of("one-bit", 1, 4, PASSES, False),
}
GBITS = [2 ** (power / 1024) for power in range(11_265)]  # 1 to 2048 Gb/s
links = [(14e-6, 8 / (1e9 * speed), BACKWARD) for speed in GBITS]
seconds = {name: [step_seconds(one, *link) for link in links] for name, one in SCHEMES.items()}
winners = [min(seconds, key=lambda name: seconds[name][place]) for place in range(len(links))]
print("fastest:", {name: f"up to {speed:.0f} Gb/s" for name, speed in zip(winners, GBITS)})
exact = {"exact is fastest above": GBITS[winners.index("fp32")]}
print(compared(predicted_bandwidth, exact, "{:.0f} Gb/s".format))
figures.at_scale(GBITS, seconds, predicted_bandwidth, exact)

# %% [markdown] id="pays_after"
# Above 119 Gb/s the exact sum is hidden behind backward, and any coding only adds time. Below 58 Gb/s PowerSGD is the fastest, on slow links by far. Between them fp16 is: its half of the bytes is hidden too,
# and its coding is the cheapest. Then look at the two exact lines: near 64 Gb/s *overlap* saves up to a whole backward pass, and costs nothing. So the first question is not "which compression?" but "**why is communication not overlapped?**": one bucket
# for everything, a wait in backward, gradients that are needed at once (clipping), or a network that is badly configured.
#
# The IDRIS course (see the references) has a table of five rates: fp16 2, PowerSGD 984, with fp16 1,969, *batched* (all gradients as one square matrix) 1,946, with fp16 3,892. A rate means nothing without model and rank, which it does not name:
# `python -m benchmarks compression` counts 1,369 for PowerSGD and 17,577 for the batched form (Llama 3.2 1B, rank 1, both in fp32). And it is not the speed-up: of an hour of communication a rate of 984 leaves less than four seconds, one of 1,969 less than two.
#
# ## 9 · The same with PyTorch
#
# On Monday you write
#
#     state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=1000)
#     model.register_comm_hook(state, powerSGD_hook)
#
# and DDP calls the hook with each bucket. The next cell calls it with the gradient of one layer, in the form of your class. It passes your checks of PowerSGD.

# %% id="run_standard" tags=["demo", "read"]
from types import SimpleNamespace

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks


def bucket_of(gradient: torch.Tensor) -> SimpleNamespace:
    """Return what DDP passes to a hook: here with the gradient of one layer."""
    flat = gradient.flatten().clone()
    has = {"index": 0, "is_last": True, "buffer": flat, "gradients": [flat.view(gradient.shape)]}
    return SimpleNamespace(**{name: lambda value=value: value for name, value in has.items()})


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
        return hooks.powerSGD_hook(self.state, bucket_of(gradient)).wait().view(gradient.shape)


lab.check("powersgd", instead={"PowerSGD": Standard})

# %% [markdown] id="standard_table_text"
# Both, step by step on the same gradients of two ranks: a matrix of 512 × 512, rank 4; the lines of PyTorch are those of the adapter. PyTorch's `batched_powerSGD_hook` is no row of the table: in the releases 2.8 to 2.15 it raises an AssertionError. And with several buckets
# on gloo, `powerSGD_hook` starts its second all-reduces in another order on each rank; here there is one bucket.

# %% id="show_standard" tags=["demo", "read"]
import time

from dlo_lib.labkit.side_by_side import Form, lines_of, table


def both_forms(side: int = 512, steps: int = 6) -> tuple[float, dict[str, dict[str, float]]]:
    """Return the largest difference, and for each form its bytes and seconds of a step."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    q, common = (torch.randn(side, other, generator=generator) for other in (4, 8))
    noise = torch.Generator().manual_seed(1 + dist.get_rank())
    forms, apart = {"yours": PowerSGD(q.clone()), "PyTorch": Standard(q.clone())}, 0.0
    cost = {name: {"seconds": 1e9, "nbytes": 0.0} for name in forms}
    for _ in range(steps):
        gradient, results = common @ common.T + torch.randn(side, side, generator=noise), []
        for name, form in forms.items():
            with trace_collectives() as trace:
                began = time.perf_counter()
                results.append(form(gradient))
            cost[name]["seconds"] = min(time.perf_counter() - began, cost[name]["seconds"])
            cost[name]["nbytes"] = trace.ring_bytes("all_reduce", dist.get_rank())
        apart = max(apart, float((results[0] - results[1]).norm() / results[1].norm()))
    return apart, cost


apart, cost = run_ranks(both_forms, 2, explain=Explain.OFF)[0]
code = {"yours": (PowerSGD,), "PyTorch": (bucket_of, Standard)}
print(table([Form(name, lines_of(*code[name]), **cost[name]) for name in code]))
print(f"largest difference of the results: {apart:.1e}; fp32 sends {512 * 512 * 4:,} bytes")

# %% [markdown] id="standard_lesson"
# Same results, same bytes. A step takes milliseconds, and its time depends on what else the machine does. PyTorch's hook also sorts the gradients of a bucket by shape, sends vectors exactly, and chains its exchanges so that they run during backward.
# For the DDP of this course, the hooks of `dlo_lib.parallel.ddp.compressed_sums` have the compressions of this lab, with `state_dict`.
#
# ## 10 · Quiz
#
# **Core · 5 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests only that every question has an answer; grading counts the right ones.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": ""}
quiz = {"q1": "c", "q2": "b", "q3": "a", "q4": "d"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
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
