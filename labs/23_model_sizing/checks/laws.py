"""The visible checks of scaling laws, their intervals, and the choice of a size."""

from __future__ import annotations

import math

import torch

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import entry, is_near, near, wrong_if
from dlo_lib.planner.tiny_runs import BATCH, RunBudget

from .twins import (
    Language,
    drawn_language,
    drawn_law,
    drawn_runs,
    law_at,
    least_loss,
    least_squares,
    trained_loss,
)

# -- law


@check("law", points=1)
def check_line(student, t):
    "The straight line in logarithms"
    alpha, x0 = t.uniform(0.05, 0.4), 10 ** t.uniform(8, 14)
    x = [10 ** t.uniform(4, 9) for _ in range(7)]
    losses = [(x0 / each) ** alpha * (1 + 0.05 * t.uniform(-1, 1)) for each in x]
    got = [
        t.number(each, "a value of power_law(...)")
        for each in t.items(student.power_law(x, losses), 2, "power_law(...)")
    ]
    logs = torch.tensor([[1.0, math.log(each)] for each in x], dtype=torch.float64)
    fitted = torch.linalg.lstsq(logs, torch.tensor(losses, dtype=torch.float64).log()[:, None]).solution
    constant, slope = fitted.flatten().tolist()
    message = "alpha is {got:.4f}, the least-squares line has {want:.4f}"
    is_near(t, got[1], -slope, message, {"alpha is positive: the loss falls": slope}, rtol=1e-4)
    scale = {"this is the loss at x = 1; x0 is where the line reaches a loss of 1": math.exp(constant)}
    message = "with x0 = {got:.3e} the line is not at a loss of 1 for x = x0: it is at {want:.3e}"
    is_near(t, got[0], math.exp(-constant / slope), message, scale, rtol=1e-3)


def fitted_law(student, t, runs: list) -> list[float]:
    values = t.items(student.fit_law(runs), 5, "fit_law(...)")
    return [t.number(value, "a constant of fit_law(...)") for value in values]


def prediction_is(t, law: list[float], n: float, d: float, want: float, rtol: float, message: str) -> None:
    with_mistake = any(value <= 0 for value in law[1:])
    t.that(not with_mistake, "A, alpha, B and beta should be positive: {law}", law=law)
    got = law_at(tuple(law), n, d)
    t.that(near(got, want, rtol), message, got=got, want=want)


@check("law", points=2, seconds=20)
def check_exact(student, t):
    "The law of runs without noise is found"
    for steep in (None, t.uniform(1.2, 1.4)):
        right = drawn_law(t, steep)
        law = fitted_law(student, t, drawn_runs(t, right, 0.0))
        n, d = 1e7 * t.uniform(1, 3), 2e8 * t.uniform(1, 3)
        message = (
            "the fitted law gives {got:.4f} for a model ten times as large, the law of the runs {want:.4f}"
        )
        prediction_is(t, law, n, d, law_at(right, n, d), 0.01 if steep else 0.004, message)


@check("law", points=1, seconds=20)
def check_relative(student, t):
    "Relative errors count"
    large = 1e7, 2e8

    def drawn():
        runs = drawn_runs(t, drawn_law(t), 0.01)
        # runs of very small models, with large losses and large errors
        small = [(n / 40, d / 40, 2.5 * loss * (1 + 0.3 * t.uniform(-1, 1))) for n, d, loss in runs[:3]]
        laws = [least_squares(runs + small, **how) for how in ({}, {"relative": False}, {"floor": 0})]
        return runs + small, laws[0], [law_at(law, *large) for law in laws]

    def tells(case) -> bool:
        _, law, (right, *wrong) = case
        inside = law[0] > 0.5 and all(0.2 < law[place] < 0.8 for place in (2, 4))
        return inside and all(abs(value / right - 1) > 0.04 for value in wrong)

    message = (
        "for noisy runs of large and small losses the law gives {got:.3f} for a larger model, least squares "
        "of relative errors {want:.3f}: divide each row by its loss"
    )
    for _ in range(2):
        runs, _, (want, *_) = t.draw_until(drawn, tells)
        prediction_is(t, fitted_law(student, t, runs), *large, want, 0.015, message)
    sunken = (-0.1, *drawn_law(t)[1:])  # the best fit without conditions has a negative floor
    e, *_ = fitted_law(student, t, drawn_runs(t, sunken, 0.0))
    t.that(e >= 0, "E is {e:.3f}, and no loss is negative: keep fits with A, B > 0 and E >= 0", e=e)


