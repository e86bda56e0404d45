"""The visible checks of this lab."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check, scenario
from dlo_lib.hpo.halving import brackets as known_brackets
from dlo_lib.hpo.halving import rungs as known_rungs
from dlo_lib.labkit.compare import wrong_if

from .twins import (
    LENGTHS,
    NOISE,
    cube,
    density_of,
    flooded,
    improvement,
    improvements,
    likelihoods,
    other_units,
    predicted,
    similarity,
    squared_z,
    standing,
    wavy,
)


def whole(*values: object) -> bool:
    """Whether all of these are integers, and none is a tensor."""
    return all(type(value) is int for value in values)


# -- 1 · scale


@check("scale", points=1)
def check_linear(student, t):
    "A linear scale"
    for _ in range(3):
        low, place = t.uniform(-5, 5), t.uniform(0, 1)
        high = low + t.uniform(1, 5)
        got = t.number(student.from_place(place, low, high, False), "from_place(...)")
        share = (got - low) / (high - low)
        t.that(
            bool(abs(share - place) < 1e-6),
            "from_place({place:.3f}, {low:.3f}, {high:.3f}, False) is {got:.4f}: it should be at {place:.3f} of the way from low to high.",
            place=place, low=low, high=high, got=got,
        )  # fmt: skip


@check("scale", points=2)
def check_logarithmic(student, t):
    "A logarithmic scale"
    for _ in range(3):
        low, place = 10 ** t.uniform(-6, -2), t.uniform(0, 1)
        high = low * 10 ** t.uniform(1, 5)
        got = t.number(student.from_place(place, low, high, True), "from_place(...)")
        t.that(
            bool(got > 0 and abs(math.log(got / low) - place * math.log(high / low)) < 1e-6),
            "from_place({place:.3f}, {low:.3g}, {high:.3g}, True) is {got:.4g}: its *logarithm* should be at {place:.3f} of the way, "
            "and the result is a value between low and high.",
            place=place, low=low, high=high, got=got,
        )  # fmt: skip


# -- 2 · interval


def ends(student, t, left, right, chosen, level) -> tuple[float, float]:
    low, high = t.items(student.interval(left, right, chosen, level), 2, "interval(...)")
    return t.number(low, "the low end"), t.number(high, "the high end")


@check("interval", points=2)
def check_mean_of_differences(student, t):
    "The interval is for the mean of left - right"
    size = t.integer(8, 15)
    left, right = t.normal(size, dtype=torch.float64), t.normal(size, dtype=torch.float64)
    once = torch.tensor(t.shuffled(list(range(size)))).repeat(20, 1)  # every resample takes each repeat once: all means are equal
    want = float((left - right).mean())
    for got in ends(student, t, left, right, once, 0.9):
        t.that(
            bool(abs(got - want) < 1e-6),
            "If every resample takes each repeat once, all means are {want:.4f}, the mean of left - right. You return {got:.4f}.",
            got=got, want=want,
        )  # fmt: skip


@check("interval", points=2)
def check_middle(student, t):
    "The interval contains the middle part of the means"
    size = t.integer(8, 15)
    left, right = t.normal(size, dtype=torch.float64), t.normal(size, dtype=torch.float64)
    chosen = t.integers(0, size - 1, 500, size)
    for level in (t.uniform(0.5, 0.7), t.uniform(0.9, 0.98)):
        low, high = ends(student, t, left, right, chosen, level)
        quantiles = torch.quantile((left - right)[chosen].mean(1), torch.tensor([0.5 - level / 2, 0.5 + level / 2]).double())
        want = float(quantiles[1] - quantiles[0])
        t.that(
            bool(abs(high - low - want) < 1e-4 * want),
            "For a level of {level:.3f} your interval is {got:.4f} wide, expected {want:.4f}: leave out (1 - level) / 2 of the means at either end.",
            level=level, got=high - low, want=want,
        )  # fmt: skip


# -- 3 · process


def process_case(t) -> dict:
    """Points so far apart that the process without noise is exact too: a mistake is recognised by its values."""
    while True:
        count, dimensions, length = t.integer(4, 9), t.integer(1, 3), t.uniform(0.15, 0.5)
        points = cube(t, count, dimensions)
        if float(torch.linalg.cond(similarity(points, points, length))) < 3000:
            break
    values = t.normal(count, dtype=torch.float64) + 1
    return {"points": points, "values": values, "new": cube(t, 7, dimensions), "length": length, "noise": t.uniform(0.01, 0.2)}


@check("process", points=2)
def check_mean(student, t):
    "The mean"
    for _ in range(3):
        case = process_case(t)
        mean, _ = t.items(student.posterior(**case), 2, "posterior(...)")
        without, everywhere = predicted(**case | {"noise": 1e-12})[0], flooded(**case)[0]
        mistakes = {
            "The noise is missing: add it to the diagonal of k(X, X).": without,
            "The noise is added to every entry of k(X, X): only the diagonal has it, noise * torch.eye(N).": everywhere,
        }
        wrong_if(t, mean, predicted(**case)[0], mistakes, rtol=1e-4)
        t.close(mean, predicted(**case)[0], "the mean k(x, X) K^-1 y, with the noise on the diagonal of K,", rtol=1e-5)


@check("process", points=2)
def check_doubt(student, t):
    "The standard deviation"
    for _ in range(3):
        case = process_case(t)
        _, std = t.items(student.posterior(**case), 2, "posterior(...)")
        want = predicted(**case)[1]
        mistakes = {
            "This is the variance: take its square root.": want.square(),
            "The noise is missing in K: it is in the formula of the standard deviation too.": predicted(**case | {"noise": 1e-12})[1],
            "The noise is added to every entry of k(X, X): only the diagonal has it, noise * torch.eye(N).": flooded(**case)[1],
        }
        wrong_if(t, std, want, mistakes, rtol=1e-4)
        t.close(std, want, "the standard deviation, the root of 1 - k(x, X) K^-1 k(X, x),", rtol=1e-5)


@check("process", points=1)
def check_sure_points(student, t):
    "Without noise there is no uncertainty at the measured points"
    points = torch.arange(60, dtype=torch.float64)[:, None] + cube(t, 60, 1) / 10
    length = t.uniform(1.5, 1.8)  # with shorter ones, rounding makes no variance negative for some inputs
    _, std = t.items(student.posterior(points, t.normal(60, dtype=torch.float64), points, length, 0.0), 2, "posterior(...)")
    t.tensor(std, "the standard deviation", shape=(60,))
    t.that(bool(std.isfinite().all()), "Rounding makes some variances slightly negative, and their root NaN: clamp them to 0.")
    t.that(bool((std < 1e-3).all()), "Without noise the standard deviation at a measured point is 0.")


# -- 4 · improvement


@check("improvement", points=3)
def check_improvement(student, t):
    "The expected gain"
    for _ in range(3):
        mean, std = t.normal(9, dtype=torch.float64), t.normal(9, dtype=torch.float64).abs() + 0.2
        best = t.uniform(-1, 0.5)
        got, want = student.expected_improvement(mean, std, best), improvement(mean, std, best)
        mistakes = {
            "This is the expected gain where *higher* values are better: the gain is best - mean.": improvement(-mean, std, -best),
            "z is divided by the variance: divide by the standard deviation.": squared_z(mean, std, best),
            "The density is not multiplied by the standard deviation.": want + (1 - std) * density_of(mean, std, best),
            "This is only the first term, the gain if the mean is right. The second one rewards uncertainty.": want
            - std * density_of(mean, std, best),
        }
        wrong_if(t, got, want, mistakes, rtol=1e-4)
        t.close(got, want, "EI, where lower values are better,", rtol=1e-5)


@check("improvement", points=1)
def check_certain(student, t):
    "A standard deviation of 0"
    mean = t.normal(12, dtype=torch.float64)
    best = float(mean.median())  # one candidate is exactly as good as the best
    got = t.tensor(student.expected_improvement(mean, torch.zeros(12, dtype=torch.float64), best), "EI", shape=(12,))
    t.that(bool(got.isfinite().all()), "If the standard deviation is 0, z is a division by 0: EI must be finite.")
    t.that(
        bool(torch.allclose(got.double(), (best - mean).clamp(min=0), atol=1e-9)),
        "If the standard deviation is 0, the gain is max(best - mean, 0), not 0.",
    )


# -- 5 · length


@check("length", points=4)
def check_length(student, t):
    "The most probable length scale"
    for dimensions in (1, 1, 2, 3):
        points = cube(t, t.integer(8, 12), dimensions)
        values, lengths, noise = wavy(t, points), t.shuffled([0.03, 0.1, 0.3, 0.6, 1.5]), t.uniform(0.001, 0.05)
        told = likelihoods(points, values, tuple(lengths), noise)
        got = student.best_length(points, values, list(lengths), noise)
        t.that(type(got) is float and got in lengths, "best_length(...) is {got}: return one of the lengths", got=got)
        t.that(
            bool(told[lengths.index(got)] >= max(told) - 1e-3),
            "You chose the length {got} with log p = {own:.2f}; {want} has {most:.2f}. Both terms count, the fit and log |K|, each with the factor 1/2.",
            got=got, own=told[lengths.index(got)], want=lengths[told.index(max(told))], most=max(told),
        )  # fmt: skip


# -- 6 · next


def chosen_candidate(student, t, points, values, candidates) -> int:
    got = student.next_candidate(points, values, candidates)
    t.that(type(got) is int and 0 <= got < len(candidates), "next_candidate(...) is {got}: return the index of a candidate", got=got)
    return got


CORRECTIONS = (0, 1)  # of the standard deviation: both are accepted


def telling_case(t, dimensions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Points, values and candidates such that the candidate with the lowest mean does not have the largest Expected Improvement."""
    while True:
        points, candidates = cube(t, t.integer(6, 10), dimensions), cube(t, 60, dimensions)
        values = wavy(t, points)
        gains = [improvements(points, values, candidates, correction) for correction in CORRECTIONS]
        lowest = [int(standing(points, values, candidates, correction)[0].argmin()) for correction in CORRECTIONS]
        if all(bool(gain[at] < 0.9 * gain.max()) for gain in gains for at in lowest):
            return points, values, candidates


