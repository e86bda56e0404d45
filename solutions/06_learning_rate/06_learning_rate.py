# %% [markdown] id="title"
# # 06 · The learning rate, found and scheduled
#
# **What you will do.** The learning rate (*taux d'apprentissage*) is the number that most often decides
# whether a training works. You write the test that finds it, then the schedules that change it during the
# training: steps, cosine, warm-up, cycles, OneCycle, warm-up – stable – decay. You use a schedule to drive an
# optimiser and to survive a restart, measure how far the rate can grow with the batch, and compare all runs
# in TensorBoard. At the end PyTorch's schedulers do the same and pass the same checks.
#
# You should have trained a small model with PyTorch before: a data loader, a loss, `backward`, and the step of an
# optimiser. Labs 01 to 05 are not needed: they make one training step faster (mixed precision, profiler, data
# loader, `torch.compile`, fused kernels). This lab keeps the step as it is and asks how many of them you need, and how long each should be.
#
# All runs train a small ResNet on real handwritten digits, in seconds. The core exercises and predictions take
# about 100 minutes; with the text and the demos plan two hours and a quarter. The two optional ones (cycles, snapshot
# ensembles) take 27 minutes more. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you are stuck,
# `lab.use_reference("name")` lets you continue without the points of that step.
#
# Words: warm-up (*montée en température*), schedule (*politique de taux d'apprentissage*), plateau, momentum
# (*inertie*), restart (*redémarrage*), gradient noise (*bruit du gradient*).

# %% id="setup"
import copy
import math
import os

import torch
import torch.nn.functional as F

from dlo_lib.grading import Lab
from dlo_lib.labkit.predictions import compared, require_numbers

EPOCHS = int(os.environ.get("DLO_EPOCHS", 3))  # of most runs below
SEEDS = int(os.environ.get("DLO_SEEDS", 4))  # repeats of each comparison
IMAGES = int(os.environ.get("DLO_IMAGES", 1348))  # for training
TEST_STEPS = int(os.environ.get("DLO_TEST_STEPS", 80))  # of a range test
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
lab = Lab(globals())

# %% [markdown] id="why_text"
# ## Why: a factor of ten
#
# These runs have the same model, data and number of steps. Only the learning rate differs.

# %% id="data" tags=["demo", "nbval-check-output"]
from dataclasses import replace

import figures

from dlo_lib.data import digits
from dlo_lib.models import ResNet

torch.set_num_threads(1)  # tensors of this size are slower with two
DATA = digits().to(DEVICE)
DATA = replace(DATA, train=DATA.train.first(IMAGES))
BATCH = 64
STEPS_PER_EPOCH = len(DATA.train) // BATCH
STEPS = EPOCHS * STEPS_PER_EPOCH


def new_model(seed):
    torch.manual_seed(seed)
    return ResNet(depth=8, widths=(8, 12, 16), channels=1).to(DEVICE).train()


def loss_of(model, batch):
    return F.cross_entropy(model(batch.images), batch.labels)


def stream(seed, size=BATCH):
    """Yield batches without end. The incomplete last batch of an epoch is dropped: batch norm over four images is too noisy."""
    epoch = 0
    while True:
        yield from (batch for batch in DATA.train.batches(size, seed=seed, epoch=epoch) if len(batch) == size)
        epoch += 1


@torch.no_grad()
def test_logits(model):
    was = model.training
    logits = model.eval()(DATA.test.images)
    model.train(was)
    return logits


def accuracy_of(logits):
    return (logits.argmax(-1) == DATA.test.labels).float().mean().item()


print(f"{len(DATA.train)} training images, {len(DATA.test)} test images, {STEPS_PER_EPOCH} steps per epoch")