def split(law: tuple, flops: float) -> float:
    """The parameters of the smallest loss, by a search."""
    low, high = 1.0, flops
    for _ in range(400):
        first, second = low ** (2 / 3) * high ** (1 / 3), low ** (1 / 3) * high ** (2 / 3)
        if law_at(law, first, flops / 6 / first) < law_at(law, second, flops / 6 / second):
            high = second
        else:
            low = first
    return math.sqrt(low * high)


@check("law", points=1)
def check_best(student, t):
    "The best size and its tokens for a budget"
    for _ in range(2):
        law, flops = drawn_law(t), 10 ** t.uniform(14, 22)
        sizes = t.items(student.best_size(law, flops), 2, "best_size(...)")
        n, d = (t.number(value, "a value of best_size(...)") for value in sizes)
        want = split(law, flops)
        swapped = split((law[0], law[1], law[4], law[3], law[2]), flops)
        wrong_if(t, n, want, {"alpha and beta are exchanged": swapped}, rtol=1e-3)
        values = {"n": n, "d": d, "flops": flops, "want": want}
        message = "best_size(..., {flops:.2e}) is {n:.3e} parameters, the loss is smallest with {want:.3e}"
        t.that(near(n, want, 0.01), message, **values)
        message = "{n:.3e} parameters and {d:.3e} tokens cost 6 N D, which is not {flops:.2e} FLOPs"
        t.that(near(6 * n * d, flops, 1e-3), message, **values)


# -- interval


class Predictor:
    """Answers with drawn numbers, and keeps what it was asked."""

    def __init__(self, t, runs: list, fails: float = 0.0) -> None:
        self.t, self.runs, self.fails = t, runs, fails
        self.draws: list[list] = []
        self.answers: list[float] = []

    def predict(self, runs: list) -> float:
        self.draws.append([tuple(run) for run in runs])
        if self.fails and self.t.uniform(0, 1) < self.fails:
            raise ValueError("too few different runs")
        self.answers.append(self.t.uniform(2.0, 3.0))
        return self.answers[-1]


def bootstrapped(student, t, fails: float = 0.0, seeds: tuple[int, ...] = ()) -> tuple[Predictor, list, int]:
    runs = [(t.integer(1, 10**6), t.integer(1, 10**9), t.uniform(2, 5)) for _ in range(t.integer(8, 11))]
    draws, seen = t.integer(80, 130), Predictor(t, runs, fails)
    for seed in seeds or (t.integer(0, 10**6),):
        asked = t.asked(
            seen.predict, calls=6 * draws, raises=(ValueError,), too_many="`predict` is asked without end"
        )
        found = t.items(student.interval(asked, runs, draws, seed), 2, "interval(...)")
    return seen, [t.number(value, "an end of interval(...)") for value in found], draws


@check("interval", points=1, seconds=20)
def check_ends(student, t):
    "The ends leave 5 % of the predictions on each side"
    seen, (low, high), draws = bootstrapped(student, t)
    values = sorted(seen.answers)
    message = "there are {got} predictions, {want} are asked for"
    t.that(len(values) == draws, message, got=len(values), want=draws)
    place = 0.05 * (draws - 1)
    first, last = math.floor(place), math.ceil(place)
    message = (
        "the interval is {low:.3f} to {high:.3f}, of {draws} predictions 5 % are below {left:.3f} and above "
        "{right:.3f}"
    )
    limits = {"low": low, "high": high, "draws": draws, "left": values[last], "right": values[-1 - last]}
    t.that(
        values[0] < low and high < values[-1],
        "these are the smallest and the largest prediction: take quantiles",
    )
    good = values[first] <= low <= values[last + 1] and values[-2 - last] <= high <= values[-1 - first]
    t.that(good, message, **limits)


