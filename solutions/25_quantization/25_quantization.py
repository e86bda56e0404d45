# %% [markdown] id="title"
# # 25 · Quantization
#
# **What you will do.** A trained model is too large for its device, and each generated token reads every weight once. You store the
# weights of a small Llama in 8, 4 and fewer bits, and multiply integers instead of floats. Plain rounding loses more than it should,
# because a few channels are unlike the others; **LLM.int8()**, **SmoothQuant**, **AWQ** and **GPTQ** are four answers to this, and
# training with rounded weights is the fifth. At the end one figure compares bytes and perplexity of all of them.
#
# You need no GPU. Builds on lab 01 (formats of numbers).
#
# The core exercises, predictions and the quiz take about 90 minutes; with the text and the demos plan 1 h 50. Each exercise
# has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you are stuck,
# `lab.use_reference("name")` lets you continue without its points.
#
# Words: quantization (*quantification*), zero-point (*point zéro*), calibration (*calibration*), outlier (*valeur aberrante*),
# perplexity (*perplexité*), straight-through estimator (*estimateur direct*).

# %% id="setup"
import os

import torch
from torch import Tensor

from dlo_lib.grading import Lab

STEPS = int(os.environ.get("DLO_STEPS", 500))  # of the training of the small Llama
torch.set_num_threads(1)  # tensors of this size are slower with two
lab = Lab(globals())

# %% [markdown] id="grid_text"
# ## 1 · Two grids
#
# **Core · 10 min · ●○○**
#
# A grid of $b$ bits maps a number $x$ to an integer $q$, and back to a number $x'$ near $x$:
#
# $$q = \mathrm{clamp}(\mathrm{round}(x / S) + Z, q_{min}, q_{max}) \qquad x' = (q - Z)\,S$$
#
# | grid | integers | scale $S$ | zero-point $Z$ |
# |---|---|---|---|
# | `absmax` | $-(2^{b-1} - 1)$ to $2^{b-1} - 1$ | $\max \vert x \vert / (2^{b-1} - 1)$ | 0 |
# | `zero_point` | $-2^{b-1}$ to $2^{b-1} - 1$ | $(\beta - \alpha) / (2^b - 1)$ | $-2^{b-1} - \mathrm{round}(\alpha / S)$ |
#
# The range from $\alpha$ to $\beta$ contains all $x$ **and 0**: $\alpha = \min(x, 0)$, $\beta = \max(x, 0)$. Padding, masks and ReLU
# write exact zeros, and $q = Z$ must represent them without an error. Where all $x$ are 0, both grids have the scale 1.
#
# Write both functions for $b$ from 2 to 8. The integers are `torch.int8`. Scale and zero-point are tensors without dimensions, or numbers.
#
# **Predict** first: how many times smaller is the error of 8 bits than that of 4 bits?

# %% id="predict_grid" tags=["prediction"]
expected_grid = {"error of 4 bits / error of 8 bits": None}


# %% nbgrader={"grade_id": "grid", "solution": true}
def absmax(x: Tensor, bits: int) -> tuple:
    """Return q (int8 of the shape of `x`) and the scale."""
    ### BEGIN SOLUTION
    most = 2 ** (bits - 1) - 1
    largest = x.abs().max()
    scale = largest / most if largest > 0 else torch.ones_like(largest)
    return torch.round(x / scale).clamp(-most, most).to(torch.int8), scale
    ### END SOLUTION


def zero_point(x: Tensor, bits: int) -> tuple:
    """Return q (int8 of the shape of `x`), the scale and the zero-point."""
    ### BEGIN SOLUTION
    least = -(2 ** (bits - 1))
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / (2**bits - 1) if high > low else torch.ones_like(low)
    zero = least - torch.round(low / scale)
    q = (torch.round(x / scale) + zero).clamp(least, -least - 1)
    return q.to(torch.int8), scale, zero
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_grid", "grade": true}
lab.check("grid")

# %% [markdown] id="model_text"
# The next cell trains the model of this lab: a Llama with two blocks of width 64, on the sources of Python, with one thread, for 10 to 20
# seconds, longer on a busy machine; it prints the loss every 50 steps. The measure is its **perplexity** on text that it has not seen: $\exp(\text{loss})$, the number of tokens among which it would choose
# with this loss if all were equally likely. Then it rounds one weight matrix, and its absolute values, with 2 to 8 bits.

# %% id="show_grid" tags=["demo"]
import figures
import small

