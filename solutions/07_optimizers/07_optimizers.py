# %% [markdown] id="title"
# # 07 · Optimisers
#
# **What you will do.** Lab 06 found the *length* of a step. An optimiser (*optimiseur*) also chooses its *direction*.
# You write seven update rules: each mends a fault of an earlier one, and Lion also halves the memory of AdamW's state.
# Then you compare them as a measurement should be made: after a range test for each, over several seeds, with a bound
# that says when a difference is shown.
#
# You should know the range test of lab 06 and the parts of a training step. The core exercises and predictions take
# about 100 minutes; with the text and the demos plan two hours and a half. `lab.hint("name")` gives a nudge, then a
# pointer, then a sketch; `lab.use_reference("name")` lets you continue without the points of that step.
#
# Words: optimiser (*optimiseur*), second moment (*moment d'ordre deux*), weight decay (*dégradation des poids*), gradient
# clipping (*écrêtage du gradient*), trust ratio (*rapport de confiance*), singular value (*valeur singulière*), loss
# landscape (*paysage de la perte*).

# %% id="setup"
import math
import os
from statistics import mean, stdev

import torch
import torch._dynamo  # PyTorch loads it with the first optimiser, which takes some seconds
import torch.nn.functional as F

from dlo_lib.grading import Lab
from dlo_lib.labkit.predictions import compared, require_numbers

SAMPLES = int(os.environ.get("DLO_SAMPLES", 8192))  # of each run of section 8
SEEDS = int(os.environ.get("DLO_SEEDS", 5))  # runs of each optimiser there
IMAGES = int(os.environ.get("DLO_IMAGES", 4096))  # for training
LARGE = int(os.environ.get("DLO_LARGE", 1024))  # the large batch
TRIED = int(os.environ.get("DLO_RATES", 11))  # rates of a range test
GRID = int(os.environ.get("DLO_GRID", 15))  # points on a side of a landscape
lab = Lab(globals())

# %% [markdown] id="why_text"
# ## 1 · A narrow valley
#
# The smallest problem on which gradient descent fails has two parameters: $f(x, y) = (x^2 + 50\, y^2)/2$. The loss is
# 50 times as curved in one direction as in the other. A rate above 2/50 makes $y$ grow; a rate below it moves $x$ by
# less than 4 % of its distance in a step. There is **one rate for all directions**, and the steepest one limits it.

# %% id="show_why" tags=["demo"]
import figures

CURVATURE = 50.0


def valley_path(update, most=40, **group):
    """Return the points of a run, until 1 % of the first distance is left or it diverges."""
    point, state, path = torch.tensor([10.0, 1.5]), {}, [(10.0, 1.5)]
    while len(path) <= most and 0.1 < math.hypot(*path[-1]) < 1e3:
        update(point, point * torch.tensor([1.0, CURVATURE]), state, group)
        path.append(tuple(point.tolist()))
    return path


def descent(parameter, gradient, state, group):
    parameter -= group["lr"] * gradient


figures.valley({"gradient descent, 40 steps": valley_path(descent, lr=0.038)}, CURVATURE)

# %% [markdown] id="rule_text"
# ### A frame for all rules
#
# An optimiser of PyTorch is a loop with a memory. The loop is given, and each rule that you write is a function of a
# few lines, `update(parameter, gradient, state, group)`: it changes `parameter` in place, keeps what it must remember in
# `state`, a dict of this parameter that is empty at first, and reads its options in `group` (*groupe de paramètres*).
# `state_dict()` saves the states and the groups, so a resumed run continues. Autograd does not record your rule.

# %% id="given_rule"
# Given: run this cell. Later cells use it.
class Rule(torch.optim.Optimizer):
    """Takes a step of `update` for each parameter that has a gradient."""

    def __init__(self, params, update, **options):
        super().__init__(params, options)
        self.update = update  # not an option: a checkpoint holds numbers and tensors only

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)


# %% [markdown] id="momentum_text"
# ### Momentum
#
# **Core · 7 min · ●○○**
#
# Across the valley the gradients alternate in sign, along it they agree. So move along their **mean** (momentum,
# *inertie*): with $m = 0$ before the first step,
#
# $$m \leftarrow \beta\, m + (1 - \beta)\, g \qquad \theta \leftarrow \theta - \mathrm{lr} \cdot m$$
#
# Keep $m$ in `state`, under a name of your choice. The options are `group["lr"]` and `group["beta"]`.
# (`torch.optim.SGD` has the *sum* $b \leftarrow \beta\, b + g$, so $m = (1 - \beta)\, b$: with it the rate is $1 -
# \beta$ times yours. The last section shows it.)

# %% nbgrader={"grade_id": "momentum", "solution": true}
def momentum(parameter, gradient, state: dict, group: dict) -> None:
    """Move `parameter` in place, by the mean of the gradients. Options: lr, beta."""
    ### BEGIN SOLUTION
    if "mean" not in state:
        state["mean"] = torch.zeros_like(parameter)
    state["mean"].lerp_(gradient, 1 - group["beta"])
    parameter -= group["lr"] * state["mean"]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_momentum", "grade": true}
lab.check("momentum")

# %% [markdown] id="predict_valley_text"
# **Predict.** Each method gets its best rate of 40 (that is the range test of this problem). After how many steps is
# the distance to the minimum below 1 % of the first one?

# %% id="predict_valley" tags=["prediction"]
predicted_steps = {"gradient descent": None, "momentum 0.9": None}

# %% id="show_valley" tags=["demo"]
require_numbers(predicted_steps)


def best_path(beta):
    paths = [valley_path(momentum, 400, lr=0.004 * 1.15**k, beta=beta) for k in range(40)]
    return min((path for path in paths if math.hypot(*path[-1]) < 0.1), key=len)


paths = {"gradient descent": best_path(0.0), "momentum 0.9": best_path(0.9)}
print(compared(predicted_steps, {name: len(path) - 1 for name, path in paths.items()}))
figures.valley(paths, CURVATURE)

