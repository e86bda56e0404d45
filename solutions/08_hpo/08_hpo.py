# %% [markdown] id="title"
# # 08 · Hyperparameter search: what it finds for what it costs
#
# **What you will do.** Write the parts of search methods: sampling on a logarithmic scale, a Gaussian process
# with **Expected Improvement**, successive halving, Hyperband, a pruning rule, and an objective for Optuna. Run
# them on a loss landscape given by a formula, then on real trainings of a small network. Compare them as
# experiments should be compared: at the same cost, with many repeats and an interval.
#
# Of lab 06 you need the learning rate and its decades. You can skip lab 07, which compares optimisers: here every network is trained by gradient
# descent with momentum, a learning rate and a weight decay, which pulls each weight towards 0 in each step.
#
# You need no GPU. The core exercises and predictions take about 100 minutes; with the text and the demos plan two hours and a
# quarter. The three optional ones (Hyperband, ASHA, population-based training) take 43 minutes more. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a
# pointer, then a sketch. If you are stuck, `lab.use_reference("name")` lets you continue without the points of
# that step.
#
# Words: hyperparameter (*hyperparamètre*), learning rate (*taux d'apprentissage*), weight decay (*dégradation
# des poids*), trial (*essai*), pruning (*élagage*), population (*population*).

# %% id="setup"
import math
import os

import optuna
import torch
from torch import Tensor

from dlo_lib.grading import Lab
from dlo_lib.labkit.predictions import compared, require_numbers, scaled

REPEATS = int(os.environ.get("DLO_REPEATS", 30))  # of every comparison
POOL = int(os.environ.get("DLO_POOL", 200))  # real trainings, run once and searched many times
EPOCHS = 27
torch.set_num_threads(1)  # the networks here are small: a second thread costs more than it saves
optuna.logging.set_verbosity(optuna.logging.WARNING)
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: one number decides, and you do not know which
#
# This is a landscape of two hyperparameters. Each point stands for a whole training; its colour is the final
# loss. (It is a formula here, so that we can see all of it. For a real network, this picture would cost ten
# thousand trainings.)
#
# You have a budget of 16 trainings. On the left they form a **grid**, on the right they are **random**. Look
# at the ticks below each picture: how many different learning rates does each method try?

# %% id="show_why" tags=["demo"]
import figures
import trainings

grid = [((i + 0.5) / 4, (j + 0.5) / 4) for i in range(4) for j in range(4)]
scattered = torch.rand(16, 2, generator=torch.Generator().manual_seed(4)).tolist()
figures.landscape({"grid": grid, "random": scattered})

# %% [markdown] id="why_after"
# The learning rate matters much, the weight decay little, but this is not known before the search. A grid
# spends its 16 trainings on only 4 learning rates, random search on 16 (Bergstra and Bengio, 2012). This does
# not yet prove that random search finds a lower loss on *this* landscape: step 2 measures it.

# %% [markdown] id="scale_text"
# ## 1 · Sample on the right scale
#
# **Core · 4 min · ●○○**
#
# Take learning rates from 0.0001 to 3: if they are sampled uniformly, only one in a thousand is below 0.003.
# If the *order of magnitude* of a hyperparameter matters, sample it on a **logarithmic scale**: as many
# values between 0.001 and 0.01 as between 0.1 and 1.
#
# Write the function that maps a position between 0 and 1 to a value between `low` and `high`.

# %% nbgrader={"grade_id": "scale", "solution": true}
def from_place(place: float, low: float, high: float, log: bool) -> float:
    """Return the value at `place` (0 is `low`, 1 is `high`) on a linear or a logarithmic scale."""
    ### BEGIN SOLUTION
    if log:
        return low * (high / low) ** place
    return low + place * (high - low)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_scale", "grade": true}
lab.check("scale")

# %% [markdown] id="interval_text"
# ## 2 · Which one is better? Repeat the experiment
#
# **Core · 10 min · ●●○**
#
# One search proves nothing: random search may be lucky. So repeat both methods, with seed 0, 1, 2, ... and
# compare **seed by seed**. Is the mean difference real? The **bootstrap** answers without a formula of
# statistics: resample the N differences, N times with replacement, and take the mean; repeat this many times;
# the interval is the middle 95 % of these means.
#
# 95 % means: of 100 such experiments, about 95 give an interval that contains the true mean difference. If 0
# is outside, we accept the sign, at that risk of error. The risk grows with the number of comparisons: ten
# independent intervals are all right only with probability 0.95¹⁰ = 0.60.
#
# `chosen` (draws, N) holds the indices of the repeats in each resample. For the quantiles use
# `torch.quantile`.

# %% nbgrader={"grade_id": "interval", "solution": true}
def interval(left: Tensor, right: Tensor, chosen: Tensor, level: float) -> tuple[float, float]:
    """Return the bootstrap interval of the mean of left - right (N,).

    It is the middle `level` of the means over the rows of `chosen`.
    """
    ### BEGIN SOLUTION
    means = (left - right)[chosen].mean(1)
    outside = (1 - level) / 2
    return float(torch.quantile(means, outside)), float(torch.quantile(means, 1 - outside))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_interval", "grade": true}
lab.check("interval")

# %% [markdown] id="predict_interval_text"
# **Predict.** Which is the best loss of 16 trainings, on average over the repeats? (The landscape falls from 2.3 to 0.2.)
# Replace each `None` that you want to predict by a number. Predictions are not graded.

# %% id="predict_interval" tags=["prediction"]
predicted_best = {"grid": None, "random": None}

