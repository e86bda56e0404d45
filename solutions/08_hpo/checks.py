"""The visible checks of this lab."""

from __future__ import annotations

import math

import torch

from dlo_lib.grading.contract import check
from dlo_lib.grading.quiz import quiz_complete
from dlo_lib.hpo.halving import brackets as known_brackets
from dlo_lib.hpo.halving import rungs as known_rungs

from .hints import HINTS as HINTS
from .quiz import QUIZ
from .twins import LENGTHS, NOISE, cube, improvement, improvements, likelihoods, predicted, wavy


def whole(*values: object) -> bool:
    """Whether all of these are whole numbers: what is compared below is no tensor."""
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
            "from_place({place:.3f}, {low:.3f}, {high:.3f}, False) is {got:.4f}: it should lie {place:.3f} of the way from low to high.",
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
            "from_place({place:.3f}, {low:.3g}, {high:.3g}, True) is {got:.4g}: its *logarithm* should lie {place:.3f} of the way, and what "
            "you return is a value between low and high.",
            place=place, low=low, high=high, got=got,
        )  # fmt: skip


# -- 2 · interval


def ends(student, t, left, right, chosen, level) -> tuple[float, float]:
    low, high = t.items(student.interval(left, right, chosen, level), 2, "interval(...)")
    return t.number(low, "the low end"), t.number(high, "the high end")


@check("interval", points=2)
def check_mean_of_differences(student, t):
    "It is about the mean of left - right"
    size = t.integer(8, 15)
    left, right = t.normal(size, dtype=torch.float64), t.normal(size, dtype=torch.float64)
    once = torch.tensor(t.shuffled(list(range(size)))).repeat(20, 1)  # every draw takes each repeat once: nothing is left to chance
    want = float((left - right).mean())
    for got in ends(student, t, left, right, once, 0.9):
        t.that(
            bool(abs(got - want) < 1e-6),
            "Where every draw takes each repeat once, all means are {want:.4f}, the mean of left - right. You return {got:.4f}.",
            got=got, want=want,
        )  # fmt: skip


@check("interval", points=2)
def check_middle(student, t):
    "Between its ends lies the middle part of the means"
    size = t.integer(8, 15)
    left, right = t.normal(size, dtype=torch.float64), t.normal(size, dtype=torch.float64)
    chosen = t.integers(0, size - 1, 500, size)
    for level in (t.uniform(0.5, 0.7), t.uniform(0.9, 0.98)):
        low, high = ends(student, t, left, right, chosen, level)
        quantiles = torch.quantile((left - right)[chosen].mean(1), torch.tensor([0.5 - level / 2, 0.5 + level / 2]).double())
        want = float(quantiles[1] - quantiles[0])
        t.that(
            bool(abs(high - low - want) < 1e-4 * want),
            "For a level of {level:.3f} your interval is {got:.4f} wide, expected {want:.4f}: leave (1 - level) / 2 of the means out at either end.",
            level=level, got=high - low, want=want,
        )  # fmt: skip


# -- 3 · process


def process_case(t) -> dict:
    count, dimensions = t.integer(4, 9), t.integer(1, 3)
    points = cube(t, count, dimensions)
    values = t.normal(count, dtype=torch.float64) + 1
    return {"points": points, "values": values, "new": cube(t, 7, dimensions), "length": t.uniform(0.2, 0.5), "noise": t.uniform(0.01, 0.2)}


@check("process", points=2)
def check_mean(student, t):
    "The mean"
    for _ in range(3):
        case = process_case(t)
        mean, _ = t.items(student.posterior(**case), 2, "posterior(...)")
        t.close(mean, predicted(**case)[0], "the mean k(x, X) K^-1 y, with the noise on the diagonal of K,", rtol=1e-5)


@check("process", points=2)
def check_doubt(student, t):
    "The standard deviation"
    for _ in range(3):
        case = process_case(t)
        _, std = t.items(student.posterior(**case), 2, "posterior(...)")
        t.close(std, predicted(**case)[1], "the standard deviation, the root of 1 - k(x, X) K^-1 k(X, x),", rtol=1e-5)


# -- 4 · improvement