from dlo_lib.labkit import columns
from dlo_lib.labkit.predictions import compared, require_numbers

require_numbers(expected_grid)
model = small.trained(STEPS)
whole = small.perplexity(model)
print(f"perplexity in fp32: {whole:.3f}")


def decibels(x: Tensor, rounded: Tensor) -> float:
    """10 log10 of the energy of x divided by that of the error."""
    return float(10 * torch.log10(x.square().sum() / (x - rounded).square().sum()))


weight = small.linears(model)["0.self_attn.o_proj"].weight
curves = {}
for name, x in {"weights": weight, "|weights|": weight.abs()}.items():
    for grid in (absmax, zero_point):
        curve = curves[f"{name}, {grid.__name__}"] = {}
        for bits in range(2, 9):
            q, scale, *zero = grid(x, bits)
            curve[bits] = decibels(x, (q - (zero[0] if zero else 0)) * scale)
apart = curves["weights, absmax"][8] - curves["weights, absmax"][4]
print(compared(expected_grid, {"error of 4 bits / error of 8 bits": 10 ** (apart / 20)}))
figures.bits_and_error(curves)

# %% [markdown] id="grid_lesson"
# Each bit doubles the number of integers, so it halves the step and the error: 6 dB a bit. With few bits it is a little more for `absmax`,
# because it leaves out one integer. For numbers of one sign, half of the integers of `absmax` are never used, which costs one bit.

# %% [markdown] id="store_text"
# ## 2 · Groups, and bytes
#
# **Core · 14 min · ●●○**
#
# One large weight widens the grid of a whole matrix. A smaller part has a smaller range: a row of the matrix (*per channel*), or a **group** of
# $g$ consecutive weights of a row. Each part has a separate `absmax` grid with one scale, so that small groups cost bytes.
#
# - `quantize_groups(w, bits, group)`: the integers of `w` (out, in) as int8 (out, in), and the scales (out, in / group), in the dtype of `w`. `group`
#   divides `in`. A group of zeros has the scale 1.
# - `store4(w, group)`: what a file contains, two tensors: the integers of 4 bits (−7 to 7), *two in each byte*, and the scales in `float16`. PyTorch has no
#   int4 for this: pack them with `<<` and `|` into `torch.uint8`. `in` is even. The check counts the bytes of what you return: $1/2 + 2/g$ for each weight.
# - `load4(packed, scale)`: the weights in `float32`. It runs in another process, and gets only the two tensors.
#
# Each weight must come back with an error of at most half a step, so the sign of the integer must survive the packing. You may divide
# by the scale in float32 or by the one rounded to float16: either is fine for the half step.


# %% nbgrader={"grade_id": "store", "solution": true}
def quantize_groups(w: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Return the int8 of absmax grids for groups, and their scales (out, in / group)."""
    ### BEGIN SOLUTION
    most = 2 ** (bits - 1) - 1
    parts = w.unflatten(1, (-1, group))
    scale = parts.abs().amax(2) / most
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    q = torch.round(parts / scale[:, :, None]).clamp(-most, most)
    return q.flatten(1).to(torch.int8), scale
    ### END SOLUTION


def store4(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the packed integers of 4 bits, and the scales in float16."""
    ### BEGIN SOLUTION
    q, scale = quantize_groups(w, 4, group)
    nibbles = (q & 15).to(torch.uint8)
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4), scale.half()
    ### END SOLUTION