# %% [markdown] id="valley_after"
# Gradient descent needs a number of steps that grows with the ratio of the curvatures; with momentum, and with **β chosen
# for the ratio**, it grows with the square root: from 7 to 57 steps for ratios from 12.5 to 800. Here β = 0.9 is too large:
# the path overshoots across the valley, and has 34 steps where β = 0.7 needs 19.
#
# ## 2 · One rate for all parameters
#
# Momentum still has one rate for all parameters. The next problem is a linear regression whose three groups of inputs
# have the sizes 1, 0.1 and 0.01: in a real model the embeddings of frequent and of rare words differ as much. The
# parameter of a small input has a small gradient **and** needs a large value.

# %% id="show_scales" tags=["demo"]
torch.manual_seed(0)
SIZES = torch.tensor([1.0] * 4 + [0.1] * 4 + [0.01] * 4)
INPUTS = torch.randn(256, 12) * SIZES
TARGETS = INPUTS @ (torch.randn(12) / SIZES)


def regression(update, **group):
    """Return the losses of 200 steps."""
    weight, state, losses = torch.zeros(12), {}, []
    for _ in range(200):
        error = INPUTS @ weight - TARGETS
        losses.append(error.square().mean().item())
        update(weight, 2 * INPUTS.T @ error / len(error), state, group)
    return losses


def best_run(update, **options):
    runs = [regression(update, lr=1e-3 * 2**k, **options) for k in range(18)]
    return min(runs, key=lambda losses: losses[-1] if losses[-1] < 1e6 else math.inf)


losses = {"momentum": best_run(momentum, beta=0.9)}
figures.lines(losses, "step", "loss at the best of 18 rates")

# %% [markdown] id="adam_text"
# ### Adam
#
# **Core · 11 min · ●●○**
#
# Divide each element of the mean by the size of its gradients. With $m = v = 0$ at first, and $t = 1$ in the
# first step,
#
# $$m \leftarrow \beta_1 m + (1 - \beta_1)\, g \qquad v \leftarrow \beta_2 v + (1 - \beta_2)\, g^2$$
# $$\hat m = \frac{m}{1 - \beta_1^t} \qquad \hat v = \frac{v}{1 - \beta_2^t} \qquad u = \frac{\hat m}{\sqrt{\hat v} + \epsilon}$$
#
# Both averages start at 0, so the first ones are too small; the divisors correct that (the exponential mean of lab
# 06). $\epsilon$ stands **beside** the root, and not inside, as on some slides.
#
# Later rules need the direction $u$ too, so write it alone: the function returns $u$, a new tensor, and moves
# nothing. It counts its steps in `state`. The options are `group["betas"]`, a pair, and `group["eps"]`.

# %% nbgrader={"grade_id": "adam", "solution": true}
def adam_direction(gradient, state: dict, group: dict) -> torch.Tensor:
    """Update the averages in `state`, and return the direction u. Options: betas, eps."""
    ### BEGIN SOLUTION
    if "step" not in state:
        state.update(step=0, m=torch.zeros_like(gradient), v=torch.zeros_like(gradient))
    beta1, beta2 = group["betas"]
    state["step"] += 1
    state["m"].lerp_(gradient, 1 - beta1)
    state["v"].lerp_(gradient.square(), 1 - beta2)
    corrected_m = state["m"] / (1 - beta1 ** state["step"])
    corrected_v = state["v"] / (1 - beta2 ** state["step"])
    return corrected_m / (corrected_v.sqrt() + group["eps"])
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_adam", "grade": true}
lab.check("adam")

# %% id="show_adam" tags=["demo"]
def adam(parameter, gradient, state, group):
    parameter -= group["lr"] * adam_direction(gradient, state, group)


losses["Adam"] = best_run(adam, betas=(0.9, 0.999), eps=1e-8)
print("left after 200 steps:", {name: f"{line[-1]:.2g}" for name, line in losses.items()})
figures.lines(losses, "step", "loss at the best of 18 rates")

# %% [markdown] id="adamw_text"
# ## 3 · Weight decay that decays all weights
#
# **Core · 7 min · ●○○**
#
# Weight decay pulls the weights towards 0. It began as a part of the loss, $\lambda |\theta|^2 / 2$, whose gradient
# is $\lambda \theta$: add it to $g$. In SGD that shrinks each weight by the factor $1 - \mathrm{lr}\, \lambda$. In
# Adam it does not: the sum $g + \lambda\theta$ is divided by the size of the gradients, so a weight with **large**
# gradients hardly decays. AdamW lets the weight shrink by itself, **decoupled** (*découplé*) from the gradient:
#
# $$\theta \leftarrow (1 - \mathrm{lr} \cdot \lambda)\, \theta - \mathrm{lr} \cdot u$$
#
# Write it with `adam_direction`; $\lambda$ is `group["weight_decay"]`.

# %% nbgrader={"grade_id": "adamw", "solution": true}
def adamw(parameter, gradient, state: dict, group: dict) -> None:
    """Move `parameter` in place. Options: lr, betas, eps, weight_decay."""
    ### BEGIN SOLUTION
    update = adam_direction(gradient, state, group)
    parameter *= 1 - group["lr"] * group["weight_decay"]
    parameter -= group["lr"] * update
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_adamw", "grade": true}
lab.check("adamw")

# %% [markdown] id="predict_decay_text"
# **Predict.** 4,000 weights start at 1. Their gradients are pure noise, of size 0.1 for one half and of size 10 for
# the other. So only the decay moves them on average. $\mathrm{lr} \cdot \lambda$ is 0.001, and $0.999^{1000} = 0.37$.
# What is the mean of each half after 1,000 steps?

# %% id="predict_decay" tags=["prediction"]
predicted_left = {"coupled, 0.1": None, "coupled, 10": None}
predicted_left |= {"decoupled, 0.1": None, "decoupled, 10": None}

# %% id="show_decay" tags=["demo", "read"]
from dlo_lib.labkit.predicted_bars import predicted_bars

require_numbers(predicted_left)
left, group = {}, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1.0}
for way in ("coupled", "decoupled"):
    torch.manual_seed(0)
    weight, state = torch.ones(2, 2000), {}
    for _ in range(1000):
        noise = torch.randn(2, 2000) * torch.tensor([[0.1], [10.0]])
        if way == "decoupled":
            adamw(weight, noise, state, group)
        else:
            adam(weight, noise + weight, state, group)
    left |= {f"{way}, {size}": half.mean().item() for size, half in zip((0.1, 10), weight)}