@check("improvement", points=3)
def check_improvement(student, t):
    "The mean of what is gained"
    for _ in range(3):
        mean, std = t.normal(9, dtype=torch.float64), t.normal(9, dtype=torch.float64).abs() + 0.2
        best = t.uniform(-1, 0.5)
        t.close(
            student.expected_improvement(mean, std, best), improvement(mean, std, best), "EI, where lower values are better,", rtol=1e-5
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
            "You chose the length {got} with log p = {own:.2f}; {want} has {most:.2f}. Both terms count, the fit and log |K|, each with its half.",
            got=got, own=told[lengths.index(got)], want=lengths[told.index(max(told))], most=max(told),
        )  # fmt: skip


# -- 6 · next


def chosen_candidate(student, t, points, values, candidates) -> int:
    got = student.next_candidate(points, values, candidates)
    t.that(type(got) is int and 0 <= got < len(candidates), "next_candidate(...) is {got}: return the number of a candidate", got=got)
    return got


@check("next", points=3)
def check_next(student, t):
    "The candidate with the largest Expected Improvement"
    for dimensions in (1, 2, 2):
        points, candidates = cube(t, t.integer(6, 10), dimensions), cube(t, 60, dimensions)
        values = wavy(t, points)
        told = improvements(points, values, candidates)
        got = float(told[chosen_candidate(student, t, points, values, candidates)])
        t.that(
            bool(got >= 0.99 * float(told.max())),
            "Your candidate has an Expected Improvement of {got:.4f}, the best one {want:.4f}.",
            got=got, want=float(told.max()),
        )  # fmt: skip


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


# -- 9 · hyperband


