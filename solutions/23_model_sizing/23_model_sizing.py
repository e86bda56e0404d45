# %% [markdown] id="title"
# # 23 · Model sizing and scaling laws
#
# **What you will do.** A budget of GPU hours is given. Which size of model, on how many tokens, and which loss will it
# reach? You count parameters and FLOPs of **Llama 3.3 70B**, **ViT-G** and **CoAtNet** from their configurations, fit
# scaling laws (Kaplan, Chinchilla) to trainings of a tenth of a second, and then answer the question for a language that
# you have not seen: eight trainings from a budget that is kept for you, a prediction with an interval, and the training
# that shows whether you were right.
#
# You need no GPU. Builds on lab 13 (parameters and memory of Llama 3.2 3B).
#
# The core exercises, predictions and the quiz take about 89 minutes; with the text and the demos plan 1 h 50. Each exercise
# has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you are stuck,
# `lab.use_reference("name")` lets you continue without its points.
#
# Words: scaling law (*loi d'échelle*), compute-optimal (*optimal pour un budget de calcul*), bootstrap (*rééchantillonnage*),
# multiply-add (*multiplication-addition*).

# %% id="setup"
import math
import os
from collections.abc import Callable

import numpy as np

from dlo_lib.grading import Lab

EVERY = int(os.environ.get("DLO_EVERY", 1))  # 2: a demo trains every second width
DRAWS = int(os.environ.get("DLO_DRAWS", 15))  # of each bootstrap in section 8
LARGER = float(os.environ.get("DLO_LARGER", 8))  # FLOPs of the last training of section 5, / 6.4e9
llama = {  # config.json of Llama 3.3 70B, shortened
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
vit_g = {
    "hidden_size": 1664,
    "intermediate_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "num_channels": 3,
}
coatnet_3 = [  # (kind, blocks, width, stride of the first block)
    ("conv", 2, 192, 2),
    ("mbconv", 2, 192, 2),
    ("mbconv", 6, 384, 2),
    ("transformer", 14, 768, 2),
    ("transformer", 2, 1536, 2),
]
lab = Lab(globals())

# %% [markdown] id="llama_text"
# ## 1 · Llama 3.3 70B from its configuration
#
# **Core · 14 min · ●○○**
#
# A question that each project begins with: what does the model cost? Its configuration is enough to answer it. With $h$ the
# hidden size, $V$ the vocabulary, $L$ blocks, $a$ heads and $k$ key-value heads of size $d$, and $f$ the intermediate size:
#
# | part | its weights (no biases) |
# |---|---|
# | embedding | a table $V \times h$ |
# | attention of a block | queries $h \times a\,d$, keys and values $h \times k\,d$ each, output $a\,d \times h$ |
# | MLP of a block | gate and up $h \times f$ each, down $f \times h$ |
# | norms | $h$ numbers: two in each block, one at the end |
# | output | a matrix $h \times V$; with `tie_word_embeddings` it *is* the embedding, and adds no weights |
#
# **Grouped-query attention** (GQA): $k < a$, so keys and values are smaller than queries. Four products of
# $8192 \times 8192$ would count 78 % too much here.
#
# The forward FLOPs of a token: 2 for each weight of a matrix *product* (a multiplication and an addition). The look-up in the
# embedding computes nothing, a norm next to nothing; the output is a product, tied or not. Attention adds the products
# of the query with the $s$ keys, and of the scores with the $s$ values: $4\,L\,a\,d\,s$.
#
# **Predict** before you write: the parameters in billions, and the part of them in the MLPs, in percent.

# %% id="predict_llama" tags=["prediction"]
expected_llama = {"parameters, billions": None, "in the MLPs, %": None}


# %% nbgrader={"grade_id": "llama", "solution": true}
def llama_parameters(config: dict) -> dict[str, int]:
    """Return the parameters of all blocks by part: embedding, attention, mlp, norm, output."""
    ### BEGIN SOLUTION
    h, blocks = config["hidden_size"], config["num_hidden_layers"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    table = config["vocab_size"] * h
    return {
        "embedding": table,
        "attention": blocks * 2 * h * (queries + keys),
        "mlp": blocks * 3 * h * config["intermediate_size"],
        "norm": (2 * blocks + 1) * h,
        "output": 0 if config["tie_word_embeddings"] else table,
    }
    ### END SOLUTION


def llama_flops(config: dict, seq: int) -> int:
    """Return the FLOPs of the forward of one token, whose query meets `seq` keys."""
    ### BEGIN SOLUTION
    parts = llama_parameters(config)
    products = parts["attention"] + parts["mlp"] + config["vocab_size"] * config["hidden_size"]
    width = config["num_attention_heads"] * config["head_dim"]
    return 2 * products + 4 * config["num_hidden_layers"] * width * seq
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_llama", "grade": true}
lab.check("llama")

# %% [markdown] id="llama_after"
# The cell builds the model on the *meta* device, where tensors have shapes and no memory, and counts there. A training costs
# three times the forward (lab 2); “6 FLOPs for each parameter and token” is the rule that the rest of this lab uses. The table
# shows how good it is.

# %% id="show_llama" tags=["demo", "nbval-check-output"]
import torch

from dlo_lib.labkit import columns
from dlo_lib.labkit.predictions import compared, require_numbers
from dlo_lib.models import Llama, model_config

require_numbers(expected_llama)
parts = llama_parameters(llama)
total = sum(parts.values())
mlps = 100 * parts["mlp"] / total
print(compared(expected_llama, {"parameters, billions": total / 1e9, "in the MLPs, %": mlps}))
with torch.device("meta"):
    built = sum(weight.numel() for weight in Llama(model_config("llama-3.3-70b")).parameters())
print(f"\nby hand {total:,}, on the meta device {built:,}")
table = [("sequence", "forward FLOPs a token", "x 3 / 6N")]
for seq in (512, 8192, 131072):
    flops = llama_flops(llama, seq)
    table.append((f"{seq:,}", f"{flops:.3e}", f"{3 * flops / (6 * total):.2f}"))
print(columns(table))

# %% [markdown] id="vit_text"
# ## 2 · ViT-G
#
# **Core · 9 min · ●○○**
#
# A vision transformer cuts an image of $S \times S$ pixels into $n = (S/P)^2$ patches of $P \times P$ pixels; one linear layer makes a
# token of all *numbers* of a patch. Other than a Llama, it has a bias in every linear layer and in every norm ($2h$
# numbers), a *learned* position for each token, an MLP of two matrices, and as many key heads as query heads ($a\,d = h$).
# ViT-G has no class token, and here no head. A block has two norms, and one norm ends the model.
#
# A slide of the course's source computes the patches as $14 \times 14 \times 1664$. What is missing?
#
# `vit_multiply_adds` counts what a forward of one image of `size` pixels multiplies and adds: each weight of a linear layer
# once for each token, and $2\,n^2 h$ for the two attention products of a block. Papers on vision call this number “FLOPs”;
# it is half of what section 1 counts.


# %% nbgrader={"grade_id": "vit", "solution": true}
def vit_parameters(config: dict) -> dict[str, int]:
    """Return the parameters by part: patches, positions, attention, mlp, norm."""
    ### BEGIN SOLUTION
    h, f, blocks = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    patch, tokens = config["patch_size"], (config["image_size"] // config["patch_size"]) ** 2
    return {
        "patches": (config["num_channels"] * patch**2 + 1) * h,
        "positions": tokens * h,
        "attention": blocks * 4 * (h * h + h),
        "mlp": blocks * (2 * h * f + f + h),
        "norm": (2 * blocks + 1) * 2 * h,
    }
    ### END SOLUTION


def vit_multiply_adds(config: dict, size: int) -> int:
    """Return the multiply-adds of the forward of one image of size x size pixels."""
    ### BEGIN SOLUTION
    h, f, blocks = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    tokens = (size // config["patch_size"]) ** 2
    weights = config["num_channels"] * config["patch_size"] ** 2 * h + blocks * (4 * h * h + 2 * h * f)
    return tokens * weights + blocks * 2 * tokens**2 * h
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_vit", "grade": true}
lab.check("vit")

# %% [markdown] id="predict_vit_text"
# A published table gives “FLOPs” of three vision transformers: ViT-L/16 at 512 pixels 364 billion, ViT-H/14 at 518 pixels
# 1,021, ViT-G/14 at 518 pixels 5,160. **Predict** what your function gives, divided by each number.

# %% id="predict_vit" tags=["prediction"]
expected_vit = {"ViT-L": None, "ViT-H": None, "ViT-G": None}

# %% id="show_vit" tags=["demo", "nbval-check-output"]
require_numbers(expected_vit)
published = {"ViT-L": (364, 512), "ViT-H": (1021, 518), "ViT-G": (5160, 518)}
shapes = {"ViT-L": (1024, 4096, 24, 16), "ViT-H": (1280, 5120, 32, 14), "ViT-G": (1664, 8192, 48, 14)}
keys = "hidden_size", "intermediate_size", "num_hidden_layers", "patch_size"
ratios = {}
for name, (billions, size) in published.items():
    ratios[name] = vit_multiply_adds(vit_g | dict(zip(keys, shapes[name])), size) / 1e9 / billions
print(compared(expected_vit, ratios, "{:.2f}".format))

with torch.device("meta"):
    block = torch.nn.TransformerEncoderLayer(1664, 16, 8192)
    first, last = torch.nn.Conv2d(3, 1664, 14, 14), torch.nn.LayerNorm(1664)
count = [sum(weight.numel() for weight in module.parameters()) for module in (first, block, last)]
print(f"\nby hand {sum(vit_parameters(vit_g).values()):,}")
print(f"with layers of PyTorch on the meta device {count[0] + 48 * count[1] + count[2] + 256 * 1664:,}")

# %% [markdown] id="vit_lesson"
# Two rows of the table are multiply-adds. The third one is not: 5,160 is nearer to *twice* our count (with the rule
# $2N$ for each token it is $2 \cdot 1369 \cdot 1.84 \cdot 10^9 = 5.04 \cdot 10^{12}$), so that ViT-G looks about two times as
# expensive beside the others as it is. Before you compare two published FLOPs, count one of each source yourself.

# %% [markdown] id="coatnet_text"
# ## 3 · CoAtNet: convolutions, then attention
#
# **Core · 14 min · ●●○**
#
# CoAtNet is a list of stages `(kind, blocks, width, stride)`. The first block of a stage divides the side of the image by the stride,
# and all weights of the block work at the *new* side. With $i$ channels in and $w$ = width out (after the first block $i = w$):
#
# | kind | weights of a block, used at each position | used once an image |
# |---|---|---|
# | `conv` | a convolution of $3 \times 3$: $9\,i\,w$ | |
# | `mbconv` | $1 \times 1$ to $e = 4w$ channels, a *depthwise* $3 \times 3$ (each channel alone), $1 \times 1$ to $w$: $i\,e + 9\,e + e\,w$ | squeeze-and-excitation: $2\,e \lfloor w/4 \rfloor$ |
# | `transformer` | keys, queries, values $3\,i\,w$, output $w^2$, MLP $8\,w^2$ | |
#
# A block of the last two kinds with $i \neq w$ has a shortcut of $i\,w$ more weights, at each position. An attention of $n$ positions adds
# $2\,n^2 w$ multiply-adds. The image has 3 channels. Norms, biases and the head are left out.
#
# Why has the last stage of CoAtNet-3 a third of the parameters and only 7 % of the multiply-adds? A stage of stride 2 has a quarter of the
# positions. Write `coatnet`.


# %% nbgrader={"grade_id": "coatnet", "solution": true}
def coatnet(stages: list[tuple], size: int) -> dict[str, int]:
    """Return "parameters" and "multiply_adds" of the forward of an image of size x size pixels."""
    ### BEGIN SOLUTION
    parameters, multiply_adds, channels = 0, 0, 3
    for kind, blocks, width, stride in stages:
        size //= stride
        positions = size * size
        for _ in range(blocks):
            once = attention = 0
            if kind == "conv":
                weights = 9 * channels * width
            elif kind == "mbconv":
                inner = 4 * width
                weights, once = channels * inner + 9 * inner + inner * width, 2 * inner * (width // 4)
            else:
                weights, attention = 3 * channels * width + 9 * width**2, 2 * positions**2 * width
            if kind != "conv" and channels != width:
                weights += channels * width
            parameters += weights + once
            multiply_adds += positions * weights + once + attention
            channels = width
    return {"parameters": parameters, "multiply_adds": multiply_adds}
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_coatnet", "grade": true}
lab.check("coatnet")

# %% [markdown] id="coatnet_after"
# The paper's numbers beside yours. What you left out is at most 4 % here. The figure answers the question above.

# %% id="show_coatnet" tags=["demo", "nbval-check-output"]
import figures

stem = ("conv", 2, 192, 2)
widths = (("mbconv", 2, 192, 2), ("mbconv", 12, 384, 2))
coatnet_4 = [stem, *widths, ("transformer", 28, 768, 2), ("transformer", 2, 1536, 2)]
coatnet_5 = [stem, ("mbconv", 2, 256, 2), ("mbconv", 12, 512, 2)]
coatnet_5 += [("transformer", 28, 1280, 2), ("transformer", 2, 2048, 2)]
coatnet_7 = [stem, ("mbconv", 2, 256, 2), ("mbconv", 4, 512, 2), ("mbconv", 8, 1024, 2)]
coatnet_7 += [("transformer", 42, 2048, 1), ("transformer", 2, 3072, 2)]
rows = [("at 512 pixels", "parameters", "paper", "multiply-adds", "paper")]
nets = {"CoAtNet-3": (coatnet_3, 168, 203), "CoAtNet-4": (coatnet_4, 275, 361)}
nets |= {"CoAtNet-5": (coatnet_5, 688, 812), "CoAtNet-7": (coatnet_7, 2440, 2586)}
for name, (stages, millions, billions) in nets.items():
    found = coatnet(stages, 512)
    weights, products = f"{found['parameters'] / 1e6:.0f} M", f"{found['multiply_adds'] / 1e9:.0f} G"
    rows.append((name, weights, f"{millions} M", products, f"{billions} G"))
print(columns(rows))
upto = [coatnet(coatnet_3[:count], 512) for count in range(6)]
by_stage = {}
for number, (kind, *_) in enumerate(coatnet_3):
    before, after = upto[number], upto[number + 1]
    by_stage[f"S{number} {kind}"] = {key: after[key] - before[key] for key in after}
figures.stages(by_stage)

# %% [markdown] id="tiny_text"
# ## 4 · What does a larger model buy?
#
# Counting says what a model costs. What it *brings* must be measured, on small models first. Our language has 256 tokens, and the
# next token depends on the last one; its entropy is known, the loss that no model can beat. A model of width $d$ has $N = 256\,d$
# parameters in matrix products (and a look-up table, which computes nothing: section 1), and $D$ tokens cost $C = 6\,N\,D$
# FLOPs. A training takes a tenth of a second to a second.
#
# The figure shows trainings with three budgets $C$. With one budget, a wide model sees few tokens, and a narrow one sees many. **Predict**: for
# 16 times the FLOPs, how many times wider is the best model? And how many times larger is the number of tokens?

# %% id="predict_valley" tags=["prediction"]
expected_valley = {"width": None, "tokens": None}

# %% id="show_valley" tags=["demo"]
from dlo_lib.planner.tiny_runs import TinyLanguage

require_numbers(expected_valley)
language = TinyLanguage(256, seed=23)


def trained(budget: float, width: int) -> tuple[int, int, float]:
    """Parameters, tokens and loss of a training of this width that costs the budget."""
    tokens = int(budget / language.flops(width, 1))
    return 256 * width, tokens, language.train(width, tokens)


widths = {4e8: (4, 6, 9, 14, 22, 36), 1.6e9: (6, 10, 16, 26, 42, 68), 6.4e9: (11, 18, 30, 48, 78, 126)}
valleys = {budget: [trained(budget, width) for width in tried[::EVERY]] for budget, tried in widths.items()}
best = {budget: figures.lowest(runs)[0] for budget, runs in valleys.items()}
times = {"width": best[6.4e9] / best[4e8], "tokens": 16 * best[4e8] / best[6.4e9]}
print(compared(expected_valley, times, "{:.1f}".format))
figures.valleys(valleys, language.entropy)

# %% [markdown] id="law_text"
# Each budget has a valley: too narrow and too wide are both worse. Do not take the *lowest run*: on a coarse grid it is rarely the
# bottom. A parabola through the runs, as in the figure (dashed), is better; a law through *all* runs is better still, because it can be
# extended.
#
# ## 5 · Scaling laws
#
# **Core · 15 min · ●●○**
#
# - **Kaplan et al.** (2020): $L(x) = (x_0/x)^{\alpha}$, for $x = N$, $D$ or $C$: a straight line in logarithms.
# - **Hestness et al.** (2017): $L(D) = c\,D^{-\alpha} + \gamma$: the line bends, because no amount of data beats $\gamma$.
# - **Hoffmann et al.** (Chinchilla, 2022): $L(N, D) = E + A/N^{\alpha} + B/D^{\beta}$: what the model is too small for, plus what
#   it has not seen.
#
# Write three functions. `power_law` fits the straight line by least squares in logarithms.
#
# `fit_law` fits the third law. If $\alpha$ and $\beta$ are known, the other three are a *linear* least-squares problem: divide
# each row $(1, N^{-\alpha}, D^{-\beta})$ by its loss, and solve for right sides 1 (`np.linalg.lstsq`), so that *relative* errors count. Try
# $\alpha$ and $\beta$ on a grid over 0.1 … 2 and keep the pair with the smallest sum of squares, among those with $A, B > 0$ and $E \geq 0$.
# Then refine the grid around it, until a step is a few hundredths.
#
# `best_size` minimises the law under $6\,N\,D = C$. Put $D = C/(6N)$, and set the derivative to 0:
# $N = G\,(C/6)^{\beta/(\alpha+\beta)}$ with $G = (\alpha A / (\beta B))^{1/(\alpha+\beta)}$. Derive it, or search for the minimum (within 1 %).


# %% nbgrader={"grade_id": "law", "solution": true}
def power_law(x: list[float], losses: list[float]) -> tuple[float, float]:
    """Return (x0, alpha) of L = (x0 / x) ** alpha, the least-squares line in logarithms."""
    ### BEGIN SOLUTION
    slope, constant = np.polyfit(np.log(x), np.log(losses), 1)
    return float(np.exp(-constant / slope)), float(-slope)
    ### END SOLUTION


def fit_law(runs: list[tuple[float, float, float]]) -> tuple[float, float, float, float, float]:
    """Return (E, A, alpha, B, beta) of the law for runs of (parameters, tokens, loss)."""
    ### BEGIN SOLUTION
    n, d, losses = np.array(runs, float).T
    grids, best = [np.linspace(0.1, 2, 14)] * 2, (math.inf, 0.0, 0.0, 0.0, 0.0, 0.0)
    for _ in range(4):
        alpha, beta = (grid.reshape(-1, 1) for grid in np.meshgrid(*grids))  # all pairs
        rows = np.stack([np.ones_like(alpha + n), n**-alpha, d**-beta], 2) / losses[:, None]
        found = np.linalg.pinv(rows) @ np.ones_like(n)  # E, A, B of least squares for each pair
        errors = (((rows @ found[:, :, None])[:, :, 0] - 1) ** 2).sum(1)
        errors[(found[:, 0] < 0) | (found[:, 1:] <= 0).any(1)] = math.inf
        least = errors.argmin()
        if errors[least] < best[0]:
            e, a, b = found[least]
            best = (errors[least], e, a, alpha[least, 0], b, beta[least, 0])
        step = grids[0][1] - grids[0][0]
        grids = [np.linspace(max(middle - step, 0.02), middle + step, 7) for middle in (best[3], best[5])]
    return tuple(float(value) for value in best[1:])
    ### END SOLUTION


def best_size(law: tuple[float, float, float, float, float], flops: float) -> tuple[float, float]:
    """Return the parameters and the tokens of the smallest loss with 6 N D = flops."""
    ### BEGIN SOLUTION
    _, a, alpha, b, beta = law
    g = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    parameters = g * (flops / 6) ** (beta / (alpha + beta))
    return parameters, flops / 6 / parameters
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_law", "grade": true}
lab.check("law")

# %% [markdown] id="law_after"
# Your law, fitted to the 18 trainings above, against a training of 8 times the largest of them. The straight line (Kaplan's form)
# goes through the bottoms of the three valleys. **Predict** the loss: read it from the figure of the valleys.

# %% id="predict_loss" tags=["prediction"]
expected_loss = {"loss at 5.1e10 FLOPs": None}

# %% id="show_law" tags=["demo"]
require_numbers(expected_loss)
runs = [run for each in valleys.values() for run in each]
law, large = fit_law(runs), LARGER * 6.4e9
e, a, alpha, b, beta = law


def loss_of(law: tuple, parameters: float, tokens: float) -> float:
    e, a, alpha, b, beta = law
    return e + a / parameters**alpha + b / tokens**beta


print(f"L = {e:.2f} + {a:.0f}/N^{alpha:.2f} + {b:.0f}/D^{beta:.2f}; entropy {language.entropy:.2f}")
width = round(best_size(law, large)[0] / 256)
size, tokens, loss = trained(large, width)
print(f"best for {large:.1e} FLOPs: width {width}, {tokens:,} tokens: {tokens / size:.0f} a parameter")
x0, slope = power_law(list(valleys), [figures.lowest(each)[1] for each in valleys.values()])
told = {"law with a floor": loss_of(law, size, tokens), "straight line": (x0 / large) ** slope}
for name, value in told.items():
    print(f"{name}: {value:.3f}, trained {loss:.3f}: {value / loss - 1:+.1%}")
print(compared(expected_loss, {"loss at 5.1e10 FLOPs": loss}))
figures.law(valleys, lambda c: loss_of(law, *best_size(law, c)), (x0, slope), (large, loss))

# %% [markdown] id="interval_text"
# The straight line knows no floor, so it promises too much.
#
# ## 6 · How sure are you?
#
# **Core · 9 min · ●●○**
#
# A prediction without an interval cannot be wrong, so it says little. The **bootstrap** asks: what if other runs had been made? It draws as many
# runs as there are, *with replacement* (some twice, some not at all), predicts from these, and repeats. The middle 90 % of the
# predictions are the interval.
#
# Write `interval`. `predict(runs)` takes a list of runs, the same tuples, and returns a number. A draw with too few *different* runs
# determines nothing: `predict` raises a ValueError then; leave this draw out and make another one, so that there are `draws` predictions.


# %% nbgrader={"grade_id": "interval", "solution": true}
def interval(predict: Callable, runs: list, draws: int, seed: int = 0) -> tuple[float, float]:
    """Return the quantiles 0.05 and 0.95 of `draws` predictions from resampled runs."""
    ### BEGIN SOLUTION
    rng, found = np.random.default_rng(seed), []
    while len(found) < draws:
        rows = rng.integers(len(runs), size=len(runs))
        try:
            found.append(predict([runs[row] for row in rows]))
        except ValueError:
            continue
    low, high = np.quantile(found, [0.05, 0.95])
    return float(low), float(high)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_interval", "grade": true}
lab.check("interval")


# %% id="show_interval" tags=["demo"]
def predict(runs: list) -> float:
    if len(set(runs)) < 7:
        raise ValueError("five constants need more than five runs")
    return loss_of(fit_law(runs), size, tokens)


low, high = interval(predict, runs, 60)
print(f"predicted {loss_of(law, size, tokens):.3f}, 90 % between {low:.3f} and {high:.3f}")
print(f"trained {loss:.3f}")

# %% [markdown] id="size_text"
# ## 7 · The answer, on a budget
#
# **Core · 20 min · ●●●**
#
# Now all of it, for a language that you do not know. `run(width, tokens)` trains a model from a budget, as the queue of a computing centre
# does, and returns a dict:
#
# | `status` | |
# |---|---|
# | `"done"` | `loss` has the loss; the cost, $6 \cdot \text{vocab} \cdot \text{width} \cdot \text{tokens}$, is taken from the budget |
# | `"lost"` | a node has failed; the reserved cost is *refunded*, `loss` is None. Ask again |
# | `"refused"` | the run costs more than what is left, or more than a fifth of the budget; nothing is taken |
#
# The key `left` has the FLOPs that are left. `choose_size` gets `run`, `vocab`, `budget` and `target`, the FLOPs of the final
# training, between 0.5 and 1.5 times the budget. It returns a dict: `width` and `tokens` of that training (ints), the `loss` that it will
# have, and an interval `low`, `high`. Then *the check* trains it. Points are for what happens on languages that the check draws; some have so much
# budget that the loss is near their entropy, others are far from it. One factor between a small run and the large one does not fit both.
#
# | requirement | |
# |---|---|
# | no run is refused, at least six different ones are done | you can compute the cost before you ask |
# | the final training costs between 90 and 100 % of the target | |
# | its loss minus the entropy is at most 10 % above that of the best width | the valley is flat: several answers are right |
# | the predicted loss is within 5 %, and within 2.4 % in the mean of four languages | |
# | the trained loss lies in the interval, which is at most 12 % of it wide | |
#
# Advice: three valleys whose FLOPs differ by a factor of 2, with two or three widths each; the sum must stay below the budget and each run below a fifth of
# it. Very small runs mislead more than they help. The best models have some 10 to 60 tokens for each parameter. A run of less than 256 tokens is an error.
#
# The bootstrap does not know that the *law* is wrong, which it always is a little: make the interval at least $\pm 4$ % of the loss. Often this
# margin is the whole interval; the bootstrap makes it wider where the runs determine the law badly. Fifty draws are enough; each costs a fit.
# The check draws eleven languages and takes 20 to 80 seconds.


# %% nbgrader={"grade_id": "size", "solution": true}
def choose_size(
    run: Callable[[int, int], dict], vocab: int, budget: float, target: float
) -> dict[str, float]:
    """Return width, tokens, loss, low and high of the training of `target` FLOPs."""
    ### BEGIN SOLUTION
    runs = []
    for part, factors in ((3, (0.6, 1.7)), (6, (0.5, 1, 2)), (12, (0.5, 1, 2))):
        flops = part * budget / 61
        middle = math.sqrt(flops / 6 / 12) / vocab  # 12 tokens for each parameter
        for factor in factors:
            width = max(1, round(middle * factor))
            tokens = int(flops / (6 * vocab * width))
            while (answer := run(width, tokens))["status"] == "lost":
                pass
            if answer["status"] == "done":
                runs.append((vocab * width, tokens, answer["loss"]))
    width = max(1, round(best_size(fit_law(runs), target)[0] / vocab))
    tokens = int(target / (6 * vocab * width))

    def predicted(runs: list) -> float:
        if len(set(runs)) < 6:
            raise ValueError("too few different runs")
        e, a, alpha, b, beta = fit_law(runs)
        return e + a / (vocab * width) ** alpha + b / tokens**beta

    loss = predicted(runs)
    low, high = interval(predicted, runs, 40)
    low, high = min(low, 0.96 * loss), max(high, 1.04 * loss)
    return {"width": width, "tokens": tokens, "loss": loss, "low": low, "high": high}
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_size", "grade": true}
lab.check("size")

# %% [markdown] id="size_after"
# Your function on one more language, with the runs that it bought. The figure shows the trained losses of other widths that cost the
# same: how flat is the valley, and where in it are you?

# %% id="show_size" tags=["demo"]
from dlo_lib.planner.tiny_runs import RunBudget

other = TinyLanguage(128, seed=7)
keeper = RunBudget(other, 4e9, lost=(1, 4), largest=0.2)
answer = choose_size(keeper.run, 128, 4e9, 6e9)
spent = f"{1 - keeper.left / 4e9:.0%} of the budget spent"
print(f"{len(keeper.runs)} runs done, {len(keeper.failed)} lost, {len(keeper.refused)} refused, {spent}")
around = {}
for factor in (0.25, 0.5, 1, 2, 4)[::EVERY]:
    wide = max(1, round(answer["width"] * factor))
    around[wide] = other.train(wide, int(6e9 / other.flops(wide, 1)))
inside = "inside" if answer["low"] <= around[answer["width"]] <= answer["high"] else "outside of"
text = "predicted {loss:.3f} ({low:.3f} to {high:.3f})".format(**answer)
print(f"{text}, trained {around[answer['width']]:.3f}: {inside} the interval")
figures.answer(keeper.runs, answer, around, other.entropy)

# %% [markdown] id="standard_text"
# ## 8 · The same with `dlo_lib.planner.laws`, and in GPU hours
#
# The library has the same fits and the bootstrap. The second part answers a real question: “I have 100,000 hours of H100: which
# model, on how many tokens, and what does it take?” It uses Chinchilla's published law ($E = 1.69$, $A = 406.4$, $\alpha = 0.34$,
# $B = 410.7$, $\beta = 0.28$), which holds for *its* text and tokenizer, an MFU of 40 %, 32 g of CO₂ for each kWh (France, production of
# 2023) and a price of 2.50 € an hour, which you replace by that of your centre. Energy and CO₂ are those of the GPUs alone.

# %% id="standard" tags=["demo", "read"]
from dlo_lib.hardware import GpuNodes, gpu, link, run_cost
from dlo_lib.planner.laws import ChinchillaLaw, bootstrap, fit_chinchilla

sizes = tuple(zip(*((128 * wide, tokens, loss) for wide, tokens, loss in keeper.runs)))
end = 128 * answer["width"], answer["tokens"]
found = fit_chinchilla(*sizes)
least, most = bootstrap(fit_chinchilla, sizes, lambda law: float(law(*end)), draws=DRAWS)
text = f"{float(found(*end)):.3f} ({least:.3f} to {most:.3f})"
print(f"the library predicts {text}, you {answer['loss']:.3f}")
least, most = bootstrap(fit_chinchilla, sizes, lambda law: law.beta, draws=DRAWS)
print(f"its exponent beta is {found.beta:.2f} ({least:.2f} to {most:.2f})\n")

chinchilla = ChinchillaLaw(floor=1.69, a=406.4, alpha=0.34, b=410.7, beta=0.28)
rows = [("H100 hours", "parameters", "tokens", "loss", "MWh", "t of CO2", "1,000 €")]
nodes = GpuNodes(gpu("h100-80"), 4, link("ndr"), links=4, co2_per_kwh=32, price=2.50)
for hours in (100, 10_000, 100_000, 7_000_000):
    flops = hours * 3600 * 0.4 * nodes.gpu.peak("bf16")
    n_best, d_best = chinchilla.best(flops)
    cost = run_cost(nodes, gpus=1, hours=hours)
    takes = (f"{value:,.2f}" for value in (cost.kwh / 1e3, cost.co2_grams / 1e6, cost.price / 1e3))
    best = f"{n_best / 1e9:.1f} G", f"{d_best / 1e9:,.0f} G", f"{chinchilla(n_best, d_best):.2f}"
    rows.append((f"{hours:,}", *best, *takes))
print(columns(rows))

# %% [markdown] id="standard_lesson"
# The published exponents send more of a large budget into tokens than into parameters. “20 tokens for each parameter” comes from two other methods of the
# same paper; its printed constants give more, and a replication found that they do not describe the paper's own runs (Besiroglu et al., 2024). An
# exponent of a few small runs is uncertain too, as the line above the table shows: this is why section 7 asks for an interval.
#
# The last row has the hours that Meta states for Llama 3.1 70B, which saw about 15 trillion tokens, 200 for each
# parameter. That is not a mistake: these laws count the training only. A smaller model on more
# tokens costs more in training for the same loss, and less in each answer that it gives. And the data is in the constants: Phi
# (1.3 billion parameters, 6 billion tokens of textbook quality) came close to models of ten times its size.

# %% [markdown] id="quiz_text"
# ## 9 · Quiz
#
# **Core · 4 min · ●○○**

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": ""}
quiz = {"q1": "c", "q2": "a", "q3": "d", "q4": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Give `TinyLanguage` another `spectrum`: 0.3, or 0.8. Which exponent changes, and where does the best width go?
# - Fit the law to the runs without the largest valley. How much wider is the interval?
# - `dlo plan` (lab 22) finds the parallel plan of the model that you chose here, and its MFU: put it in place of 40 %.
#
# **What comes next.** Labs 24 to 26 make a trained model smaller: distillation, quantization, pruning.
#
# ## References
#
# - J. Kaplan et al., *Scaling Laws for Neural Language Models* (2020), [arXiv:2001.08361](https://arxiv.org/abs/2001.08361)
# - J. Hoffmann et al., *Training Compute-Optimal Large Language Models* (2022), [arXiv:2203.15556](https://arxiv.org/abs/2203.15556)
# - T. Besiroglu et al., *Chinchilla Scaling: A replication attempt* (2024), [arXiv:2404.10102](https://arxiv.org/abs/2404.10102)
# - J. Hestness et al., *Deep Learning Scaling is Predictable, Empirically* (2017), [arXiv:1712.00409](https://arxiv.org/abs/1712.00409)
# - X. Zhai et al., *Scaling Vision Transformers* (2021), [arXiv:2106.04560](https://arxiv.org/abs/2106.04560): ViT-G
# - Z. Dai et al., *CoAtNet: Marrying Convolution and Attention for All Data Sizes* (2021), [arXiv:2106.04803](https://arxiv.org/abs/2106.04803)
# - S. Gunasekar et al., *Textbooks Are All You Need* (2023), [arXiv:2306.11644](https://arxiv.org/abs/2306.11644): Phi
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