# %% id="show_why" tags=["demo"]
curves, ends = {}, {}
for rate in (0.001, 0.01, 0.1, 1.0, 10.0):
    model, curves[rate] = new_model(0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for _, batch in zip(range(STEPS), stream(0)):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        curves[rate].append(loss.item())
    ends[rate] = accuracy_of(test_logits(model))
figures.by_rate(curves, ends)

# %% [markdown] id="why_after"
# With a rate that is too low, training ends before convergence. With a rate that is too high, the loss does
# not decrease or diverges. The good rates between them span about one decade, and you cannot know which
# without a test: it depends on the model, the batch size and the optimiser.

# %% [markdown] id="sweep_text"
# ## 1 · The range test
#
# **Core · 5 min · ●○○**
#
# Leslie Smith's answer (2015): do not guess, **measure**. Train for a few steps while the rate grows from far
# too low to far too high, and observe the loss.
#
# A good rate may be in any decade, so the rate grows by the same **factor** in each step.

# %% nbgrader={"grade_id": "sweep", "solution": true}
def sweep(lowest: float, highest: float, count: int) -> list[float]:
    """Return `count` learning rates from `lowest` to `highest`.

    Each is the previous one times a constant factor.
    """
    ### BEGIN SOLUTION
    return [lowest * (highest / lowest) ** (i / (count - 1)) for i in range(count)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_sweep", "grade": true}
lab.check("sweep")

# %% [markdown] id="range_text"
# ### The test itself
#
# **Core · 13 min · ●●○**
#
# Now write the test itself, with plain gradient descent: for each rate take one batch and one step,
# $w \leftarrow w - \mathrm{rate} \cdot \mathrm{gradient}$. Record each loss **before the step**: it is the loss whose gradient the step
# uses.
#
# `batches` may have more batches than there are rates, and it may be endless. The test must not change the
# model. At the end, restore its weights, its buffers (the running means of a batch norm) and its mode. During
# the test the model is in training mode.

# %% nbgrader={"grade_id": "range_test", "solution": true}
def range_test(model: torch.nn.Module, loss_of, batches, rates: list[float]) -> list[float]:
    """Return the loss before each step.

    `loss_of(model, batch)` returns a loss. `batches` has at least one batch per rate.
    """
    ### BEGIN SOLUTION
    before, was_training = copy.deepcopy(model.state_dict()), model.training
    model.train()
    losses = []
    for rate, batch in zip(rates, batches):
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
    model.zero_grad()
    model.load_state_dict(before)
    model.train(was_training)
    return losses
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_range_test", "grade": true}
lab.check("range_test")

# %% [markdown] id="smoothed_text"
# ### A smooth curve
#
# **Core · 5 min · ●○○**
#
# Losses of single batches are noisy. The usual remedy is an **exponential mean**: after each loss
# $m \leftarrow \beta\, m + (1 - \beta)\, \mathrm{loss}$.
#
# It starts with $m = 0$, so its first values are far too low. After $k$ losses the weights sum to $1 - \beta^k$: divide
# by that.

# %% nbgrader={"grade_id": "smoothed", "solution": true}
def smoothed(losses: list[float], beta: float) -> list[float]:
    """Return the exponential mean after each loss, without the bias of its start."""
    ### BEGIN SOLUTION
    mean, curve = 0.0, []
    for k, loss in enumerate(losses, 1):
        mean = beta * mean + (1 - beta) * loss
        curve.append(mean / (1 - beta**k))
    return curve
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_smoothed", "grade": true}
lab.check("smoothed")

# %% [markdown] id="suggest_text"
# ### Which rates?
#
# **Core · 8 min · ●●○**
#
# Read two rates from the curve:
#
# - **bottom**: the rate with the lowest smoothed loss. Above it the loss becomes unstable and diverges. The
#   largest rate of a schedule must be lower.
# - **steepest**: *before* the bottom, the rate where the loss falls fastest on the **logarithmic** axis. At
#   this rate the model still learns; how safe it is depends on the distance to the bottom.
#
# For the slope at rate i, use its two neighbours and the difference of their logarithms. The first rate has no
# slope, and the bottom itself is not a candidate.

# %% nbgrader={"grade_id": "suggest", "solution": true}
def suggest(rates: list[float], losses: list[float]) -> dict[str, float]:
    """Return two of the `rates`, as {"steepest": ..., "bottom": ...}.

    `losses` are already smoothed, one per rate.
    """
    ### BEGIN SOLUTION
    bottom = min(range(len(losses)), key=lambda i: losses[i])
    def slope(i):
        return (losses[i + 1] - losses[i - 1]) / math.log(rates[i + 1] / rates[i - 1])

    steepest = min(range(1, bottom), key=slope)
    return {"steepest": rates[steepest], "bottom": rates[bottom]}
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_suggest", "grade": true}
lab.check("suggest")

# %% [markdown] id="predict_range_text"
# **Predict.** Look at the five runs at the top. They use momentum 0.9, your test uses none. With momentum $\mu$ a
# gradient also acts in later steps, $1/(1 - \mu)$ times in total, so your test needs rates about 10 times as large.
# At which rate does the loss of your test fall fastest, and at which rate is it lowest? Replace each `None` that you want to predict by a number. Predictions are not graded; the next
# cell shows them beside the measurement.

# %% id="predict_range" tags=["prediction"]
predicted_rates = {"steepest": None, "bottom": None}

# %% [markdown] id="show_range_text"
# The cell runs your test on the digits, with several orders of the batches, and takes the mean of the losses: in
# one order alone, a lucky batch can move both rates. The mean lags behind the losses by about $\beta/(1 - \beta)$ steps, so the
# bottom that it shows is too far to the right. The panel on the right shows the other method, **with a
# reset**: each rate starts from the same weights and takes a few steps. Your `range_test` restores the model,
# so this is one call per rate. It costs more, but no rate is affected by the previous ones.

# %% id="show_range" tags=["demo"]
require_numbers(predicted_rates)
rates = sweep(1e-3, 10.0, TEST_STEPS)
model = new_model(0)
orders = [range_test(model, loss_of, stream(seed), rates) for seed in range(SEEDS)]
losses = [sum(column) / SEEDS for column in zip(*orders)]
curve = smoothed(losses, 0.8)
FOUND = suggest(rates, curve)
few_rates = sweep(1e-3, 10.0, TEST_STEPS // 8)
reset = {rate: range_test(model, loss_of, stream(0), [rate] * 9)[-1] for rate in few_rates}
print(compared(predicted_rates, FOUND))
figures.tested(rates, losses, curve, FOUND, reset, predicted_rates)

# %% [markdown] id="peak_text"
# The two rates may be close, here a factor of about two: the model learns during the test, so the loss falls fastest
# shortly before it rises. The restarts on the right show how wide the good range is.
#
# The library's `range_test` works with your optimiser; the runs below use it with SGD and momentum 0.9. Its figure
# marks four rates: the loss *begins to fall* (a tenth of its whole fall), *falls fastest* (your steepest), *stops
# falling* (your bottom), and between these two the **peak**, their geometric mean: the largest rate of the runs
# below. The title judges the smoothed curve: it can stay bounded although single losses leave the picture.

# %% id="show_peak" tags=["demo"]
from dlo_lib.optim import range_test as library_test
from dlo_lib.optim.draw import draw_range_test

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
found = library_test(
    model, optimizer, stream(0), loss_of, lowest=1e-4, highest=10.0, steps=TEST_STEPS
)
PEAK = found.suggestion().peak
print(f"peak: {PEAK:.2g}")
draw_range_test(found)

# %% [markdown] id="decay_text"
# ## 2 · Schedules are functions
#
# **Core · 6 min · ●○○**
#
# A high rate moves the weights far, a low rate lets them converge. So the rate should change during the run.
# We write each schedule as a **pure function**: its argument is the number of completed steps (0 for the
# first step), its result is a **factor** of the peak. Such a function has no state to save or restore, and
# you can plot it without training.
#
# Two schedules that fall:
# - **steps** (*par paliers*): times `gamma` after every `every` steps;
# - **cosine**: half a cosine from 1 to `final` in `steps` steps. After that it stays at `final`.

# %% nbgrader={"grade_id": "decay", "solution": true}
def step_factor(step: int, every: int, gamma: float) -> float:
    """Return the factor: times `gamma` after every `every` steps."""
    ### BEGIN SOLUTION
    return gamma ** (step // every)
    ### END SOLUTION


def cosine_factor(step: int, steps: int, final: float = 0.0) -> float:
    """Return the factor: half a cosine from 1 at step 0 to `final` at `steps`, then `final`."""
    ### BEGIN SOLUTION
    return final + (1 - final) * (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_decay", "grade": true}
lab.check("decay")

# %% [markdown] id="warmup_text"
# ### Warm-up
#
# **Core · 6 min · ●○○**
#
# The first gradients are large and have very different directions; with a high rate they can
# ruin a model at the start. So the rate rises linearly: before step `warm` the factor of step s is s / `warm`. Step
# `warm` is the first of the cosine and has the factor 1; the cosine takes the remaining steps. `warm` may be 0.
# After step `steps` the factor stays at `final`. (The first step has the rate 0. Many libraries count from 1
# instead, so that no step is lost.)

# %% nbgrader={"grade_id": "warmup", "solution": true}
def warmup_cosine(step: int, warm: int, steps: int, final: float = 0.0) -> float:
    """Return the factor: a rise of `warm` steps, then a cosine to `final` at step `steps`."""
    ### BEGIN SOLUTION
    if step < warm:
        return step / warm
    share = min((step - warm) / (steps - warm), 1.0)
    return final + (1 - final) * (1 + math.cos(math.pi * share)) / 2
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_warmup", "grade": true}
lab.check("warmup")

# %% [markdown] id="one_cycle_text"
# ### OneCycle
#
# **Core · 9 min · ●●○**
#
# OneCycle (Smith and Topin, 2017): the whole run is one cycle, with a much higher peak than usual and a
# very low end. The **momentum changes in the opposite direction**: the effective step grows as
# $\mathrm{rate} / (1 - \mathrm{momentum})$, so the momentum is low where the rate is high.
#
# - factor: half a cosine from `start` (step 0) to 1 (step `top`), then half a cosine to `final` in the
#   **last** step, `steps - 1`; it stays there;
# - momentum: the same two halves, from `high` to `low` and back to `high`, where it stays.
#
# `between` is half a cosine from one value to another; use it for all four halves. Write the formula yourself:
# `torch.optim.lr_scheduler.OneCycleLR` comes in the last section.

# %% id="between"
def between(a: float, b: float, share: float) -> float:
    """Return the value on half a cosine from `a` (share 0) to `b` (share 1)."""
    return b + (a - b) * (1 + math.cos(math.pi * share)) / 2


# %% nbgrader={"grade_id": "one_cycle", "solution": true}
def one_cycle(
    step: int, top: int, steps: int, start: float, final: float, low: float, high: float
) -> tuple[float, float]:
    """Return the factor and the momentum of this step."""
    ### BEGIN SOLUTION
    if step <= top:
        return between(start, 1.0, step / top), between(high, low, step / top)
    share = (min(step, steps - 1) - top) / (steps - 1 - top)
    return between(1.0, final, share), between(low, high, share)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_one_cycle", "grade": true}
lab.check("one_cycle")

# %% [markdown] id="wsd_text"
# ### Warm-up – stable – decay
#
# **Core · 9 min · ●●○**
#
# A cosine must know its end from the start: if you stop it half-way, the rate
# is still high, and after its end the rate is too low to continue. WSD, which many language models use today,
# separates the two: a plateau of any length, and a short decay when you need a result.
#
# - `warm` steps of linear rise from `lowest` to 1, then `stable` steps at 1;
# - `decay` steps of fall: with x from 0 to 1, as $1 - \sqrt{x}$, scaled so that it ends at `lowest`; it stays
#   there.
#
# Each phase may have no steps.

# %% nbgrader={"grade_id": "wsd", "solution": true}
def wsd(step: int, warm: int, stable: int, decay: int, lowest: float = 0.0) -> float:
    """Return the factor: warm-up, plateau, then a fall as one minus a square root."""
    ### BEGIN SOLUTION
    if step < warm:
        return lowest + (1 - lowest) * step / warm
    if step < warm + stable:
        return 1.0
    done = step - warm - stable
    return lowest + (1 - lowest) * (1 - math.sqrt(done / decay)) if done < decay else lowest
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_wsd", "grade": true}
lab.check("wsd")

# %% [markdown] id="show_schedules_text"
# All schedules over the steps of one run:

# %% id="show_schedules" tags=["demo"]
def schedules_of(steps):
    """Return the schedules of a run of `steps` steps, as functions step -> factor."""
    warm, top = max(1, steps // 8), max(1, round(0.3 * steps))
    return {
        "constant": lambda step: 1.0,
        "steps": lambda step: step_factor(step, -(-steps // 3), 0.2),
        "cosine": lambda step: cosine_factor(step, steps),
        "warm-up + cosine": lambda step: warmup_cosine(step, warm, steps),
        "OneCycle": lambda step: one_cycle(step, top, steps, 0.04, 1e-4, 0.85, 0.95)[0],
        "WSD": lambda step: wsd(step, warm, steps - warm - steps // 4, steps // 4),
    }


def one_cycle_momentum(steps):
    return lambda step: one_cycle(step, max(1, round(0.3 * steps)), steps, 0.04, 1e-4, 0.85, 0.95)[1]


drawn = 120
figures.schedules(
    {name: [factor(step) for step in range(drawn)] for name, factor in schedules_of(drawn).items()},
    [one_cycle_momentum(drawn)(step) for step in range(drawn)],
)

# %% [markdown] id="follow_text"
# ## 3 · A schedule drives an optimiser
#
# **Core · 14 min · ●●○**
#
# PyTorch's schedulers are objects that refer to an optimiser. Write one for any factor, without theirs:
#
# - the constructor records the **peak** of each parameter group (`group["lr"]`), and sets each rate to
#   $\mathrm{peak} \times \mathrm{factor}(0)$;
# - `step()`, called after each optimiser step, sets the rates of the next step: always from the peak, never
#   from the current rate;
# - `state_dict()` and `load_state_dict(state)` serve checkpoints. The state is a dict of plain numbers and
#   lists of them, so that a checkpoint can be read without your class. After loading, the rates are
#   **immediately** those of the next step, because the groups of a new optimiser still have their first rates.
#   The peaks, too, are those of the saved run, even if the new optimiser was created with others.

# %% nbgrader={"grade_id": "follow", "solution": true}
class Follow:
    def __init__(self, optimizer: torch.optim.Optimizer, factor):
        ### BEGIN SOLUTION
        self.optimizer, self.factor, self.done = optimizer, factor, 0
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self._set()
        ### END SOLUTION

    def step(self) -> None:
        ### BEGIN SOLUTION
        self.done += 1
        self._set()
        ### END SOLUTION

    def state_dict(self) -> dict:
        ### BEGIN SOLUTION
        return {"done": self.done, "peaks": list(self.peaks)}
        ### END SOLUTION

    def load_state_dict(self, state: dict) -> None:
        ### BEGIN SOLUTION
        self.done, self.peaks = state["done"], list(state["peaks"])
        self._set()

    def _set(self) -> None:
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group["lr"] = peak * self.factor(self.done)
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_follow", "grade": true}
lab.check("follow")

# %% [markdown] id="train_text"
# This training uses your class. With a folder name in `log`, it writes loss, learning rate and test accuracy
# as **TensorBoard events**.

# %% id="train" tags=["demo"]
import tempfile

from torch.utils.tensorboard import SummaryWriter

folder = tempfile.TemporaryDirectory(prefix="lab06-runs-")  # deleted when the kernel ends
RUNS = folder.name


def train(factor, peak, steps=STEPS, seed=0, momentum=None, log=None, after_step=None):
    """Train for `steps` steps; return the test accuracy."""
    model = new_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9, weight_decay=5e-4)
    follow = Follow(optimizer, factor)
    board = SummaryWriter(os.path.join(RUNS, log)) if log else None
    for step, batch in zip(range(steps), stream(seed)):
        if momentum is not None:
            optimizer.param_groups[0]["momentum"] = momentum(step)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        if board is not None:
            board.add_scalar("train/loss", loss.item(), step + 1)
            board.add_scalar("train/lr", optimizer.param_groups[0]["lr"], step + 1)
            if (step + 1) % STEPS_PER_EPOCH == 0:
                board.add_scalar("test/accuracy", accuracy_of(test_logits(model)), step + 1)
        follow.step()
        if after_step is not None:
            after_step(step + 1, model)
    if board is not None:
        board.close()
    return accuracy_of(test_logits(model))


# %% [markdown] id="compare_text"
# ## 4 · Which one is best?
#
# One run proves nothing: another seed gives other weights and another order of the data. So each schedule
# trains several times, and all use the same seeds, so that differences can be compared **pair by pair**.
# Points are runs, bars their means.
#
# **Predict.** Which accuracy, in percent, do these three reach on average?

# %% id="predict_compare" tags=["prediction"]
predicted_accuracy = {"constant": None, "cosine": None, "OneCycle": None}

# %% id="compare" tags=["demo"]
from statistics import mean, stdev

require_numbers(predicted_accuracy)
runs = {name: [] for name in schedules_of(STEPS)}
for seed in range(SEEDS):
    for name, factor in schedules_of(STEPS).items():
        momentum = one_cycle_momentum(STEPS) if name == "OneCycle" else None
        log = f"{name.replace(' ', '')}-seed{seed}" if seed < 2 else None
        runs[name].append(train(factor, PEAK, seed=seed, momentum=momentum, log=log))
accuracy = {name: 100 * mean(runs[name]) for name in ("constant", "cosine", "OneCycle")}
print(compared(predicted_accuracy, accuracy))
figures.spread(runs, f"peak {PEAK:.2g}, {STEPS} steps, {SEEDS} seeds", predicted_accuracy)

# %% id="versus" tags=["demo"]

STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # two-sided, 95 %


def versus(name, ours, other, theirs, unit="points", scale=100):
    """Return a line with the mean difference of the pairs, its 95 % interval and the conclusion; more is better."""
    pairs = [scale * (a - b) for a, b in zip(ours, theirs)]
    half = STUDENT_T.get(len(pairs), 2.2) * stdev(pairs) / math.sqrt(len(pairs))
    low, high = mean(pairs) - half, mean(pairs) + half
    verdict = f"{name} is better" if low > 0 else f"{other} is better" if high < 0 else f"{len(pairs)} repeats show no difference"
    return f"{name} - {other}: {mean(pairs):+.2g} {unit}, 95 % between {low:+.2g} and {high:+.2g}: {verdict}"


for name, accuracies in runs.items():
    if name != "constant":
        print(versus(name, accuracies, "constant", runs["constant"]))
print(versus("OneCycle", runs["OneCycle"], "cosine", runs["cosine"]))

# %% [markdown] id="compare_after"
# Read the last column before you say that one schedule is better. If an interval contains 0, these repeats
# show no difference, even if one single run looks good. And six intervals at 95 % are not all right with 95 %
# probability: if they were independent, with 0.95⁶ = 74 %.

# %% [markdown] id="board_text"
# ## 5 · The runs in TensorBoard
#
# The training wrote event files. TensorBoard can read them during a run, which is useful on a cluster. Here
# this kernel serves it, and it ends with the kernel. Without the course, use `%load_ext tensorboard` and
# `%tensorboard --logdir FOLDER` in a cell, or `tensorboard --logdir FOLDER` in a terminal.
#
# Try: the box *Filter runs* with `OneCycle|cosine`, the curve `train/lr` beside `train/loss`, the slider
# *Smoothing* (your exponential mean).

# %% id="board" tags=["demo"]
from dlo_lib.train.board import serve_board

serve_board(RUNS)

# %% [markdown] id="table_text"
# The table shows the same files. The best value of each column is bold. Only two seeds are written, so do not
# draw conclusions from it.

# %% id="table" tags=["demo"]
from dlo_lib.train.compare import Pick, compare_runs

chosen = {"test/accuracy": Pick.HIGHEST, "train/loss": Pick.LOWEST, "train/lr": Pick.LAST}
compare_runs(RUNS, chosen)

# %% [markdown] id="super_text"
# ## 6 · Super-convergence
#
# Smith and Topin found networks that reach, in a fraction of the steps, the accuracy for which a cautious
# schedule needs many epochs, if one cycle rises to **very** high rates. They called it super-convergence.
# Look for it here, with three schedules: steps from a tenth of the peak, a choice without a range test; steps
# from the peak itself; OneCycle up to the peak. Each length is a separate run.
#
# **Predict.** Which accuracy, in percent, do the three reach on average in the shortest run, of one epoch?

# %% id="predict_super" tags=["prediction"]
predicted_super = {"peak / 10, in steps": None, "peak, in steps": None, "OneCycle": None}

# %% id="super" tags=["demo"]
require_numbers(predicted_super)
lengths = (1, 2, 3, 4) if EPOCHS > 1 else (1,)
budget = {"peak / 10, in steps": {}, "peak, in steps": {}, "OneCycle": {}}
cautious, bold, cycle = budget.values()
for epochs in lengths:
    steps = epochs * STEPS_PER_EPOCH
    kinds = schedules_of(steps)
    cautious[epochs] = [train(kinds["steps"], PEAK / 10, steps, seed) for seed in range(SEEDS)]
    bold[epochs] = [train(kinds["steps"], PEAK, steps, seed) for seed in range(SEEDS)]
    cycle[epochs] = [
        train(kinds["OneCycle"], PEAK, steps, seed, one_cycle_momentum(steps))
        for seed in range(SEEDS)
    ]
in_one_epoch = {name: 100 * mean(line[lengths[0]]) for name, line in budget.items()}
print(compared(predicted_super, in_one_epoch))
figures.budgets(budget, predicted_super)

# %% id="super_said" tags=["demo"]
for epochs in lengths:
    print(f"{epochs} epochs:", versus("OneCycle", cycle[epochs], "peak / 10", cautious[epochs]))
    print(" " * 9, versus("OneCycle", cycle[epochs], "peak in steps", bold[epochs]))
longest = lengths[-1]
reached = [epochs for epochs in lengths if mean(cycle[epochs]) >= mean(cautious[longest])]
if reached:
    print(
        f"{reached[0]} epochs of OneCycle reach the mean accuracy "
        f"of {longest} epochs at a tenth of the peak."
    )
else:
    print(
        f"{longest} epochs of OneCycle do not reach the mean accuracy of as many "
        "at a tenth of the peak: no super-convergence here."
    )

# %% [markdown] id="super_after"
# The word covers two effects, and the two lines for each length separate them. Compared with the cautious
# rate, OneCycle shows the gain from **a high rate**. Compared with steps from the same peak, it shows only
# the gain from **the cycle**. Quote the second to show that a schedule is better, the first to show that a
# range test is worth its cost.

# %% [markdown] id="batch_text"
# ## 7 · The batch grows: how far does the rate follow?
#
# **Core · 15 min · ●●○**
#
# With $k$ times the ranks the batch is $k$ times as large. If the number of epochs stays the same, there are $k$
# times fewer steps, so each step should be larger. Two rules are common:
#
# - **linear**: the peak times $k$. In nearly the same direction $k$ small steps are one step that is $k$ times as
#   long (Goyal et al., 2017, for SGD, with a warm-up);
# - **sqrt**: the peak times $\sqrt{k}$. The noise of the mean over a batch falls as $1/\sqrt{k}$. It is often used with Adam.
#
# Write `rescaled`: the peak and the number of steps for another batch size. Each epoch has `images` images and
# drops its incomplete last batch.
#
# How far is the linear rule valid? The gradient of a batch of $B$ images is the true gradient $G$ plus noise, whose
# variance, summed over all parameters, is $S/B$. On average therefore
#
# $$|G_B|^2 = |G|^2 + S / B$$
#
# Two batch sizes give two equations with the unknowns $\|G\|^2$ and $S$. The **noise scale** $S / \|G\|^2$ is the batch size
# at which noise and gradient are equally large (McCandlish et al., 2018). Far below it the linear rule can be
# valid; far above it a larger batch gives hardly a better direction, and the best rate no longer grows.
#
# Both rules look only at the noise. A small model need not follow them, and ours follows neither: the cells below
# measure it.
#
# Write `noise_scale`. If the estimate of $\|G\|^2$ is 0 or negative, the noise hides the gradient: return
# `math.inf`.

# %% nbgrader={"grade_id": "batch", "solution": true}
def rescaled(
    batch: int, base_batch: int, base_peak: float, images: int, epochs: int, rule: str
) -> tuple[float, int]:
    """Return the peak for `batch`, given the peak for `base_batch`; and the number of steps.

    rule: "linear" or "sqrt".
    """
    ### BEGIN SOLUTION
    ratio = batch / base_batch
    peak = base_peak * (ratio if rule == "linear" else math.sqrt(ratio))
    return peak, epochs * (images // batch)
    ### END SOLUTION


def noise_scale(small: float, large: float, small_batch: int, large_batch: int) -> float:
    """Return S / |G|².

    `small` and `large` are the mean of |G_B|² over many batches of `small_batch` and of
    `large_batch` images.
    """
    ### BEGIN SOLUTION
    noise = (small - large) / (1 / small_batch - 1 / large_batch)
    signal = large - noise / large_batch
    return noise / signal if signal > 0 else math.inf
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_batch", "grade": true}
lab.check("batch")

# %% [markdown] id="predict_batch_text"
# **Predict.** You know the peak that the range test of section 1 found for batches of 64 images. Which peak does
# it find for 16 images, and which for 256? (Here it takes the mean over some seeds, so its peak for 64 images
# differs a little from that of section 1.)

# %% id="predict_batch" tags=["prediction"]
predicted_peaks = {"16": None, "256": None}

# %% id="show_noise" tags=["demo"]
require_numbers(predicted_peaks)
def mean_square(model, size, count):
    """Return the mean of the squared norm of the gradient over `count` batches."""
    total = 0.0
    for _, batch in zip(range(count), stream(1, size)):
        model.zero_grad()
        loss_of(model, batch).backward()
        total += sum(parameter.grad.double().square().sum().item() for parameter in model.parameters())
    return total / count


def peak_of(size):
    """Return the peak that a range test with momentum finds for this batch size, the geometric mean of some seeds."""
    peaks = []
    for seed in range(1 + SEEDS // 3):
        model = new_model(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        found = library_test(model, optimizer, stream(seed, size), loss_of, lowest=1e-3, highest=10.0, steps=TEST_STEPS)
        peaks.append(found.suggestion().peak)
    return math.prod(peaks) ** (1 / len(peaks))


model = new_model(0)
SCALE = noise_scale(mean_square(model, 8, TEST_STEPS // 2), mean_square(model, 256, TEST_STEPS // 8), 8, 256)
PEAKS = {str(size): peak_of(size) for size in (16, 64, 256)}
print(f"noise scale of the untrained model: {SCALE:.0f} images")
print(compared(predicted_peaks, PEAKS))
figures.peaks(PEAKS, SCALE, predicted_peaks)

# %% [markdown] id="batch_after"
# The lines are the two rules, from the peak for 64 images. Above the noise scale both must fail in the end. Do your
# points follow one of them below it? In our run the peak only doubles from 16 to 256 images, less than by either
# rule, also far below the noise scale.
#
# The reason is what limits the rate. The rules assume that it is the noise. But a step that is too long for the
# **curvature** of the loss makes the loss rise even without noise, and the curvature does not depend on the batch.
# The range test finds the lower of the two limits. So repeat the test for a new batch size, and use a rule only
# where a test is too expensive.
#
# The next cell trains with 256 images for the same number of epochs, with the same peak and with both rules. It uses
# twice as many seeds as before, because the differences are small.
#
# **Predict.** Which accuracy, in percent, do the four kinds of runs reach on average?

# %% id="predict_same_epochs" tags=["prediction"]
predicted_same_epochs = {
    "64 images": None,
    "256, same peak": None,
    "256, sqrt": None,
    "256, linear": None,
}

# %% id="show_batch" tags=["demo"]
require_numbers(predicted_same_epochs)
def train_batch(size, rule, seed):
    """Train for EPOCHS epochs with batches of `size`; return the test accuracy."""
    peak, steps = rescaled(size, BATCH, PEAKS[str(BATCH)], len(DATA.train), EPOCHS, rule or "linear")
    model = new_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=peak if rule else PEAKS[str(BATCH)], momentum=0.9, weight_decay=5e-4)
    follow = Follow(optimizer, lambda step: warmup_cosine(step, steps // 8, steps))
    for _, batch in zip(range(steps), stream(seed, size)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        follow.step()
    return accuracy_of(test_logits(model))


kinds = {"64 images": (64, None), "256, same peak": (256, None), "256, sqrt": (256, "sqrt"), "256, linear": (256, "linear")}
same_epochs = {name: [train_batch(*kind, seed) for seed in range(2 * SEEDS)] for name, kind in kinds.items()}
for name in ("256, sqrt", "256, linear"):
    print(versus(name, same_epochs[name], "256, same peak", same_epochs["256, same peak"]))
print(compared(predicted_same_epochs, {name: 100 * mean(accuracies) for name, accuracies in same_epochs.items()}))
figures.spread(same_epochs, f"{EPOCHS} epochs: {STEPS} steps of 64 images, {EPOCHS * (len(DATA.train) // 256)} of 256", predicted_same_epochs)

# %% [markdown] id="batch_steps"
# In our run, with eight seeds, the sqrt rule beats the same peak by 9 points. The runs of the linear rule differ so
# much from seed to seed that no difference to the same peak can be seen.
#
# A larger rate replaces only a part of the missing steps: three epochs of 256 images are 15 steps, and no rule gives
# the accuracy of 63 steps of 64 images. On a data set of a million images the larger batch still leaves thousands of
# steps; there the question is only whether it is below the noise scale.
#
# The noise scale grows during training, because |G| shrinks. Near the end the same estimate needs many more batches.

# %% [markdown] id="cyclical_text"
# ## 8 · Cycles
#
# **Optional · 10 min · ●●○**
#
# Before OneCycle Smith (2015) proposed many cycles. The rate rises and falls repeatedly: a rise lets the model leave a poor valley, a
# fall lets it converge in the next one. It rises from `lowest` to 1 in `rise` steps, falls in the same number
# of steps, and repeats. With `halve` each triangle is half as high as the previous one: this is the *height
# above* `lowest`.

# %% nbgrader={"grade_id": "cyclical", "solution": true}
def triangular(step: int, rise: int, lowest: float, halve: bool) -> float:
    """Return the factor: triangles between `lowest` and 1.

    With `halve` each has half the height of the previous one.
    """
    ### BEGIN SOLUTION
    cycle, place = divmod(step, 2 * rise)
    height = 1 - abs(place - rise) / rise
    return lowest + (1 - lowest) * height * (0.5**cycle if halve else 1.0)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_cyclical", "grade": true}
lab.check("cyclical")

# %% id="show_cyclical" tags=["demo"]
RISE = max(1, STEPS // 6)
cycles = {
    "cycles": lambda step: triangular(step, RISE, 0.05, halve=False),
    "halved cycles": lambda step: triangular(step, RISE, 0.05, halve=True),
}
lines = {name: [factor(step) for step in range(STEPS)] for name, factor in cycles.items()}
figures.schedules(lines)

# %% [markdown] id="predict_cyclical_text"
# **Predict.** Which accuracy, in percent, do cycles reach on average? The constant rate is in the figure of section 4.

# %% id="predict_cyclical" tags=["prediction"]
predicted_cycles = {"cycles": None, "halved cycles": None}

# %% id="compare_cyclical" tags=["demo"]
require_numbers(predicted_cycles)
cycled = {
    name: [train(factor, PEAK, seed=seed) for seed in range(SEEDS)]
    for name, factor in cycles.items()
}
for name, accuracies in cycled.items():
    print(versus(name, accuracies, "constant", runs["constant"]))
accuracy = {name: 100 * mean(accuracies) for name, accuracies in cycled.items()}
print(compared(predicted_cycles, accuracy))
title = f"peak {PEAK:.2g}, {STEPS} steps, {SEEDS} seeds"
figures.spread({"constant": runs["constant"], **cycled}, title, predicted_cycles)

# %% [markdown] id="snapshots_text"
# ## 9 · Snapshot ensembles: train once, get several models
#
# **Optional · 15 min · ●●○**
#
# Models that make different errors are better together than alone, but several models cost several trainings.
# One run can produce them all: with **warm restarts** the rate falls along a cosine several times. At the end
# of each cycle the rate is low, the model is good, and you save it; then the rate jumps up and the weights
# move elsewhere.
#
# - `snapshot_steps`: the steps, counted from 1, after which a snapshot is taken: the end of each cycle. A
#   cycle has ceil(steps / snapshots) steps; the last one may have fewer, and ends with the run. There may be
#   fewer cycles than `snapshots`: `snapshot_steps(5, 4)` has cycles of 2, 2 and 1 steps, so 3 snapshots. A
#   shortened last cycle ends at a higher rate: choose a number of steps that `snapshots` divides.
# - `ensemble`: from the members' logits (members, images, classes) to the probabilities of the ensemble: the
#   mean of the members' **probabilities**.

# %% nbgrader={"grade_id": "snapshots", "solution": true}
def snapshot_steps(steps: int, snapshots: int) -> list[int]:
    """Return the steps of a run after which a snapshot is taken."""
    ### BEGIN SOLUTION
    length = math.ceil(steps / snapshots)
    return [min(end, steps) for end in range(length, steps + length, length)]
    ### END SOLUTION


def ensemble(logits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities (images, classes) for the logits (members, images, classes)."""
    ### BEGIN SOLUTION
    return logits.softmax(-1).mean(0)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_snapshots", "grade": true}
lab.check("snapshots")

# %% [markdown] id="predict_snapshots_text"
# **Predict.** The cell trains with three cycles, and once with one cosine of the same length. Which accuracy, in
# percent, do the last member, the ensemble and the one cosine reach on average?

# %% id="predict_snapshots" tags=["prediction"]
predicted_snapshots = {"last member alone": None, "ensemble": None, "one cosine, same steps": None}

# %% id="show_snapshots" tags=["demo"]
require_numbers(predicted_snapshots)
MEMBERS, TOTAL = 3, 2 * STEPS
ends = snapshot_steps(TOTAL, MEMBERS)


def restarting(step):
    return cosine_factor(step % ends[0], ends[0])


def log_likelihood(probabilities):
    """Return the mean log-probability of the right class, which also measures the confidence of a model."""
    return probabilities.gather(-1, DATA.test.labels[:, None]).clamp(min=1e-12).log().mean().item()


names = ("last member alone", "ensemble", "one cosine, same steps")
results, likelihoods = ({name: [] for name in names} for _ in range(2))
alone = [[] for _ in ends]
for seed in range(SEEDS):
    members, single = [], []

    def keep(step, model, members=members):
        if step in ends:
            members.append(test_logits(model))

    def keep_last(step, model, single=single):
        if step == TOTAL:
            single.append(test_logits(model))

    train(restarting, PEAK, TOTAL, seed, after_step=keep)
    train(lambda step: cosine_factor(step, TOTAL), PEAK, TOTAL, seed, after_step=keep_last)
    for number, logits in enumerate(members):
        alone[number].append(accuracy_of(logits))
    for name, logits in zip(names, (members[-1:], members, single)):
        together = ensemble(torch.stack(logits))
        results[name].append(accuracy_of(together))
        likelihoods[name].append(log_likelihood(together))
print("members alone, on average:", ", ".join(f"{100 * mean(accuracies):.1f} %" for accuracies in alone))
for other in (names[0], names[2]):
    print("accuracy:      ", versus("ensemble", results["ensemble"], other, results[other]))
    print("log-likelihood:", versus("ensemble", likelihoods["ensemble"], other, likelihoods[other], "nats", 1))
print(compared(predicted_snapshots, {name: 100 * mean(accuracies) for name, accuracies in results.items()}))
figures.spread(results, f"{MEMBERS} snapshots in {TOTAL} steps, {SEEDS} seeds", predicted_snapshots)

# %% [markdown] id="snapshots_after"
# With so few test images, accuracy hardly separates a small gain from chance; the log-likelihood is more
# sensitive. Look at the first line too: members of early cycles that are clearly worse than the last one
# reduce the quality of the ensemble. The cycles of the paper are tens of epochs long, and it uses only the
# last members. *Go further* has the experiment.

# %% [markdown] id="scale_text"
# ## 10 · At scale
#
# - **More ranks, a larger batch.** Repeat the range test rather than trust a rule. The library's `range_test`
#   works under DDP: it averages the losses, so that all ranks see one curve.
# - **The horizon.** Schedules count optimiser steps. With twice the ranks there are half the steps: recompute
#   every schedule that is given in steps.
# - **Restarts of a job.** A job on a cluster ends at its time limit and resumes in the next job. A schedule
#   that is a function of the step has no state to lose.
#
# The library's training command accepts these schedules; the cell prints it, after some rates. The library counts
# steps from 1: its first step has 1/50 of the peak, where your `wsd` has 0. The last fifth of the steps decays. On a
# cluster, pass the same options to `sbatch`.

# %% id="scale" tags=["demo"]
from dlo_lib.train import TrainConfig

config = TrainConfig(steps=1000, warmup=50, lr_schedule="wsd", lr=3e-3)
print([round(config.learning_rate(step), 5) for step in (1, 50, 500, 800, 900, 1000)])
print("  python -m dlo_lib.train --model tiny --lr 3e-3 --warmup 50 --steps 1000 --lr-schedule wsd")
print(
    "  sbatch --account=ACCOUNT --nodes=2 --ntasks-per-node=4 --gres=gpu:4 slurm/train.sbatch "
    "--model llama-3.2-1b --lr-schedule wsd"
)

# %% [markdown] id="monday_text"
# ## 11 · The same with torch.optim.lr_scheduler
#
# In a project you use PyTorch's schedulers. `LambdaLR` takes a factor of the step, as your `Follow` does:

# %% id="monday" tags=["demo"]
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR, StepLR


class TorchFollow:
    def __init__(self, optimizer, factor):
        self.optimizer, self.scheduler = optimizer, LambdaLR(optimizer, factor)
        self.step = self.scheduler.step

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


lab.check("follow", instead={"Follow": TorchFollow})

# %% [markdown] id="monday_both"
# Why does it save the optimiser too? A scheduler of PyTorch restores its counter and its peaks, but does not set
# the rate: the rate comes back with the optimiser. The cell loads only the scheduler, a usual mistake:

# %% id="monday_mistake" tags=["demo"]
def resumed_rate(with_optimizer):
    """Return the rate of the first step after a resume at step 50 of 100."""
    runs = [TorchFollow(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), lambda step: cosine_factor(step, 100)) for _ in range(2)]
    for _ in range(50):
        runs[0].optimizer.step()
        runs[0].step()
    if with_optimizer:
        runs[1].load_state_dict(runs[0].state_dict())
    else:
        runs[1].scheduler.load_state_dict(runs[0].scheduler.state_dict())
    return runs[1].optimizer.param_groups[0]["lr"]


print(f"expected {0.1 * cosine_factor(50, 100):.3f}; both loaded {resumed_rate(True):.3f}, only the scheduler loaded {resumed_rate(False):.3f}")

# %% [markdown] id="monday_chain"
# For the usual shapes there are classes. Each is compared with your function over one run, and 10 steps later:

# %% id="monday_shapes" tags=["demo"]
def rates_of(make, count):
    """Return the factors of the first `count` steps of the scheduler that `make(optimizer)` returns."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    scheduler, found = make(optimizer), []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def warm_then_cosine(optimizer):
    parts = [LinearLR(optimizer, 1e-8, total_iters=10), CosineAnnealingLR(optimizer, 90)]
    return SequentialLR(optimizer, parts, milestones=[10])


shapes = {
    "StepLR": (lambda o: StepLR(o, 30, 0.2), lambda step: step_factor(step, 30, 0.2)),
    "CosineAnnealingLR": (lambda o: CosineAnnealingLR(o, 100), lambda step: cosine_factor(step, 100)),
    "LinearLR, then cosine": (warm_then_cosine, lambda step: warmup_cosine(step, 10, 100)),
    "OneCycleLR": (
        # The peak is at step 0.31 · 100 − 1 = 30. The last rate is the first one, 1/25, divided by 400: 1e-4.
        lambda o: OneCycleLR(o, 1.0, 100, pct_start=0.31, div_factor=25, final_div_factor=400),
        lambda step: one_cycle(step, 30, 100, 0.04, 1e-4, 0.85, 0.95)[0],
    ),
}
for name, (make, yours) in shapes.items():
    try:
        torchs = rates_of(make, 110)
        later = f"10 steps after its end {torchs[-1]:.3f}, yours {yours(109):.3f}"
    except ValueError as error:
        torchs, later = rates_of(make, 99), f"after its end an error: {str(error).split('.')[0]}"
    apart = max(abs(one - yours(step)) for step, one in enumerate(torchs[:99]))
    print(f"{name:22} largest difference {apart:.0e}; {later}")

# %% [markdown] id="monday_after"
# Two differences matter. `CosineAnnealingLR` **rises again** after its end, so a run that is continued trains
# with a growing rate; `OneCycleLR` raises an error there. And `LinearLR` cannot begin at 0. WSD with a square
# root has no class: `LambdaLR` with your function is the usual way.
#
# The table compares a whole training step of the digits model, each measured five times; the minimum counts. A
# scheduler takes some microseconds of it: a difference of milliseconds is noise of the machine.

# %% id="monday_table" tags=["demo"]
import time

from dlo_lib.labkit.side_by_side import Form, lines_of, table


def seconds_of_a_step(scheduler):
    """Return the time of a training step with this scheduler."""
    model = new_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    follow, times = scheduler(optimizer, lambda step: cosine_factor(step, STEPS)), []
    for _, batch in zip(range(6), stream(0)):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        follow.step()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


forms = {"yours": (Follow, Follow), "LambdaLR": (TorchFollow, TorchFollow)}
print(table(Form(name, lines=lines_of(source), seconds=seconds_of_a_step(kind)) for name, (kind, source) in forms.items()))

# %% [markdown] id="quiz_text"
# ## 12 · Quiz
#
# **Core · 5 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests whether every question has an
# answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "b", "q2": "c", "q3": "d", "q4": "a", "q5": "c"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Measure the noise scale after 20 and after 60 steps of training, with 10 and with 100 batches. Which of the
#   four numbers do you trust?
# - `dlo_lib.optim.ReduceOnPlateau` cuts the rate when a measured loss stops falling. Why can it not be a
#   function of the step?
# - Take a checkpoint on the plateau of a WSD run: decay it for 10 % of the steps, and continue the original.
#   How far is the result from a cosine of the same length?
# - Use `TOTAL = 6 * STEPS` in the last figure, and `members[-2:]` instead of `members`: from which length on
#   is the ensemble better?
# - `DLO_SEEDS=10` makes the intervals of section 4 narrower. Which conclusions change?
# - CIFAR-10 instead of digits: put its files in `datasets/cifar-10`, then `DATA = dlo_lib.data.cifar10()` and
#   `channels=3`, with a GPU.
#
# ## References
#
# - L. N. Smith, *Cyclical Learning Rates for Training Neural Networks* (2015),
#   [arXiv:1506.01186](https://arxiv.org/abs/1506.01186)
# - L. N. Smith, N. Topin, *Super-Convergence: Very Fast Training of Neural Networks Using Large Learning
#   Rates* (2017), [arXiv:1708.07120](https://arxiv.org/abs/1708.07120)
# - I. Loshchilov, F. Hutter, *SGDR: Stochastic Gradient Descent with Warm Restarts* (2016),
#   [arXiv:1608.03983](https://arxiv.org/abs/1608.03983)
# - G. Huang et al., *Snapshot Ensembles: Train 1, get M for free* (2017),
#   [arXiv:1704.00109](https://arxiv.org/abs/1704.00109)
# - S. McCandlish et al., *An Empirical Model of Large-Batch Training* (the noise scale; 2018),
#   [arXiv:1812.06162](https://arxiv.org/abs/1812.06162)
# - P. Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour* (2017),
#   [arXiv:1706.02677](https://arxiv.org/abs/1706.02677)
# - S. Hu et al., *MiniCPM* (WSD; 2024), [arXiv:2404.06395](https://arxiv.org/abs/2404.06395)
# - A. Hägele et al., *Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations* (2024),
#   [arXiv:2405.18392](https://arxiv.org/abs/2405.18392)
# - The course this lab follows: FIDLE, sequence 16, and IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
