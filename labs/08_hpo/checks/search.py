"""The visible checks of this lab."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check, scenario
from dlo_lib.hpo import halving
from dlo_lib.labkit.compare import same

from . import twins
from .twins import cube, wavy


def whole(*values: object) -> bool:
    """Whether all of these are integers, and none is a tensor."""
    return all(type(value) is int for value in values)


# -- 1 · scale


@check("scale", points=1)
def check_linear(student, t):
    "A linear scale"
    message = (
        "from_place({place:.3f}, {low:.3f}, {high:.3f}, False) is {got:.4f}: it should be at {place:.3f} of "
        "the way from low to high."
    )
    for _ in range(3):
        low, place = t.uniform(-5, 5), t.uniform(0, 1)
        high = low + t.uniform(1, 5)
        got = t.number(student.from_place(place, low, high, False), "from_place(...)")
        share = (got - low) / (high - low)
        t.that(bool(abs(share - place) < 1e-6), message, place=place, low=low, high=high, got=got)


@check("scale", points=2)
def check_logarithmic(student, t):
    "A logarithmic scale"
    message = (
        "from_place({place:.3f}, {low:.3g}, {high:.3g}, True) is {got:.4g}: its *logarithm* should be at "
        "{place:.3f} of the way, and the result is a value between low and high."
    )
    for _ in range(3):
        low, place = 10 ** t.uniform(-6, -2), t.uniform(0, 1)
        high = low * 10 ** t.uniform(1, 5)
        got = t.number(student.from_place(place, low, high, True), "from_place(...)")
        good = got > 0 and abs(math.log(got / low) - place * math.log(high / low)) < 1e-6
        t.that(bool(good), message, place=place, low=low, high=high, got=got)


# -- 2 · interval


def ends(student, t, left, right, chosen, level) -> tuple[float, float]:
    low, high = t.items(student.interval(left, right, chosen, level), 2, "interval(...)")
    return t.number(low, "the low end"), t.number(high, "the high end")


@check("interval", points=2)
def check_mean_of_differences(student, t):
    "The interval is for the mean of left - right"
    size = t.integer(8, 15)
    left, right = t.normal(size, dtype=torch.float64), t.normal(size, dtype=torch.float64)
    # Every resample takes each repeat once: all means are equal.
    once = torch.tensor(t.shuffled(list(range(size)))).repeat(20, 1)
    want = float((left - right).mean())
    message = (
        "If every resample takes each repeat once, all means are {want:.4f}, the mean of left - right. You "
        "return {got:.4f}."
    )
    for got in ends(student, t, left, right, once, 0.9):
        t.that(bool(abs(got - want) < 1e-6), message, got=got, want=want)


@check("interval", points=2)
def check_middle(student, t):
    "The interval contains the middle part of the means"
    size = t.integer(8, 15)
    left, right = t.normal(size, dtype=torch.float64), t.normal(size, dtype=torch.float64)
    chosen = t.integers(0, size - 1, 500, size)
    means = (left - right)[chosen].mean(1)
    message = (
        "For a level of {level:.3f} your interval is {got:.4f} wide, expected {want:.4f}: leave out (1 - "
        "level) / 2 of the means at either end."
    )
    for level in (t.uniform(0.5, 0.7), t.uniform(0.9, 0.98)):
        low, high = ends(student, t, left, right, chosen, level)
        want = float(means.quantile(0.5 + level / 2) - means.quantile(0.5 - level / 2))
        t.that(bool(abs(high - low - want) < 1e-4 * want), message, level=level, got=high - low, want=want)


# -- 3 · process


def process_case(t) -> dict[str, Any]:
    """Points so far apart that the process without noise is exact too, and tells a mistake."""
    while True:
        count, dimensions, length = t.integer(4, 9), t.integer(1, 3), t.uniform(0.15, 0.5)
        points = cube(t, count, dimensions)
        if float(torch.linalg.cond(twins.similarity(points, points, length))) < 3000:
            break
    case = {"points": points, "values": t.normal(count, dtype=torch.float64) + 1}
    return case | {"new": cube(t, 7, dimensions), "length": length, "noise": t.uniform(0.01, 0.2)}


PRECISION = {"rtol": 1e-5, "atol": 1e-6}


ON_THE_DIAGONAL = "The noise is in every entry of k(X, X): only the diagonal has it, noise * torch.eye(N)."


@check("process", points=2)
def check_mean(student, t):
    "The mean"
    for _ in range(3):
        case = process_case(t)
        mean, _ = t.items(student.posterior(**case), 2, "posterior(...)")
        without, _ = twins.predicted(**case | {"noise": 1e-12})
        everywhere, _ = twins.flooded(**case)
        mistakes = {
            "The noise is missing: add it to the diagonal of k(X, X).": without,
            ON_THE_DIAGONAL: everywhere,
        }
        want, _ = twins.predicted(**case)
        same(
            t,
            mean,
            want,
            "the mean k(x, X) K^-1 y, with the noise on the diagonal of K,",
            mistakes,
            **PRECISION,
        )


@check("process", points=2)
def check_doubt(student, t):
    "The standard deviation"
    for _ in range(3):
        case = process_case(t)
        _, std = t.items(student.posterior(**case), 2, "posterior(...)")
        _, want = twins.predicted(**case)
        _, without = twins.predicted(**case | {"noise": 1e-12})
        _, everywhere = twins.flooded(**case)
        mistakes = {
            "This is the variance: take its square root.": want.square(),
            "The noise is missing in K: it is in the formula of the standard deviation too.": without,
            ON_THE_DIAGONAL: everywhere,
        }
        what = "the standard deviation, the root of 1 - k(x, X) K^-1 k(X, x),"
        same(t, std, want, what, mistakes, **PRECISION)


@check("process", points=1)
def check_sure_points(student, t):
    "Without noise there is no uncertainty at the measured points"
    points = torch.arange(60, dtype=torch.float64)[:, None] + cube(t, 60, 1) / 10
    length = t.uniform(1.5, 1.8)  # with shorter ones, rounding makes no variance negative for some inputs
    found = student.posterior(points, t.normal(60, dtype=torch.float64), points, length, 0.0)
    _, std = t.items(found, 2, "posterior(...)")
    t.tensor(std, "the standard deviation", shape=(60,))
    message = "Rounding makes some variances slightly negative, and their root NaN: clamp them to 0."
    t.that(bool(std.isfinite().all()), message)
    t.that(bool((std < 1e-3).all()), "Without noise the standard deviation at a measured point is 0.")


# -- 4 · improvement


@check("improvement", points=3)
def check_improvement(student, t):
    "The expected gain"
    for _ in range(3):
        mean, std = t.normal(9, dtype=torch.float64), t.normal(9, dtype=torch.float64).abs() + 0.2
        case = mean, std, t.uniform(-1, 0.5)
        want, density = twins.improvement(*case), twins.density_of(*case)
        reverse = twins.improvement(-mean, std, -case[2])
        first = "This is the first term, the gain if the mean is right. The second one rewards uncertainty."
        mistakes = {
            "This is the expected gain where *higher* values are better: the gain is best - mean.": reverse,
            "z is divided by the variance: divide by the standard deviation.": twins.squared_z(*case),
            "The density is not multiplied by the standard deviation.": want + (1 - std) * density,
            first: want - std * density,
        }
        got = student.expected_improvement(*case)
        same(t, got, want, "EI, where lower values are better,", mistakes, **PRECISION)


@check("improvement", points=1)
def check_certain(student, t):
    "A standard deviation of 0"
    mean = t.normal(12, dtype=torch.float64)
    best = float(mean.median())  # one candidate is exactly as good as the best
    got = student.expected_improvement(mean, torch.zeros(12, dtype=torch.float64), best)
    t.tensor(got, "EI", shape=(12,))
    message = "If the standard deviation is 0, z is a division by 0: EI must be finite."
    t.that(bool(got.isfinite().all()), message)
    message = "If the standard deviation is 0, the gain is max(best - mean, 0), not 0."
    t.that(bool(torch.allclose(got.double(), (best - mean).clamp(min=0), atol=1e-9)), message)


# -- 5 · length


@check("length", points=4)
def check_length(student, t):
    "The most probable length scale"
    less = (
        "You chose the length {got} with log p = {own:.2f}; {want} has {most:.2f}. Both terms count, the "
        "fit and log |K|, each with the factor 1/2."
    )
    for dimensions in (1, 1, 2, 3):
        points = cube(t, t.integer(8, 12), dimensions)
        values, lengths = wavy(t, points), t.shuffled([0.03, 0.1, 0.3, 0.6, 1.5])
        noise = t.uniform(0.001, 0.05)
        told = dict(zip(lengths, twins.likelihoods(points, values, tuple(lengths), noise)))
        got = student.best_length(points, values, list(lengths), noise)
        message = "best_length(...) is {got}: return one of the lengths"
        t.that(type(got) is float and got in lengths, message, got=got)
        want = max(told, key=told.__getitem__)
        t.that(bool(told[got] >= told[want] - 1e-3), less, got=got, own=told[got], want=want, most=told[want])


# -- 6 · next


"""N - correction is the divisor of the standard deviation: both are accepted."""


def chosen_candidate(student, t, case: Case) -> int:
    got = student.next_candidate(*case)
    message = "next_candidate(...) is {got}: return the index of a candidate"
    t.that(type(got) is int and 0 <= got < len(case[2]), message, got=got)
    return got


Case = tuple[Tensor, Tensor, Tensor]
"""Points, values and candidates."""
CORRECTIONS = (0, 1)


def with_lowest_mean(case: Case) -> set[int]:
    """The candidates with the lowest mean."""
    return {int(twins.standing(*case, correction)[0].argmin()) for correction in CORRECTIONS}


def gains_of(case: Case) -> list[Tensor]:
    return [twins.improvements(*case, correction) for correction in CORRECTIONS]


def telling_case(t, dimensions: int) -> Case:
    """Points, values and candidates such that the candidate with the lowest mean does not have the largest
    Expected Improvement."""
    while True:
        points, candidates = cube(t, t.integer(6, 10), dimensions), cube(t, 60, dimensions)
        case = points, wavy(t, points), candidates
        if all(bool(gain[at] < 0.9 * gain.max()) for gain in gains_of(case) for at in with_lowest_mean(case)):
            return case


OTHER_UNITS = "`best` is in the units of the losses: pass the lowest of the *standardised* values."


def has_other_units(case: Case, chosen: int) -> bool:
    """Whether ``chosen`` is the best candidate if `best` is not standardised."""
    others = (twins.other_units(*case, correction) for correction in CORRECTIONS)
    return any(chosen == int(gain.argmax()) for gain in others)


@check("next", points=3)
def check_next(student, t):
    "The candidate with the largest Expected Improvement"
    for dimensions in (1, 2, 2):
        case = telling_case(t, dimensions)
        chosen, gains = chosen_candidate(student, t, case), gains_of(case)
        right = any(bool(gain[chosen] >= 0.99 * gain.max()) for gain in gains)
        message = "This is the candidate with the lowest mean: maximise Expected Improvement."
        t.that(right or chosen not in with_lowest_mean(case), message)
        t.that(right or not has_other_units(case, chosen), OTHER_UNITS)
        message = "Your candidate has an Expected Improvement of {got:.4f}, the best one {want:.4f}."
        t.that(right, message, got=float(gains[0][chosen]), want=float(gains[0].max()))


@check("next", points=1)
def check_units(student, t):
    "Losses in other units lead to the same choice"
    equal, known, chosen = [], [], set()
    for sign in (1, -1, 1, -1):
        points, candidates = cube(t, 8, 2), cube(t, 40, 2)
        values = wavy(t, points)
        losses = t.uniform(50, 100) * values + sign * t.uniform(300, 500)
        one, other = (chosen_candidate(student, t, (points, each, candidates)) for each in (values, losses))
        equal.append(one == other)
        chosen.add(one)
        known.append(has_other_units((points, losses, candidates), other))
    message = "not tested yet: the same candidate for four sets of points, see the first check"
    t.that(len(chosen) > 1, message)
    t.that(all(equal) or not all(known), OTHER_UNITS)
    message = "The process needs values with mean 0 and standard deviation 1: standardise them, and `best`."
    t.that(all(equal), message)


# -- 8 · halving


@check("halving", points=2)
def check_rungs(student, t):
    "The rungs"
    wrong = (
        "{call} is {got}, expected {want}: each rung has 1 / eta of the trials, rounded down, and eta times "
        "the epochs; the last has at least one trial and at most `most` epochs."
    )
    for _ in range(4):
        eta, least = t.integer(2, 4), t.integer(1, 3)
        trials, most = t.integer(1, 60), least * t.integer(1, 60)
        case = trials, least, most, eta
        want = [(rung.trials, rung.resource) for rung in halving.rungs(*case)]
        got, call = student.rungs(*case), f"rungs{case}"
        message = "{call} should be a list of pairs (trials, epochs)"
        t.that(type(got) is list and all(type(rung) is tuple for rung in got), message, call=call)
        t.that(got == want, wrong, call=call, got=got, want=want)


@check("halving", points=2)
def check_survivors(student, t):
    "The best, best first"
    for _ in range(3):
        losses = t.normal(t.integer(5, 12)).tolist()
        keep = t.integer(2, 4)
        got = t.items(student.survivors(losses, keep), keep, "survivors(losses, {keep})", keep=keep)
        want = torch.tensor(losses).argsort()[:keep].tolist()
        message = "survivors(losses, {keep}) is {got}, expected {want}: the lowest losses, the best first."
        t.that(whole(*got) and got == want, message, keep=keep, got=got, want=want)
    count = t.integer(4, 7)
    got = t.items(student.survivors([t.uniform(0.1, 1.0)] * count, 3), 3, "survivors(losses, 3)")
    message = "{count} equal losses: the survivors are the first three indices, not {got}."
    t.that(got == list(range(len(got))), message, count=count, got=got)


@check("halving", points=2)
def check_diverged(student, t):
    "A trial that diverged is the worst"
    message = (
        "With NaN among the losses, the survivors are not the best: no comparison with NaN is true, so sort "
        "with a key that puts it last."
    )
    for _ in range(4):
        count, gone = t.integer(8, 12), t.integer(2, 4)
        losses = t.shuffled(t.normal(count - gone).tolist() + [math.nan] * gone)
        keep = count - gone - 1
        got = t.items(student.survivors(losses, keep), keep, "survivors(...)")
        finite = sorted((loss, number) for number, loss in enumerate(losses) if not math.isnan(loss))
        t.that(whole(*got) and set(got) == {number for _, number in finite[:keep]}, message)


# -- 9 · hyperband


def begun(student, t, most: int, eta: int) -> tuple[list[list[int]], list[list[int]]]:
    """The trials and the epochs with which the student's brackets start, and the expected ones."""
    sizes = {"most": most, "eta": eta}
    first = [bracket[0] for bracket in halving.brackets(most, eta)]
    found = t.items(student.brackets(most, eta), len(first), "brackets({most}, {eta})", **sizes)
    pairs = [t.items(pair, 2, "a bracket of brackets({most}, {eta})", **sizes) for pair in found]
    got = [[pair[part] for pair in pairs] for part in range(2)]
    t.that(whole(*got[0], *got[1]), "brackets({most}, {eta}) should hold integers", **sizes)
    return got, [[rung.trials for rung in first], [rung.resource for rung in first]]