print(compared(predicted_left, left))
predicted_bars(left, predicted_left, "mean of the weights")

# %% [markdown] id="clip_text"
# Decoupled, both halves decay as planned. Coupled with large noise, $u$ is about $\theta / 10$: $0.9999^{1000} = 0.90$.
# With small noise the sum is mostly the weight itself, and its size falls below 1 as the weights shrink. So the division
# makes the decay **faster**: 0.26 is left in place of 0.37.
#
# ## 4 · Gradients that explode
#
# In a deep chain a gradient is a product of as many factors as there are layers. With weights that are a little too large
# it grows by orders of magnitude with the depth, and one step with it destroys the model. Good first weights (Kaiming),
# skip connections and norms are the first remedies; clipping (*écrêtage du gradient*) catches what is left.
#
# ### Clip
#
# **Core · 7 min · ●○○**
#
# Take **one** norm of all gradients together, $n = \sqrt{\sum_i |g_i|^2}$. If it is above `most`, scale all of them
# by the same factor `most` / n, in place: the step gets shorter and keeps its direction. Shorter gradients stay as
# they are. Return the norm **before** clipping, because it shows an explosion. An element of the list can be None.

# %% nbgrader={"grade_id": "clip", "solution": true}
def clip_(gradients: list, most: float) -> float:
    """Scale `gradients` in place to a common norm of at most `most`; return their norm before."""
    ### BEGIN SOLUTION
    present = [gradient for gradient in gradients if gradient is not None]
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in present))
    if norm > most:
        for gradient in present:
            gradient *= most / norm
    return norm
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_clip", "grade": true}
lab.check("clip")

# %% [markdown] id="accumulate_text"
# ### Accumulate
#
# **Core · 10 min · ●●○**
#
# A large batch may not fit into the memory. Then it comes in **parts** (gradient accumulation, *accumulation des
# gradients*). Write one step that is equal to the step with the whole batch:
#
# - `loss_of(model, part)` is the mean over the samples of the part, and `len(part[0])` is their number. Parts may
#   have different sizes, so their losses need weights, and the weights sum to 1.
# - Clear the gradients first. Call `backward` for each part, in order, before the next part begins: it adds to `.grad`
#   and frees the graph of the part. One `backward` for the sum of all losses would keep all graphs.
# - Clip the gradient with your `clip_` once, when it is complete; then call `optimizer.step()`.

# %% nbgrader={"grade_id": "accumulate", "solution": true}
def accumulated_step(model, loss_of, parts: list, optimizer, most: float) -> None:
    """Take one step, as if all `parts` were one batch, with a gradient of at most `most`."""
    ### BEGIN SOLUTION
    samples = sum(len(part[0]) for part in parts)
    optimizer.zero_grad()
    for part in parts:
        (loss_of(model, part) * len(part[0]) / samples).backward()
    clip_([parameter.grad for parameter in model.parameters()], most)
    optimizer.step()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_accumulate", "grade": true}
lab.check("accumulate")

# %% [markdown] id="show_clip_text"
# The layers of the chain end with ReLU; the variance of their weights is twice that of Kaiming, 2 / inputs. The cell prints
# the norm of the first gradient, and trains 20 layers with your step, in two parts: without a bound, and with a norm of
# at most 1.

# %% id="show_clip" tags=["demo"]
def chain(depth):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32, bias=False) for _ in range(depth)]
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=math.sqrt(4 / 32))
    return torch.nn.Sequential(*(module for layer in layers for module in (layer, torch.nn.ReLU())))


def chain_loss(model, part):
    return (model(part[0]) - part[1]).square().mean()


torch.manual_seed(1)
x, y = torch.randn(64, 32), torch.randn(64, 32).relu()
for depth in (2, 5, 10, 20):
    model = chain(depth)
    chain_loss(model, (x, y)).backward()
    norm = clip_([parameter.grad for parameter in model.parameters()], math.inf)
    print(f"{depth:2} layers: a gradient of norm {norm:.2g}")
clip_losses = {"not clipped": [], "norm at most 1": []}
for (name, line), most in zip(clip_losses.items(), (math.inf, 1.0)):
    model = chain(20)
    optimizer = Rule(model.parameters(), momentum, lr=0.05, beta=0.9)
    for _ in range(60):
        line.append(chain_loss(model, (x, y)).item())
        accumulated_step(model, chain_loss, [(x[:40], y[:40]), (x[40:], y[40:])], optimizer, most)
    print(f"{name}: the loss of 60 steps begins with {line[0]:.2g}, {line[1]:.2g}, {line[2]:.2g}")
figures.lines(clip_losses, "step", "loss")

# %% [markdown] id="layers_text"
# ## 5 · Large batches: one rate for each layer
#
# With a batch that is 32 times as large there are 32 times fewer steps, so each one must go further. What limits its
# length? The cell draws, for each layer of a ResNet, the norm of the weights over the norm of the gradient: the rate
# at which one step is as long as the weights themselves. The smallest one limits all layers.

# %% id="data" tags=["demo"]
from dlo_lib.data import generated
from dlo_lib.models import ResNet

torch.set_num_threads(1)  # tensors of this size are slower with two
DATA = generated(train=IMAGES, test=1000, size=16)


def new_model(seed, **shape):
    torch.manual_seed(seed)
    return ResNet(**{"depth": 8, "widths": (4, 8, 16), **shape}).train()


def loss_of(model, batch):
    return F.cross_entropy(model(batch.images), batch.labels)


def stream(seed, size):
    """Yield whole batches without end."""
    epoch = 0
    while True:
        batches = DATA.train.batches(size, seed=seed, epoch=epoch)
        yield from (batch for batch in batches if len(batch) == size)
        epoch += 1