# %% id="show_interval" tags=["demo"]
require_numbers(predicted_best)
def verdict(a: str, b: str, losses: dict[str, list[float]]) -> None:
    """Print the result of comparing a with b; lower is better."""
    left, right = torch.tensor(losses[a]).double(), torch.tensor(losses[b]).double()
    chosen = torch.randint(len(left), (4000, len(left)), generator=torch.Generator().manual_seed(0))
    low, high = interval(left, right, chosen, 0.95)
    said = f"{a} beats {b}" if high < 0 else f"{b} beats {a}" if low > 0 else f"{a} and {b}: no difference can be seen"
    print(f"{said} ({len(left)} repeats: mean difference {float((left - right).mean()):+.3f}, 95 % interval {low:+.3f} to {high:+.3f})")


def loss_at(place) -> float:
    rate, decay = (from_place(float(at), *bounds, log=True) for at, bounds in zip(place, (trainings.LEARNING_RATE, trainings.WEIGHT_DECAY)))
    return trainings.landscape(rate, decay)


def random_losses(count: int, seed: int) -> list[float]:
    return [loss_at(place) for place in torch.rand(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)]


def moved_grid(side: int, seed: int) -> list[float]:
    """Return the losses on a grid that is shifted at random, as if its bounds were chosen a little differently."""
    shift = torch.rand(2, generator=torch.Generator().manual_seed(seed))
    return [loss_at(((i + shift[0]) / side, (j + shift[1]) / side)) for i in range(side) for j in range(side)]


found = {
    "grid": [min(moved_grid(4, seed)) for seed in range(10 * REPEATS)],
    "random": [min(random_losses(16, seed)) for seed in range(10 * REPEATS)],
}
verdict("random", "grid", found)
print(compared(predicted_best, {name: sum(losses) / len(losses) for name, losses in found.items()}))
figures.best_losses(found, "best of 16 trainings", predicted_best)

# %% [markdown] id="interval_after"
# The cell derives the printed sentence from your interval. All comparisons in this lab are made this way. "No
# difference can be seen" is also a result: the dots overlap, and a single run of each method would have named a
# winner by chance.
#
# Why is the grid not worse here? The valley is tilted: each of the four rows of the grid meets it at another
# learning rate, so the 16 trainings try more than 4 positions across the valley. And random positions leave gaps
# too. With a valley that is not tilted, random search is better by 0.5.

# %% [markdown] id="process_text"
# ## 3 · A model of the landscape: the Gaussian process
#
# **Core · 13 min · ●●●**
#
# Random search does not use its results. After ten trainings we know something about the landscape, and a
# **Gaussian process** expresses it: at each point a mean and an *uncertainty*. The closer two points are, the
# more similar are their values, according to the kernel with length scale $\ell$; $X$ are the measured
# points, $y$ their values:
#
# $$k(x, x') = e^{-|x - x'|^2 / 2\ell^2} \qquad K = k(X, X) + n I$$
#
# $$\mu(x) = k(x, X)\, K^{-1} y \qquad \sigma^2(x) = 1 - k(x, X)\, K^{-1} k(X, x)$$
#
# $n$ is the variance of the measurement noise, $I$ the identity. The kernel is given. Use
# `torch.linalg.solve` or a Cholesky factor. Rounding can make $\sigma^2$ slightly negative: clamp it to 0
# before the square root.
#
# `new` holds M points at once. The standard deviation of each is needed, but no covariance between two of them:
# $\sigma^2$ is the *diagonal* of the matrix that the formula gives for M points.

# %% id="kernel"
def kernel(a: Tensor, b: Tensor, length: float) -> Tensor:
    """Return k (A, B) between the points `a` (A, d) and `b` (B, d)."""
    return torch.exp(-(a[:, None] - b[None]).square().sum(-1) / (2 * length**2))