POWERS = [(eta**power, eta) for eta in range(2, 130) for power in range(2, 12) if eta**power < 10**7]
INEXACT = [(most, eta) for most, eta in POWERS if eta ** int(math.log(most) / math.log(eta)) != most]
EXACT = [
    size for size in POWERS if size not in INEXACT
]  # whose logarithms are integers in floating point too


@check("hyperband", points=2)
def check_bracket_trials(student, t):
    "The number of trials that each bracket starts with"
    message = (
        "brackets({most}, {eta}) start with {own} trials, expected {right}: (s_max + 1) / (s + 1) eta^s, "
        "rounded *up*, from s_max down to 0."
    )
    for most, eta in [*t.shuffled(EXACT)[:3], (81, 3)]:
        (own, _), (right, _) = begun(student, t, most, eta)
        t.that(own == right, message, most=most, eta=eta, own=own, right=right)


@check("hyperband", points=2)
def check_bracket_resources(student, t):
    "The number of epochs that each bracket starts with"
    message = "brackets({most}, {eta}) start with {own} epochs, not {right}: after s more rungs it is R."
    for most, eta in [*t.shuffled(EXACT)[:3], (27, 3)]:
        (_, own), (_, right) = begun(student, t, most, eta)
        t.that(own == right, message, most=most, eta=eta, own=own, right=right)