@check("interval", points=1, seconds=20)
def check_resampled(student, t):
    "As many runs as there are, with replacement"
    seen, _, draws = bootstrapped(student, t)
    count, runs = len(seen.runs), set(seen.runs)
    t.that(len(seen.draws) > 0, "`predict` was not asked")
    sizes = {len(draw) for draw in seen.draws}
    message = "a draw has {got} runs: draw as many as there are, {want}"
    t.that(sizes == {count}, message, got=min(sizes), want=count)
    t.that(
        all(run in runs for draw in seen.draws for run in draw),
        "a draw has a run that was never made: keep runs whole",
    )
    different = [len(set(draw)) for draw in seen.draws]
    message = "each draw has every run once: draw with replacement"
    t.that(min(different) < count, message)
    mean = sum(different) / len(different) / count  # 1 - (1 - 1/n)^n, about 0.65
    t.that(
        0.55 < mean < 0.75, "a draw has {mean:.0%} of the runs: with replacement it has about 65 %", mean=mean
    )
    drawn = [bootstrapped(student, t, seeds=seeds)[0].draws for seeds in ((5, 5), (5, 6))]
    halves = [(each[: len(each) // 2], each[len(each) // 2 :]) for each in drawn]
    t.that(halves[0][0] == halves[0][1], "the same seed gives other draws when it is used again")
    t.that(halves[1][0] != halves[1][1], "two seeds give the same draws: use `seed`")
    kinds = len({tuple(sorted(draw)) for draw in seen.draws})
    message = "{kinds} of {draws} draws are different: draw again each time"
    t.that(kinds > draws / 2, message, kinds=kinds, draws=draws)


@check("interval", points=1, seconds=20)
def check_left_out(student, t):
    "A draw that determines nothing is repeated"
    seen, (low, high), draws = bootstrapped(student, t, fails=0.3)
    message = (
        "{got} predictions: of {tried} draws some raised a ValueError, and {want} predictions are asked for"
    )
    got = len(seen.answers)
    t.that(got == draws, message, got=got, tried=len(seen.draws), want=draws)
    inside = min(seen.answers) <= low < high <= max(seen.answers)
    t.that(inside, "the ends {low} and {high} are not among the predictions", low=low, high=high)


# -- size: real trainings, which the judge makes


class Case:
    """A language, its budget, and what the function answered for a target of ``part`` of the budget."""

    def __init__(self, student, t, regime: str = "far", part: float = 1.0, lost: tuple = ()) -> None:
        self.language, self.budget = drawn_language(t, regime)
        vocab, self.target = self.language[0], part * self.budget
        self.keeper = RunBudget(Language(self.language), self.budget, lost, largest=0.2)

        def run(width: int, tokens: int) -> dict:
            good = type(width) is int and type(tokens) is int and width >= 1 and tokens >= BATCH
            message = (
                "run({width}, {tokens}): a width of 1 or more and {least} tokens or more, as whole numbers"
            )
            t.that(good, message, width=width, tokens=tokens, least=BATCH)
            return self.keeper.run(width, tokens)

        run = t.asked(
            run, calls=60, too_many="`run` was called more than {calls} times: the search does not end"
        )
        self.answer = student.choose_size(run, vocab, self.budget, self.target)
        self.t = t

    def value(self, name: str) -> float:
        return entry(self.t, self.answer, name, "choose_size(...)")

    def sizes(self) -> tuple[int, int]:
        width, tokens = self.value("width"), self.value("tokens")
        whole = all(isinstance(value, int) and value >= least for value, least in ((width, 1), (tokens, 256)))
        message = "width should be an int from 1 and tokens one from 256, not {w} and {d}"
        self.t.that(whole, message, w=width, d=tokens)
        return int(width), int(tokens)

    def cost(self) -> float:
        """The part of the target that the final training costs."""
        width, tokens = self.sizes()
        return 6 * self.language[0] * width * tokens / self.target

    def trained(self) -> float:
        fits = 0.9 <= self.cost() <= 1.0000001
        self.t.that(fits, "not tested yet: the final training does not cost the target, see the second check")
        return trained_loss(self.language, *self.sizes())

    def error(self) -> float:
        """The relative error of the predicted loss."""
        return self.value("loss") / self.trained() - 1


@check("size", points=2, seconds=60)
def check_budget(student, t):
    "No run is refused, lost runs are asked for again"
    keeper = Case(student, t, lost=(t.integer(0, 1), 2, 3, t.integer(5, 6), 8)).keeper
    message = (
        "{count} runs were refused: compute the cost, and compare it with what is left and with a fifth of "
        "the budget"
    )
    t.that(not keeper.refused, message, count=len(keeper.refused))
    different = len({(width, tokens) for width, tokens, _ in keeper.runs})
    message = (
        "{count} different runs were done, six are needed; {lost} were lost: their cost is refunded, ask "
        "again"
    )
    t.that(different >= 6, message, count=different, lost=len(keeper.failed))


@check("size", points=1, seconds=60)
def check_target(student, t):
    "The final training costs what it may"
    message = "the training costs {cost:.0%} of the target, it should be between 90 and 100 %"
    for part in (t.uniform(0.5, 0.75), t.uniform(1.2, 1.5)):  # so far apart that no constant fits both
        cost = Case(student, t, part=part).cost()
        t.that(0.9 <= cost <= 1.0000001, message, cost=cost)


@check("size", points=2, seconds=60)
def check_width(student, t):
    "The loss minus the entropy is at most 10 % above that of the best width"
    for regime, part in (("hungry", 0.5), ("flat", 1.5)):
        case = Case(student, t, regime, part)
        loss, (least, entropy) = case.trained(), least_loss(case.language, case.target)
        excess = (loss - least) / (least - entropy)
        message = (
            "with width {width} the loss is {loss:.3f}, with the best width {least:.3f}, and the entropy is "
            "{entropy:.3f}: {excess:.0%} more is left than with the best width"
        )
        values = {"width": case.value("width"), "loss": loss, "least": least, "entropy": entropy}
        t.that(excess <= 0.1, message, excess=excess, **values)


@check("size", points=1, seconds=60)
def check_near(student, t):
    "The predicted loss is within 5 %"
    error = Case(student, t).error()
    t.that(abs(error) <= 0.05, "the predicted loss is {error:+.1%} from the trained one", error=error)


@check("size", points=3, seconds=90)
def check_close(student, t):
    "The predicted loss is within 2.4 % in the mean of four languages"
    errors = [Case(student, t, regime).error() for regime in ("far", "near", "far", "near")]
    mean = sum(abs(error) for error in errors) / len(errors)
    told = ", ".join(f"{error:+.1%}" for error in errors)
    message = (
        "the predicted loss is {told} from the trained one, {mean:.1%} in the mean; languages 1 and 3 "
        "are far from their entropy, 2 and 4 are near it"
    )
    t.that(mean <= 0.024, message, told=told, mean=mean)


@check("size", points=1, seconds=60)
def check_inside(student, t):
    "The trained loss lies in the interval"
    case = Case(student, t)
    loss, low, high = case.trained(), case.value("low"), case.value("high")
    values = {"low": low, "high": high, "loss": loss, "part": (high - low) / loss}
    t.that(low <= case.value("loss") <= high, "the prediction should lie in its interval", **values)
    t.that(
        values["part"] <= 0.12,
        "the interval is {part:.1%} of the loss wide, at most 12 % says something",
        **values,
    )
    message = "the trained loss {loss:.3f} is outside of your interval, {low:.3f} to {high:.3f}"
    t.that(low <= loss <= high, message, **values)