def begun(student, t, most: int, eta: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What the student's brackets begin with, and what they should."""
    want = [(bracket[0].trials, bracket[0].resource) for bracket in known_brackets(most, eta)]
    got = t.items(student.brackets(most, eta), len(want), "brackets({most}, {eta})", most=most, eta=eta)
    pairs = [tuple(t.items(pair, 2, "a bracket of brackets({most}, {eta})", most=most, eta=eta)) for pair in got]
    t.that(whole(*(number for pair in pairs for number in pair)), "brackets({most}, {eta}) should hold whole numbers", most=most, eta=eta)
    return pairs, want


SIZES = [(9, 3), (27, 3), (81, 3), (16, 2), (64, 4)]  # whole logarithms that floating point gets right


@check("hyperband", points=2)
def check_bracket_trials(student, t):
    "How many trials each bracket begins with"
    for most, eta in t.shuffled(SIZES)[:3]:
        got, want = begun(student, t, most, eta)
        own, right = [trials for trials, _ in got], [trials for trials, _ in want]
        t.that(
            own == right,
            "brackets({most}, {eta}) begin with {own} trials, expected {right}: (s_max + 1) / (s + 1) eta^s, rounded *up*, from s_max down to 0.",
            most=most, eta=eta, own=own, right=right,
        )  # fmt: skip


@check("hyperband", points=2)
def check_bracket_resources(student, t):
    "How many epochs each bracket begins with"
    for most, eta in t.shuffled(SIZES)[:3]:
        got, want = begun(student, t, most, eta)
        own, right = [epochs for _, epochs in got], [epochs for _, epochs in want]
        t.that(
            own == right,
            "brackets({most}, {eta}) begin with {own} epochs, expected {right}: after s more rungs a bracket is at R.",
            most=most, eta=eta, own=own, right=right,
        )  # fmt: skip


# -- 10 · ASHA


def told(t, trials: list[int]) -> dict[int, float]:
    """Losses of ``trials``, in another order of reporting; all different."""
    losses = [place + t.uniform(0, 0.5) for place in range(len(trials))]
    return dict(t.shuffled(list(zip(trials, losses))))


def ranked(losses: dict[int, float]) -> list[int]:
    return sorted(losses, key=losses.__getitem__)


@check("asha", points=2)
def check_best_goes_on(student, t):
    "Of several candidates the best goes on"
    for eta in (2, 3):
        rung = told(t, sorted(t.shuffled(list(range(30)))[: 3 * eta], reverse=True))  # so the best of them has not the lowest number
        got = student.promotion([rung, {}, {}], [[], [], []], eta)
        best = ranked(rung)[0]
        t.that(
            type(got) is tuple and whole(*got) and got == (best, 0),
            "eta = {eta}, {count} trials have reported on rung 0, nobody has gone on: trial {best} is the best of them. You return {got}.",
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
        "Trial {best} may leave rung 1, and another one rung 0: the higher rung comes first. You return {got}.",
        best=best,
        got=got,
    )


@check("asha", points=1)
def check_too_few(student, t):
    "With fewer than eta reports nobody goes on"
    for eta in (2, 3, 4):
        rung = told(t, t.shuffled(list(range(20)))[: eta - 1])
        got = student.promotion([rung, {}], [[], []], eta)
        message = "eta = {eta}, {count} reports: one part in eta of them, rounded down, is nobody. Return None. You return {got}."
        t.that(got is None, message, eta=eta, count=len(rung), got=got)


# -- 11 · prune


def falling(t, last: float, epochs: int) -> list[float]:
    return [last + 0.1 * (epochs - 1 - epoch) + t.uniform(0, 0.05) * (epoch < epochs - 1) for epoch in range(epochs)]


def stops(student, t, losses, others, warmup, enough) -> bool:
    got = student.should_stop(losses, others, warmup, enough)
    t.that(type(got) is bool, "should_stop(...) is {got}: return True or False", got=got)
    return got


@check("prune", points=2)
def check_median(student, t):
    "Above the median of the same epoch it stops, below it goes on"
    epochs = t.integer(3, 6)
    for at, count in ((0.9, 5), (0.9, 6), (0.9, 7)):
        values = [at - 0.3 - 0.01 * i for i in range(count // 2)] + [at + 0.3 + 0.01 * i for i in range(count - count // 2 - 1)] + [at + 20]
        others = t.shuffled([falling(t, value, epochs) + [0.0] * t.integer(0, 2) for value in values])
        others += [[0.1] * t.integer(1, epochs - 1) for _ in range(3)]  # stopped before: they say nothing about this epoch
        middle = sorted(values)
        median = (middle[(count - 1) // 2] + middle[count // 2]) / 2
        for losses, want in ((falling(t, median + 0.05, epochs), True), (falling(t, median - 0.05, epochs), False)):
            got = stops(student, t, losses, t.shuffled(others), 1, count)
            t.that(
                got is want,
                "epoch {epochs}, {count} earlier trials got so far, their median there is {median:.3f}, this trial has {loss:.3f}: "
                "should_stop is {got}. Compare with the median of the losses at the same epoch.",
                epochs=epochs, count=count, median=median, loss=losses[-1], got=got,
            )  # fmt: skip


@check("prune", points=1)
def check_patience(student, t):
    "Not during warm-up, not before enough trials got so far"
    epochs, count = t.integer(2, 5), t.integer(4, 7)
    others = [falling(t, 0.2, epochs) for _ in range(count)]
    losses = falling(t, 5.0, epochs)
    t.that(not stops(student, t, losses, others, epochs, 2), "Epoch {epochs} of a warm-up of {epochs} is not judged.", epochs=epochs)
    t.that(stops(student, t, losses, others, epochs - 1, count), "The first epoch after warm-up is judged, with exactly `enough` trials.")
    short = [*others, [0.2] * (epochs - 1)]
    message = (
        "{count} earlier trials got to this epoch and {enough} are needed: it is not judged. One that was stopped before does not count."
    )
    t.that(not stops(student, t, losses, short, epochs - 1, count + 1), message, count=count, enough=count + 1)


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


def generation(student, t, case: dict) -> tuple[list, list]:
    parents, rates = t.items(student.new_generation(**case), 2, "new_generation(...)")
    size = len(case["losses"])
    return t.items(parents, size, "the parents"), t.items(rates, size, "the learning rates")


@check("population", points=2)
def check_exploit(student, t):
    "The worst, and only they, go on from one of the best"
    for _ in range(3):
        case = population_case(t)
        best, worst = ranks_of(case)
        want = [best[case["picks"][member]] if member in worst else member for member in range(len(case["losses"]))]
        got, _ = generation(student, t, case)
        t.that(
            whole(*got) and got == want,
            "The parents are {got}, expected {want}: {count} members of {size} are the worst, and only these are replaced.",
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


# -- quiz

complete_quiz = quiz_complete(QUIZ, points=1)