@check("hyperband", points=1)
def check_whole_logarithms(student, t):
    "Powers whose logarithm is not an integer in floating point"
    message = "A floating-point logarithm of a power may be below the integer: compute with integers."
    for most, eta in t.shuffled(INEXACT)[:3]:
        got = student.brackets(most, eta)
        t.that(type(got) is list and len(got) == len(halving.brackets(most, eta)), message)


# -- 10 · ASHA


def told(t, trials: list[int]) -> dict[int, float]:
    """Different losses of ``trials``, reported in a random order."""
    losses = [place + t.uniform(0, 0.5) for place in range(len(trials))]
    return dict(t.shuffled(list(zip(trials, losses))))


def ranked(losses: dict[int, float]) -> list[int]:
    return sorted(losses, key=losses.__getitem__)


def promoted(got: object, trial: int, rung: int) -> bool:
    """Whether ``trial`` leaves ``rung``."""
    return type(got) is tuple and whole(*got) and got == (trial, rung)


@check("asha", points=2)
def check_best_goes_on(student, t):
    "Of several candidates the best is promoted"
    message = (
        "eta = {eta}, {count} trials have reported on rung 0, none is promoted: trial {best} is the best of "
        "them. You return {got}."
    )
    for eta in (2, 3):
        # The best of them does not have the lowest index.
        rung = told(t, sorted(t.shuffled(list(range(30)))[: 3 * eta], reverse=True))
        got, best = student.promotion([rung, {}, {}], [[], [], []], eta), ranked(rung)[0]
        t.that(promoted(got, best, 0), message, eta=eta, count=len(rung), best=best, got=got)


