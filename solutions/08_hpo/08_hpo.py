# %% [markdown] id="title"
# # 08 · Hyperparameter search: what it finds for what it costs
#
# **What you will do.** Write the parts of which search methods are made: draws on a logarithmic scale, a Gaussian process with **Expected
# Improvement**, successive halving, Hyperband, ASHA, a population, a pruning rule. Run them on a landscape that is a formula, then on real
# trainings of a small network. And judge them as experiments should be judged: the same cost, many repeats, an interval.
#
# You need no GPU. It takes about 90 minutes. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a
# pointer, then a sketch. If a step stays stuck, `lab.use_reference("name")` lets you go on without its points.
#
# Words: hyperparameter (*hyperparamètre*), learning rate (*taux d'apprentissage*), weight decay (*dégradation des poids*), trial (*essai*),
# pruning (*élagage*), population (*population*).

# %% id="setup"
import math
import os

import torch
from torch import Tensor

from dlo_lib.grading import Lab

REPEATS = int(os.environ.get("DLO_REPEATS", 30))  # of every comparison
POOL = int(os.environ.get("DLO_POOL", 200))  # real trainings that are run once and searched many times
EPOCHS = 27
torch.set_num_threads(1)  # the networks here are small: a second thread costs more than it brings
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: one number decides, and nobody tells you which
#
# A landscape of two hyperparameters. Each point stands for a whole training; its colour is the loss at the end. (Here it is a formula, so that we
# may look at all of it. For a real network, this picture would cost ten thousand trainings.)
#
# You may train 16 times. On the left they are spent on a **grid**, on the right **at random**. Look at the ticks below each picture: how many
# different learning rates has each of them tried?

# %% id="show_why" tags=["demo"]
import figures
import trainings

grid = [((i + 0.5) / 4, (j + 0.5) / 4) for i in range(4) for j in range(4)]
scattered = torch.rand(16, 2, generator=torch.Generator().manual_seed(4)).tolist()
figures.landscape({"grid": grid, "random": scattered})

# %% [markdown] id="why_after"
# The learning rate matters much, the weight decay little; before the search nobody knows that. A grid spends its 16 trainings on 4 learning rates
# (Bergstra and Bengio, 2012). Whether random search is really better *here* is a question for a measurement: it comes in a moment.

# %% [markdown] id="scale_text"
# ## 1 · Draw on the right scale
#
# Learning rates from 0.0001 to 3: drawn uniformly, one in a thousand would be below 0.003. Hyperparameters that act by their *order of
# magnitude* are drawn on a **logarithmic scale**: as many between 0.001 and 0.01 as between 0.1 and 1.
#
# Write the function that turns a place between 0 and 1 into a value between `low` and `high`.

# %% nbgrader={"grade_id": "scale", "solution": true}
def from_place(place: float, low: float, high: float, log: bool) -> float:
    """The value at `place` (0 is `low`, 1 is `high`) on a linear or a logarithmic scale."""
    ### BEGIN SOLUTION
    if log:
        return low * (high / low) ** place
    return low + place * (high - low)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_scale", "grade": true, "points": 3}
lab.check("scale")

# %% [markdown] id="interval_text"
# ## 2 · Which one is better? Ask many times
#
# One search proves nothing: random search may be lucky. So repeat both methods, with seed 0, 1, 2, ... and compare **seed by seed**. Is the mean
# difference real? The **bootstrap** answers without any formula of statistics: draw the N differences again, N times with replacement,
# and take the mean; do that many times; the middle 95 % of these means is the interval. If 0 is outside, the sign can be trusted.
#
# `chosen` (draws, N) holds the numbers of the repeats that each new draw takes. For the quantiles use `torch.quantile`.

# %% nbgrader={"grade_id": "interval", "solution": true}
def interval(left: Tensor, right: Tensor, chosen: Tensor, level: float) -> tuple[float, float]:
    """Where the mean of left - right (N,) lies, by the bootstrap: the middle `level` of the means over the rows of `chosen`."""
    ### BEGIN SOLUTION
    means = (left - right)[chosen].mean(1)
    outside = (1 - level) / 2
    return float(torch.quantile(means, outside)), float(torch.quantile(means, 1 - outside))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_interval", "grade": true, "points": 4}
lab.check("interval")

