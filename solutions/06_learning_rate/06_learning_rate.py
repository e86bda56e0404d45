# %% [markdown] id="title"
# # 06 · The learning rate, found and scheduled
#
# **What you will do.** The learning rate (*taux d'apprentissage*) is the one number that decides most often whether a training works. You write
# the test that finds it, then the schedules that move it while the model learns: steps, cosine, warm-up, cycles, OneCycle, warm-up – stable –
# decay. You make one of them drive an optimiser and survive a restart, build an ensemble out of a single run, and look at all runs in TensorBoard.
#
# Everything trains a small ResNet on real handwritten digits, in seconds. It takes about 80 minutes. Each exercise has a check that answers at
# once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If a step stays stuck, `lab.use_reference("name")` lets you go on
# without its points.
#
# Words: warm-up (*montée en température*), schedule (*politique de taux d'apprentissage*), plateau, momentum (*inertie*), restart (*redémarrage*).

# %% id="setup"
import copy
import math
import os

import torch
import torch.nn.functional as F

from dlo_lib.grading import Lab

EPOCHS = int(os.environ.get("DLO_EPOCHS", 3))  # of most runs below
SEEDS = int(os.environ.get("DLO_SEEDS", 4))  # repeats of each comparison
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
lab = Lab(globals())

# %% [markdown] id="why_text"
# ## Why: a factor of ten
#
# The same model, the same data, the same number of steps. Only the learning rate differs.

# %% id="data" tags=["demo"]
import figures

from dlo_lib.data import digits
from dlo_lib.models import ResNet

torch.set_num_threads(1)  # tensors of this size are slower on two
DATA = digits().to(DEVICE)
BATCH = 64
STEPS_PER_EPOCH = len(DATA.train) // BATCH
STEPS = EPOCHS * STEPS_PER_EPOCH


def new_model(seed):
    torch.manual_seed(seed)
    return ResNet(depth=8, widths=(8, 12, 16), channels=1).to(DEVICE).train()


def loss_of(model, batch):
    return F.cross_entropy(model(batch.images), batch.labels)


def stream(seed):
    """Batches without end. What an epoch leaves over is dropped: a batch norm over four images would shake every curve."""
    epoch = 0
    while True:
        yield from (batch for batch in DATA.train.batches(BATCH, seed=seed, epoch=epoch) if len(batch) == BATCH)
        epoch += 1


@torch.no_grad()
def test_logits(model):
    was = model.training
    logits = model.eval()(DATA.test.images)
    model.train(was)
    return logits


def accuracy_of(logits):
    return (logits.argmax(-1) == DATA.test.labels).float().mean().item()


print(f"{len(DATA.train)} images to learn from, {len(DATA.test)} to test with, {STEPS_PER_EPOCH} steps in an epoch")

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
# Too low, and the steps are spent before the model has arrived. Too high, and it jumps over every valley. In between lies about one decade, and
# nobody can tell from the outside which: it changes with the model, the batch size, the optimiser.

# %% [markdown] id="sweep_text"
# ## 1 · The range test
#
# Leslie Smith's answer (2015): do not guess, **look**. Train for a few steps while the rate grows from far too low to far too high, and watch the loss.
#
# A good rate may lie in any decade, so the rate grows by the same **factor** in each step.