# %% nbgrader={"grade_id": "process", "solution": true}
def posterior(
    points: Tensor, values: Tensor, new: Tensor, length: float, noise: float
) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation (M,) at `new` (M, d).

    Given are `values` (N,) at `points` (N, d).
    """
    ### BEGIN SOLUTION
    covariance = kernel(points, points, length) + noise * torch.eye(len(points), dtype=points.dtype)
    across = kernel(points, new, length)
    weights = torch.linalg.solve(covariance, across)
    return weights.T @ values, (1 - (across * weights).sum(0)).clamp(min=0).sqrt()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_process", "grade": true}
lab.check("process")

# %% [markdown] id="improvement_text"
# ## 4 · Expected Improvement
#
# **Core · 9 min · ●●○**
#
# Where should we measure next? At the lowest mean (**exploit**), or where the uncertainty is large
# (**explore**)? Jones, Schonlau and Welch (1998) combine both in one number. The next value is normally
# distributed, with mean $\mu$ and standard deviation $\sigma$; if it is below the best so far, we gain the
# difference, otherwise nothing. The expected gain is
#
# $$z = \frac{best - \mu}{\sigma} \qquad EI = E[\max(best - f, 0)] = (best - \mu)\,\Phi(z) + \sigma\,\varphi(z)$$
#
# with the normal distribution function $\Phi$ (`torch.special.ndtr`) and its density
# $\varphi(z) = e^{-z^2/2} / \sqrt{2\pi}$. If $\sigma = 0$ the value is certain, and the gain is
# $\max(best - \mu, 0)$.

# %% nbgrader={"grade_id": "improvement", "solution": true}
def expected_improvement(mean: Tensor, std: Tensor, best: float) -> Tensor:
    """Return EI (M,): the expected amount by which the next value is below the lowest, `best`."""
    ### BEGIN SOLUTION
    gain = best - mean
    z = gain / std.clamp(min=1e-300)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return torch.where(std > 0, gain * torch.special.ndtr(z) + std * density, gain.clamp(min=0))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_improvement", "grade": true}
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
    expected = expected_improvement(mean, std, float((values - middle).min()))
    pictures[f"length scale {length}"] = (mean + middle, std, expected)
figures.improvement(line[:, 0], truth, (measured[:, 0], values), pictures)

# %% [markdown] id="length_text"
# ## 5 · How rough is the landscape?
#
# **Core · 8 min · ●●○**
#
# The three pictures have the same measurements but choose different next points. The length scale must come
# from the data. The **marginal likelihood** is the probability density of the values under a length scale,
# over all functions that it allows:
#
# $$\log p(y) = -\frac{1}{2}\, y^T K^{-1} y \;-\; \frac{1}{2} \log |K| \;-\; \frac{N}{2} \log 2\pi$$
#
# The first term rewards a good fit, the second penalises flexibility: a short length scale can fit any
# values, so it gives *each* of them a low probability. Return the length with the highest likelihood. (Use
# `torch.logdet`, or twice the sum of the logarithms of the Cholesky factor's diagonal.)

# %% nbgrader={"grade_id": "length", "solution": true}
def best_length(points: Tensor, values: Tensor, lengths: list[float], noise: float) -> float:
    """Return the length with which `values` (N,) at `points` (N, d) are most probable."""
    ### BEGIN SOLUTION
    def log_likelihood(length):
        covariance = kernel(points, points, length) + noise * torch.eye(len(points), dtype=points.dtype)
        return -0.5 * (values @ torch.linalg.solve(covariance, values) + torch.logdet(covariance))

    return max(lengths, key=log_likelihood)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_length", "grade": true}
lab.check("length")

# %% [markdown] id="next_text"
# ## 6 · Where to measure next
#
# **Core · 9 min · ●●○**
#
# Combine the three functions. The process assumes values with mean 0 and standard deviation 1, which losses
# do not have: **standardise** them first. (The standard deviation may divide by $N$, `std(correction=0)`, or by
# $N - 1$, torch's default: the check accepts both.) Then choose the length from `LENGTHS`, predict at the
# candidates, and return the index of the candidate with the largest EI. Give `best` in the same units as the
# predictions.

# %% nbgrader={"grade_id": "next", "solution": true}
LENGTHS, NOISE = [0.05, 0.1, 0.2, 0.4, 0.8], 1e-4


def next_candidate(points: Tensor, values: Tensor, candidates: Tensor) -> int:
    """Return the index of the row of `candidates` (M, d) with the largest Expected Improvement."""
    ### BEGIN SOLUTION
    scaled = (values - values.mean()) / values.std(correction=0)
    length = best_length(points, scaled, LENGTHS, NOISE)
    mean, std = posterior(points, scaled, candidates, length, NOISE)
    return int(expected_improvement(mean, std, float(scaled.min())).argmax())
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_next", "grade": true}
lab.check("next")

# %% [markdown] id="next_after"
# The cell compares your search with random search, and with **TPE**, the default sampler of Optuna: TPE
# models the good and the bad trials with two densities, and proposes points where their ratio is large. All
# three start with the same 8 random trainings.
#
# **Predict.** Which is the best loss after 28 trainings, on average over the repeats?

# %% id="predict_next" tags=["prediction"]
predicted_loss = {"random": None, "TPE": None, "your Bayesian search": None}

# %% id="show_next" tags=["demo"]
require_numbers(predicted_loss)
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
print(compared(predicted_loss, {name: sum(losses) / len(losses) for name, losses in last.items()}))
verdict("TPE", "random", last)
verdict("your Bayesian search", "random", last)
verdict("your Bayesian search", "TPE", last)
figures.best_so_far(curves, START, predicted_loss)

# %% [markdown] id="pool_text"
# ## 7 · Real trainings, and the resource that they use
#
# So far every trial was trained to its end. But a learning rate that is far too small is visible in the first
# epoch. The cell trains a few hundred small networks on handwritten digits in parallel, each with different
# hyperparameters (sampled with your `from_place`). The next searches use this **pool** of real curves: the
# cost of a trial is the number of epochs of its curve that the search reads.

# %% id="show_pool" tags=["demo"]
data = trainings.load_digits()
places = torch.rand(POOL, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
rates = torch.tensor(
    [from_place(float(u), *trainings.LEARNING_RATE, log=True) for u in places[:, 0]]
)
decays = torch.tensor(
    [from_place(float(v), *trainings.WEIGHT_DECAY, log=True) for v in places[:, 1]]
)
# pool[trial][epoch]; NaN after divergence
pool = trainings.train_many(data, rates, decays, EPOCHS, seed=0).T.tolist()
figures.curves(pool, rates.tolist())

# %% [markdown] id="predict_ranks_text"
# **Predict.** How much do the first epochs tell about the final result? The rank correlation is 1 if the order of
# the trials after some epochs is the final order, and 0 if both have nothing in common.

# %% id="predict_ranks" tags=["prediction"]
predicted_ranks = {"after 1 epoch": None, "after 3": None, "after 9": None}

# %% id="show_ranks" tags=["demo"]
from dlo_lib.labkit.predicted_bars import predicted_bars

require_numbers(predicted_ranks)


def ranks_agree(epochs: int) -> float:
    """Return the correlation of the trials' ranks after `epochs` with their final ranks."""
    early, late = (torch.tensor([row[at - 1] for row in pool]).nan_to_num(99).argsort().argsort().double() for at in (epochs, EPOCHS))
    return float(torch.corrcoef(torch.stack([early, late]))[0, 1])


