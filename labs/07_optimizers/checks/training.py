"""The visible checks of clipping, accumulation and the verdict on two optimisers."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import explaining, near, same, wrong_if

from .scenarios import accumulated, clipped
from .twins import descended, watched_step

# -- clip

WHOLE = "One norm for all gradients: the root of the sum of all squares, not one for each tensor."
AFTER = "a gradient, after clipping,"


def clip_case(t, share: float) -> tuple[list[Tensor | None], float, float]:
    """Gradients with a None, their norm, and a bound of ``share`` times the norm."""
    gradients: list[Tensor | None] = [t.normal(t.integer(2, 4), t.integer(2, 4)) for _ in range(2)]
    gradients.insert(t.integer(0, 2), None)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients if g is not None))
    return gradients, norm, share * norm


def clip_result(student, t, gradients: list[Tensor | None], most: float) -> tuple[Any, list[Any]]:
    cause = {"NoneType": "A gradient can be None: leave it out", "ZeroDiv": "All gradients can be 0"}
    with explaining(cause):
        run = student.run(clipped, gradients=gradients, most=most)
    norm, after = t.items(run, 2, "the result")
    return norm, t.items(after, len(gradients), "the gradients")


@check("clip", points=1)
def check_norm(student, t):
    "The norm of all gradients together, as it was before"
    gradients, norm, most = clip_case(t, t.uniform(0.3, 0.6))
    got = t.number(clip_result(student, t, gradients, most)[0], "clip_(...)")
    shorter = "This is the norm after clipping: return the one before, which shows an explosion."
    longest = max(float(g.norm()) for g in gradients if g is not None)
    wrong_if(t, got, norm, {shorter: most, WHOLE: longest}, rtol=1e-4)
    t.close(got, norm, "the norm", rtol=1e-4)


@check("clip", points=1)
def check_scaled(student, t):
    "Gradients that are too long get one factor"
    gradients, norm, most = clip_case(t, t.uniform(0.3, 0.6))
    after = clip_result(student, t, gradients, most)[1]
    unchanged = "The tensors have not changed: scale them in place, and put no new ones into the list."
    cut = "Each element was cut. Scale all by one factor, so that the direction stays."
    for before, got in zip(gradients, after):
        if before is None:
            t.that(got is None, "a gradient that was None is not None afterwards")
            continue
        alone = before * min(1.0, most / float(before.norm()))
        mistakes = {WHOLE: alone, unchanged: before, cut: before.clamp(-most, most)}
        same(t, got, before * most / norm, AFTER, mistakes)


@check("clip", points=1)
def check_short(student, t):
    "Short gradients stay unchanged"
    gradients, norm, most = clip_case(t, t.uniform(0.3, 0.6))
    _, after = clip_result(student, t, gradients, most)
    changed = any(not near(value, before) for before, value in zip(gradients, after) if before is not None)
    t.that(changed, "not tested yet: long gradients do not change, see the check of those")
    most = norm * t.uniform(1.5, 3.0)
    _, after = clip_result(student, t, gradients, most)
    stretched = "The gradients were shorter than `most`, and are now longer: the factor is at most 1."
    for before, value in zip(gradients, after):
        if before is not None:
            same(t, value, before, AFTER, {stretched: before * most / norm})
    zeros = [torch.zeros(t.integer(2, 4)), None]
    _, after = clip_result(student, t, zeros, most)
    t.close(after[0], zeros[0], "a tensor of zeros, after clipping,")


# -- accumulate


def accumulation_case(t, sizes: list[list[int]], most: float) -> dict[str, Any]:
    """A weight, and for each step its parts: inputs and targets."""
    inside, outside = t.integer(2, 4), t.integer(1, 3)
    drawn = [[[t.normal(count, n).double() for n in (inside, outside)] for count in parts] for parts in sizes]
    batches = [[tuple(part) for part in parts] for parts in drawn]
    weight = t.normal(outside, inside).double()
    return {"weight": weight, "batches": batches, "rate": t.uniform(0.05, 0.2), "most": most}


def compare_steps(student, t, case: dict, mistakes: dict[str, str], also=(), watched=False) -> None:
    """The weights after each step are the twin's; ``also``: ways that another check names, which pass."""
    run = student.run(accumulated, watched=watched, **case)
    found = t.items(run, len(case["batches"]), "the weights")
    got = [t.tensor(row, "the weight", shape=case["weight"].shape) for row in found]
    known = (watched_step if watched else descended)(**case)
    if not any(near(got, known[way], 1e-6) for way in also):
        wrong = {message: known[way] for message, way in mistakes.items()}
        same(t, got, known["right"], "the weight after step {i}", wrong, 1e-6, 1e-9)


@check("accumulate", points=1)
def check_accumulated(student, t):
    "Parts of different sizes give the step of the whole batch"
    sizes = [t.shuffled([t.integer(1, 3), t.integer(4, 6), t.integer(7, 9)]) for _ in range(2)]
    mistakes = {
        "A mean of means: weight each part by its share of the samples.": "mean of means",
        "The gradients of the parts are summed: the weights of the parts must sum to 1.": "sum",
        "Only the last part counts: clear the gradients once, before the first part.": "last part",
        "The gradients of the previous step are still there: clear them before the first part.": "kept",
    }
    compare_steps(student, t, accumulation_case(t, sizes, 1e6), mistakes)