def load4(packed: Tensor, scale: Tensor) -> Tensor:
    """Return the weights (out, in) in float32."""
    ### BEGIN SOLUTION
    nibbles = torch.stack([packed & 15, packed >> 4], 2).flatten(1).to(torch.int8)
    q = torch.where(nibbles > 7, nibbles - 16, nibbles)
    group = q.shape[1] // scale.shape[1]
    return (q.unflatten(1, (-1, group)) * scale[:, :, None].float()).flatten(1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_store", "grade": true}
lab.check("store")

# %% [markdown] id="store_after"
# The cell rounds all matrices of the blocks. Read the last column: do smaller groups help as much as you expect?

# %% id="show_store" tags=["demo"]
def in_groups(bits: int, group: int | None):
    """A function that rounds a weight in groups; None: a group is the whole row."""

    def change(w: Tensor, x: Tensor) -> Tensor:
        q, scale = quantize_groups(w, bits, group or w.shape[1])
        return (q.unflatten(1, (-1, group or w.shape[1])) * scale[:, :, None]).flatten(1)

    return change


table = [("bits", "a scale for", "bytes a weight", "perplexity")]
for bits in (8, 4, 3):
    for group in (None, 32, 16):
        value = small.perplexity(small.with_weights(model, in_groups(bits, group)))
        cost = bits / 8 + 2 / (group or 64)
        table.append((str(bits), f"{group or 'a row'}", f"{cost:.2f}", f"{value:.3f}"))
print(columns(table))

# %% [markdown] id="store_lesson"
# They hardly help: something else than a few large weights causes the error. Section 7 finds it.

# %% [markdown] id="calibrate_text"
# ## 3 · The range of activations
#
# **Core · 8 min · ●○○**
#
# Weights are known; activations differ from batch to batch. A *dynamic* grid is computed for each batch, which takes time in each step. A
# *static* grid is fixed before, from a few batches: the **calibration**. The range from the smallest to the largest number seen is the first idea.
# One broken batch ruins it, because the grid stays wide forever. The $p$-th **percentile** ignores it: a few numbers are clamped, and all others
# have a smaller error.
#
# Write `calibrate`: the numbers of *all* batches together count, of whatever shape they are. `low` is the $(100 - p)$-th percentile and `high` the
# $p$-th, with linear interpolation as in `torch.quantile`; $p = 100$ is min-max.


# %% nbgrader={"grade_id": "calibrate", "solution": true}
def calibrate(batches: list[Tensor], p: float) -> tuple[float, float]:
    """Return (low, high), the (100 - p)-th and the p-th percentile of all numbers."""
    ### BEGIN SOLUTION
    every = torch.cat([batch.flatten() for batch in batches])
    low, high = torch.quantile(every, torch.tensor([1 - p / 100, p / 100], dtype=every.dtype))
    return low.item(), high.item()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_calibrate", "grade": true}
lab.check("calibrate")

# %% id="show_calibrate" tags=["demo"]
name = "1.self_attn.o_proj"
seen = [small.inputs(model, small.batch(seed)[:, :-1])[name] for seed in range(8)]
broken = [*seen[:-1], torch.cat([seen[-1], 30 * seen[-1][:8]])]
fresh = small.inputs(model, small.batch(99, test=True)[:, :-1])[name]
table = [("calibration", "8 good batches", "one broken batch")]
for p in (100, 99.99, 99.9, 99, 95):
    row = []
    for batches in (seen, broken):
        scale = max(map(abs, calibrate(batches, p))) / 127
        row.append(f"{decibels(fresh, torch.round(fresh / scale).clamp(-127, 127) * scale):.1f} dB")
    table.append((f"percentile {p}" if p < 100 else "min-max", *row))
print(columns(table))

# %% [markdown] id="product_text"
# ## 4 · The product of integers
#
# **Core · 14 min · ●●○**
#
# Stored integers save bytes. To save *time* in a large batch the product itself must be one of integers: tensor cores multiply int8 twice as fast as
# fp16, and add up in int32. With $x \approx S_x (q_x - Z_x)$ and $w \approx S_w\, q_w$, where $S_w$ has a number for each row of $w$:
#
# $$x\,w^T + b \;\approx\; S_x S_w \left[\, (q_x - Z_x)\, q_w^T + \mathrm{round}\!\left(\frac{b}{S_x S_w}\right) \right]$$
#
# Everything in the bracket is an integer. $Z_x$ is the same for a whole row, so that $-Z_x \sum_k q_w$ can be computed once and added to the bias.
#
# - `accumulate(qx, zero, qw, bias)` returns the bracket in `torch.int32`, *exactly*: `qx` int8 (tokens, in), `zero` an int, `qw` int8 (out, in), `bias`
#   int32 (out,). Do not compute in float32: above $2^{24}$ it has no odd numbers. And $q_x - Z_x$ does not fit in 8 bits.
# - `static_linear(x, scale_x, zero, qw, scale_w, bias)` rounds `x` (tokens, in) to the grid of a calibration (the integers −128 to 127; clamp), rounds
#   the bias, calls `accumulate`, and returns floating-point numbers (tokens, out) in the dtype of `x`. `scale_x` is a number, `scale_w` (out,).


# %% nbgrader={"grade_id": "product", "solution": true}
def accumulate(qx: Tensor, zero: int, qw: Tensor, bias: Tensor) -> Tensor:
    """Return (qx - zero) qw^T + bias, int32 (tokens, out)."""
    ### BEGIN SOLUTION
    wide = qw.to(torch.int32)
    folded = bias - zero * wide.sum(1, dtype=torch.int32)
    return qx.to(torch.int32) @ wide.t() + folded
    ### END SOLUTION


def static_linear(
    x: Tensor, scale_x: float, zero: int, qw: Tensor, scale_w: Tensor, bias: Tensor
) -> Tensor:
    """Return x w^T + bias by a product of integers, (tokens, out) in the dtype of x."""
    ### BEGIN SOLUTION
    qx = (torch.round(x / scale_x) + zero).clamp(-128, 127).to(torch.int8)
    scale = scale_x * scale_w
    return scale * accumulate(qx, zero, qw, torch.round(bias / scale).to(torch.int32))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_product", "grade": true}
lab.check("product")

# %% [markdown] id="outliers_text"
# ## 5 · Outliers
#
# **Core · 12 min · ●●○**
#
# From a few billion parameters on, language models have **outliers**: some channels of the activations are 20 to 100 times larger than the
# others, in every token. A training of seconds does not give them, so `small.trained` plants them: it multiplies four channels behind each norm by
# 100 and divides the weights that read them. The function of the model is unchanged, as the perplexity showed.
#
# A grid for each token must contain its outliers, and most other channels are then rounded to 0. **LLM.int8()** takes them out of the product:
#
# $$x\,w^T = x_O\, w_O^T + x_R\, w_R^T$$
#
# The first product stays in floating point, and the second is one of int8.
#
# - `outlier_columns(x, threshold)`: the indices of the columns of `x` (tokens, in) in which at least one token has $|x| \geq$ threshold; int64, ascending.
# - `llm_int8(x, w, threshold)`: the product with `w` (out, in). The rest of `x` has an `absmax` grid of 8 bits for each token, the rest of `w`
#   one for each row; the largest values are those of the *rest*. Every column, or none, may be an outlier; a row of zeros has the scale 1. Where no column is left,
#   skip the int8 part: the `amax` of no columns is an error. The result is in the dtype of `x`; the sum may be computed in floating point here.
#
# **Predict**: the perplexity with int8 for weights and activations without any decomposition. If nothing is lost, it is the perplexity that section 1 printed.

# %% id="predict_outliers" tags=["prediction"]
expected_outliers = {"plain int8, perplexity": None}


# %% nbgrader={"grade_id": "outliers", "solution": true}
def outlier_columns(x: Tensor, threshold: float) -> Tensor:
    """Return the indices of the outlier columns, int64, ascending."""
    ### BEGIN SOLUTION
    return (x.abs() >= threshold).any(0).nonzero().flatten()
    ### END SOLUTION


def llm_int8(x: Tensor, w: Tensor, threshold: float) -> Tensor:
    """Return x w^T with the outlier columns in floating point, and the others in int8."""
    ### BEGIN SOLUTION
    out = torch.zeros(x.shape[1], dtype=torch.bool)
    out[outlier_columns(x, threshold)] = True
    result = x[:, out] @ w[:, out].t()
    if out.all():
        return result
    qx, scale_x = quantize_groups(x[:, ~out], 8, int((~out).sum()))
    qw, scale_w = quantize_groups(w[:, ~out], 8, int((~out).sum()))
    return result + (qx.to(x.dtype) @ qw.to(x.dtype).t()) * scale_x * scale_w.t()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_outliers", "grade": true}
lab.check("outliers")

# %% id="show_outliers" tags=["demo"]
from functools import partial

require_numbers(expected_outliers)
inputs = small.inputs(model, small.batch(0)[:, :-1])
x, w = inputs["0.self_attn.q_proj"], small.linears(model)["0.self_attn.q_proj"].weight
int8_product = partial(llm_int8, threshold=float("inf"))
plain = small.perplexity(small.with_product(model, int8_product))
print(compared(expected_outliers, {"plain int8, perplexity": plain}), "\n")
table = [("threshold", "columns of 64 in floating point", "perplexity")]
for threshold in (200.0, 50.0, 20.0, 6.0):
    product = partial(llm_int8, threshold=threshold)
    value = small.perplexity(small.with_product(model, product))
    table.append((f"{threshold:g}", str(len(outlier_columns(x, threshold))), f"{value:.3f}"))
print(columns([*table, ("fp32", "64", f"{whole:.3f}")]))
figures.channels(x.abs().amax(0), w.abs().amax(0))

# %% [markdown] id="smooth_text"
# ## 6 · SmoothQuant
#
# **Core · 10 min · ●●○**
#
# A decomposition needs two products, and a search for outliers in each step. But the figure shows more: the activations are hard, and the *weights* of these
# channels are easy. **SmoothQuant** moves the difficulty, once and before the model runs:
#
# $$x\,w^T = (x / s)\,(w\,s)^T \qquad s_j = \frac{\max |x_j|^{\,a}}{\max |w_j|^{\,1 - a}}$$
#
# for each input channel $j$. The division is free: `x` comes out of a norm, whose weight (`gain`) is divided by $s$. All matrices that read this norm
# (queries, keys and values) share $s$, so $\max |w_j|$ goes over the rows of all of them. A channel without activations, or without weights,
# must not give infinity: raise both maxima to at least $10^{-5}$.
#
# Write `smooth`. It changes no argument.


# %% nbgrader={"grade_id": "smooth", "solution": true}
def smooth(
    gain: Tensor, weights: list[Tensor], largest: Tensor, a: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the new gain (in,) and the new weights; `largest` (in,) has max |x_j|."""
    ### BEGIN SOLUTION
    of_weights = torch.cat(weights).abs().amax(0).clamp(min=1e-5)
    s = largest.clamp(min=1e-5) ** a / of_weights ** (1 - a)
    return gain / s, [w * s for w in weights]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_smooth", "grade": true}
lab.check("smooth")

# %% id="show_smooth" tags=["demo"]
import copy

table = [("exponent a", "fp32, smoothed", "int8, smoothed")]
for a in (0.0, 0.25, 0.5, 0.75, 1.0):
    smoothed = copy.deepcopy(model)
    names = {id(linear): name for name, linear in small.linears(smoothed).items()}
    for norm, linears in small.readers(smoothed):
        largest = inputs[names[id(linears[0])]].abs().amax(0)
        gain, weights = smooth(norm.weight, [linear.weight for linear in linears], largest, a)
        norm.weight.data = gain
        for linear, new in zip(linears, weights):
            linear.weight.data = new
    rounded = small.with_product(smoothed, int8_product)
    values = small.perplexity(smoothed), small.perplexity(rounded)
    table.append((f"{a:g}", *(f"{value:.3f}" for value in values)))
print(columns([*table, ("no smoothing", f"{whole:.3f}", f"{plain:.3f}")]))

# %% [markdown] id="awq_text"
# ## 7 · Which weights matter? (AWQ)
#
# **Core · 15 min · ●●○**
#
# From here on only weights are rounded, to 4 bits or fewer. Which of them must be protected? First an experiment. Rounding in section 2 lost
# more than one expects of weights that look harmless. The next cell prints what 3 bits cost if all weights are rounded.

# %% id="show_rounded" tags=["demo"]
BITS, GROUP = 3, 32
all_rounded = small.perplexity(small.with_weights(model, in_groups(BITS, GROUP)))
print(f"perplexity in fp32: {whole:.3f}; all weights rounded to {BITS} bits: {all_rounded:.3f}")

# %% [markdown] id="salient_text"
# Now the weights of 4 of 64 input channels stay in floating point, also with 3 bits for the others: the channels with the largest weights, 4 random
# ones, or those with the largest *activations*. **Predict** the three perplexities.

# %% id="predict_salient" tags=["prediction"]
expected_salient = {"largest weights": None, "random": None, "largest activations": None}

# %% id="show_salient" tags=["demo"]
require_numbers(expected_salient)


def protecting(choose) -> float:
    """The perplexity if a few columns of each matrix stay in floating point."""

    def change(w: Tensor, x: Tensor) -> Tensor:
        kept = choose(w, x).topk(w.shape[1] // 16).indices
        new = in_groups(BITS, GROUP)(w, x)
        new[:, kept] = w[:, kept]
        return new

    return small.perplexity(small.with_weights(model, change))


def scaled(factor: float):
    """Scale the columns of outliers before rounding, and divide afterwards."""

    def change(w: Tensor, x: Tensor) -> Tensor:
        mean = x.abs().mean(0)
        s = torch.where(mean > 20 * mean.median(), factor, 1.0)
        return in_groups(BITS, GROUP)(w * s, x) / s

    return change


generator = torch.Generator().manual_seed(0)
choices = {
    "largest weights": lambda w, x: w.abs().mean(0),
    "random": lambda w, x: torch.rand(w.shape[1], generator=generator),
    "largest activations": lambda w, x: x.abs().mean(0),
}
found = {name: protecting(choose) for name, choose in choices.items()}
print(compared(expected_salient, found, "{:.3f}".format))
bars = {"all rounded": all_rounded}
bars |= {f"kept: {name}": value for name, value in found.items()}
for factor in (2, 30, 300):
    bars[f"scaled by {factor}"] = small.perplexity(small.with_weights(model, scaled(factor)))
figures.ablation(bars, whole)

# %% [markdown] id="awq_after"
# What matters is not the size of a weight but that of its activation: the error of the output is $\sum_j \Delta w_j\, x_j$. Columns of mixed
# formats are slow on a GPU, and the last bars show another way: *scale* the columns of outliers before rounding and divide afterwards. While the
# largest weight of the group stays the same, the step is the same, and the error of the scaled columns is divided by the factor. With a factor that is too
# large, they widen the grid for all others. **AWQ** searches between the two. For $k = 0, \dots,$ `steps` it tries
#
# $$s_j = \left(\mathrm{mean} |x_j|\right)^{k / \mathtt{steps}} \qquad \text{error} = \left\Vert x \left( Q(w\,s) / s - w \right)^T \right\Vert^2$$
#
# and keeps the exponent with the smallest error of the *output*. $Q$ rounds in groups, as `quantize_groups`. Raise each mean to at least $10^{-4}$.
# Write `awq`: it returns the factors (in,) and the exponent. The factors may be multiplied by any positive number.


# %% nbgrader={"grade_id": "awq", "solution": true}
def awq(x: Tensor, w: Tensor, bits: int, group: int, steps: int) -> tuple[Tensor, float]:
    """Return the best factors (in,) for the weights `w` (out, in), and their exponent."""
    ### BEGIN SOLUTION
    mean = x.abs().mean(0).clamp(min=1e-4)
    found = []
    for step in range(steps + 1):
        s = mean ** (step / steps)
        q, scale = quantize_groups(w * s, bits, group)
        rounded = (q.unflatten(1, (-1, group)) * scale[:, :, None]).flatten(1) / s
        found.append((x @ (rounded - w).t()).square().sum().item())
    best = found.index(min(found)) / steps
    return mean**best, best
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_awq", "grade": true}
lab.check("awq")

# %% id="show_awq" tags=["demo"]
exponents = []


def by_awq(w: Tensor, x: Tensor) -> Tensor:
    """Round with the factors of the search."""
    s, exponent = awq(x, w, BITS, GROUP, 20)
    exponents.append(exponent)
    return in_groups(BITS, GROUP)(w * s, x) / s


bars["searched (AWQ)"] = small.perplexity(small.with_weights(model, by_awq))
print("exponents:", *(f"{exponent:.2f}" for exponent in exponents))
figures.ablation(bars, whole)

# %% [markdown] id="gptq_text"
# ## 8 · Compensate what is lost (GPTQ)
#
# **Optional · 20 min · ●●●**
#
# Rounding to the nearest integer is the best that *one* weight can do. A row of weights can do better, because inputs are correlated: the error that column $j$
# makes can be compensated by the columns that are not yet rounded. For the squared error of the output, $H = x^T x + \lambda I$ with
# $\lambda =$ `damping` times the mean of the diagonal of $x^T x$. **GPTQ** takes the columns from the first to the last. For column $j$, with the matrix $H_j$ of
# rows and columns $j, j + 1, \dots$ of $H$:
#
# $$q_j = \mathrm{round}(w_j / S) \qquad e = \frac{w_j - q_j S}{[H_j^{-1}]_{jj}} \qquad w_k \leftarrow w_k - e\,[H_j^{-1}]_{jk} \quad (k > j)$$
#
# Each row of `w` has one scale $S$: that of `absmax` for the weights *before* any correction. The inverses of all $H_j$ come out of one factor: with the upper triangular $U$
# of $H^{-1} = U^T U$ (`torch.linalg.cholesky(..., upper=True)`), $[H_j^{-1}]_{jk} / [H_j^{-1}]_{jj} = U_{jk} / U_{jj}$.
#
# Write `gptq`: integers (out, in) int8, clamped, and scales (out, 1).


# %% nbgrader={"grade_id": "gptq", "solution": true}
def gptq(x: Tensor, w: Tensor, bits: int, damping: float) -> tuple[Tensor, Tensor]:
    """Return the integers of `w` (out, in) for inputs `x` (tokens, in), and the scales."""
    ### BEGIN SOLUTION
    most = 2 ** (bits - 1) - 1
    h = x.t() @ x
    h = h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
    u = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    scale = quantize_groups(w, bits, w.shape[1])[1]
    left, q = w.clone(), torch.zeros_like(w, dtype=torch.int8)
    for j in range(w.shape[1]):
        column = left[:, j : j + 1]
        q[:, j : j + 1] = torch.round(column / scale).clamp(-most, most).to(torch.int8)
        error = (column - q[:, j : j + 1] * scale) / u[j, j]
        left[:, j:] -= error * u[j, j:]
    return q, scale
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_gptq", "grade": true}
lab.check("gptq")

# %% id="show_gptq" tags=["demo"]
def by_gptq(w: Tensor, x: Tensor) -> Tensor:
    """Round a weight with compensation, in fp64."""
    q, scale = gptq(x.double(), w.double(), BITS, 0.01)
    return q * scale


rounded = small.perplexity(small.with_weights(model, in_groups(BITS, None)))
compensated = small.perplexity(small.with_weights(model, by_gptq))
print(f"{BITS} bits: rounded {rounded:.3f}, GPTQ {compensated:.3f}; fp32 {whole:.3f}")

# %% [markdown] id="qat_text"
# ## 9 · Train with rounded weights
#
# **Optional · 20 min · ●●○**
#
# With 2 bits no rounding after the training is good enough. **Quantization-aware training** rounds in each forward, so that the loss sees the rounded
# weights. But a rounding has the gradient 0 almost everywhere. The **straight-through estimator** takes the gradient of the rounded weight as that of
# the weight in floating point, which the optimizer changes: small steps add up until a weight reaches the next integer.
#
# - `fake_quantize(w, bits)`: `w` (out, in) rounded to an `absmax` grid for each row, in the dtype of `w`; the gradient passes unchanged. A row of zeros stays zero.
# - `ternary(w)`: the weights of BitNet b1.58, $G \cdot \mathrm{clamp}(\mathrm{round}(w / G), -1, 1)$ with $G = \mathrm{mean} |w|$ over the whole matrix (1 if all are 0); the
#   gradient passes unchanged.
#
# `x.detach()` stops a gradient. The check trains a small network with *its* loop: it asks your functions for the rounded weights and for the gradients, and makes the steps
# itself. The trained weights must beat the same network rounded after the training.


# %% nbgrader={"grade_id": "qat", "solution": true}
def fake_quantize(w: Tensor, bits: int) -> Tensor:
    """Return `w` on absmax grids for its rows; the gradient passes unchanged."""
    ### BEGIN SOLUTION
    q, scale = quantize_groups(w.detach(), bits, w.shape[1])
    return w + (q * scale - w).detach()
    ### END SOLUTION


def ternary(w: Tensor) -> Tensor:
    """Return the ternary weights of BitNet b1.58; the gradient passes unchanged."""
    ### BEGIN SOLUTION
    g = w.detach().abs().mean()
    g = torch.where(g > 0, g, torch.ones_like(g))
    return w + ((w / g).round().clamp(-1, 1) * g - w).detach()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_qat", "grade": true}
lab.check("qat")

# %% [markdown] id="table_text"
# ## 10 · The same with the library, in one figure
#
# `dlo_lib.compress.quantize_llama` replaces the linear layers of a Llama block by block: each block is calibrated with the rounded blocks before it,
# as in real tools. Bytes are those of the tensors that a file of the blocks contains. Which points are on the dashed line, and which method would you take for
# a phone, where memory is the limit? Which one for a server with large batches?

# %% id="show_table" tags=["demo", "read"]
from dlo_lib.compress import quantize_llama
from dlo_lib.compress.packing import stored_bytes

batches = [small.batch(seed)[:, :-1] for seed in range(2)]
settings = {
    "int8, rounded": {"method": "rtn", "bits": 8},
    "int4, rounded": {"method": "rtn", "bits": 4},
    "int4 in groups": {"method": "rtn", "bits": 4, "group_size": 32},
    "AWQ int4": {"method": "awq", "bits": 4},
    "AWQ int4 in groups": {"method": "awq", "bits": 4, "group_size": 32},
    "GPTQ int4": {"method": "gptq", "bits": 4},
    "GPTQ int4 in groups": {"method": "gptq", "bits": 4, "group_size": 32},
    "int8 product": {"method": "int8"},
    "LLM.int8()": {"method": "llm_int8"},
    "SmoothQuant": {"method": "smoothquant"},
}
points = {}
for name, setting in settings.items():
    new = quantize_llama(copy.deepcopy(model), batches=batches, **setting)
    points[name] = stored_bytes(new.layers) / 1e3, small.perplexity(new)
print(columns(figures.rows_of(points)))
print(f"fp32: {stored_bytes(model.layers) / 1e3:.1f} kB, {whole:.3f}")
figures.pareto(points, whole)

# %% [markdown] id="torchao_text"
# With **torchao** the same is one call, `quantize_(model, config)`: it replaces the weights of linear layers by tensors that know how to multiply.
# The cell compares it with the library. Where torchao is not installed, it shows what it gave on another machine: kB, and the perplexity
# divided by that in fp32.

# %% id="run_torchao" tags=["demo", "read"]
from dlo_lib.labkit.stored_results import StoredResult, measured_or_stored


def by_torchao(kind: str) -> tuple[float, float]:
    """The kB of the blocks, and the perplexity in units of that in fp32, after quantize_."""
    import torchao.quantization as ao
    from torchao.quantization.granularity import PerGroup

    new = copy.deepcopy(model)
    config = {
        "int8 weights": ao.Int8WeightOnlyConfig,
        "int8 product": ao.Int8DynamicActivationInt8WeightConfig,
        "int4 in groups of 32": partial(
            ao.IntxWeightOnlyConfig, weight_dtype=torch.int4, granularity=PerGroup(32)
        ),
    }[kind]()
    linear = torch.nn.Linear
    ao.quantize_(new.layers, config, filter_fn=lambda module, name: isinstance(module, linear))
    return stored_bytes(new.layers) / 1e3, small.perplexity(new) / whole


same = {
    "int8 weights": "int8, rounded",
    "int8 product": "int8 product",
    "int4 in groups of 32": "int4 in groups",
}
on_two_cores = StoredResult(
    "2 CPU cores",
    "2026-11-29",
    "torchao 0.18.0, torch 2.13",
    {
        "int8 weights": (79.872, 1.0027),
        "int8 product": (79.872, 1.3369),
        "int4 in groups of 32": (86.272, 1.0381),
    },
)
measurements = {kind: partial(by_torchao, kind) for kind in same}
found = measured_or_stored(measurements, on_two_cores, package="torchao")
rows = [("", "torchao, kB", "perplexity / fp32", "the library, kB", "perplexity / fp32")]
for kind, (kilobytes, ratio) in found.items():
    own_kilobytes, own = points[same[kind]]
    rows.append(
        (kind, f"{kilobytes:.1f}", f"{ratio:.3f}", f"{own_kilobytes:.1f}", f"{own / whole:.3f}")
    )
print(columns(rows))

# %% [markdown] id="torchao_lesson"
# The scales differ a little: torchao divides the largest value by 7.5 or 127.5 and uses −8 and −128 too. Its form of int4 for CPUs keeps each integer in
# a byte; its packed form needs a GPU. So count the bytes of what is stored before you believe the name of a format.

# %% [markdown] id="quiz_text"
# ## 11 · Quiz
#
# **Core · 4 min · ●○○**

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": ""}
quiz = {"q1": "b", "q2": "d", "q3": "a", "q4": "c"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Which layers are sensitive? Round one layer of `small.linears(model)` at a time to 2 bits, and give the bits of a budget to the worst ones.
# - Plant 16 outlier channels instead of 4. Which methods still work?
# - Apply `awq` first and `gptq` to the scaled weights. Do the gains add up?
#
# **What comes next.** Lab 26 removes weights instead of bits, and lab 28 serves the model.
#
# ## References
#
# - B. Jacob et al., *Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference* (2018), [arXiv:1712.05877](https://arxiv.org/abs/1712.05877)
# - T. Dettmers et al., *LLM.int8()* (2022), [arXiv:2208.07339](https://arxiv.org/abs/2208.07339)
# - G. Xiao et al., *SmoothQuant* (2023), [arXiv:2211.10438](https://arxiv.org/abs/2211.10438)
# - J. Lin et al., *AWQ* (2024), [arXiv:2306.00978](https://arxiv.org/abs/2306.00978); the ablation of section 7 follows the course MIT 6.5940
# - E. Frantar et al., *GPTQ* (2023), [arXiv:2210.17323](https://arxiv.org/abs/2210.17323)
# - Y. Bengio et al., *Estimating or Propagating Gradients Through Stochastic Neurons* (2013), [arXiv:1308.3432](https://arxiv.org/abs/1308.3432)
# - S. Ma et al., *The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits* (2024), [arXiv:2402.17764](https://arxiv.org/abs/2402.17764)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