@check("asha", points=2)
def check_top_first(student, t):
    "The highest rung first"
    low = told(t, t.shuffled(list(range(40)))[:12])
    gone = ranked(low)[:3]
    high = told(t, gone)
    got, best = student.promotion([low, high, {}], [t.shuffled(gone), [], []], 3), ranked(high)[0]
    message = "Trial {best} can leave rung 1, another one rung 0: the higher rung comes first, not {got}."
    t.that(promoted(got, best, 1), message, best=best, got=got)


def promotes(student, t) -> None:
    """A function that always returns None promotes no trial, and is not tested by cases in which none may be
    promoted."""
    got = student.promotion([told(t, range(9)), {}], [[], []], 3)
    message = (
        "not tested yet: of nine trials on rung 0 none leaves it, see the first checks. You return {got}."
    )
    t.that(type(got) is tuple, message, got=got)


@check("asha", points=1)
def check_too_few(student, t):
    "With fewer than eta reports no trial is promoted"
    promotes(student, t)
    message = (
        "eta = {eta}, {count} reports: 1 / eta of them, rounded down, is zero trials: return None, not {got}."
    )
    for eta in (2, 3, 4):
        rung = told(t, t.shuffled(list(range(20)))[: eta - 1])
        got = student.promotion([rung, {}], [[], []], eta)
        t.that(got is None, message, eta=eta, count=len(rung), got=got)