@check("accumulate", points=1)
def check_part_by_part(student, t):
    "Each part has its backward before the next part begins"
    case = accumulation_case(t, [[t.integer(2, 4)] * t.integer(2, 4)], 1e6)
    together = (
        "When a part begins, `.grad` must hold the gradient of the parts before it: call backward for each "
        "part, which frees its graph. One backward for all, or one batch of all, saves no memory."
    )
    compare_steps(student, t, case, {together: "together"}, also=("sum", "last part"), watched=True)


@check("accumulate", points=1)
def check_clipped_once(student, t):
    "The sum is clipped, once"
    case = accumulation_case(t, [[t.integer(2, 4)] * 3], t.uniform(0.01, 0.05))
    mistakes = {
        "Each part was clipped: clip the whole gradient, after the last part.": "each clipped",
        "The gradient was clipped after each part: clip it once, when it is complete.": "clipped again",
        "The gradient was not clipped: call clip_ before the step.": "not clipped",
    }
    compare_steps(student, t, case, mistakes, also=("last part", "sum"))


# -- verdict


def pooled(ours: list[float], theirs: list[float]) -> float:
    n, m = len(ours), len(theirs)
    return math.sqrt(((n - 1) * stdev(ours) ** 2 + (m - 1) * stdev(theirs) ** 2) / (n + m - 2))


def scattered(t, count: int, spread: float, twice: bool = False) -> list[float]:
    """Accuracies with the mean 0 and exactly this spread; ``twice``: each occurs two times."""
    values = [float(z) for z in t.normal(count // 2 if twice else count)] * (1 + twice)
    return [spread * (value - mean(values)) / stdev(values) for value in values]


def compared(t, n: int, m: int, bound: float, share: float, twice=False, constant=False):
    """Accuracies whose statistic is ``share`` times the bound; ours vary twice as much as theirs, and theirs
    not at all if they are ``constant``."""
    spread = t.uniform(0.005, 0.03)
    theirs = [0.8] * m if constant else [0.8 + value for value in scattered(t, m, spread)]
    ours = scattered(t, n, 2 * spread, twice)
    gap = share * bound * pooled(ours, theirs) * math.sqrt(1 / n + 1 / m)
    first, last = (min, max) if share > 0 else (max, min)  # the first runs say the opposite of the means
    ours.insert(0, ours.pop(ours.index(first(ours))))
    theirs.insert(0, theirs.pop(theirs.index(last(theirs))))
    return [0.8 + value + gap for value in ours], theirs


def said(student, t, ours: list[float], theirs: list[float], bound: float) -> str:
    got = student.verdict(ours, theirs, bound)
    words = ("better", "worse", "not shown")
    t.that(got in words, 'verdict(...) is {got}: return "better", "worse" or "not shown"', got=str(got)[:40])
    return got


SAYS = 'the means differ by {share:.2f} x bound x s x sqrt(1/{n} + 1/{m}): "{want}", not "{got}"'


@check("verdict", points=2)
def check_verdict(student, t):
    "Better, worse, or not shown"
    bound, cases = t.uniform(2.0, 4.0), {1.012: "better", -1.012: "worse"}
    for share, want in t.shuffled([*cases.items(), (0.988, "not shown"), (-0.988, "not shown")]):
        n, m = 5, t.choice((5, t.integer(11, 14)))
        got = said(student, t, *compared(t, n, m, bound, share), bound)
        t.that(got == want, SAYS, n=n, m=m, share=share, want=want, got=got)
    message = 'some runs are equal, but the difference is above the bound: "better", not "{got}"'
    for how in ({"twice": True}, {"constant": True}):
        got = said(student, t, *compared(t, 8, t.integer(11, 14), bound, 1.012, **how), bound)
        t.that(got == "better", message, got=got)


def tested_verdict(student, t) -> float:
    """A bound, after an ordinary case."""
    bound = t.uniform(2.0, 4.0)
    ours, theirs = compared(t, 8, 8, bound, 3.0)
    message = "not tested yet: verdict(...) does not find a clear difference, see the first check"
    t.that(said(student, t, ours, theirs, bound) == "better", message)
    return bound


@check("verdict", points=1)
def check_few_seeds(student, t):
    "Fewer than five runs show nothing"
    bound = tested_verdict(student, t)
    message = '{n} and {m} runs: a claim needs at least 5 of each, so "not shown"'
    for n, m in t.shuffled([(1, 6), (t.integer(2, 4), 7), (6, t.integer(2, 4)), (1, 1)]):
        ours, theirs = ([shift + 0.001 * float(z) for z in t.normal(k)] for k, shift in ((n, 0.9), (m, 0.5)))
        t.that(said(student, t, ours, theirs, bound) == "not shown", message, n=n, m=m)


@check("verdict", points=1)
def check_copies(student, t):
    "Copies of one run show nothing"
    bound, first = tested_verdict(student, t), t.uniform(0.5, 0.9)
    second = first - t.uniform(0.1, 0.3)
    ours, theirs = [first] * t.integer(5, 9), [second] * t.integer(5, 9)
    with explaining({"ZeroDivision": "s can be 0, if all runs are equal: then nothing is shown"}):
        got = said(student, t, ours, theirs, bound)
    message = 'all runs of each optimiser are equal, so the seed changes nothing: "not shown", not "{got}"'
    t.that(got == "not shown", message, got=got)