OTHER_UNITS = "`best` is in the units of the losses, the predictions are not: pass the lowest of the *standardised* values."


def has_other_units(points, values, candidates, chosen: int) -> bool:
    """Whether ``chosen`` is the best candidate if `best` is not standardised."""
    return any(chosen == int(other_units(points, values, candidates, correction).argmax()) for correction in CORRECTIONS)


@check("next", points=3)
def check_next(student, t):
    "The candidate with the largest Expected Improvement"
    for dimensions in (1, 2, 2):
        points, values, candidates = telling_case(t, dimensions)
        chosen = chosen_candidate(student, t, points, values, candidates)
        told = [improvements(points, values, candidates, correction) for correction in CORRECTIONS]
        right = any(bool(each[chosen] >= 0.99 * each.max()) for each in told)
        lowest = {int(standing(points, values, candidates, correction)[0].argmin()) for correction in CORRECTIONS}
        t.that(
            right or chosen not in lowest,
            "This is the candidate with the lowest mean: the uncertainty counts too. Maximise Expected Improvement.",
        )
        t.that(right or not has_other_units(points, values, candidates, chosen), OTHER_UNITS)
        t.that(
            right,
            "Your candidate has an Expected Improvement of {got:.4f}, the best one {want:.4f}.",
            got=float(told[0][chosen]), want=float(told[0].max()),
        )  # fmt: skip