@check("asha", points=1)
def check_already_promoted(student, t):
    "A promoted trial still counts among the best of its rung"
    promotes(student, t)
    message = (
        "All of the best 1 / eta are already promoted, and the next best is not one of them: return None, "
        "to start a new trial."
    )
    for eta in (2, 3):
        rung = told(t, t.shuffled(list(range(40)))[: 4 * eta])
        got = student.promotion([rung, {}, {}], [t.shuffled(ranked(rung)[:4]), [], []], eta)
        t.that(got is None, message)


@check("asha", points=1)
def check_edges(student, t):
    "No trial leaves the top rung, and of equal losses the lower index is better"
    trials = t.shuffled(list(range(40)))
    got = student.promotion([{}, told(t, trials[:9])], [[], []], 3)
    message = "The trials on the last rung are complete: no trial is promoted from it. You return {got}."
    t.that(got is None, message, got=got)
    # The lowest index is the last to report.
    rung = dict.fromkeys(sorted(trials[:6], reverse=True), t.uniform(0.1, 2.0))
    got, best = student.promotion([rung, {}], [[], []], 3), min(rung)
    message = "All six trials have the same loss: trial {best} has the lowest index. You return {got}."
    t.that(promoted(got, best, 0), message, best=best, got=got)


# -- 11 · prune


def falling(t, last: float, epochs: int) -> list[float]:
    return [last + 0.1 * left + t.uniform(0, 0.05) * (left > 0) for left in reversed(range(epochs))]


def stops(student, t, losses, others, warmup, enough) -> bool:
    got = student.should_stop(losses, others, warmup, enough)
    t.that(type(got) is bool, "should_stop(...) is {got}: return True or False", got=got)
    return got


@check("prune", points=2)
def check_median(student, t):
    "Above the median of the same epoch a trial stops, below it continues"
    message = (
        "epoch {epochs}, {count} earlier trials reached it, their median there is {median:.3f}, this trial "
        "has {loss:.3f}: should_stop is {got}. Compare with the median of the losses at the same epoch; a "
        "trial above it stops."
    )
    epochs, at = t.integer(3, 6), 0.9
    for count in (5, 6, 7):
        below, above = count // 2, count - count // 2 - 1
        values = [at - 0.3 - 0.01 * i for i in range(below)] + [at + 0.3 + 0.01 * i for i in range(above)]
        values.append(at + 20)
        others = t.shuffled([falling(t, value, epochs) + [0.0] * t.integer(0, 2) for value in values])
        # Stopped before: they have no loss at this epoch.
        others += [[0.1] * t.integer(1, epochs - 1) for _ in range(3)]
        median = statistics.median(values)
        cases = [(falling(t, median + 0.05, epochs), True), (falling(t, median - 0.05, epochs), False)]
        for losses, want in cases + [(falling(t, median, epochs), False)] * (count % 2):
            got = stops(student, t, losses, t.shuffled(others), 1, count)
            shown = {"epochs": epochs, "count": count, "median": median, "loss": losses[-1]}
            t.that(got is want, message, **shown, got=got)