agreement = {"after 1 epoch": ranks_agree(1), "after 3": ranks_agree(3), "after 9": ranks_agree(9)}
print(compared(predicted_ranks, agreement))
predicted_bars(agreement, predicted_ranks, "rank correlation\nwith the end")

# %% [markdown] id="halving_text"
# ## 8 · Successive halving
#
# **Core · 12 min · ●●○**
#
# Start many trials with few epochs, keep the best part, train these longer, and repeat. A **rung** is a
# number of trials and the *total* resource (epochs) that each of them receives. From $n$ trials with $r$
# epochs, with the factor $\eta$:
#
# $$n_k = \lfloor n / \eta^k \rfloor \qquad r_k = r\, \eta^k \qquad \text{as long as } r_k \leq \text{most and } n_k \geq 1$$
#
# Write the rungs, and the survivors of one rung: the indices of the `keep` trials with the lowest losses,
# best first. A trial that diverged has the loss NaN and is the worst of all. `nan < 1` and `nan > 1` are both
# false, so sorting by the loss alone gives a wrong order.

# %% nbgrader={"grade_id": "halving", "solution": true}
def rungs(trials: int, least: int, most: int, eta: int) -> list[tuple[int, int]]:
    """Return (trials, total epochs) of each rung, starting at (trials, least)."""
    ### BEGIN SOLUTION
    found = []
    while trials >= 1 and least <= most:
        found.append((trials, least))
        trials, least = trials // eta, least * eta
    return found
    ### END SOLUTION


def survivors(losses: list[float], keep: int) -> list[int]:
    """Return the indices of the `keep` best trials, best first; equal losses by their indices."""
    ### BEGIN SOLUTION
    return sorted(range(len(losses)), key=lambda i: (math.isnan(losses[i]), losses[i] if losses[i] == losses[i] else 0.0, i))[:keep]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_halving", "grade": true}
lab.check("halving")

# %% [markdown] id="hyperband_text"
# ## 9 · Hyperband
#
# **Optional · 10 min · ●●○**
#
# You can skip the code: no later cell needs it. But read the idea, because the next figure and the quiz use it.
#
# How many trials should halving start with? Many if early losses predict the final ones, few if they do not.
# This is not known in advance. **Hyperband** (Li et al., 2017) runs both extremes and the cases between:
# brackets $s = s_{max}, \dots, 0$ of about equal cost, with
#
# $$s_{max} = \lfloor \log_\eta R \rfloor \qquad n_s = \left\lceil \frac{s_{max} + 1}{s + 1}\, \eta^s \right\rceil \qquad r_s = R\, \eta^{-s}$$
#
# Return the first rung $(n_s, r_s)$ of each bracket; here $R$ is a power of $\eta$. Compute with integers:
# `math.log(243, 3)` is 4.999....