@check("next", points=1)
def check_units(student, t):
    "Losses in other units lead to the same choice"
    same, known = [], []
    for sign in (1, -1, 1, -1):
        points, candidates = cube(t, 8, 2), cube(t, 40, 2)
        values = wavy(t, points)
        losses = t.uniform(50, 100) * values + sign * t.uniform(300, 500)
        one = chosen_candidate(student, t, points, values, candidates)
        other = chosen_candidate(student, t, points, losses, candidates)
        same.append(one == other)
        known.append(has_other_units(points, losses, candidates, other))
    t.that(all(same) or not all(known), OTHER_UNITS)
    t.that(all(same), "The process assumes values with mean 0 and standard deviation 1: standardise them, and `best` too.")


# -- 8 · halving


@check("halving", points=2)
def check_rungs(student, t):
    "The rungs"
    for _ in range(4):
        eta, least = t.integer(2, 4), t.integer(1, 3)
        trials, most = t.integer(1, 60), least * t.integer(1, 60)
        want = [(rung.trials, rung.resource) for rung in known_rungs(trials, least, most, eta)]
        call = f"rungs({trials}, {least}, {most}, {eta})"
        got = student.rungs(trials, least, most, eta)
        t.that(
            type(got) is list and all(type(rung) is tuple for rung in got), "{call} should be a list of pairs (trials, epochs)", call=call
        )
        t.that(
            got == want,
            "{call} is {got}, expected {want}: each rung has 1 / eta of the trials, rounded down, and eta times the epochs; "
            "the last has at least one trial and at most `most` epochs.",
            call=call, got=got, want=want,
        )  # fmt: skip