@check("prune", points=1)
def check_patience(student, t):
    "Not during warm-up, not before enough trials have reached the epoch"
    epochs, count = t.integer(2, 5), t.integer(4, 7)
    others = [falling(t, 0.2, epochs) for _ in range(count)]
    losses = falling(t, 5.0, epochs)
    message = "Epoch {epochs} of a warm-up of {epochs} is not judged."
    t.that(not stops(student, t, losses, others, epochs, 2), message, epochs=epochs)
    message = "The first epoch after warm-up is judged, with exactly `enough` trials."
    t.that(stops(student, t, losses, others, epochs - 1, count), message)
    stopped = stops(student, t, losses, [*others, [0.2] * (epochs - 1)], epochs - 1, count + 1)
    message = (
        "{count} earlier trials reached this epoch and {enough} are needed: it is not judged. A trial "
        "stopped before does not count."
    )
    t.that(not stopped, message, count=count, enough=count + 1)


@check("prune", points=1)
def check_best_so_far(student, t):
    "The best loss so far counts"
    epochs = t.integer(4, 6)
    others = [falling(t, 1.0 + 0.01 * i, epochs) for i in range(5)]
    message = "not tested yet: a trial that was never good is not stopped, see the first checks"
    t.that(stops(student, t, falling(t, 3.0, epochs), others, 1, 3), message)
    losses = [*falling(t, 0.5, epochs - 1), 3.0]
    message = "One bad epoch after a good one must not stop a trial: its best loss so far counts."
    t.that(not stops(student, t, losses, others, 1, 3), message)


@check("prune", points=1)
def check_nan_stops(student, t):
    "NaN stops the trial at once"
    epochs = t.integer(2, 4)
    losses = [*falling(t, 0.5, epochs - 1), math.nan]
    others = [falling(t, 1.0, epochs) for _ in range(4)]
    message = "not tested yet: a trial better than the others is stopped, see the first checks"
    t.that(not stops(student, t, falling(t, 0.5, epochs), others, 0, 2), message)
    for warmup, known in ((0, others), (epochs + 3, others), (0, [])):
        message = "A training with a NaN loss does not recover: stop it, also during warm-up."
        t.that(stops(student, t, losses, known, warmup, 2), message)


# -- 12 · population


def population_case(t) -> dict[str, Any]:
    size, quantile = t.integer(8, 14), t.uniform(0.15, 0.4)
    few = max(1, int(quantile * size))
    return {
        "losses": t.shuffled([0.1 * place + t.uniform(0, 0.05) for place in range(size)]),
        "rates": [t.uniform(0.02, 0.08) for _ in range(size)],
        "quantile": quantile,
        "picks": [t.integer(0, few - 1) for _ in range(size)],
        "ups": [bool(t.integer(0, 1)) for _ in range(size)],
        "low": t.uniform(1e-3, 1e-2),
        "high": t.uniform(0.5, 1.0),
    }


def sources_of(case: dict[str, Any]) -> dict[int, int]:
    """The member that each of the worst becomes a copy of; the worst is the last one."""
    losses = case["losses"]
    order = sorted(
        range(len(losses)), key=lambda member: (math.isnan(losses[member]), losses[member], member)
    )
    few = max(1, int(case["quantile"] * len(order)))
    return {member: order[case["picks"][member]] for member in order[-few:]}


def diverged_case(t) -> tuple[dict[str, Any], int]:
    """A case and its member with the loss NaN, which is not the last one if the members are sorted by the
    loss alone."""
    while True:
        case = population_case(t)
        losses = case["losses"]
        gone = t.integer(0, len(losses) - 1)
        losses[gone] = math.nan
        by_loss = sorted(range(len(losses)), key=losses.__getitem__)
        if gone not in by_loss[-len(sources_of(case)) :]:
            return case, gone