# %% nbgrader={"grade_id": "hyperband", "solution": true}
def brackets(most: int, eta: int) -> list[tuple[int, int]]:
    """Return (trials, epochs) of the first rung of each bracket, most trials first.

    `most` is a power of `eta`.
    """
    ### BEGIN SOLUTION
    boldest = 0
    while eta ** (boldest + 1) <= most:
        boldest += 1
    return [(-(-(boldest + 1) * eta**s // (s + 1)), most // eta**s) for s in range(boldest, -1, -1)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_hyperband", "grade": true}
lab.check("hyperband")

# %% [markdown] id="budget_text"
# What do they find with the same number of epochs? Every method has the budget of one Hyperband run, with the brackets
# of the library (yours are the same), and takes its trials at random from the pool. Random search trains fewer trials, all to the end.
#
# **Predict.** How many times the best final loss of random search is that of the two others, on average?

# %% id="predict_budget" tags=["prediction"]
# mean loss / mean loss of random search
predicted_gain = {"successive halving": None, "Hyperband": None}

# %% id="show_budget" tags=["demo"]
from dlo_lib.hpo.halving import brackets as library_brackets

require_numbers(predicted_gain)


def halving(order: list[int], trials: int, least: int) -> tuple[float, int]:
    """Return the lowest final loss that successive halving finds among the trials of `order`, and its cost in epochs."""
    alive, cost, before = order[:trials], 0, 0
    for count, epochs in rungs(len(alive), least, EPOCHS, 3):
        alive = [alive[i] for i in survivors([pool[trial][before - 1] for trial in alive], count)] if before else alive
        cost, before = cost + len(alive) * (epochs - before), epochs
    final = [pool[trial][before - 1] for trial in alive]
    return final[survivors(final, 1)[0]], cost


def hyperband(order: list[int]) -> tuple[float, int]:
    results, begun = [], 0
    for first, *_ in library_brackets(EPOCHS, 3):
        results.append(halving(order[begun : begun + first.trials], first.trials, first.resource))
        begun += first.trials
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
print(f"budget {budget} epochs: {budget // EPOCHS} random trials, or {budget // once} runs of successive halving from 27 trials")
verdict("successive halving", "random", found)
verdict("Hyperband", "random", found)
verdict("successive halving", "Hyperband", found)
means = {name: sum(losses) / len(losses) for name, losses in found.items()}
print(compared(predicted_gain, {name: means[name] / means["random"] for name in predicted_gain}, "{:.2f}".format))
figures.best_losses(found, f"best final loss for {budget} epochs", scaled(predicted_gain, means["random"]), log=True)

# %% [markdown] id="budget_after"
# All repeats draw from one pool of trainings, so the dots stand in columns: many repeats find the same trial. The
# interval is therefore a statement about *this pool*. For a statement about the methods, repeat with other pools.
#
# You have measured how well early losses predict final ones in this pool. If a good trial starts slowly
# (small learning rate, long warm-up, strong regularisation), halving from few epochs discards it. Hyperband's
# brackets with few trials are the cost of protection against this.

# %% [markdown] id="prune_text"
# ## 10 · Pruning: stop trials that fall behind
#
# **Core · 14 min · ●●○**
#
# A simpler rule needs no rungs. The **median rule**: after each epoch, compare the trial's **best** loss so far
# with the losses that earlier trials had at **the same epoch**. Stop the trial if it is above their median. There
# is no judgement in the first `warmup` epochs, nor while fewer than `enough` earlier trials have reached this
# epoch.
#
# Epochs count from 1: `losses[e - 1]` is the loss after epoch e. `others` are the losses of earlier trials, all
# finite; a stopped trial has a shorter list. With an even number of values, the median is the mean of the two in
# the middle. A NaN loss of the trial itself stops it, also during warm-up.

# %% nbgrader={"grade_id": "prune", "solution": true}
def should_stop(losses: list[float], others: list[list[float]], warmup: int, enough: int) -> bool:
    """Return whether a trial with these `losses` so far should stop now."""
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


# %% nbgrader={"grade_id": "test_prune", "grade": true}
lab.check("prune")

# %% [markdown] id="predict_prune_text"
# **Predict.** 30 random trials of the pool, judged by your rule: which share of all epochs are trained, and in
# which share of the searches does the best trial reach its end? (Both in percent.)

# %% id="predict_prune" tags=["prediction"]
predicted_share = {"epochs trained": None, "best trial survives": None}

# %% id="show_prune" tags=["demo"]
require_numbers(predicted_share)
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
shares = {"epochs trained": 100 * sum(spent) / len(spent), "best trial survives": 100 * kept / len(spent)}
print(compared(predicted_share, shares))
predicted_bars(shares, predicted_share, "percent")

# %% [markdown] id="objective_text"
# ## 11 · An objective for Optuna
#
# **Core · 12 min · ●●○**
#
# In Optuna a search is a *study*, and a training is a *trial*. You write the **objective**: a function that
# receives a trial, asks it for hyperparameters, trains, and returns the value to minimise. The study has a
# *sampler*, which proposes the hyperparameters, and a *pruner*, which stops trials; neither is part of your
# function.
#
# Write an objective for any search space and any training:
#
# 1. For each name in `space`, `trial.suggest_float(name, low, high, log=True)` returns a value. Collect them in a
#    dict.
# 2. `train(params)` is a generator: it trains one epoch each time that you take a value from it, and yields the
#    validation loss.
# 3. After each epoch report its loss with the number of the epoch, from 1: `trial.report(loss, epoch)`. **Then**
#    ask `trial.should_prune()`. If it is true, raise `optuna.TrialPruned()`: no further epoch is trained, and
#    Optuna records the trial as pruned.
# 4. If a loss is NaN, raise `optuna.TrialPruned()` immediately, without reporting it: Optuna's pruners compare
#    the *best* loss so far, so one good epoch would protect a diverged trial.
# 5. Return the last loss.
#
# The first check takes some seconds: it loads Optuna in a new process.

# %% nbgrader={"grade_id": "objective", "solution": true}
def objective(trial, space: dict[str, tuple[float, float]], train) -> float:
    """Train with the hyperparameters that `trial` suggests, and return the last loss.

    Stop when the trial should be pruned.
    """
    ### BEGIN SOLUTION
    params = {name: trial.suggest_float(name, low, high, log=True) for name, (low, high) in space.items()}
    for epoch, loss in enumerate(train(params), 1):
        if math.isnan(loss):
            raise optuna.TrialPruned()
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned()
    return loss
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_objective", "grade": true}
lab.check("objective")

# %% [markdown] id="objective_after"
# The cell runs your objective in two studies with the same sampler and the same seed, without and with a pruner.
# These are real trainings, one network at a time.
#
# **Predict.** Which share of the epochs does the study with the pruner train, in percent of those without a pruner?

# %% id="predict_objective" tags=["prediction"]
predicted_epochs = {"median pruner": None}

# %% id="show_objective" tags=["demo"]
import time

require_numbers(predicted_epochs)

SPACE = {"learning_rate": trainings.LEARNING_RATE, "weight_decay": trainings.WEIGHT_DECAY}
TRIALS = max(8, min(20, REPEATS))


def train(params: dict[str, float]):
    """Train one network; yield its validation loss after each epoch."""
    networks = trainings.Networks.begin(1, seed=0)
    rate, decay = (torch.tensor([params[name]]) for name in SPACE)
    for epoch in range(EPOCHS):
        networks, losses = trainings.train_epoch(networks, data, rate, decay, seed=epoch)
        yield float(losses)


studies, trained = {}, {}
for name, pruner in {
    "no pruner": optuna.pruners.NopPruner(),
    "median pruner": optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=3),
}.items():
    begin = time.perf_counter()
    studies[name] = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1), pruner=pruner)
    studies[name].optimize(lambda trial: objective(trial, SPACE, train), n_trials=TRIALS)
    epochs = sum(len(trial.intermediate_values) for trial in studies[name].trials)
    stopped = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in studies[name].trials)
    print(
        f"{name:13} best loss {studies[name].best_value:.3f} in {epochs} epochs, {stopped} of {TRIALS} trials stopped early,"
        f" {time.perf_counter() - begin:.1f} s"
    )
    trained[name] = epochs
percent = {"no pruner": 100.0, "median pruner": 100 * trained["median pruner"] / trained["no pruner"]}
print(compared(predicted_epochs, percent))
predicted_bars(percent, predicted_epochs, "epochs trained (%)")