@check("halving", points=2)
def check_survivors(student, t):
    "The best, best first"
    for _ in range(3):
        losses = t.normal(t.integer(5, 12)).tolist()
        keep = t.integer(2, 4)
        got = t.items(student.survivors(losses, keep), keep, "survivors(losses, {keep})", keep=keep)
        want = torch.tensor(losses).argsort()[:keep].tolist()
        t.that(
            whole(*got) and got == want,
            "survivors(losses, {keep}) is {got}, expected {want}: the lowest losses, the best first.",
            keep=keep,
            got=got,
            want=want,
        )
    count = t.integer(4, 7)
    got = t.items(student.survivors([t.uniform(0.1, 1.0)] * count, 3), 3, "survivors(losses, 3)")
    t.that(
        got == list(range(len(got))), "{count} equal losses: the survivors are the first three indices, not {got}.", count=count, got=got
    )


@check("halving", points=2)
def check_diverged(student, t):
    "A trial that diverged is the worst"
    for _ in range(4):
        count, gone = t.integer(8, 12), t.integer(2, 4)
        losses = t.shuffled(t.normal(count - gone).tolist() + [math.nan] * gone)
        keep = count - gone - 1
        got = t.items(student.survivors(losses, keep), keep, "survivors(...)")
        finite = sorted((loss, number) for number, loss in enumerate(losses) if not math.isnan(loss))
        want = {number for _, number in finite[:keep]}
        t.that(
            all(type(number) is int for number in got) and set(got) == want,
            "With NaN among the losses, the survivors are not the best: no comparison with NaN is true, so sort with a key that puts it last.",
        )


# -- 9 · hyperband