def generation(student, t, case: dict) -> tuple[list, list]:
    parents, rates = t.items(student.new_generation(**case), 2, "new_generation(...)")
    size = len(case["losses"])
    return t.items(parents, size, "the parents"), t.items(rates, size, "the learning rates")


def same_parents(student, t, case: dict[str, Any], members: Sequence[int], message: str) -> None:
    """The parents of ``members`` are the right ones."""
    sources, (parents, _) = sources_of(case), generation(student, t, case)
    for member in members:
        got, want = parents[member], sources[member]
        t.that(whole(got) and got == want, message, member=member, size=len(parents), want=want, got=got)


@check("population", points=2)
def check_exploit(student, t):
    "The worst, and only these, become copies of the best"
    message = (
        "The parents are {got}, expected {want}: the {count} worst members of {size} are replaced, and only "
        "these are replaced."
    )
    for _ in range(3):
        case = population_case(t)
        sources, size = sources_of(case), len(case["losses"])
        want = [sources.get(member, member) for member in range(size)]
        got, _ = generation(student, t, case)
        t.that(whole(*got) and got == want, message, got=got, want=want, count=len(sources), size=size)


@check("population", points=2)
def check_explore(student, t):
    "The copied learning rate is perturbed"
    message = (
        "Member {member} takes over a learning rate of {copied:.4f}; with ups {up} it should become "
        "{want:.4f}, not {got:.4f}."
    )
    for _ in range(3):
        case = population_case(t)
        _, rates = generation(student, t, case)
        for member, source in sources_of(case).items():
            up, copied = case["ups"][member], case["rates"][source]
            got, want = t.number(rates[member], "a learning rate"), copied * (1.2 if up else 0.8)
            good = abs(got - want) < 1e-6 * copied
            t.that(bool(good), message, member=member, copied=copied, up=up, want=want, got=got)


@check("population", points=1)
def check_bounds(student, t):
    "Learning rates stay within their bounds"
    case = population_case(t)
    message = "A perturbed learning rate outside its bounds is set to the bound."
    low, high = case["low"], case["high"]
    for up, rate, want in ((True, 0.95 * high, high), (False, 1.05 * low, low)):
        case["rates"] = [rate] * len(case["rates"])
        case["ups"] = [up] * len(case["ups"])
        _, rates = generation(student, t, case)
        for member in sources_of(case):
            got = t.number(rates[member], "a learning rate")
            t.that(bool(abs(got - want) < 1e-9), message)


@check("population", points=1)
def check_diverged_member(student, t):
    "A member that diverged is replaced, and of equal losses the higher index is worse"
    message = (
        "Member {member} has the loss NaN, so it is the worst and becomes a copy of member {want}. Its "
        "parent is {got}."
    )
    for _ in range(2):
        case, gone = diverged_case(t)
        same_parents(student, t, case, [gone], message)
    case = population_case(t)
    case["losses"] = [case["losses"][0]] * len(case["losses"])
    message = (
        "All losses are equal, so member {member} of {size} is among the worst and becomes a copy of member "
        "{want}. Its parent is {got}."
    )
    same_parents(student, t, case, list(sources_of(case)), message)


# -- objective


@scenario
def optimised(student, space, epochs, suggest, begin, loss_of, report, prune):
    """Run the objective on a trial and a training that ask the check for all that they return."""
    import optuna

    class Trial:
        def suggest_float(self, name, low, high, *, step=None, log=False):
            return suggest(name, low, high, log)

        def report(self, value, step):
            report(value, step)

        def should_prune(self):
            return prune()

    def train(params):
        begin(params)
        for epoch in range(1, epochs + 1):
            yield loss_of(epoch)

    try:
        return ["returned", student.objective(Trial(), space, train)]
    except optuna.TrialPruned:
        return ["pruned", None]


def objective_case(t) -> dict:
    names = t.shuffled(["learning_rate", "weight_decay", "dropout", "width"])[: t.integer(2, 4)]
    space = {name: (10 ** t.uniform(-6, -3), 10 ** t.uniform(-2, 0)) for name in names}
    values = {name: t.uniform(low, high) for name, (low, high) in space.items()}
    losses = [t.uniform(0.1, 2.0) for _ in range(t.integer(5, 9))]
    return {"space": space, "values": values, "losses": losses, "prune_at": 1000}