# %% [markdown] id="objective_question"
# Pruning saves epochs, and in a real training epochs are the time. Here a whole training takes a tenth of a second,
# so Optuna's own work hides the gain in seconds.
#
# The two studies propose different trials as soon as the first one is pruned, because TPE learns from what it
# sees. So the two best losses are one repeat of two searches, whether they are equal or not: which cell above
# would show whether pruning changes the result?

# %% [markdown] id="asha_text"
# ## 12 · ASHA: no worker waits
#
# **Optional · 15 min · ●●●**
#
# A rung of successive halving waits for its slowest trial: on 100 GPUs, 99 wait. **ASHA** (Li et al., 2018)
# promotes a trial as soon as it is in the best $1/\eta$ of those that have reported on its rung *so far*. A
# free worker asks:
#
# 1. For each rung, from the one below the top downwards: of the trials that have reported on this rung, take
#    the best $\lfloor \mathrm{reported} / \eta \rfloor$. Promote the best of these that has not been promoted.
# 2. If there is no trial to promote, start a new trial on rung 0.
#
# `reported[k]` maps trials to their losses on rung k, and `promoted[k]` holds the trials that were promoted
# from rung k. The top rung is the last one of `reported`: no trial is promoted from it. All losses are finite. Of
# trials with equal losses, the one with the lower index is better.