def begun(student, t, most: int, eta: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The first rungs of the student's brackets, and the expected ones."""
    want = [(bracket[0].trials, bracket[0].resource) for bracket in known_brackets(most, eta)]
    got = t.items(student.brackets(most, eta), len(want), "brackets({most}, {eta})", most=most, eta=eta)
    pairs = [tuple(t.items(pair, 2, "a bracket of brackets({most}, {eta})", most=most, eta=eta)) for pair in got]
    t.that(whole(*(number for pair in pairs for number in pair)), "brackets({most}, {eta}) should hold integers", most=most, eta=eta)
    return pairs, want


SIZES = [(9, 3), (27, 3), (81, 3), (16, 2), (64, 4)]  # the logarithms are integers in floating point too


@check("hyperband", points=2)
def check_bracket_trials(student, t):
    "The number of trials that each bracket starts with"
    for most, eta in t.shuffled(SIZES)[:3]:
        got, want = begun(student, t, most, eta)
        own, right = [trials for trials, _ in got], [trials for trials, _ in want]
        t.that(
            own == right,
            "brackets({most}, {eta}) start with {own} trials, expected {right}: (s_max + 1) / (s + 1) eta^s, rounded *up*, from s_max down to 0.",
            most=most, eta=eta, own=own, right=right,
        )  # fmt: skip


@check("hyperband", points=2)
def check_bracket_resources(student, t):
    "The number of epochs that each bracket starts with"
    for most, eta in t.shuffled(SIZES)[:3]:
        got, want = begun(student, t, most, eta)
        own, right = [epochs for _, epochs in got], [epochs for _, epochs in want]
        t.that(
            own == right,
            "brackets({most}, {eta}) start with {own} epochs, expected {right}: after s more rungs a bracket reaches R.",
            most=most, eta=eta, own=own, right=right,
        )  # fmt: skip


@check("hyperband", points=1)
def check_whole_logarithms(student, t):
    "Powers whose logarithm is not an integer in floating point"
    for most, eta in t.shuffled([(243, 3), (1000, 10), (125, 5)]):
        got, want = student.brackets(most, eta), len(known_brackets(most, eta))
        t.that(
            type(got) is list and len(got) == want,
            "A floating-point logarithm of a power of eta may be slightly below the integer: compute with integers.",
        )


# -- 10 · ASHA


def told(t, trials: list[int]) -> dict[int, float]:
    """Different losses of ``trials``, reported in a random order."""
    losses = [place + t.uniform(0, 0.5) for place in range(len(trials))]
    return dict(t.shuffled(list(zip(trials, losses))))


def ranked(losses: dict[int, float]) -> list[int]:
    return sorted(losses, key=losses.__getitem__)


@check("asha", points=2)
def check_best_goes_on(student, t):
    "Of several candidates the best is promoted"
    for eta in (2, 3):
        rung = told(t, sorted(t.shuffled(list(range(30)))[: 3 * eta], reverse=True))  # the best of them does not have the lowest index
        got = student.promotion([rung, {}, {}], [[], [], []], eta)
        best = ranked(rung)[0]
        t.that(
            type(got) is tuple and whole(*got) and got == (best, 0),
            "eta = {eta}, {count} trials have reported on rung 0, none is promoted: trial {best} is the best of them. You return {got}.",
            eta=eta, count=len(rung), best=best, got=got,
        )  # fmt: skip


@check("asha", points=2)
def check_top_first(student, t):
    "The highest rung first"
    trials = t.shuffled(list(range(40)))[:12]
    low = told(t, trials)
    gone = ranked(low)[:3]
    high = told(t, gone)
    got = student.promotion([low, high, {}], [t.shuffled(gone), [], []], 3)
    best = ranked(high)[0]
    t.that(
        type(got) is tuple and whole(*got) and got == (best, 1),
        "Trial {best} can leave rung 1, and another one rung 0: the higher rung comes first. You return {got}.",
        best=best,
        got=got,
    )


def promotes(student, t) -> None:
    """A function that always returns None promotes no trial, and is not tested by cases in which none may be promoted."""
    got = student.promotion([told(t, range(9)), {}], [[], []], 3)
    t.that(
        type(got) is tuple, "not tested yet: of nine trials on rung 0 none is promoted, see the first checks. You return {got}.", got=got
    )


@check("asha", points=1)
def check_too_few(student, t):
    "With fewer than eta reports no trial is promoted"
    promotes(student, t)
    for eta in (2, 3, 4):
        rung = told(t, t.shuffled(list(range(20)))[: eta - 1])
        got = student.promotion([rung, {}], [[], []], eta)
        message = "eta = {eta}, {count} reports: 1 / eta of them, rounded down, is zero trials. Return None. You return {got}."
        t.that(got is None, message, eta=eta, count=len(rung), got=got)


@check("asha", points=1)
def check_already_promoted(student, t):
    "A promoted trial still counts among the best of its rung"
    promotes(student, t)
    for eta in (2, 3):
        rung = told(t, t.shuffled(list(range(40)))[: 4 * eta])
        best = ranked(rung)[:4]
        got = student.promotion([rung, {}, {}], [t.shuffled(best), [], []], eta)
        t.that(
            got is None,
            "All of the best 1 / eta are already promoted, and the next best is not one of them: return None, to start a new trial.",
        )


@check("asha", points=1)
def check_edges(student, t):
    "No trial leaves the top rung, and of equal losses the lower index is better"
    trials = t.shuffled(list(range(40)))
    top = told(t, trials[:9])
    got = student.promotion([{}, top], [[], []], 3)
    t.that(got is None, "The trials on the last rung are complete: no trial is promoted from it. You return {got}.", got=got)
    rung = dict.fromkeys(sorted(trials[:6], reverse=True), t.uniform(0.1, 2.0))  # the lowest index is the last to report
    got = student.promotion([rung, {}], [[], []], 3)
    best = min(rung)
    ok = type(got) is tuple and whole(*got) and got == (best, 0)
    t.that(ok, "All six trials have the same loss: trial {best} has the lowest index. You return {got}.", best=best, got=got)


# -- 11 · prune


def falling(t, last: float, epochs: int) -> list[float]:
    return [last + 0.1 * (epochs - 1 - epoch) + t.uniform(0, 0.05) * (epoch < epochs - 1) for epoch in range(epochs)]


def stops(student, t, losses, others, warmup, enough) -> bool:
    got = student.should_stop(losses, others, warmup, enough)
    t.that(type(got) is bool, "should_stop(...) is {got}: return True or False", got=got)
    return got


@check("prune", points=2)
def check_median(student, t):
    "Above the median of the same epoch a trial stops, below it continues"
    epochs = t.integer(3, 6)
    for at, count in ((0.9, 5), (0.9, 6), (0.9, 7)):
        values = [at - 0.3 - 0.01 * i for i in range(count // 2)] + [at + 0.3 + 0.01 * i for i in range(count - count // 2 - 1)] + [at + 20]
        others = t.shuffled([falling(t, value, epochs) + [0.0] * t.integer(0, 2) for value in values])
        others += [[0.1] * t.integer(1, epochs - 1) for _ in range(3)]  # stopped before: they have no loss at this epoch
        middle = sorted(values)
        median = (middle[(count - 1) // 2] + middle[count // 2]) / 2
        cases = [(falling(t, median + 0.05, epochs), True), (falling(t, median - 0.05, epochs), False)]
        for losses, want in cases + [(falling(t, median, epochs), False)] * (count % 2):
            got = stops(student, t, losses, t.shuffled(others), 1, count)
            t.that(
                got is want,
                "epoch {epochs}, {count} earlier trials reached it, their median there is {median:.3f}, this trial has {loss:.3f}: "
                "should_stop is {got}. Compare with the median of the losses at the same epoch; a trial above it stops.",
                epochs=epochs, count=count, median=median, loss=losses[-1], got=got,
            )  # fmt: skip


@check("prune", points=1)
def check_patience(student, t):
    "Not during warm-up, not before enough trials have reached the epoch"
    epochs, count = t.integer(2, 5), t.integer(4, 7)
    others = [falling(t, 0.2, epochs) for _ in range(count)]
    losses = falling(t, 5.0, epochs)
    t.that(not stops(student, t, losses, others, epochs, 2), "Epoch {epochs} of a warm-up of {epochs} is not judged.", epochs=epochs)
    t.that(stops(student, t, losses, others, epochs - 1, count), "The first epoch after warm-up is judged, with exactly `enough` trials.")
    short = [*others, [0.2] * (epochs - 1)]
    message = "{count} earlier trials reached this epoch and {enough} are needed: it is not judged. A trial stopped before does not count."
    t.that(not stops(student, t, losses, short, epochs - 1, count + 1), message, count=count, enough=count + 1)


@check("prune", points=1)
def check_best_so_far(student, t):
    "The best loss so far counts"
    epochs = t.integer(4, 6)
    others = [falling(t, 1.0 + 0.01 * i, epochs) for i in range(5)]
    losses = [*falling(t, 0.5, epochs - 1), 3.0]
    t.that(
        not stops(student, t, losses, others, 1, 3), "One bad epoch after a good one must not stop a trial: its best loss so far counts."
    )


@check("prune", points=1)
def check_nan_stops(student, t):
    "NaN stops the trial at once"
    epochs = t.integer(2, 4)
    losses = [*falling(t, 0.5, epochs - 1), math.nan]
    others = [falling(t, 1.0, epochs) for _ in range(4)]
    for warmup, known in ((0, others), (epochs + 3, others), (0, [])):
        t.that(stops(student, t, losses, known, warmup, 2), "A training with a NaN loss does not recover: stop it, also during warm-up.")


# -- 12 · population


def population_case(t) -> dict:
    size = t.integer(8, 14)
    few = max(1, int(0.25 * size))
    return {
        "losses": t.shuffled([0.1 * place + t.uniform(0, 0.05) for place in range(size)]),
        "rates": [t.uniform(0.02, 0.08) for _ in range(size)],
        "quantile": 0.25,
        "picks": [t.integer(0, few - 1) for _ in range(size)],
        "ups": [bool(t.integer(0, 1)) for _ in range(size)],
        "low": 1e-3,
        "high": 1.0,
    }


def ranks_of(case: dict) -> tuple[list[int], list[int]]:
    """The best and the worst members, best first."""
    order = sorted(range(len(case["losses"])), key=lambda member: (math.isnan(case["losses"][member]), case["losses"][member], member))
    few = max(1, int(case["quantile"] * len(order)))
    return order[:few], order[-few:]


def diverged_case(t) -> tuple[dict, int]:
    """A case and its member with the loss NaN, which is not the last one if the members are sorted by the loss alone."""
    while True:
        case = population_case(t)
        losses = case["losses"]
        gone = t.integer(0, len(losses) - 1)
        losses[gone] = math.nan
        if gone not in sorted(range(len(losses)), key=losses.__getitem__)[-len(ranks_of(case)[1]) :]:
            return case, gone


def generation(student, t, case: dict) -> tuple[list, list]:
    parents, rates = t.items(student.new_generation(**case), 2, "new_generation(...)")
    size = len(case["losses"])
    return t.items(parents, size, "the parents"), t.items(rates, size, "the learning rates")


@check("population", points=2)
def check_exploit(student, t):
    "The worst, and only these, become copies of the best"
    for _ in range(3):
        case = population_case(t)
        best, worst = ranks_of(case)
        want = [best[case["picks"][member]] if member in worst else member for member in range(len(case["losses"]))]
        got, _ = generation(student, t, case)
        t.that(
            whole(*got) and got == want,
            "The parents are {got}, expected {want}: the {count} worst members of {size} are replaced, and only these are replaced.",
            got=got, want=want, count=len(worst), size=len(want),
        )  # fmt: skip


@check("population", points=2)
def check_explore(student, t):
    "The copied learning rate is perturbed"
    for _ in range(3):
        case = population_case(t)
        best, worst = ranks_of(case)
        _, rates = generation(student, t, case)
        for member in worst:
            copied = case["rates"][best[case["picks"][member]]]
            factor = t.number(rates[member], "a learning rate") / copied
            t.that(
                bool(abs(factor - (1.2 if case["ups"][member] else 0.8)) < 1e-6),
                "Member {member} takes over a learning rate of {copied:.4f}; with ups {up} it should become {want:.4f}, not {got:.4f}.",
                member=member, copied=copied, up=case["ups"][member], want=copied * (1.2 if case["ups"][member] else 0.8), got=rates[member],
            )  # fmt: skip


@check("population", points=1)
def check_bounds(student, t):
    "Learning rates stay within their bounds"
    case = population_case(t)
    _, worst = ranks_of(case)
    for up, rate, want in ((True, 0.95, 1.0), (False, 0.00105, 1e-3)):
        case["rates"] = [rate] * len(case["rates"])
        case["ups"] = [up] * len(case["ups"])
        _, rates = generation(student, t, case)
        for member in worst:
            got = t.number(rates[member], "a learning rate")
            t.that(bool(abs(got - want) < 1e-9), "A perturbed learning rate outside its bounds is set to the bound.")


@check("population", points=1)
def check_diverged_member(student, t):
    "A member that diverged is replaced, and of equal losses the higher index is worse"
    for _ in range(2):
        case, gone = diverged_case(t)
        best, _ = ranks_of(case)
        want = best[case["picks"][gone]]
        parents, _ = generation(student, t, case)
        message = "Member {gone} has the loss NaN, so it is the worst and becomes a copy of member {want}. Its parent is {got}."
        t.that(whole(parents[gone]) and parents[gone] == want, message, gone=gone, want=want, got=parents[gone])
    case = population_case(t)
    case["losses"] = [case["losses"][0]] * len(case["losses"])
    best, worst = ranks_of(case)
    parents, _ = generation(student, t, case)
    for member in worst:
        want = best[case["picks"][member]]
        message = "All losses are equal, so member {member} of {size} is among the worst and becomes a copy of member {want}. Its parent is {got}."
        t.that(
            whole(parents[member]) and parents[member] == want, message,
            member=member, size=len(parents), want=want, got=parents[member],
        )  # fmt: skip


# -- objective


@scenario
def asked(student, rank, world, space, values, losses, prune_at):
    """Run the objective on a trial that keeps what it is asked; the pruner stops it after epoch ``prune_at``."""
    import optuna

    class Trial:
        def __init__(self):
            self.suggested, self.calls = [], []

        def suggest_float(self, name, low, high, *, step=None, log=False):
            self.suggested.append([name, float(low), float(high), bool(log)])
            return values[name]

        def report(self, value, step):
            self.calls.append([int(step), float(value)])

        def should_prune(self):
            return len(self.calls) >= prune_at

    trial, given, read = Trial(), [], []

    def train(params):
        given.append(dict(params))
        for epoch, loss in enumerate(losses, 1):
            read.append(epoch)
            yield loss

    try:
        value, end = student.objective(trial, space, train), "returned"
    except optuna.TrialPruned:
        value, end = None, "pruned"
    return [trial.suggested, given, trial.calls, len(read), end, value]


def objective_case(t) -> dict:
    names = t.shuffled(["learning_rate", "weight_decay", "dropout", "width"])[: t.integer(2, 4)]
    space = {name: (10 ** t.uniform(-6, -3), 10 ** t.uniform(-2, 0)) for name in names}
    values = {name: t.uniform(low, high) for name, (low, high) in space.items()}
    losses = [t.uniform(0.1, 2.0) for _ in range(t.integer(5, 9))]
    return {"space": space, "values": values, "losses": losses, "prune_at": 1000}


def run_objective(student, t, case: dict) -> list:
    return t.items(student.ranks(asked, [case]).results[0], 6, "the result")


@check("objective", points=1, seconds=30)
def check_suggested(student, t):
    "Each hyperparameter is suggested on its logarithmic scale, and reaches the training"
    case = objective_case(t)
    suggested, given, *_ = run_objective(student, t, case)
    want = [[name, *bounds, True] for name, bounds in case["space"].items()]
    linear = [[name, *bounds, False] for name, bounds in case["space"].items()]
    t.that(suggested != linear, "The values are suggested on a linear scale: pass log=True.")
    t.that(type(suggested) is list and sorted(map(str, suggested)) == sorted(map(str, want)), "suggest_float was called for {got}, expected {want}", got=suggested, want=want)  # fmt: skip
    t.that(
        given == [case["values"]],
        "train received {got}, expected one dict with the suggested values, {want}",
        got=given,
        want=case["values"],
    )


@check("objective", points=2, seconds=30)
def check_reports(student, t):
    "Each epoch is reported with its loss and its number"
    case = objective_case(t)
    calls = run_objective(student, t, case)[2]
    want = [[epoch, loss] for epoch, loss in enumerate(case["losses"], 1)]
    t.that(calls != [[epoch - 1, loss] for epoch, loss in want], "The first epoch is reported as epoch 0: epochs count from 1.")
    t.that(bool(calls), "No loss is reported: the pruner sees a trial only through trial.report(loss, epoch).")
    t.that(len(calls) > 1, "Only one loss is reported: report after *each* epoch.")
    t.that(calls == want, "the reports (epoch, loss) are {got}, expected {want}", got=calls, want=want)


@check("objective", points=2, seconds=30)
def check_stops(student, t):
    "A trial that should be pruned stops at once, with TrialPruned"
    case = objective_case(t)
    case["prune_at"] = t.integer(2, len(case["losses"]) - 2)
    _, _, calls, read, end, _ = run_objective(student, t, case)
    ended = "should_prune() was true after epoch {at}, and the objective returned a value: Optuna counts such a trial as complete. Raise TrialPruned."
    t.that(end == "pruned" or read != case["prune_at"], ended, at=case["prune_at"])
    late = "should_prune() was true after epoch {at}, and {read} epochs were trained: report first, then ask, in every epoch."
    t.that(read == case["prune_at"], late, at=case["prune_at"], read=read)
    t.that(end == "pruned" and len(calls) == case["prune_at"], "The last epoch before the stop is not reported.")


@check("objective", points=1, seconds=30)
def check_last_loss(student, t):
    "The objective returns the last loss"
    case = objective_case(t)
    case["losses"][t.integer(1, 3)] = 0.01  # the lowest is not the last
    *_, end, value = run_objective(student, t, case)
    t.that(end == "returned", "The objective raised TrialPruned, although should_prune() was always false.")
    got = t.number(value, "the result of the objective")
    t.that(abs(got - 0.01) > 1e-9, "The objective returned the lowest loss of the training: return the last one.")
    t.that(abs(got - case["losses"][-1]) < 1e-9, "The objective returned {got:.4f}, expected {want:.4f}.", got=got, want=case["losses"][-1])


@check("objective", points=1, seconds=30)
def check_nan_loss(student, t):
    "A NaN loss ends the trial, unreported"
    case = objective_case(t)
    at = t.integer(2, len(case["losses"]) - 2)
    case["losses"][at - 1] = math.nan
    _, _, calls, read, end, _ = run_objective(student, t, case)
    went = "The loss of epoch {at} is NaN, and {read} epochs were trained: the trial cannot recover. Raise TrialPruned."
    t.that(end == "pruned" and read == at, went, at=at, read=read)
    t.that(len(calls) == at - 1, "The NaN of epoch {at} is reported: test the loss before trial.report.", at=at)