# %% nbgrader={"grade_id": "sweep", "solution": true}
def sweep(lowest: float, highest: float, count: int) -> list[float]:
    """`count` learning rates: the first is `lowest`, the last is `highest`, each is the one before times one factor."""
    ### BEGIN SOLUTION
    return [lowest * (highest / lowest) ** (i / (count - 1)) for i in range(count)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_sweep", "grade": true, "points": 2}
lab.check("sweep")

# %% [markdown] id="range_text"
# Now the test itself, with plain gradient descent: for each rate one batch, one step, `w ← w − rate · gradient`. Note each loss **as the backward
# begins with it**, before the step.
#
# It is only a test. Afterwards the model is what it was: its weights, what it keeps beside its weights (the running means of a batch norm), and its mode.
# Within, it trains, so it is in training mode.

# %% nbgrader={"grade_id": "range_test", "solution": true}
def range_test(model: torch.nn.Module, loss_of, batches, rates: list[float]) -> list[float]:
    """The loss seen with each rate. `loss_of(model, batch)` gives a loss; `batches` has as many batches as there are rates, or more."""
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


# %% nbgrader={"grade_id": "test_range_test", "grade": true, "points": 5}
lab.check("range_test")

# %% [markdown] id="smoothed_text"
# Losses of single batches are noisy. The usual cure is an **exponential mean**: after each loss `m ← β · m + (1 − β) · loss`.
#
# It begins with m = 0, so its first values are far too low. After k losses the weights sum to 1 − βᵏ: divide by that.

# %% nbgrader={"grade_id": "smoothed", "solution": true}
def smoothed(losses: list[float], beta: float) -> list[float]:
    """The exponential mean after each loss, without the bias of its beginning."""
    ### BEGIN SOLUTION
    mean, curve = 0.0, []
    for k, loss in enumerate(losses, 1):
        mean = beta * mean + (1 - beta) * loss
        curve.append(mean / (1 - beta**k))
    return curve
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_smoothed", "grade": true, "points": 2}
lab.check("smoothed")

# %% [markdown] id="suggest_text"
# Read the curve for two rates:
#
# - **bottom**: where the smoothed loss is lowest. Beyond it the loss varies and breaks. A schedule's largest rate stays below.
# - **steepest**: *before* the bottom, where the loss falls fastest on the **logarithmic** axis. A safe rate.
#
# For the slope at rate i take its two neighbours, and the distance of their logarithms.

# %% nbgrader={"grade_id": "suggest", "solution": true}
def suggest(rates: list[float], losses: list[float]) -> dict[str, float]:
    """Two of the `rates`, as {"steepest": ..., "bottom": ...}. `losses` are smoothed already, one for each rate."""
    ### BEGIN SOLUTION
    bottom = min(range(len(losses)), key=lambda i: losses[i])
    def slope(i):
        return (losses[i + 1] - losses[i - 1]) / math.log(rates[i + 1] / rates[i - 1])

    steepest = min(range(1, bottom), key=slope)
    return {"steepest": rates[steepest], "bottom": rates[bottom]}
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_suggest", "grade": true, "points": 4}
lab.check("suggest")

# %% [markdown] id="show_range_text"
# Your test on the digits. A mean lags behind what it follows, by about β/(1 − β) steps: the bottom that it shows lies too far right. On the right the other way to do it: **with a reset**, each rate gets the same start and a few steps of its own. Your
# `range_test` leaves the model as it was, so this is one call for each rate. It is dearer, but no rate suffers from what the one before it has done.

# %% id="show_range" tags=["demo"]
rates = sweep(1e-3, 30.0, 80)
model = new_model(0)
losses = range_test(model, loss_of, stream(0), rates)
curve = smoothed(losses, 0.8)
FOUND = suggest(rates, curve)
reset = {rate: range_test(model, loss_of, stream(0), [rate] * 9)[-1] for rate in sweep(1e-3, 30.0, 10)}
print("found:", {name: f"{rate:.2g}" for name, rate in FOUND.items()})
figures.tested(rates, losses, curve, FOUND, reset)

# %% [markdown] id="peak_text"
# This test descended without momentum. With momentum μ a gradient acts in later steps too, 1/(1 − μ) times in all, so the same step needs a smaller rate.
# The library's `range_test` takes your optimiser as it is; that is what the runs below use, with SGD and momentum 0.9. Their largest rate, the **peak**, lies
# between steepest and bottom.

# %% id="show_peak" tags=["demo"]
from dlo_lib.optim import range_test as library_test
from dlo_lib.optim.draw import draw_range_test

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
found = library_test(model, optimizer, stream(0), loss_of, lowest=1e-4, highest=10.0, steps=80)
PEAK = found.suggestion().peak
print(f"peak: {PEAK:.2g}")
draw_range_test(found)

# %% [markdown] id="decay_text"
# ## 2 · Schedules are functions
#
# A high rate travels, a low rate settles. So the rate should change during the run. We write each schedule as a **pure function**: the number of steps done so
# far goes in (0 for the first step), a **factor** of the peak comes out. Such a function has nothing to save and nothing to restore, and can be drawn
# without training.
#
# Two that fall:
# - **steps** (*par paliers*): times `gamma` after each `every` steps;
# - **cosine**: half a cosine from 1 to `final` in `steps` steps. After that it stays at `final`.

# %% nbgrader={"grade_id": "decay", "solution": true}
def step_factor(step: int, every: int, gamma: float) -> float:
    """Times `gamma` after each `every` steps."""
    ### BEGIN SOLUTION
    return gamma ** (step // every)
    ### END SOLUTION


def cosine_factor(step: int, steps: int, final: float = 0.0) -> float:
    """From 1 at step 0 along half a cosine to `final` at step `steps`, and `final` from there on."""
    ### BEGIN SOLUTION
    return final + (1 - final) * (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_decay", "grade": true, "points": 4}
lab.check("decay")

# %% [markdown] id="warmup_text"
# **Warm-up.** The first gradients are large and point every way; with a high rate they can wreck a model before it has begun. So the rate rises in a
# straight line, from 0 at step 0 to where it would be 1 at step `warm`; there the cosine begins, and has the steps that are left. `warm` may be 0.

# %% nbgrader={"grade_id": "warmup", "solution": true}
def warmup_cosine(step: int, warm: int, steps: int, final: float = 0.0) -> float:
    """A rise of `warm` steps, then a cosine to `final` at step `steps`."""
    ### BEGIN SOLUTION
    if step < warm:
        return step / warm
    share = min((step - warm) / (steps - warm), 1.0)
    return final + (1 - final) * (1 + math.cos(math.pi * share)) / 2
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_warmup", "grade": true, "points": 4}
lab.check("warmup")

# %% [markdown] id="cyclical_text"
# **Cycles** (Smith, 2015). Up and down again and again: a rise lets the model leave a poor valley, a fall lets it settle in the next one. From `lowest` to 1 in
# `rise` steps, back in as many, for ever. With `halve` each triangle is half as high as the one before: the *height above* `lowest`.

# %% nbgrader={"grade_id": "cyclical", "solution": true}
def triangular(step: int, rise: int, lowest: float, halve: bool) -> float:
    """Triangles between `lowest` and 1; with `halve` each has half the height of the one before."""
    ### BEGIN SOLUTION
    cycle, place = divmod(step, 2 * rise)
    height = 1 - abs(place - rise) / rise
    return lowest + (1 - lowest) * height * (0.5**cycle if halve else 1.0)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_cyclical", "grade": true, "points": 3}
lab.check("cyclical")

# %% [markdown] id="one_cycle_text"
# **OneCycle** (Smith and Topin, 2017). One cycle for the whole run, much higher than usual, and at the end far down. The **momentum moves too**, the other
# way: the step that is really taken grows as rate/(1 − momentum), so where the rate is high the momentum is low.
#
# - factor: half a cosine from `start` (step 0) to 1 (step `top`), then half a cosine to `final` in the **last** step, `steps − 1`; there it stays;
# - momentum: the same two halves, from `high` to `low` and back to `high`.

# %% nbgrader={"grade_id": "one_cycle", "solution": true}
def one_cycle(step: int, top: int, steps: int, start: float, final: float, low: float, high: float) -> tuple[float, float]:
    """The factor and the momentum of that step."""
    ### BEGIN SOLUTION
    def between(a: float, b: float, share: float) -> float:
        return b + (a - b) * (1 + math.cos(math.pi * share)) / 2

    if step <= top:
        return between(start, 1.0, step / top), between(high, low, step / top)
    share = (min(step, steps - 1) - top) / (steps - 1 - top)
    return between(1.0, final, share), between(low, high, share)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_one_cycle", "grade": true, "points": 6}
lab.check("one_cycle")

# %% [markdown] id="wsd_text"
# **Warm-up – stable – decay.** A cosine must know from the start when it will end; stopped half-way it is a run at a high rate, and one cannot train on from its
# end. WSD, which many language models are trained with today, separates the two: a plateau as long as one likes, and a short fall when a result is wanted.
#
# - `warm` steps of straight rise from `lowest` to 1, `stable` steps at 1;
# - `decay` steps of fall: with x going from 0 to 1, as **1 − √x**, stretched so that it ends at `lowest`; there it stays.
#
# Each phase may have no steps at all.

# %% nbgrader={"grade_id": "wsd", "solution": true}
def wsd(step: int, warm: int, stable: int, decay: int, lowest: float = 0.0) -> float:
    """Warm-up, plateau, fall as one minus a square root."""
    ### BEGIN SOLUTION
    if step < warm:
        return lowest + (1 - lowest) * step / warm
    if step < warm + stable:
        return 1.0
    done = step - warm - stable
    return lowest + (1 - lowest) * (1 - math.sqrt(done / decay)) if done < decay else lowest
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_wsd", "grade": true, "points": 4}
lab.check("wsd")

# %% [markdown] id="show_schedules_text"
# All of them over the steps of one run:

# %% id="show_schedules" tags=["demo"]
def schedules_of(steps):
    """Each schedule for a run of so many steps: step -> factor."""
    warm, top = max(1, steps // 8), max(1, round(0.3 * steps))
    return {
        "constant": lambda step: 1.0,
        "steps": lambda step: step_factor(step, -(-steps // 3), 0.2),
        "cosine": lambda step: cosine_factor(step, steps),
        "warm-up + cosine": lambda step: warmup_cosine(step, warm, steps),
        "cyclical": lambda step: triangular(step, max(1, steps // 6), 0.05, True),
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
# PyTorch's schedulers are objects beside the optimiser. Write one for any factor:
#
# - when it is made, it notes the **peak** of each parameter group (`group["lr"]`), and sets each rate to peak × factor(0);
# - `step()`, called after each optimiser step, sets the rates of the next step: always from the peak, never from what is there already;
# - `state_dict()` and `load_state_dict(state)`: what a checkpoint needs. The state is a dict of plain numbers (and lists of them). After loading, the
#   rates are **at once** those of the step that comes next: groups of a fresh optimiser still have their peaks.

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
        ### END SOLUTION

    ### BEGIN SOLUTION
    def _set(self) -> None:
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group["lr"] = peak * self.factor(self.done)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_follow", "grade": true, "points": 5}
lab.check("follow")

# %% [markdown] id="train_text"
# Here is a training that uses it. Given a folder, it writes loss, learning rate and test accuracy as **TensorBoard events**.

# %% id="train" tags=["demo"]
import tempfile

from torch.utils.tensorboard import SummaryWriter

folder = tempfile.TemporaryDirectory(prefix="lab06-runs-")  # gone when the kernel ends
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
# One run proves nothing: another seed gives other weights and another order of the data. So each schedule trains several times, and the seeds are the
# same for all, which makes differences comparable **pair by pair**. Points are runs, bars their means.

# %% id="compare" tags=["demo"]
runs = {name: [] for name in schedules_of(STEPS)}
for seed in range(SEEDS):
    for name, factor in schedules_of(STEPS).items():
        momentum = one_cycle_momentum(STEPS) if name == "OneCycle" else None
        log = f"{name.replace(' ', '')}-seed{seed}" if seed < 2 else None
        runs[name].append(train(factor, PEAK, seed=seed, momentum=momentum, log=log))
figures.spread(runs, f"peak {PEAK:.2g}, {STEPS} steps, {SEEDS} seeds")

# %% id="versus" tags=["demo"]
from statistics import mean, stdev

STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # two-sided, 95 %


def versus(name, ours, other, theirs, unit="points", scale=100):
    """The mean difference of pairs with its 95 % interval, and what may be said of it; more is better."""
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
# Read the last column before you say that one schedule wins. Where an interval holds 0, these repeats do not show a difference, however nice one
# single run looks.

# %% [markdown] id="board_text"
# ## 5 · The runs in TensorBoard
#
# The training wrote event files. TensorBoard reads them while runs go on, which is what makes it useful on a cluster. Here it is served by this kernel
# and ends with it; on its own it is `%load_ext tensorboard` and `%tensorboard --logdir FOLDER` in a cell, or `tensorboard --logdir FOLDER` in a terminal.
#
# Try: the box *Filter runs* with `OneCycle|cosine`, the curve `train/lr` beside `train/loss`, the slider *Smoothing* (your exponential mean).

# %% id="board" tags=["demo"]
from dlo_lib.train.board import serve_board

serve_board(RUNS)

# %% [markdown] id="table_text"
# The same files as a table. The best of each column is bold: only two seeds are written, so take it as a list, not as a verdict.

# %% id="table" tags=["demo"]
from dlo_lib.train.compare import Pick, compare_runs

compare_runs(RUNS, {"test/accuracy": Pick.HIGHEST, "train/loss": Pick.LOWEST, "train/lr": Pick.LAST})

# %% [markdown] id="super_text"
# ## 6 · Super-convergence
#
# Smith and Topin saw networks reach in a fraction of the steps what a cautious schedule needs many epochs for, if one cycle goes up to **very** high
# rates. They called it super-convergence. Look for it here, with three schedules: a tenth of the peak, cut in steps, as one would do without having looked; the
# peak itself, cut in steps; OneCycle up to the peak. Each length is a run of its own.

# %% id="super" tags=["demo"]
lengths = (1, 2, 4) if EPOCHS > 1 else (1,)
budget = {"peak / 10, in steps": {}, "peak, in steps": {}, "OneCycle": {}}
cautious, bold, cycle = budget.values()
for epochs in lengths:
    steps = epochs * STEPS_PER_EPOCH
    kinds = schedules_of(steps)
    cautious[epochs] = [train(kinds["steps"], PEAK / 10, steps, seed) for seed in range(SEEDS)]
    bold[epochs] = [train(kinds["steps"], PEAK, steps, seed) for seed in range(SEEDS)]
    cycle[epochs] = [train(kinds["OneCycle"], PEAK, steps, seed, one_cycle_momentum(steps)) for seed in range(SEEDS)]
figures.budgets(budget)

# %% id="super_said" tags=["demo"]
for epochs in lengths:
    print(f"{epochs} epochs:", versus("OneCycle", cycle[epochs], "peak / 10", cautious[epochs]))
    print(" " * 9, versus("OneCycle", cycle[epochs], "peak in steps", bold[epochs]))
longest = lengths[-1]
reached = [epochs for epochs in lengths if mean(cycle[epochs]) >= mean(cautious[longest])]
if reached:
    print(f"{reached[0]} epochs of OneCycle reach on average what {longest} epochs at a tenth of the peak reach.")
else:
    print(f"{longest} epochs of OneCycle do not reach on average what as many at a tenth of the peak reach: no super-convergence here.")

# %% [markdown] id="super_after"
# Two things are mixed in that word, and the two lines for each length take them apart. Against the cautious rate OneCycle gains what **a high rate** gains. Against
# steps from the same peak it gains only what **the cycle** adds. Quote the second when you say that a schedule is better, the first when you say that it pays to
# look for the rate.

# %% [markdown] id="snapshots_text"
# ## 7 · Snapshot ensembles: train one, get M
#
# Models that err in different places are better together than alone, but cost as many trainings. Unless one run gives them all: with **warm restarts** the rate falls along a cosine
# M times; each time it has come down the model is good, and is kept; then the rate jumps up and throws the model elsewhere.
#
# - `snapshot_steps`: after which steps, counted from 1, a snapshot is taken. A cycle has ceil(steps / snapshots) steps; the last one may have fewer, and ends with the run.
# - `ensemble`: from the members' logits (members, images, classes) to the probabilities of the ensemble: the mean of the members' **probabilities**.

# %% nbgrader={"grade_id": "snapshots", "solution": true}
def snapshot_steps(steps: int, snapshots: int) -> list[int]:
    """After which steps of a run a snapshot is taken."""
    ### BEGIN SOLUTION
    length = math.ceil(steps / snapshots)
    return [min(end, steps) for end in range(length, steps + length, length)]
    ### END SOLUTION


def ensemble(logits: torch.Tensor) -> torch.Tensor:
    """Logits (members, images, classes) to probabilities (images, classes)."""
    ### BEGIN SOLUTION
    return logits.softmax(-1).mean(0)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_snapshots", "grade": true, "points": 4}
lab.check("snapshots")

# %% id="show_snapshots" tags=["demo"]
MEMBERS, TOTAL = 3, 2 * STEPS
ends = snapshot_steps(TOTAL, MEMBERS)


def restarting(step):
    return cosine_factor(step % ends[0], ends[0])


def log_likelihood(probabilities):
    """The mean log-probability of the right class: it also counts how sure a model is, and of what."""
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
figures.spread(results, f"{MEMBERS} snapshots in {TOTAL} steps, {SEEDS} seeds")

# %% [markdown] id="snapshots_after"
# Accuracy on so few test images hardly tells a small gain from luck; the log-likelihood sees more. And look at the first line: members of early cycles that are
# clearly worse than the last one pull the ensemble down. The paper's cycles are tens of epochs long, and it takes the last members only. *Go further* has the
# experiment.

# %% [markdown] id="scale_text"
# ## 8 · At scale
#
# - **The batch grows, the rate grows.** With k times the ranks, k times the batch: Goyal et al. (2017) multiply the peak by k and add a warm-up. Run the range test
#   again rather than trust the rule. The library's `range_test` works under DDP: it averages the losses, so that all ranks see one curve.
# - **The horizon.** Schedules count optimiser steps. Twice the ranks, half the steps: a schedule in steps must be written anew.
# - **Restarts of a job.** A job of a cluster ends after its time limit and goes on in the next. A schedule that is a function of the step has nothing to lose.
#
# The library's training command takes these schedules; the cell prints it. On a cluster the same line goes to `sbatch`.

# %% id="scale" tags=["demo"]
from dlo_lib.train import TrainConfig

config = TrainConfig(steps=1000, warmup=50, lr_schedule="wsd", lr=3e-3)
print([round(config.learning_rate(step), 5) for step in (1, 50, 500, 800, 900, 1000)])
print("  python -m dlo_lib.train --model tiny --lr 3e-3 --warmup 50 --steps 1000 --lr-schedule wsd")
print("  sbatch --account=ACCOUNT --nodes=2 --ntasks-per-node=4 --gres=gpu:4 slurm/train.sbatch --model llama-3.2-1b --lr-schedule wsd")

# %% [markdown] id="quiz_text"
# ## 9 · Quiz
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here says whether every question has an answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "b", "q2": "c", "q3": "d", "q4": "a", "q5": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true, "points": 6}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Run the range test with twice and four times the batch. Does the bottom move with it?
# - `dlo_lib.optim.ReduceOnPlateau` cuts the rate when a measured loss stops falling. Why can it not be a function of the step?
# - A checkpoint on the plateau of a WSD run: decay it for 10 % of the steps, go on with the original. How far behind a cosine of the same length is it?
# - `TOTAL = 6 * STEPS` in the last figure, and `members[-2:]` instead of `members`: from what length on does the ensemble pay?
# - `DLO_SEEDS=10` makes the intervals of section 4 narrower. Which verdicts change?
# - CIFAR-10 instead of digits: put its files in `datasets/cifar-10`, then `DATA = dlo_lib.data.cifar10()` and `channels=3`, with a GPU.
#
# ## References
#
# - L. N. Smith, *Cyclical Learning Rates for Training Neural Networks* (2015), [arXiv:1506.01186](https://arxiv.org/abs/1506.01186)
# - L. N. Smith, N. Topin, *Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates* (2017), [arXiv:1708.07120](https://arxiv.org/abs/1708.07120)
# - I. Loshchilov, F. Hutter, *SGDR: Stochastic Gradient Descent with Warm Restarts* (2016), [arXiv:1608.03983](https://arxiv.org/abs/1608.03983)
# - G. Huang et al., *Snapshot Ensembles: Train 1, get M for free* (2017), [arXiv:1704.00109](https://arxiv.org/abs/1704.00109)
# - P. Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour* (2017), [arXiv:1706.02677](https://arxiv.org/abs/1706.02677)
# - S. Hu et al., *MiniCPM* (WSD; 2024), [arXiv:2404.06395](https://arxiv.org/abs/2404.06395)
# - A. Hägele et al., *Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations* (2024), [arXiv:2405.18392](https://arxiv.org/abs/2405.18392)
# - The course this lab follows: FIDLE, sequence 16, and IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