def run_objective(student, t, case: dict) -> tuple:
    """What the objective asks, in order: suggestions, the start of a training, reports, the number of epochs;
    its end and its result. The pruner stops it after ``prune_at`` reports."""
    suggested: list[list] = []
    given: list[dict] = []
    reports: list[list] = []
    read: list[int] = []

    def suggest(name, low, high, log):
        suggested.append([name, float(low), float(high), bool(log)])
        return case["values"][name]

    def begin(params):
        given.append(dict(params))

    def loss_of(epoch):
        read.append(epoch)
        return case["losses"][epoch - 1]

    def report(value, step):
        reports.append([int(step), float(value)])

    def prune():
        return len(reports) >= case["prune_at"]

    asked = {each.__name__: t.asked(each, calls=100) for each in (suggest, begin, loss_of, report, prune)}
    result = student.run(optimised, space=case["space"], epochs=len(case["losses"]), **asked)
    end, value = t.items(result, 2, "the result")
    return suggested, given, reports, len(read), end, value


@check("objective", points=1, seconds=30)
def check_suggested(student, t):
    "Each hyperparameter is suggested on its logarithmic scale, and reaches the training"
    case = objective_case(t)
    suggested, given, *_ = run_objective(student, t, case)
    linear, want = ([[name, *ends, log] for name, ends in case["space"].items()] for log in (False, True))
    t.that(suggested != linear, "The values are suggested on a linear scale: pass log=True.")
    right = sorted(map(str, suggested)) == sorted(map(str, want))
    message = "suggest_float was called for {got}, expected {want}"
    t.that(right, message, got=suggested, want=want)
    message = "train received {got}, expected one dict with the suggested values, {want}"
    t.that(given == [case["values"]], message, got=given, want=case["values"])


@check("objective", points=2, seconds=30)
def check_reports(student, t):
    "Each epoch is reported with its loss and its number"
    case = objective_case(t)
    _, _, calls, *_ = run_objective(student, t, case)
    want = [[epoch, loss] for epoch, loss in enumerate(case["losses"], 1)]
    message = "The first epoch is reported as epoch 0: epochs count from 1."
    t.that(calls != [[epoch - 1, loss] for epoch, loss in want], message)
    message = "No loss is reported: the pruner sees a trial only through trial.report(loss, epoch)."
    t.that(bool(calls), message)
    t.that(len(calls) > 1, "Only one loss is reported: report after *each* epoch.")
    t.that(calls == want, "the reports (epoch, loss) are {got}, expected {want}", got=calls, want=want)


@check("objective", points=2, seconds=30)
def check_stops(student, t):
    "A trial that should be pruned stops at once, with TrialPruned"
    case = objective_case(t)
    at = case["prune_at"] = t.integer(2, len(case["losses"]) - 2)
    _, _, calls, read, end, _ = run_objective(student, t, case)
    message = (
        "should_prune() was true after epoch {at}, and the objective returned a value: Optuna counts such a "
        "trial as complete. Raise TrialPruned."
    )
    t.that(end == "pruned" or read != at, message, at=at)
    message = (
        "should_prune() was true after epoch {at}, and {read} epochs were trained: report first, then ask, "
        "in every epoch."
    )
    t.that(read == at, message, at=at, read=read)
    t.that(end == "pruned" and len(calls) == at, "The last epoch before the stop is not reported.")


@check("objective", points=1, seconds=30)
def check_last_loss(student, t):
    "The objective returns the last loss"
    case = objective_case(t)
    case["losses"][t.integer(1, 3)] = 0.01  # the lowest is not the last
    *_, end, value = run_objective(student, t, case)
    t.that(end == "returned", "The objective raised TrialPruned, although should_prune() was always false.")
    got, want = t.number(value, "the result of the objective"), case["losses"][-1]
    message = "The objective returned the lowest loss of the training: return the last one."
    t.that(abs(got - 0.01) > 1e-9, message)
    message = "The objective returned {got:.4f}, expected {want:.4f}."
    t.that(abs(got - want) < 1e-9, message, got=got, want=want)


@check("objective", points=1, seconds=30)
def check_nan_loss(student, t):
    "A NaN loss ends the trial, unreported"
    case = objective_case(t)
    at = t.integer(2, len(case["losses"]) - 2)
    case["losses"][at - 1] = math.nan
    _, _, calls, read, end, _ = run_objective(student, t, case)
    message = (
        "The loss of epoch {at} is NaN, and {read} were trained: the trial cannot recover. Raise TrialPruned."
    )
    t.that(end == "pruned" and read == at, message, at=at, read=read)
    message = "The NaN of epoch {at} is reported: test the loss before trial.report."
    t.that(len(calls) == at - 1, message, at=at)