model = new_model(0)
loss_of(model, next(stream(0, LARGE))).backward()
weights = [weight for weight in model.parameters() if weight.ndim > 1]
layers = [(weight.norm() / weight.grad.norm()).item() for weight in weights]
print(f"the largest ratio is {max(layers) / min(layers):.0f} times the smallest")
figures.lines({"ResNet": layers}, "layer", "|weights| / |gradient|")

# %% [markdown] id="layers_exercise"
# ### LARS and LAMB
#
# **Core · 14 min · ●●○**
#
# Give each layer its own rate: a step moves it by a fraction of its norm, whatever its gradient is. The factor is
# called the trust ratio. With $|\cdot|$ as the norm of a whole parameter, and $\lambda$ as `weight_decay`:
#
# - **LARS** (You et al., 2017) does it to SGD with momentum. Options: lr, weight_decay, beta, trust. Here $m$ is a
#   sum, as in the paper:
#   $$r = \mathrm{trust} \cdot \frac{|\theta|}{|g| + \lambda |\theta|} \qquad m \leftarrow \beta\, m + r\, (g + \lambda \theta) \qquad \theta \leftarrow \theta - \mathrm{lr} \cdot m$$
# - **LAMB** (You et al., 2019) does it to Adam's direction $u$, after LARS had failed on BERT. Options: lr, betas,
#   eps, weight_decay:
#   $$w = u + \lambda \theta \qquad r = \frac{|\theta|}{|w|} \qquad \theta \leftarrow \theta - \mathrm{lr} \cdot r \cdot w$$
#
# $r = 1$ for a parameter with fewer than two dimensions (`parameter.ndim`: biases and norms), as is usual, and where a
# norm is 0: $|\theta|$ or $|g|$ for LARS, $|\theta|$ or $|w|$ for LAMB. A layer of zeros could never move with $r = 0$.

# %% nbgrader={"grade_id": "layers", "solution": true}
def lars(parameter, gradient, state: dict, group: dict) -> None:
    """Move `parameter` in place. Options: lr, weight_decay, beta, trust."""
    ### BEGIN SOLUTION
    decay, ratio = group["weight_decay"], 1.0
    weight, slope = parameter.norm().item(), gradient.norm().item()
    if parameter.ndim > 1 and weight > 0 and slope > 0:
        ratio = group["trust"] * weight / (slope + decay * weight)
    if "sum" not in state:
        state["sum"] = torch.zeros_like(parameter)
    state["sum"].mul_(group["beta"]).add_(ratio * (gradient + decay * parameter))
    parameter -= group["lr"] * state["sum"]
    ### END SOLUTION


def lamb(parameter, gradient, state: dict, group: dict) -> None:
    """Move `parameter` in place. Options: lr, betas, eps, weight_decay."""
    ### BEGIN SOLUTION
    update = adam_direction(gradient, state, group) + group["weight_decay"] * parameter
    size, length = parameter.norm().item(), update.norm().item()
    rescaled = size / length if parameter.ndim > 1 and size > 0 and length > 0 else 1.0
    parameter -= group["lr"] * rescaled * update
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_layers", "grade": true}
lab.check("layers")

# %% [markdown] id="lion_text"
# ## 6 · Half of the state: Lion
#
# **Core · 6 min · ●○○**
#
# Adam and LAMB keep two numbers for each weight. Llama 3.2 3B then has 24 GiB of optimiser state in fp32. A program
# search (Chen et al., 2023) found a rule with one average, in which each element moves by exactly lr:
#
# $$u = \mathrm{sign}(\beta_1 m + (1 - \beta_1)\, g) \qquad \theta \leftarrow (1 - \mathrm{lr} \cdot \lambda)\, \theta - \mathrm{lr} \cdot u \qquad m \leftarrow \beta_2 m + (1 - \beta_2)\, g$$
#
# Mind the order: the direction takes the **old** average with $\beta_1$, and then the average moves with $\beta_2$.
# All elements move, the smallest gradient as far as the largest. So the rate of Lion is 3 to 10 times smaller than
# AdamW's, and its weight decay as many times larger.

# %% nbgrader={"grade_id": "lion", "solution": true}
def lion(parameter, gradient, state: dict, group: dict) -> None:
    """Move `parameter` in place. Options: lr, betas, weight_decay."""
    ### BEGIN SOLUTION
    if "mean" not in state:
        state["mean"] = torch.zeros_like(parameter)
    beta1, beta2 = group["betas"]
    update = state["mean"].lerp(gradient, 1 - beta1).sign()
    parameter *= 1 - group["lr"] * group["weight_decay"]
    parameter -= group["lr"] * update
    state["mean"].lerp_(gradient, 1 - beta2)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_lion", "grade": true}
lab.check("lion")

# %% [markdown] id="muon_text"
# ## 7 · A matrix is more than its elements: Muon
#
# All rules so far treat a weight matrix as a list of numbers. Look at the momentum of a layer as a **matrix**,
# through its singular values (*valeurs singulières*): how far the update moves along each of its directions.

# %% id="show_spectrum" tags=["demo"]
model = new_model(0)
optimizer = Rule(model.parameters(), momentum, lr=0.5, beta=0.9)
for _, batch in zip(range(20), stream(0, 64)):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
WEIGHT = model.blocks[2].conv2.weight
KEPT = [value for value in optimizer.state[WEIGHT].values() if torch.is_tensor(value)]
UPDATE = next(value.detach().flatten(1) for value in KEPT if value.shape == WEIGHT.shape)
BEFORE = torch.linalg.svdvals(UPDATE / UPDATE.norm())
times, SPECTRUM = BEFORE[0] / BEFORE[-1], ("number of the singular value", "singular value")
print(f"{tuple(UPDATE.shape)}: the largest singular value is {times:.0f} times the smallest")
figures.lines({"momentum / its norm": BEFORE.tolist()}, *SPECTRUM)