# %% id="show_interval" tags=["demo"]
def verdict(a: str, b: str, losses: dict[str, list[float]]) -> None:
    """Say what the repeats say of a against b; lower is better."""
    left, right = torch.tensor(losses[a]).double(), torch.tensor(losses[b]).double()
    chosen = torch.randint(len(left), (4000, len(left)), generator=torch.Generator().manual_seed(0))
    low, high = interval(left, right, chosen, 0.95)
    said = f"{a} beats {b}" if high < 0 else f"{b} beats {a}" if low > 0 else f"{a} against {b}: no difference can be seen"
    print(f"{said} ({len(left)} repeats: mean difference {float((left - right).mean()):+.3f}, 95 % interval {low:+.3f} to {high:+.3f})")


def loss_at(place) -> float:
    rate, decay = (from_place(float(at), *bounds, log=True) for at, bounds in zip(place, (trainings.LEARNING_RATE, trainings.WEIGHT_DECAY)))
    return trainings.landscape(rate, decay)


def random_losses(count: int, seed: int) -> list[float]:
    return [loss_at(place) for place in torch.rand(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)]


def moved_grid(side: int, seed: int) -> list[float]:
    """A grid whose bounds somebody else would have chosen a little differently."""
    shift = torch.rand(2, generator=torch.Generator().manual_seed(seed))
    return [loss_at(((i + shift[0]) / side, (j + shift[1]) / side)) for i in range(side) for j in range(side)]


found = {
    "grid": [min(moved_grid(4, seed)) for seed in range(10 * REPEATS)],
    "random": [min(random_losses(16, seed)) for seed in range(10 * REPEATS)],
}
verdict("random", "grid", found)
figures.best_losses(found, "best of 16 trainings")

# %% [markdown] id="interval_after"
# The sentence above is made by the cell, from your interval. That is how every comparison in this lab is made. "No difference can be seen" is a
# result too: the dots overlap, and a single run of each method would have named a winner all the same.

# %% [markdown] id="process_text"
# ## 3 · A model of the landscape: the Gaussian process
#
# Random search forgets. After ten trainings we know something about the landscape; a **Gaussian process** says what: at each point a mean and
# a *doubt*. Two points are as alike as they are near, by the kernel with length scale $\ell$; $X$ are the measured points, $y$ their values:
#
# $$k(x, x') = e^{-|x - x'|^2 / 2\ell^2} \qquad K = k(X, X) + n I$$
#
# $$\mu(x) = k(x, X)\, K^{-1} y \qquad \sigma^2(x) = 1 - k(x, X)\, K^{-1} k(X, x)$$
#
# $n$ is the variance of the noise of a measurement. Use `torch.linalg.solve` or a Cholesky factor. Rounding can make $\sigma^2$ a little
# negative: clamp it to 0 before the root.

