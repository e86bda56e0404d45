"""The hidden checks: where rounding, divergence and units show, and the right answers of the quiz. Never released."""

from __future__ import annotations

import math

import torch

from dlo_lib.grading.contract import check
from dlo_lib.grading.quiz import Answer, quiz_right
from dlo_lib.hpo.halving import brackets as known_brackets

from .checks import chosen_candidate, falling, generation, population_case, ranked, ranks_of, stops, told
from .quiz import QUIZ
from .twins import cube, wavy

# -- 3 · process


@check("process", points=1)
def check_sure_points(student, t):
    "Without noise there is no doubt at the measured points"
    points = torch.arange(60, dtype=torch.float64)[:, None] + cube(t, 60, 1) / 10
    _, std = t.items(student.posterior(points, t.normal(60, dtype=torch.float64), points, t.uniform(0.5, 0.8), 0.0), 2, "posterior(...)")
    t.tensor(std, "the standard deviation", shape=(60,))
    t.that(bool(std.isfinite().all()), "Rounding makes some variances a little negative, and their root NaN: clamp them to 0.")
    t.that(bool((std < 1e-3).all()), "Without noise a measured point has no doubt left.")


# -- 4 · improvement


@check("improvement", points=1)
def check_certain(student, t):
    "Where nothing is left to chance"
    mean = t.normal(12, dtype=torch.float64)
    best = float(mean.median())  # one candidate is exactly as good as the best
    got = t.tensor(student.expected_improvement(mean, torch.zeros(12, dtype=torch.float64), best), "EI", shape=(12,))
    t.that(bool(got.isfinite().all()), "Where the doubt is 0, z is a division by 0: EI must stay a number.")
    t.that(
        bool(torch.allclose(got.double(), (best - mean).clamp(min=0), atol=1e-9)), "Without doubt the gain is max(best - mean, 0), not 0."
    )


# -- 6 · next


@check("next", points=1)
def check_units(student, t):
    "Losses in other units lead to the same choice"
    for _ in range(3):
        points, candidates = cube(t, 8, 2), cube(t, 40, 2)
        values = wavy(t, points)
        one = chosen_candidate(student, t, points, values, candidates)
        other = chosen_candidate(student, t, points, t.uniform(50, 100) * values + t.uniform(300, 500), candidates)
        t.that(one == other, "The process assumes values of mean 0 and standard deviation 1: standardise them, and `best` with them.")


# -- 8 · halving


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
            "With NaN among the losses others survive than the best: no comparison with NaN is true, so sorting needs a key that puts it last.",
        )


# -- 9 · hyperband


@check("hyperband", points=1)
def check_whole_logarithms(student, t):
    "Powers whose logarithm is not whole in floating point"
    for most, eta in t.shuffled([(243, 3), (1000, 10), (125, 5)]):
        got, want = student.brackets(most, eta), len(known_brackets(most, eta))
        t.that(
            type(got) is list and len(got) == want,
            "A floating-point logarithm of a power of eta may fall just short of a whole number: count in whole numbers.",
        )


# -- 10 · ASHA


@check("asha", points=1)
def check_already_promoted(student, t):
    "Who has gone on keeps its place among the best"
    for eta in (2, 3):
        rung = told(t, t.shuffled(list(range(40)))[: 4 * eta])
        best = ranked(rung)[:4]
        got = student.promotion([rung, {}, {}], [t.shuffled(best), [], []], eta)
        t.that(got is None, "All of the best 1 / eta have gone on already: the next best is not among them, so a new trial begins.")


# -- 11 · prune


@check("prune", points=1)
def check_best_so_far(student, t):
    "Its best loss so far counts"
    epochs = t.integer(4, 6)
    others = [falling(t, 1.0 + 0.01 * i, epochs) for i in range(5)]
    losses = [*falling(t, 0.5, epochs - 1), 3.0]
    t.that(
        not stops(student, t, losses, others, 1, 3), "One bad epoch after a good one does not stop a trial: its best loss so far counts."
    )


@check("prune", points=1)
def check_nan_stops(student, t):
    "NaN stops the trial at once"
    epochs = t.integer(2, 4)
    losses = [*falling(t, 0.5, epochs - 1), math.nan]
    others = [falling(t, 1.0, epochs) for _ in range(4)]
    for warmup, known in ((0, others), (epochs + 3, others), (0, [])):
        t.that(
            stops(student, t, losses, known, warmup, 2), "A training whose loss is NaN will not come back: stop it, also during warm-up."
        )


# -- 12 · population


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
            t.that(bool(abs(got - want) < 1e-9), "A perturbed learning rate that leaves its bounds is set to the bound.")


# -- quiz

ANSWERS = {
    "q1": Answer("b", "16 random trials have 16 different values of each hyperparameter, the grid has 4"),
    "q2": Answer("a", "its mean is no lower than others, but its doubt is large: that is what the second term pays for"),
    "q3": Answer("c", "a rung decides when its last trial has reported; ASHA promotes among those that have reported so far"),
    "q4": Answer("d", "early losses that say little throw good trials away; Hyperband's careful brackets begin with more resource"),
    "q5": Answer("b", "0 is inside: with these repeats the sign cannot be told"),
}
right = quiz_right(QUIZ, ANSWERS, points=1)