# %% nbgrader={"grade_id": "asha", "solution": true}
def promotion(
    reported: list[dict[int, float]], promoted: list[list[int]], eta: int
) -> tuple[int, int] | None:
    """Return (trial, rung it leaves) of the trial to promote, or None to start a new trial."""
    ### BEGIN SOLUTION
    for rung in range(len(reported) - 2, -1, -1):
        ranked = sorted(reported[rung], key=lambda trial: (reported[rung][trial], trial))
        for trial in ranked[: len(ranked) // eta]:
            if trial not in promoted[rung]:
                return trial, rung
    return None
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_asha", "grade": true}
lab.check("asha")

# %% [markdown] id="asha_after"
# Eight workers in simulated time run 27 trials of the pool; some configurations take three times as long as
# others. The upper timeline is successive halving; in the lower one your promotions decide. The darker a bar,
# the higher the rung.
#
# **Predict.** What is the time to the end of each, relative to successive halving?

# %% id="predict_asha" tags=["prediction"]
predicted_time = {"ASHA": None}  # successive halving is 1

# %% id="show_asha" tags=["demo"]
from dlo_lib.hpo import SuccessiveHalving, draw_timeline, simulate
from dlo_lib.hpo.table import Begin, Promote, idle

require_numbers(predicted_time)


class YourAsha:
    """A policy that calls your function with the table of trials."""

    def __init__(self, promotion):
        self.promotion = promotion
        self.levels = [epochs for _, epochs in rungs(27, 1, EPOCHS, 3)]

    def decide(self, table):
        reported = [{row.number: row.loss(level) for row in table if row.is_through(level)} for level in self.levels]
        gone = [[row.number for row in table if row.has_begun(level)] for level in self.levels[1:]] + [[]]
        go_on = self.promotion(reported, gone, 3)
        if go_on is not None:
            return Promote(go_on[0], self.levels[go_on[1] + 1])
        return Begin(1, EPOCHS) if len(table) < 27 else idle(table)


def from_pool(row, epochs):
    loss = pool[row.params["trial"]][epochs - 1]
    return None if math.isnan(loss) else loss


def propose(table):
    return {"trial": len(table)}


slow = [1 + 2 * float(v) for v in places[:, 1]]
runs = {
    name: simulate(policy, from_pool, propose, workers=8, cost=lambda row: slow[row.params["trial"]])
    for name, policy in {"successive halving": SuccessiveHalving(27, 1, EPOCHS), "ASHA, your promotions": YourAsha(promotion)}.items()
}
for name, run in runs.items():
    best = min(row.reports[EPOCHS] for row in run.table if EPOCHS in row.reports)
    print(f"{name}: best loss {best:.3f}, ends at time {run.makespan:.0f}, trained {run.cost:.0f} units of time")
ends = dict(zip(("halving", "ASHA"), (run.makespan / runs["successive halving"].makespan for run in runs.values())))
print(compared(predicted_time, ends, "{:.2f}".format))
draw_timeline(runs)

# %% id="show_asha_time" tags=["demo"]
predicted_bars(ends, predicted_time, "time to the end,\ntimes that of halving")

# %% [markdown] id="population_text"
# ## 13 · Population-based training
#
# **Optional · 15 min · ●●○**
#
# The best learning rate at the start need not be the best one at the end. **Population-based training**
# (Jaderberg et al., 2017) trains a population in parallel and changes hyperparameters *during the training*.
# After every interval:
#
# - **exploit**: with $q = \max(1, \lfloor \mathrm{quantile} \cdot n \rfloor)$, each of the $q$ worst members becomes a copy, weights and
#   learning rate, of one of the $q$ best: `best[pick]`, where `best` are the $q$ best members, best first, and
#   `picks[i]` belongs to member i;
# - **explore**: its new learning rate is the copied one, times 1.2 if `ups[i]`, otherwise times 0.8, and
#   clamped to `low` and `high`.
#
# All other members continue unchanged. A NaN loss is the worst; `survivors(losses, len(losses))` ranks all
# members.

# %% nbgrader={"grade_id": "population", "solution": true}
def new_generation(
    losses: list[float],
    rates: list[float],
    quantile: float,
    picks: list[int],
    ups: list[bool],
    low: float,
    high: float,
) -> tuple[list[int], list[float]]:
    """Return the parent of each member, and its learning rate.

    A member takes the weights of its parent; one that stays is its own parent.
    """
    ### BEGIN SOLUTION
    ranked = survivors(losses, len(losses))
    few = max(1, int(quantile * len(losses)))
    parents, changed = list(range(len(losses))), list(rates)
    for member in ranked[-few:]:
        parents[member] = ranked[:few][picks[member]]
        changed[member] = min(high, max(low, rates[parents[member]] * (1.2 if ups[member] else 0.8)))
    return parents, changed
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_population", "grade": true}
lab.check("population")

# %% [markdown] id="population_after"
# This is real training: 6 members, 27 epochs, a new generation after every third. The comparison keeps the
# same 6 learning rates to the end (random search), with the same initial weights and batches. Both cost
# 6 × 27 epochs. The picture shows the last repeat: the learning rate of every member, and in colour the
# learning rates that the weights of the best member were trained with.
#
# **Predict.** How many times the best loss of random search is that of the population, on average?

# %% id="predict_population" tags=["prediction"]
predicted_population = {"population": None}  # random search is 1

# %% id="show_population" tags=["demo"]
require_numbers(predicted_population)
MEMBERS, QUANTILE = 6, 0.25


def train_population(seed: int, generation=None) -> tuple[list[float], list[list[float]], list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    rates = [from_place(float(u), *trainings.LEARNING_RATE, log=True) for u in torch.rand(MEMBERS, generator=generator)]
    decay, networks = torch.full((MEMBERS,), 1e-4), trainings.Networks.begin(MEMBERS, seed)
    history, families = [rates], []
    for epoch in range(EPOCHS):
        networks, losses = trainings.train_epoch(networks, data, torch.tensor(rates), decay, seed=1000 * seed + epoch)
        if generation is not None and epoch % 3 == 2 and epoch < EPOCHS - 1:
            picks = torch.randint(max(1, int(QUANTILE * MEMBERS)), (MEMBERS,), generator=generator).tolist()
            ups = (torch.rand(MEMBERS, generator=generator) < 0.5).tolist()
            parents, rates = generation(losses.tolist(), rates, QUANTILE, picks, ups, *trainings.LEARNING_RATE)
            networks = networks.copies(parents)
            history.append(rates)
            families.append(parents)
    return losses.tolist(), history, families


def lowest(losses: list[float]) -> float:
    return losses[survivors(losses, 1)[0]]


found = {"population": [], "random": []}
for seed in range(REPEATS):
    losses, history, families = train_population(seed, new_generation)
    found["population"].append(lowest(losses))
    found["random"].append(lowest(train_population(seed)[0]))
verdict("population", "random", found)
relative = {name: sum(found[name]) / sum(found["random"]) for name in ("random", "population")}
print(compared(predicted_population, relative, "{:.2f}".format))
figures.population(history, families, losses, every=3)

# %% id="show_population_gain" tags=["demo"]
predicted_bars(relative, predicted_population, "mean best loss,\ntimes that of random")

# %% [markdown] id="shared_text"
# ## 14 · A search that several processes share
#
# On a cluster, workers come and go: jobs are killed at their time limit. `dlo_lib.hpo` stores a search in
# **one file**, the journal of an Optuna study. Workers share nothing else. Each worker asks the file what to
# train next and reports there. The trial of a killed worker passes to the next worker that asks, with the
# last checkpoint. There is no server; no trial is lost or done twice.
#
# The objective of the cell really trains a network, saves at `task.checkpoint`, and resumes from `task.resume`.

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


def resumable(task) -> float:
    torch.set_num_threads(1)
    networks = trainings.Networks.begin(1, seed=task.trial)
    if task.resume is not None:
        networks = trainings.Networks(*torch.load(task.resume))
    for epoch in range(task.begin, task.resource):
        rate, decay = (torch.tensor([task.params[name]]) for name in ("learning_rate", "weight_decay"))
        networks, losses = trainings.train_epoch(networks, data, rate, decay, seed=epoch)
    torch.save((networks.weights, networks.velocities), task.checkpoint)
    return float(losses)


# A worker takes a trial and leaves before it reports.
lost = search.ask()
search.leave()

print("tasks done by each of two processes:", run_workers(journal, resumable, workers=2))
table = Search.join(journal).table()
print(f"{len(table)} trials; trial {lost.trial}, which the first worker left, has reported: {dict(table[lost.trial].reports)}")
best = Search.join(journal).best
print(f"best: trial {best.number}, learning rate {best.params['learning_rate']:.3g}, losses by epoch {best.reports}")
draw_trials(table)

# %% [markdown] id="dashboard_text"
# The file is an Optuna study, so Optuna's tools can read it: its plots and a dashboard. The plot shows the
# lifetime of each trial, which includes its waits: trial 0 waited after its worker had left, others for a promotion.
# *PRUNED* means here: not promoted. A thread of this kernel serves the dashboard and ends with the kernel. Run the
# last of the three cells, which stops the dashboard, only when you have seen it.

# %% id="show_optuna" tags=["demo"]
figures.optuna_timeline(Search.join(journal).study)

# %% id="show_dashboard" tags=["demo"]
from dlo_lib.hpo import Dashboard

dashboard = Dashboard(journal, height=500)
dashboard

# %% id="stop_dashboard" tags=["demo"]
dashboard.stop()

# %% [markdown] id="scale_cluster"
# ## 15 · At scale
#
# On a cluster the same search is a **job array**: each element is a worker, and the queue decides how many
# run at once. Without SLURM the same call runs here. With `dry_run=True` it only shows the script; remove it
# to submit the job, with the journal in a folder that all nodes can access.

# %% id="show_cluster" tags=["demo"]
from dlo_lib.cluster import submit
from dlo_lib.hpo import take_part

shared = {"path": "digits.journal", "objective": resumable}
sweep = {"worker": range(16)}
script = submit(
    take_part, shared, gpus=1, site="jean-zay-v100", account="abc", sweep=sweep, dry_run=True
)
print(script)

# %% [markdown] id="monday_text"
# ## 16 · The same with Optuna
#
# In a project the sampler and the pruner come from Optuna, and you write only the objective, as in section 11.
# Is Optuna's `MedianPruner` your median rule? The cell gives it the same trials and runs the same check:

# %% id="monday" tags=["demo"]
from optuna.trial import TrialState, create_trial


def should_stop_by_optuna(losses, others, warmup, enough):
    if math.isnan(losses[-1]):  # the objective's task: the pruner compares the best loss so far
        return True
    pruner = optuna.pruners.MedianPruner(n_startup_trials=0, n_warmup_steps=warmup + 1, n_min_trials=enough)
    study = optuna.create_study(pruner=pruner)
    for state, curve in [*((TrialState.COMPLETE, other) for other in others), (TrialState.RUNNING, losses)]:
        values = dict(enumerate(curve, 1))
        value = curve[-1] if state == TrialState.COMPLETE else None
        study.add_trial(create_trial(state=state, value=value, intermediate_values=values))
    return bool(pruner.prune(study, study.get_trials()[-1]))


lab.check("prune", instead={"should_stop": should_stop_by_optuna})

# %% [markdown] id="monday_differences"
# It is the same rule, with three differences that matter in use. The warm-up is counted from the first step that
# is judged (`warmup + 1`). A NaN does not stop a trial that was good before. And in a study only **completed**
# trials are compared, whereas your rule also uses the curves of stopped trials.
#
# The table compares the Bayesian search of section 6 with Optuna's TPE and with its Gaussian process. A *step* is
# here one proposal, of the 28th trial (the minimum of three); the last column has the lines that you write and maintain. Optuna's Gaussian process
# fits its kernel and maximises its acquisition function numerically, so a proposal takes longer than yours; beside a
# training of minutes this is little.

# %% id="monday_table" tags=["demo"]
from dlo_lib.labkit.side_by_side import Form, lines_of, table

optuna.logging.set_verbosity(optuna.logging.ERROR)  # a missing optional package of the Gaussian process gives a warning


def proposal_of(sampler) -> float:
    """Return the seconds that Optuna takes to propose a trial after 27 trials."""
    study = optuna.create_study(sampler=sampler)
    axis = {"u": FloatDistribution(0, 1), "v": FloatDistribution(0, 1)}
    for u, v in torch.rand(TRAININGS - 1, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist():
        study.add_trial(create_trial(params={"u": u, "v": v}, distributions=axis, value=loss_at((u, v))))
    begin = time.perf_counter()
    study.ask(axis)
    return time.perf_counter() - begin


def own_proposal() -> float:
    points = torch.rand(TRAININGS - 1, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.tensor([loss_at(point) for point in points]).double()
    begin = time.perf_counter()
    next_candidate(points, values, torch.rand(260, 2, dtype=torch.float64))
    return time.perf_counter() - begin


ask = "study = optuna.create_study(sampler=sampler, pruner=pruner)\nstudy.optimize(objective, n_trials=28)"
samplers = {"Optuna, TPE": optuna.samplers.TPESampler, "Optuna, Gaussian process": optuna.samplers.GPSampler}
forms = [Form("yours", lines_of(posterior, expected_improvement, best_length, next_candidate), min(own_proposal() for _ in range(3)))]
forms += [Form(name, lines_of(ask), min(proposal_of(kind(seed=0)) for _ in range(3))) for name, kind in samplers.items()]
print(table(forms, measured="a proposal"))

# %% [markdown] id="quiz_text"
# ## 17 · Quiz
#
# **Core · 4 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests whether every question has an
# answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "b", "q2": "a", "q3": "c", "q4": "d", "q5": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - All methods above choose by the validation images. Measure the best of each on the test images, which no
#   method has used. How much of its advantage is left?
# - Give Expected Improvement several candidates at once: assume that the trials in training have the worst
#   value so far.
# - Let TPE propose the trials of Hyperband (BOHB, Falkner et al., 2018):
#   `Definition(space, Hyperband(27), Sampler.TPE)`.
# - Search a learning rate and a batch size that depend on each other: which of the samplers uses the
#   dependence?
#
# ## References
#
# - J. Bergstra and Y. Bengio, *Random Search for Hyper-Parameter Optimization* (2012), [JMLR
#   13](https://jmlr.org/papers/v13/bergstra12a.html)
# - D. Jones, M. Schonlau and W. Welch, *Efficient Global Optimization of Expensive Black-Box Functions*
#   (1998), [doi:10.1023/A:1008306431147](https://doi.org/10.1023/A:1008306431147)
# - J. Bergstra et al., *Algorithms for Hyper-Parameter Optimization* (TPE; 2011), NeurIPS
# - L. Li et al., *Hyperband* (2016), [arXiv:1603.06560](https://arxiv.org/abs/1603.06560)
# - L. Li et al., *A System for Massively Parallel Hyperparameter Tuning* (ASHA; 2018),
#   [arXiv:1810.05934](https://arxiv.org/abs/1810.05934)
# - M. Jaderberg et al., *Population Based Training of Neural Networks* (2017),
#   [arXiv:1711.09846](https://arxiv.org/abs/1711.09846)
# - D. Golovin et al., *Google Vizier* (the median rule; 2017), doi:10.1145/3097983.3098043
# - T. Akiba et al., *Optuna* (2019), [arXiv:1907.10902](https://arxiv.org/abs/1907.10902)
# - The courses this lab follows: FIDLE, sequence 16; IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