# %% [markdown] id="orthogonal_text"
# A step mostly moves along a few directions, and the others hardly learn. Muon (Jordan et al., 2024) replaces the
# matrix $U S V^\top$ by $U V^\top$: the same directions, all of them with length 1.
#
# ### Orthogonalise
#
# **Core · 9 min · ●●○**
#
# A singular value decomposition is slow on a GPU. A polynomial of odd degree does it with products of matrices: in $X
# \leftarrow a X + (b\, A + c\, A^2)\, X$ with $A = X X^\top$, each singular value $\sigma$ becomes $a\sigma +
# b\sigma^3 + c\sigma^5$. With $a = 3.4445$, $b = -4.775$, $c = 2.0315$, five steps bring all values above 0.01
# to 0.68 … 1.13. (They do not converge to 1; this is enough, and fast.)
#
# Divide the matrix first by its norm (the root of the sum of all squares, at least the largest singular value) plus
# $10^{-7}$, so that zeros stay zeros. If it has more rows than columns, its transpose gives the same with a smaller $A$.

# %% nbgrader={"grade_id": "orthogonal", "solution": true}
def orthogonalised(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return a new matrix (rows, columns), with its singular values brought near 1."""
    ### BEGIN SOLUTION
    a, b, c = 3.4445, -4.775, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_orthogonal", "grade": true}
lab.check("orthogonal")

# %% id="show_orthogonal" tags=["demo"]
after = torch.linalg.svdvals(orthogonalised(UPDATE))
print(f"after five steps they are between {after.min():.2f} and {after.max():.2f}")
both = {"momentum / its norm": BEFORE.tolist(), "orthogonalised": after.tolist()}
figures.lines(both, *SPECTRUM)

# %% [markdown] id="muon_exercise"
# ### Muon
#
# **Core · 9 min · ●●●**
#
# For a parameter with two dimensions or more, with the mean $m$ of `momentum`:
#
# 1. $m \leftarrow \beta\, m + (1 - \beta)\, g$, and one step ahead (Nesterov): $n = \beta\, m + (1 - \beta)\, g$
#    with the new $m$;
# 2. as a matrix, `n.flatten(1)`: a convolution (out, in, height, width) has out rows. $O$ = `orthogonalised` of
#    it, in the shape of the parameter;
# 3. $\theta \leftarrow (1 - \mathrm{lr} \cdot \lambda)\, \theta - \mathrm{lr} \cdot 0.2 \sqrt{\max(\mathrm{rows},
#    \mathrm{columns})} \cdot O$.
#
# The factor gives the update about the size of AdamW's, so that both share one rate (Liu et al., 2025). Parameters
# with one dimension have no directions: update them with your `adamw`, from the same group. Options: lr, beta, betas,
# eps, weight_decay.

# %% nbgrader={"grade_id": "muon", "solution": true}
def muon(parameter, gradient, state: dict, group: dict) -> None:
    """Move `parameter` in place. Options: lr, beta, betas, eps, weight_decay."""
    ### BEGIN SOLUTION
    if parameter.ndim < 2:
        adamw(parameter, gradient, state, group)
        return
    if "mean" not in state:
        state["mean"] = torch.zeros_like(parameter)
    state["mean"].lerp_(gradient, 1 - group["beta"])
    ahead = gradient.lerp(state["mean"], group["beta"]).flatten(1)
    update = 0.2 * math.sqrt(max(ahead.shape)) * orthogonalised(ahead)
    parameter *= 1 - group["lr"] * group["weight_decay"]
    parameter -= group["lr"] * update.view_as(parameter)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_muon", "grade": true}
lab.check("muon")

# %% [markdown] id="predict_state_text"
# **Predict.** How many bytes of state does each rule keep for one fp32 weight of this ResNet, on average?

# %% id="predict_state" tags=["prediction"]
predicted_state = {"SGD": None, "AdamW": None, "LAMB": None}
predicted_state |= {"LARS": None, "Lion": None, "Muon": None}

# %% id="show_state" tags=["demo", "read"]
require_numbers(predicted_state)
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
RULES = {  # the rule, and its options except lr
    "SGD": (momentum, {"beta": 0.9}),
    "AdamW": (adamw, ADAM),
    "LAMB": (lamb, ADAM),
    "LARS": (lars, {"beta": 0.9, "trust": 0.01, "weight_decay": 5e-4}),
    "Lion": (lion, {"betas": (0.9, 0.99), "weight_decay": 0.1}),
    "Muon": (muon, {"beta": 0.95, **ADAM}),
}
kept = {}
for name, (update, options) in RULES.items():
    model = new_model(0)
    optimizer = Rule(model.parameters(), update, lr=1e-3, **options)
    loss_of(model, next(stream(0, 32))).backward()
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    nbytes = sum(value.nbytes for value in values if torch.is_tensor(value))
    kept[name] = nbytes / sum(p.numel() for p in model.parameters())
print(compared(predicted_state, kept))

# %% [markdown] id="verdict_text"
# ## 8 · Which one is better?
#
# A table of single runs, as in most blog posts, mixes two things: the optimiser and the seed. The means of $n_1$ and
# $n_2$ runs differ by chance too, with the standard deviation $s \sqrt{1/n_1 + 1/n_2}$, where $s$ is the spread from
# seed to seed. So divide:
#
# $$z = \frac{\bar a - \bar b}{s \sqrt{1/n_1 + 1/n_2}} \qquad s^2 = \frac{(n_1 - 1)\, s_1^2 + (n_2 - 1)\, s_2^2}{n_1 + n_2 - 2}$$
#
# ($s_1$ is `statistics.stdev` of the first runs.) How large must $|z|$ be? The cell lets **equal** optimisers
# compete, 20,000 times: two, and six, of whose 15 pairs the most different one is taken, as in a table.

# %% id="show_chance" tags=["demo", "read"]
def chance(optimisers, runs, times=20_000):
    """Return the largest |z| of all pairs of equal optimisers, for each of `times` tables."""
    values = torch.randn(times, optimisers, runs, generator=torch.Generator().manual_seed(0))
    means, squares = values.mean(2), values.var(2)
    first, second = torch.combinations(torch.arange(optimisers)).T
    spread = ((squares[:, first] + squares[:, second]) / 2 * 2 / runs).sqrt()
    return ((means[:, first] - means[:, second]).abs() / spread).amax(1)


for count in (2, 6):
    values = chance(count, 5)
    bound, share = values.quantile(0.95), 100 * (values > 3).float().mean()
    above = f"above {bound:.1f} in 5 % of the tables, and above 3 in {share:.0f} %"
    print(f"{count} optimisers, 5 runs each: |z| is {above}")

# %% [markdown] id="verdict_exercise"
# For one pair that you named before, the bound is 2.3 (Student's t for 5 + 5 runs). In a table of six it is about 3.9:
# the best pair is above 3 by chance in 17 % of the tables.
#
# ### A verdict
#
# **Core · 10 min · ●●○**
#
# Write the claim as a function of the accuracies of both. It says "better" if $z$ is above `bound`, "worse" if it is
# below −`bound`, and otherwise **"not shown"**. That is a good answer: it does not say that both are equal. "not
# shown" too, if one of both has fewer than five runs, because its spread is then hardly known; and if $s = 0$: five
# copies of one run are one run.

# %% nbgrader={"grade_id": "verdict", "solution": true}
def verdict(ours: list[float], theirs: list[float], bound: float) -> str:
    """Return "better", "worse" or "not shown" for our accuracies, compared with theirs."""
    ### BEGIN SOLUTION
    n, m = len(ours), len(theirs)
    if min(n, m) < 5:
        return "not shown"
    s = math.sqrt(((n - 1) * stdev(ours) ** 2 + (m - 1) * stdev(theirs) ** 2) / (n + m - 2))
    difference = mean(ours) - mean(theirs)
    if s == 0 or abs(difference) <= bound * s * math.sqrt(1 / n + 1 / m):
        return "not shown"
    return "better" if difference > 0 else "worse"
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_verdict", "grade": true}
lab.check("verdict")

# %% [markdown] id="table_text"
# ### The table of the course
#
# Six optimisers, batches of 32 and of 1,024 images, **the same number of samples**: 16,384 images are 512 steps of
# 32, and 16 steps of 1,024. Each cell has its own range test, which starts again from the same weights for each rate,
# because 16 steps are too few for a slow rise. All runs have a warm-up of a tenth of the steps and a cosine. The images
# are those of `generated`, 16 × 16, of which the best possible classifier gets 93 % on average.
#
# **Predict.** The mean test accuracy in percent: of all, or of the few that you find interesting. (Guessing gives 10 %.)

# %% id="predict_table" tags=["prediction"]
predicted_table = {"SGD, 32": None, "SGD, 1024": None, "AdamW, 32": None, "AdamW, 1024": None}
predicted_table |= {"LAMB, 32": None, "LAMB, 1024": None, "LARS, 32": None, "LARS, 1024": None}
predicted_table |= {"Lion, 32": None, "Lion, 1024": None, "Muon, 32": None, "Muon, 1024": None}

# %% [markdown] id="small_text"
# First a small part of it on your machine, with half as many images, in one to five minutes: two optimisers of your
# choice in `CHOSEN`.

# %% id="run_small" tags=["demo", "read"]
import itertools

from torch.optim.swa_utils import update_bn

from dlo_lib.optim import range_test_with_reset

CHOSEN = ["SGD", "Muon"]


def peak_of(name, size):
    """Return the peak that the range test finds, on a model that no run uses."""
    update, options = RULES[name]
    model = new_model(100)
    optimizer = Rule(model.parameters(), update, lr=1e-3, **options)
    spans = {"lowest": 3e-4, "highest": 30.0, "rates": TRIED, "steps_each": 20 if size == 32 else 5}
    found = range_test_with_reset(model, optimizer, stream(100, size), loss_of, **spans)
    return found.suggestion().peak


def warm_cosine(step, steps):
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2


def trained(name, size, peak, seed, samples, **shape):
    """Return a model after a run with `samples` images."""
    update, options = RULES[name]
    model, steps = new_model(seed, **shape), samples // size
    optimizer = Rule(model.parameters(), update, lr=peak, **options)
    for step, batch in zip(range(steps), stream(seed, size)):
        optimizer.param_groups[0]["lr"] = peak * warm_cosine(step, steps)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    update_bn([DATA.train.images[:1024]], model)  # after few steps the running means lag behind
    return model.eval()


@torch.no_grad()
def accuracy_of(model):
    return (model(DATA.test.images).argmax(-1) == DATA.test.labels).float().mean().item()


def part_of_table(names, sizes, samples, seeds):
    """Return the accuracies of each cell, a run for each seed, and the first model."""
    accuracies, models = {}, {}
    for name, size in itertools.product(names, sizes):
        peak, key = peak_of(name, size), f"{name}, {size}"
        runs = [trained(name, size, peak, seed, samples) for seed in range(seeds)]
        accuracies[key], models[key] = [accuracy_of(model) for model in runs], runs[0]
    return accuracies, models


small, models = part_of_table(CHOSEN, (32, LARGE), SAMPLES, SEEDS)
first, second = CHOSEN
for size in (32, LARGE):
    said = verdict(small[f"{first}, {size}"], small[f"{second}, {size}"], 2.3)
    print(f"batch {size}: {first} against {second}: {said}")
figures.runs(small, f"{SAMPLES} samples, {SEEDS} seeds", {})

# %% [markdown] id="full_text"
# The full table took 8 minutes of CPU time, so it is stored: `part_of_table(RULES, (32, 1024), 16_384, 8)` measures
# it. Its bound, 3.4, is for 15 pairs of 8 runs each.

# %% id="show_table" tags=["demo", "read"]
from dlo_lib.labkit.stored_results import StoredResult

require_numbers(predicted_table)
STORED = StoredResult(
    "2 cores of an AMD EPYC",
    "2026-11-27",
    "torch 2.13",
    {
        "SGD, 32": [0.942, 0.941, 0.938, 0.946, 0.938, 0.945, 0.94, 0.945],
        "SGD, 1024": [0.507, 0.247, 0.488, 0.445, 0.387, 0.401, 0.487, 0.481],
        "AdamW, 32": [0.934, 0.936, 0.94, 0.933, 0.937, 0.944, 0.94, 0.942],
        "AdamW, 1024": [0.658, 0.41, 0.533, 0.588, 0.519, 0.401, 0.587, 0.519],
        "LAMB, 32": [0.944, 0.94, 0.94, 0.934, 0.942, 0.944, 0.932, 0.939],
        "LAMB, 1024": [0.774, 0.561, 0.629, 0.696, 0.681, 0.506, 0.618, 0.641],
        "LARS, 32": [0.928, 0.934, 0.944, 0.938, 0.93, 0.936, 0.947, 0.939],
        "LARS, 1024": [0.724, 0.726, 0.653, 0.744, 0.823, 0.697, 0.769, 0.721],
        "Lion, 32": [0.935, 0.94, 0.942, 0.942, 0.937, 0.946, 0.943, 0.947],
        "Lion, 1024": [0.736, 0.571, 0.601, 0.77, 0.654, 0.542, 0.705, 0.649],
        "Muon, 32": [0.939, 0.936, 0.94, 0.941, 0.938, 0.94, 0.943, 0.943],
        "Muon, 1024": [0.668, 0.54, 0.565, 0.702, 0.618, 0.602, 0.717, 0.607],
    },
)
full = STORED.values
print(f"STORED, not measured here: {STORED.machine}, {STORED.date}, {STORED.software}")
print(compared(predicted_table, {name: 100 * mean(values) for name, values in full.items()}))
bound = chance(6, 8).quantile(0.95).item()
for size in (32, 1024):
    print(f"batch {size}: a difference is shown above z = {bound:.1f}")
    for name in RULES:
        pairs = {other: (full[f"{name}, {size}"], full[f"{other}, {size}"]) for other in RULES}
        beaten = [other for other, pair in pairs.items() if verdict(*pair, bound) == "better"]
        print(f"  {name} is shown to be better than: {', '.join(beaten) or 'none'}")
figures.runs(full, "16384 samples, 8 seeds", predicted_table)

# %% [markdown] id="table_after"
# **Batch 32.** No difference is shown: with 512 steps, and a rate from a range test, all six are near the best possible
# classifier. That all are above 93 % is one chance and not six, because they share one test set: on these 1,000
# images, a classifier that knows the direction of the stripes gets 95.4 %.
#
# **Batch 1,024.** All lose: 16 steps are too few for every rule. LARS is better than SGD, AdamW and Muon, and LAMB, Lion and
# Muon are better than SGD. Between LARS and LAMB, or LAMB and AdamW, **nothing is shown**, although their means are 9 and
# 11 points apart: from seed to seed an optimiser varies by 5 to 9 points here. And with the first seed alone? LAMB would
# have won the table with 77 %, before Lion with 74 % and LARS with 72 %; the mean of 8 seeds is highest for LARS, 73 %.

# %% [markdown] id="minima_text"
# ## 9 · Sharp and flat minima
#
# What do architecture and batch change about the place where a run ends? Two ways to look: the curvature in the
# steepest direction, and a drawing of the loss around the weights. The curvature is the eigenvalue of largest size of
# the Hessian $H$. $H$ is too large to store, but its product with a vector is a backward of a backward, and **power
# iteration** needs no more: scale $v$ to length 1, compute $Hv$, which is the next $v$, and repeat. The component of
# the largest eigenvalue grows fastest, and $v \cdot Hv$ is its estimate, with its sign (`dlo_lib.optim.curvature`).
#
# The cell measures both batches of your first choice. Keskar et al. (2016) found that large batches end in **sharper**
# minima. This cell cannot show it: after so few steps the run of 1,024 still has a high loss, so it is at no minimum, and
# one run of each batch shows nothing. With norms, the same function with smaller weights also has a larger curvature.

# %% id="show_eigenvalue" tags=["demo", "read"]
from dlo_lib.optim.curvature import largest_eigenvalue
from dlo_lib.optim.landscape import filter_normalised, loss_on_plane


def loss_and_weights(model, batch):
    return lambda: loss_of(model, batch), [p for p in model.parameters() if p.ndim > 1]


some = next(stream(7, min(512, 2 * LARGE)))
for key in (f"{CHOSEN[0]}, 32", f"{CHOSEN[0]}, {LARGE}"):
    loss, weights = loss_and_weights(models[key], some)
    first = torch.Generator().manual_seed(0)
    sharpness = largest_eigenvalue(loss, weights, max_iterations=20, generator=first).value
    print(f"{key}: loss {loss().item():.2f}, largest eigenvalue {sharpness:.1f}")

# %% [markdown] id="landscape_text"
# ### The landscape
#
# A plane through the weights of a trained model: two random directions, and the loss at each point. A random
# direction says little unless each **filter** of it has the norm of the model's own filter, because a step of length
# 1 is tiny for a large filter and destroys a small one (Li et al., 2018). Both models have 20 layers and the same
# training; one has no skip connections.

# %% id="show_landscape" tags=["demo"]
generator = torch.Generator().manual_seed(0)
places = [2 * k / (GRID - 1) - 1 for k in range(GRID)]
surfaces = {}
for name, skip in (("with skips", True), ("without skips", False)):
    model = trained("AdamW", 64, 3e-3, 0, SAMPLES, depth=20, skip=skip)
    print(f"{name}: test accuracy {100 * accuracy_of(model):.1f} %")
    loss, weights = loss_and_weights(model, next(stream(7, 128)))
    plane = filter_normalised(weights, generator), filter_normalised(weights, generator)
    surfaces[name] = places, loss_on_plane(loss, weights, plane, (places, places)).tolist()
figures.landscapes(surfaces)

# %% [markdown] id="landscape_after"
# In our run the valley with skip connections is wider: along both directions the loss reaches 5 at a larger distance, and
# the model without them is 19 points worse after the same steps. Li et al. draw 56 layers without skip connections: there the
# surface has no valley left. It is one run of each model, so this is a picture, not a claim.

# %% [markdown] id="scale_text"
# ## 10 · At scale
#
# - **State.** AdamW's 8 bytes for a weight are half of a training state; ZeRO (lab 14) divides them by the ranks.
# - **What an update must see.** SGD, AdamW and Lion treat elements one by one: a rank that holds a part of a matrix
#   updates its part. LARS and LAMB need one norm of each layer, an all-reduce of one number. Muon needs the whole matrix,
#   which a rank must gather. Clipping needs the norm over all ranks: local norms let the weights drift apart.
# - **The batch.** The published results (LARS: ImageNet with 32,768 images, LAMB: BERT) have thousands of steps, not 16.
#
# The training command of the library takes the rules by name:
#
#     python -m dlo_lib.train --model tiny --optimizer lion --lr 3e-4 --weight-decay 0.5

# %% [markdown] id="monday_text"
# ## 11 · The same with torch.optim
#
# PyTorch's classes pass the same checks. The helper makes a class with one parameter from your arguments, and keeps
# its state dict in `state`:

# %% id="monday" tags=["demo", "read"]
def with_torch(make):
    """Return an update rule that takes one step with the optimiser `make(parameter, group)`."""

    def update(parameter, gradient, state, group):
        held = torch.nn.Parameter(parameter)  # shares the memory of the parameter
        held.grad = gradient
        optimizer = make([held], group)
        rate = optimizer.param_groups[0]["lr"]
        if state:
            optimizer.load_state_dict(state["saved"])
            optimizer.param_groups[0]["lr"] = rate  # the saved one is that of the last step
        optimizer.step()
        state["saved"] = optimizer.state_dict()

    return update


def torch_sgd(parameters, group):  # the sum in place of the mean, so a smaller rate
    return torch.optim.SGD(parameters, lr=group["lr"] * (1 - group["beta"]), momentum=group["beta"])


def torch_adamw(parameters, group):
    return torch.optim.AdamW(parameters, **{name: group[name] for name in ("lr", *ADAM)})


lab.check("momentum", instead={"momentum": with_torch(torch_sgd)})
lab.check("adamw", instead={"adamw": with_torch(torch_adamw)})

# %% [markdown] id="dispatch_text"
# Your rule calls some operators of PyTorch for each parameter, and on a GPU each operator is at least one kernel. For
# small parameters the time of a step is the time to **start** them. `foreach` calls each operator once for a list of
# parameters, `fused` one operator for the whole update.
#
# **Predict.** How many operators does one step of AdamW call, for 100 parameters? The cell leaves out what computes
# nothing: records for the profiler, and reads of the step counters (`foreach` reads 200).

# %% id="predict_operators" tags=["prediction"]
predicted_operators = {"yours": None, "for-loop": None, "foreach": None, "fused": None}

# %% id="show_operators" tags=["demo", "read"]
import time

from torch.utils._python_dispatch import TorchDispatchMode

from dlo_lib.labkit.side_by_side import Form, lines_of, table

require_numbers(predicted_operators)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Counter(TorchDispatchMode):
    """Count the operators that PyTorch dispatches, without records and reads."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        left_out = ("profiler.", "aten._local_scalar_dense")
        self.count += not str(function).startswith(left_out)
        return function(*args, **(kwargs or {}))


forms = {
    "yours": lambda p: Rule(p, adamw, lr=1e-3, **ADAM),
    "for-loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}
operators, times = {}, {}
for name, make in forms.items():
    parameters = [torch.nn.Parameter(torch.randn(64, 64, device=DEVICE)) for _ in range(100)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    step, times[name] = make(parameters).step, math.inf
    step()  # makes the states
    with Counter() as counter:
        step()
    operators[name] = counter.count
    for _ in range(20):
        begin = time.perf_counter()
        step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times[name] = min(times[name], time.perf_counter() - begin)
print(compared(predicted_operators, operators, "{:.0f}".format))
lines = {"yours": lines_of(Rule, adam_direction, adamw), "for-loop": 1, "foreach": 1, "fused": 1}
print(table(Form(name, lines=lines[name], seconds=times[name]) for name in forms))

# %% [markdown] id="monday_after"
# On a CPU `fused` is much shorter; `foreach` has fewer operators, but each still computes one tensor after the other, so it
# need not be faster. On a GPU the number of kernels decides for small tensors, and `foreach` is the default there.
# `torch.optim` has no LARS, LAMB or Lion, and Muon since PyTorch 2.9, for matrices only; `dlo_lib.optim` has all of them.

# %% [markdown] id="quiz_text"
# ## 12 · Quiz
#
# **Core · 5 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check tests that none is missing; grading counts the right ones.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "a", "q2": "b", "q3": "d", "q4": "b", "q5": "c"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - `CHOSEN = ["AdamW", "Lion"]`: which number of seeds shows a difference at a batch of 32? Begin with $z$ of five
#   seeds: it grows as the root of the number.
# - Give `muon` three steps of the iteration in place of five. Which singular values does the figure show?
# - Measure the eigenvalue for five seeds of each batch, and give both lists to `verdict`.
#
# ## References
#
# - D. Kingma, J. Ba, *Adam* (2014), [arXiv:1412.6980](https://arxiv.org/abs/1412.6980)
# - I. Loshchilov, F. Hutter, *Decoupled Weight Decay Regularization* (2017), [arXiv:1711.05101](https://arxiv.org/abs/1711.05101)
# - Y. You et al., *Large Batch Training of Convolutional Networks* (LARS; 2017), [arXiv:1708.03888](https://arxiv.org/abs/1708.03888)
# - Y. You et al., *Large Batch Optimization for Deep Learning* (LAMB; 2019), [arXiv:1904.00962](https://arxiv.org/abs/1904.00962)
# - X. Chen et al., *Symbolic Discovery of Optimization Algorithms* (Lion; 2023), [arXiv:2302.06675](https://arxiv.org/abs/2302.06675)
# - K. Jordan et al., *Muon: An optimizer for hidden layers in neural networks* (2024), [kellerjordan.github.io](https://kellerjordan.github.io/posts/muon/)
# - J. Liu et al., *Muon is Scalable for LLM Training* (2025), [arXiv:2502.16982](https://arxiv.org/abs/2502.16982)
# - H. Li et al., *Visualizing the Loss Landscape of Neural Nets* (2018), [arXiv:1712.09913](https://arxiv.org/abs/1712.09913)
# - N. Keskar et al., *On Large-Batch Training for Deep Learning* (2016), [arXiv:1609.04836](https://arxiv.org/abs/1609.04836)
# - The course this lab follows: FIDLE, sequence 16, and IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