# %% nbgrader={"grade_id": "process", "solution": true}
def posterior(points: Tensor, values: Tensor, new: Tensor, length: float, noise: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (M,) at `new` (M, d), after `values` (N,) at `points` (N, d)."""
    ### BEGIN SOLUTION
    def kernel(a, b):
        return torch.exp(-(a[:, None] - b[None]).square().sum(-1) / (2 * length**2))

    covariance = kernel(points, points) + noise * torch.eye(len(points), dtype=points.dtype)
    across = kernel(points, new)
    weights = torch.linalg.solve(covariance, across)
    return weights.T @ values, (1 - (across * weights).sum(0)).clamp(min=0).sqrt()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_process", "grade": true, "points": 5}
lab.check("process")

# %% [markdown] id="improvement_text"
# ## 4 · Expected Improvement
#
# Where to measure next? At the lowest mean (**exploit**), or where the doubt is large (**explore**)? Jones, Schonlau and Welch (1998) weigh both
# in one number. The next value is normal, with mean $\mu$ and standard deviation $\sigma$; if it is below the best so far, we gain the
# difference, else nothing. On average we gain
#
# $$z = \frac{best - \mu}{\sigma} \qquad EI = E[\max(best - f, 0)] = (best - \mu)\,\Phi(z) + \sigma\,\varphi(z)$$
#
# with the normal distribution $\Phi$ (`torch.special.ndtr`) and its density $\varphi(z) = e^{-z^2/2} / \sqrt{2\pi}$. Where $\sigma = 0$ nothing is
# left to chance: the gain is max(best − μ, 0).

# %% nbgrader={"grade_id": "improvement", "solution": true}
def expected_improvement(mean: Tensor, std: Tensor, best: float) -> Tensor:
    """EI (M,): how far below `best`, the lowest value so far, the next value will be on average."""
    ### BEGIN SOLUTION
    gain = best - mean
    z = gain / std.clamp(min=1e-300)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return torch.where(std > 0, gain * torch.special.ndtr(z) + std * density, gain.clamp(min=0))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_improvement", "grade": true, "points": 4}
lab.check("improvement")

# %% id="show_improvement" tags=["demo"]
measured = torch.tensor([[0.08], [0.3], [0.45], [0.92]], dtype=torch.float64)
line = torch.linspace(0, 1, 201, dtype=torch.float64)[:, None]
values = torch.tensor([loss_at((float(u), 0.4)) for u in measured[:, 0]], dtype=torch.float64)
truth = torch.tensor([loss_at((float(u), 0.4)) for u in line[:, 0]], dtype=torch.float64)
middle = values.mean()
pictures = {}
for length in (0.05, 0.15, 0.5):
    mean, std = posterior(measured, values - middle, line, length, 1e-6)
    pictures[f"length scale {length}"] = (mean + middle, std, expected_improvement(mean, std, float((values - middle).min())))
figures.improvement(line[:, 0], truth, (measured[:, 0], values), pictures)

# %% [markdown] id="length_text"
# ## 5 · How rough is the landscape?
#
# The three pictures have the same measurements and would measure next at different places. The length scale must come from the data. The
# **marginal likelihood** says how probable the values are if all functions of a length scale are possible:
#
# $$\log p(y) = -\tfrac12\, y^T K^{-1} y \;-\; \tfrac12 \log |K| \;-\; \tfrac{N}{2} \log 2\pi$$
#
# The first term asks for a good fit, the second charges for freedom: a short length scale can fit anything, and so no values are *probable* with it.
# Return the most probable of some lengths. (`torch.logdet` or twice the sum of the logarithms of the Cholesky factor's diagonal.)

# %% nbgrader={"grade_id": "length", "solution": true}
def best_length(points: Tensor, values: Tensor, lengths: list[float], noise: float) -> float:
    """The one of `lengths` under which `values` (N,) at `points` (N, d) are most probable."""
    ### BEGIN SOLUTION
    def log_likelihood(length):
        kernel = torch.exp(-(points[:, None] - points[None]).square().sum(-1) / (2 * length**2))
        covariance = kernel + noise * torch.eye(len(points), dtype=points.dtype)
        return -0.5 * (values @ torch.linalg.solve(covariance, values) + torch.logdet(covariance))

    return max(lengths, key=log_likelihood)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_length", "grade": true, "points": 4}
lab.check("length")

# %% [markdown] id="next_text"
# ## 6 · Where to measure next
#
# Put the three together. The process above assumes values with mean 0 and standard deviation 1: **standardise** them first (a loss is neither). Then
# choose the length from `LENGTHS`, predict at the candidates, and return the number of the candidate with the largest EI. Mind the scale
# in which `best` is.

# %% nbgrader={"grade_id": "next", "solution": true}
LENGTHS, NOISE = [0.05, 0.1, 0.2, 0.4, 0.8], 1e-4


def next_candidate(points: Tensor, values: Tensor, candidates: Tensor) -> int:
    """The number of the row of `candidates` (M, d) with the largest Expected Improvement."""
    ### BEGIN SOLUTION
    scaled = (values - values.mean()) / values.std(correction=0)
    length = best_length(points, scaled, LENGTHS, NOISE)
    mean, std = posterior(points, scaled, candidates, length, NOISE)
    return int(expected_improvement(mean, std, float(scaled.min())).argmax())
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_next", "grade": true, "points": 4}
lab.check("next")

# %% [markdown] id="next_after"
# Your search against random search, and against the **TPE** of Optuna, the sampler most people use: it models the good and the bad trials by
# two densities, and proposes where their ratio is large. Each has the same 8 random trainings to begin with.

# %% id="show_next" tags=["demo"]
import optuna

optuna.logging.set_verbosity(optuna.logging.WARNING)
TRAININGS, START = 28, 8


def bayesian(seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(START, 2, generator=generator, dtype=torch.float64)
    values = [loss_at(point) for point in points]
    while len(values) < TRAININGS:
        around = points[values.index(min(values))] + torch.randn(60, 2, generator=generator, dtype=torch.float64) / 20
        candidates = torch.cat([torch.rand(200, 2, generator=generator, dtype=torch.float64), around.clamp(0, 1)])
        chosen = candidates[next_candidate(points, torch.tensor(values).double(), candidates)]
        points = torch.cat([points, chosen[None]])
        values.append(loss_at(chosen))
    return values


def tpe(seed: int) -> list[float]:
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=START, multivariate=True))
    for u, v in torch.rand(START, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist():
        study.enqueue_trial({"u": u, "v": v})
    study.optimize(lambda trial: loss_at((trial.suggest_float("u", 0, 1), trial.suggest_float("v", 0, 1))), n_trials=TRAININGS)
    return [trial.value for trial in study.trials]


searches = {"random": lambda seed: random_losses(TRAININGS, seed), "TPE": tpe, "your Bayesian search": bayesian}
curves = {name: [search(seed) for seed in range(REPEATS)] for name, search in searches.items()}
last = {name: [min(curve) for curve in runs] for name, runs in curves.items()}
verdict("TPE", "random", last)
verdict("your Bayesian search", "random", last)
verdict("your Bayesian search", "TPE", last)
figures.best_so_far(curves, START)

# %% [markdown] id="pool_text"
# ## 7 · Real trainings, and the resource that they take
#
# So far every trial was trained to its end. But a learning rate that is far too small shows it in the first epoch. The cell trains a
# few hundred small networks on handwritten digits, each with hyperparameters of its own (drawn by your `from_place`), all side by side. This
# **pool** of real curves is what the next searches search on: a trial costs the epochs of its curve that are looked at.

# %% id="show_pool" tags=["demo"]
data = trainings.load_digits()
places = torch.rand(POOL, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
rates = torch.tensor([from_place(float(u), *trainings.LEARNING_RATE, log=True) for u in places[:, 0]])
decays = torch.tensor([from_place(float(v), *trainings.WEIGHT_DECAY, log=True) for v in places[:, 1]])
pool = trainings.train_many(data, rates, decays, EPOCHS, seed=0).T.tolist()  # pool[trial][epoch]; NaN after divergence
figures.curves(pool, rates.tolist())

# %% id="show_ranks" tags=["demo"]
def ranks_agree(epochs: int) -> float:
    """Correlation of the trials' ranks after `epochs` with their ranks at the end."""
    early, late = (torch.tensor([row[at - 1] for row in pool]).nan_to_num(99).argsort().argsort().double() for at in (epochs, EPOCHS))
    return float(torch.corrcoef(torch.stack([early, late]))[0, 1])


for epochs in (1, 3, 9, 27):
    print(f"after {epochs:2} epochs the ranks agree with the final ones to {ranks_agree(epochs):.2f}")

# %% [markdown] id="halving_text"
# ## 8 · Successive halving
#
# Begin many trials with little, keep the best part, give them more, and again. A **rung** is a number of trials and the resource (epochs) to which
# they are trained *in all*. From $n$ trials with $r$ epochs, and with the factor $\eta$:
#
# $$n_k = \lfloor n / \eta^k \rfloor \qquad r_k = r\, \eta^k \qquad \text{as long as } r_k \le \text{most and } n_k \ge 1$$
#
# Write the rungs, and who survives one: the numbers of the `keep` trials with the lowest losses, best first. A trial that diverged has the loss NaN.
# It is the worst of all; `nan < 1` and `nan > 1` are both false, so sorting by the loss alone goes wrong.

# %% nbgrader={"grade_id": "halving", "solution": true}
def rungs(trials: int, least: int, most: int, eta: int) -> list[tuple[int, int]]:
    """(trials, epochs in all) of each rung, from (trials, least) upwards."""
    ### BEGIN SOLUTION
    found = []
    while trials >= 1 and least <= most:
        found.append((trials, least))
        trials, least = trials // eta, least * eta
    return found
    ### END SOLUTION


def survivors(losses: list[float], keep: int) -> list[int]:
    """The numbers of the `keep` best trials, best first; equal losses in the order of their numbers."""
    ### BEGIN SOLUTION
    return sorted(range(len(losses)), key=lambda i: (math.isnan(losses[i]), losses[i] if losses[i] == losses[i] else 0.0, i))[:keep]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_halving", "grade": true, "points": 6}
lab.check("halving")

# %% [markdown] id="hyperband_text"
# ## 9 · Hyperband
#
# How many trials should halving begin with? If early losses say much, many; if they say little, few. Nobody knows beforehand. **Hyperband** (Li et al.,
# 2017) runs both and what lies between: brackets $s = s_{max}, \dots, 0$ of about equal cost, with
#
# $$s_{max} = \lfloor \log_\eta R \rfloor \qquad n_s = \left\lceil \frac{s_{max} + 1}{s + 1}\, \eta^s \right\rceil \qquad r_s = R\, \eta^{-s}$$
#
# Return for each bracket its first rung $(n_s, r_s)$; here $R$ is a power of $\eta$. Count with whole numbers: `math.log(243, 3)` is 4.999....

# %% nbgrader={"grade_id": "hyperband", "solution": true}
def brackets(most: int, eta: int) -> list[tuple[int, int]]:
    """(trials, epochs) with which each bracket begins, the one with most trials first. `most` is a power of `eta`."""
    ### BEGIN SOLUTION
    boldest = 0
    while eta ** (boldest + 1) <= most:
        boldest += 1
    return [(-(-(boldest + 1) * eta**s // (s + 1)), most // eta**s) for s in range(boldest, -1, -1)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_hyperband", "grade": true, "points": 5}
lab.check("hyperband")

# %% [markdown] id="budget_text"
# What do they find for the same number of epochs? Every method gets the budget of one Hyperband and takes its trials at random from the
# pool. Random search trains fewer trials, all to the end.

# %% id="show_budget" tags=["demo"]
def halving(order: list[int], trials: int, least: int) -> tuple[float, int]:
    """The lowest final loss that successive halving finds among the trials of `order`, and its cost in epochs."""
    alive, cost, before = order[:trials], 0, 0
    for count, epochs in rungs(len(alive), least, EPOCHS, 3):
        alive = [alive[i] for i in survivors([pool[trial][before - 1] for trial in alive], count)] if before else alive
        cost, before = cost + len(alive) * (epochs - before), epochs
    final = [pool[trial][before - 1] for trial in alive]
    return final[survivors(final, 1)[0]], cost


def hyperband(order: list[int]) -> tuple[float, int]:
    results, begun = [], 0
    for trials, least in brackets(EPOCHS, 3):
        results.append(halving(order[begun : begun + trials], trials, least))
        begun += trials
    return min(loss for loss, _ in results), sum(cost for _, cost in results)


found = {"random": [], "successive halving": [], "Hyperband": []}
for seed in range(10 * REPEATS):
    order = torch.randperm(POOL, generator=torch.Generator().manual_seed(seed)).tolist()
    loss, budget = hyperband(order)
    found["Hyperband"].append(loss)
    whole = [pool[trial][-1] for trial in order[: budget // EPOCHS]]
    found["random"].append(whole[survivors(whole, 1)[0]])
    once = halving(order, 27, 1)[1]
    parts = [halving(order[27 * i : 27 * i + 27], 27, 1)[0] for i in range(min(budget // once, POOL // 27))]
    found["successive halving"].append(min(parts))
print(f"budget {budget} epochs: {budget // EPOCHS} trials at random, or {budget // once} times successive halving from 27")
verdict("successive halving", "random", found)
verdict("Hyperband", "random", found)
verdict("successive halving", "Hyperband", found)
figures.best_losses(found, f"best final loss for {budget} epochs", log=True)

# %% [markdown] id="budget_after"
# How much early losses say about final ones, you have measured for this pool. Where a good trial begins slowly (small learning rates, long warm-up, strong
# regularisation), bold halving throws it away; Hyperband's careful brackets are the price of not knowing.

# %% [markdown] id="asha_text"
# ## 10 · ASHA: nobody waits
#
# A rung of successive halving waits for its slowest trial. On 100 GPUs, 99 wait. **ASHA** (Li et al., 2018) promotes a trial as soon as it is in the
# best $1/\eta$ of those that have reported on its rung *so far*. A free worker asks:
#
# 1. from the rung below the top downwards: of the trials that have reported on this rung, take the best ⌊reported / η⌋. Is one among them that has not
#    been promoted? The best such trial goes on.
# 2. Nobody to promote: begin a new trial on rung 0.
#
# `reported[k]` are the losses on rung k by trial, and `promoted[k]` the trials that have gone on from rung k. The top rung is the last one of `reported`:
# from there nobody goes on. Trials with equal losses: the lower number is better.

# %% nbgrader={"grade_id": "asha", "solution": true}
def promotion(reported: list[dict[int, float]], promoted: list[list[int]], eta: int) -> tuple[int, int] | None:
    """(trial, rung it leaves) of the trial that should go on; None: begin a new one."""
    ### BEGIN SOLUTION
    for rung in range(len(reported) - 2, -1, -1):
        ranked = sorted(reported[rung], key=lambda trial: (reported[rung][trial], trial))
        for trial in ranked[: len(ranked) // eta]:
            if trial not in promoted[rung]:
                return trial, rung
    return None
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_asha", "grade": true, "points": 6}
lab.check("asha")

# %% [markdown] id="asha_after"
# Eight workers in simulated time, 27 trials of the pool; some configurations take three times as long as others. Above, successive halving as you know it;
# below, your promotions decide. The darker a bar, the higher the rung.

# %% id="show_asha" tags=["demo"]
from dlo_lib.hpo import SuccessiveHalving, draw_timeline, simulate
from dlo_lib.hpo.table import Begin, GoOn, idle


class YourAsha:
    """Asks your function with the table of trials."""

    def __init__(self):
        self.levels = [epochs for _, epochs in rungs(27, 1, EPOCHS, 3)]

    def decide(self, table):
        reported = [{row.number: row.loss(level) for row in table if row.is_through(level)} for level in self.levels]
        gone = [[row.number for row in table if row.has_begun(level)] for level in self.levels[1:]] + [[]]
        go_on = promotion(reported, gone, 3)
        if go_on is not None:
            return GoOn(go_on[0], self.levels[go_on[1] + 1])
        return Begin(1, EPOCHS) if len(table) < 27 else idle(table)


def from_pool(row, epochs):
    loss = pool[row.params["trial"]][epochs - 1]
    return None if math.isnan(loss) else loss


def propose(table):
    return {"trial": len(table)}


slow = [1 + 2 * float(v) for v in places[:, 1]]
runs = {
    name: simulate(policy, from_pool, propose, workers=8, cost=lambda row: slow[row.params["trial"]])
    for name, policy in {"successive halving": SuccessiveHalving(27, 1, EPOCHS), "ASHA, your promotions": YourAsha()}.items()
}
for name, run in runs.items():
    best = min(row.reports[EPOCHS] for row in run.table if EPOCHS in row.reports)
    print(f"{name}: best loss {best:.3f}, trained {run.cost:.0f} units of time")
draw_timeline(runs)

# %% [markdown] id="prune_text"
# ## 11 · Pruning: stop what lags behind
#
# A simpler rule needs no rungs. The **median rule**: after each epoch a trial compares its *best loss so far* with the losses that earlier trials had at
# *the same epoch*. Is it above their median, it stops. The first `warmup` epochs are not judged, and neither is anything while there are fewer than
# `enough` earlier trials that got so far.
#
# Epochs count from 1: `losses[e - 1]` is the loss after epoch e. `others` are the losses of earlier trials; one that was stopped has a shorter list. A NaN loss
# stops the trial, also during warm-up. With an even number of values, the median is the mean of the two in the middle. Losses of `others` are finite.

# %% nbgrader={"grade_id": "prune", "solution": true}
def should_stop(losses: list[float], others: list[list[float]], warmup: int, enough: int) -> bool:
    """Whether a trial with these `losses` so far should stop now."""
    ### BEGIN SOLUTION
    epoch = len(losses)
    if math.isnan(losses[-1]):
        return True
    told = sorted(other[epoch - 1] for other in others if len(other) >= epoch)
    if epoch <= warmup or len(told) < enough:
        return False
    half = len(told) // 2
    median = told[half] if len(told) % 2 else (told[half - 1] + told[half]) / 2
    return min(losses) > median
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_prune", "grade": true, "points": 5}
lab.check("prune")

# %% id="show_prune" tags=["demo"]
spent, whole, kept = [], [], 0
for seed in range(10 * REPEATS):
    order = torch.randperm(POOL, generator=torch.Generator().manual_seed(seed)).tolist()[:30]
    earlier, cost = [], 0
    for trial in order:
        losses = []
        for loss in pool[trial]:
            losses.append(loss)
            if should_stop(losses, earlier, warmup=2, enough=4):
                break
        cost += len(losses)
        earlier.append([loss for loss in losses if not math.isnan(loss)])
    best = min(pool[trial][-1] for trial in order if not math.isnan(pool[trial][-1]))
    kept += any(len(losses) == EPOCHS and losses[-1] == best for losses in earlier)
    spent.append(cost / (30 * EPOCHS))
print(f"30 trials, the median rule: {100 * sum(spent) / len(spent):.0f} % of the epochs; the best trial survives in {100 * kept / len(spent):.0f} % of the searches")

# %% [markdown] id="population_text"
# ## 12 · Population-based training
#
# The best learning rate at the beginning need not be the best one at the end. **Population-based training** (Jaderberg et al., 2017) trains a population side
# by side and changes hyperparameters *while it trains*. After every interval:
#
# - **exploit**: with $q$ = max(1, ⌊quantile · n⌋), each of the q worst members becomes a copy, weights and learning rate, of one of the q best:
#   `best[pick]`, where `best` are the q best members, best first, and `picks[i]` belongs to member i;
# - **explore**: its new learning rate is the copied one, times 1.2 if `ups[i]`, else times 0.8, and kept within `low` and `high`.
#
# All others go on as they are. A NaN loss is the worst; `survivors(losses, len(losses))` ranks all members.

# %% nbgrader={"grade_id": "population", "solution": true}
def new_generation(
    losses: list[float], rates: list[float], quantile: float, picks: list[int], ups: list[bool], low: float, high: float
) -> tuple[list[int], list[float]]:
    """For each member whose weights it goes on with (its own number: it stays), and its learning rate."""
    ### BEGIN SOLUTION
    ranked = survivors(losses, len(losses))
    few = max(1, int(quantile * len(losses)))
    parents, changed = list(range(len(losses))), list(rates)
    for member in ranked[-few:]:
        parents[member] = ranked[:few][picks[member]]
        changed[member] = min(high, max(low, rates[parents[member]] * (1.2 if ups[member] else 0.8)))
    return parents, changed
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_population", "grade": true, "points": 5}
lab.check("population")

# %% [markdown] id="population_after"
# Real training: 6 members, 27 epochs, a new generation after every third. Against it, the same 6 learning rates kept to the end (random search), from the
# same weights and with the same batches. Both cost 6 × 27 epochs. The picture shows the last repeat: every member's learning rate, and in colour what the
# weights of the best one have been trained with.

# %% id="show_population" tags=["demo"]
MEMBERS, QUANTILE = 6, 0.25


def train_population(seed: int, changes: bool) -> tuple[list[float], list[list[float]], list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    rates = [from_place(float(u), *trainings.LEARNING_RATE, log=True) for u in torch.rand(MEMBERS, generator=generator)]
    decay, networks = torch.full((MEMBERS,), 1e-4), trainings.Networks.begin(MEMBERS, seed)
    history, families = [rates], []
    for epoch in range(EPOCHS):
        networks, losses = trainings.train_epoch(networks, data, torch.tensor(rates), decay, seed=1000 * seed + epoch)
        if changes and epoch % 3 == 2 and epoch < EPOCHS - 1:
            picks = torch.randint(max(1, int(QUANTILE * MEMBERS)), (MEMBERS,), generator=generator).tolist()
            ups = (torch.rand(MEMBERS, generator=generator) < 0.5).tolist()
            parents, rates = new_generation(losses.tolist(), rates, QUANTILE, picks, ups, *trainings.LEARNING_RATE)
            networks = networks.copies(parents)
            history.append(rates)
            families.append(parents)
    return losses.tolist(), history, families


def lowest(losses: list[float]) -> float:
    return losses[survivors(losses, 1)[0]]


found = {"population": [], "random": []}
for seed in range(REPEATS):
    losses, history, families = train_population(seed, changes=True)
    found["population"].append(lowest(losses))
    found["random"].append(lowest(train_population(seed, changes=False)[0]))
verdict("population", "random", found)
figures.population(history, families, losses, every=3)

# %% [markdown] id="shared_text"
# ## 13 · A search that several processes share
#
# On a cluster, workers come and go: jobs are killed at their time limit. `dlo_lib.hpo` puts a search into **one file**, the journal of an Optuna study. Workers
# share nothing else. Each asks the file what to train next and reports there; one that is killed leaves its trial to the next one that asks, with the last
# checkpoint. No server, no trial lost, none done twice.
#
# The objective trains for real, saves at `task.checkpoint`, and goes on from `task.resume`.

# %% id="show_shared" tags=["demo"]
import tempfile
from pathlib import Path

from optuna.distributions import FloatDistribution

from dlo_lib.hpo import Asha, Definition, Sampler, Search, draw_trials, run_workers

folder = tempfile.TemporaryDirectory()
journal = Path(folder.name) / "digits.journal"
space = {
    "learning_rate": FloatDistribution(*trainings.LEARNING_RATE, log=True),
    "weight_decay": FloatDistribution(*trainings.WEIGHT_DECAY, log=True),
}
search = Search.make(journal, Definition(space, Asha(trials=18, least=1, most=9), Sampler.TPE, seed=3))


def objective(task) -> float:
    torch.set_num_threads(1)
    networks = trainings.Networks.begin(1, seed=task.trial)
    if task.resume is not None:
        networks = trainings.Networks(*torch.load(task.resume))
    for epoch in range(task.begin, task.resource):
        rate, decay = (torch.tensor([task.params[name]]) for name in ("learning_rate", "weight_decay"))
        networks, losses = trainings.train_epoch(networks, data, rate, decay, seed=epoch)
    torch.save((networks.weights, networks.velocities), task.checkpoint)
    return float(losses)


# A worker takes a trial and is gone before it reports.
lost = search.ask()
search.leave()

print("tasks done by each of two processes:", run_workers(journal, objective, workers=2))
table = Search.join(journal).table()
print(f"{len(table)} trials; trial {lost.trial}, which the first worker left, has reported: {dict(table[lost.trial].reports)}")
best = Search.join(journal).best
print(f"best: trial {best.number}, learning rate {best.params['learning_rate']:.3g}, losses by epoch {best.reports}")
draw_trials(table)

# %% [markdown] id="dashboard_text"
# The file is an Optuna study, so Optuna's tools read it: its plots (here: when each trial lived; one that waits for its promotion lives on), and a dashboard. The
# dashboard is served by a thread of this kernel, and is gone with it.

# %% id="show_optuna" tags=["demo"]
figures.optuna_timeline(Search.join(journal).study)

# %% id="show_dashboard" tags=["demo"]
from dlo_lib.hpo import Dashboard

dashboard = Dashboard(journal, height=500)
dashboard

# %% id="stop_dashboard" tags=["demo"]
dashboard.stop()

# %% [markdown] id="scale_cluster"
# ## 14 · At scale
#
# On a cluster the same search is a **job array**: each element is a worker, however many the queue lets run. Where there is no SLURM the same call runs
# here. With `dry_run=True` it only shows the script; take that away to send it, with the journal in a folder that all nodes see.

# %% id="show_cluster" tags=["demo"]
from dlo_lib.cluster import submit
from dlo_lib.hpo import take_part

shared = {"path": "digits.journal", "objective": objective}
print(submit(take_part, shared, gpus=1, site="jean-zay-v100", account="abc", sweep={"worker": range(16)}, dry_run=True))

# %% [markdown] id="quiz_text"
# ## 15 · Quiz
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here says whether every question has an answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "b", "q2": "a", "q3": "c", "q4": "d", "q5": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true, "points": 6}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - All methods above chose by the validation images. Measure the best of each on the test images, which nobody has looked at. How much of its lead is left?
# - Give Expected Improvement several candidates at once: pretend that the trials in training have the worst value so far.
# - Let TPE propose the trials of Hyperband (that is BOHB, Falkner et al., 2018): `Definition(space, Hyperband(27), Sampler.TPE)`.
# - A learning rate and a batch size that depend on each other: which of the samplers notices?
#
# ## References
#
# - J. Bergstra and Y. Bengio, *Random Search for Hyper-Parameter Optimization* (2012), [JMLR 13](https://jmlr.org/papers/v13/bergstra12a.html)
# - D. Jones, M. Schonlau and W. Welch, *Efficient Global Optimization of Expensive Black-Box Functions* (1998), [doi:10.1023/A:1008306431147](https://doi.org/10.1023/A:1008306431147)
# - J. Bergstra et al., *Algorithms for Hyper-Parameter Optimization* (TPE; 2011), NeurIPS
# - L. Li et al., *Hyperband* (2016), [arXiv:1603.06560](https://arxiv.org/abs/1603.06560)
# - L. Li et al., *A System for Massively Parallel Hyperparameter Tuning* (ASHA; 2018), [arXiv:1810.05934](https://arxiv.org/abs/1810.05934)
# - M. Jaderberg et al., *Population Based Training of Neural Networks* (2017), [arXiv:1711.09846](https://arxiv.org/abs/1711.09846)
# - D. Golovin et al., *Google Vizier* (the median rule; 2017), doi:10.1145/3097983.3098043
# - T. Akiba et al., *Optuna* (2019), [arXiv:1907.10902](https://arxiv.org/abs/1907.10902)
# - The courses this lab follows: FIDLE, sequence 16; IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
