"""The visible checks of this lab. A schedule is compared step by step with the library's; what trains runs in a process of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch

from dlo_lib.grading.contract import check, scenario
from dlo_lib.grading.quiz import quiz_complete
from dlo_lib.optim.finder import smooth
from dlo_lib.optim.schedules import Cosine, Schedule, Step, Triangular, Triangular2, WarmUp, WarmUpStableDecay
from dlo_lib.optim.snapshots import SnapshotEnsemble

from .hints import HINTS as HINTS
from .quiz import QUIZ
from .twins import ACCUMULATED, AFTER, RIGHT, descent, one_cycle_of, valley

CLOSE = 1e-6


def same_factors(t, call: Callable[[int], object], want: Schedule, steps: Iterable[int], what: str, lesson: str) -> None:
    """The student's factor at each of ``steps`` is that of ``want``."""
    for step in steps:
        got, expected = t.number(call(step), what, step=step), want(step)
        message = what + " is {got:.5g}, and should be {want:.5g}. " + lesson
        t.that(bool(abs(got - expected) < CLOSE), message, step=step, got=got, want=expected)


# -- 1 · sweep


def rates_of(student, t) -> tuple[list[float], float, float]:
    lowest, highest, count = 10 ** t.uniform(-6.0, -4.0), 10 ** t.uniform(-1.0, 1.0), t.integer(5, 40)
    rates = t.items(student.sweep(lowest, highest, count), count, "sweep(..., {count})", count=count)
    return [t.number(rate, "a rate of the sweep") for rate in rates], lowest, highest


@check("sweep", points=1)
def check_sweep_ends(student, t):
    "It begins at the lowest rate and ends at the highest"
    for _ in range(2):
        rates, lowest, highest = rates_of(student, t)
        t.that(bool(abs(rates[0] / lowest - 1) < CLOSE), "the first rate is {got:.3g}, not {want:.3g}", got=rates[0], want=lowest)
        message = "the last rate is {got:.3g}, not {want:.3g}: n rates have n - 1 gaps between them"
        t.that(bool(abs(rates[-1] / highest - 1) < CLOSE), message, got=rates[-1], want=highest)


@check("sweep", points=1)
def check_sweep_factor(student, t):
    "Each rate is the one before, times one factor"
    rates, _, _ = rates_of(student, t)
    t.that(all(rate > 0 for rate in rates), "a learning rate is above 0")
    factors = [later / rate for rate, later in itertools.pairwise(rates)]
    message = "the second rate is {first:.3g} times the first, the last {last:.3g} times the one before: that is not exponential"
    t.that(bool(max(factors) / min(factors) - 1 < 1e-4 and factors[0] > 1), message, first=factors[0], last=factors[-1])


# -- 2 · range_test


@scenario
def tested(student, rank, world, weight, batches, rates):
    """A range test on a small model; what it returned, and what the model is afterwards."""
    net = torch.nn.Sequential(torch.nn.Linear(*reversed(weight.shape), bias=False), torch.nn.Tanh())
    net[0].weight.data.copy_(weight)
    losses = student.range_test(net, lambda model, x: (model(x) - 1).square().mean(), batches, rates)
    return [losses, net[0].weight.data]


def test_case(t) -> dict:
    inside, outside, count = t.integer(2, 5), t.integer(1, 4), t.integer(4, 7)
    rates = [10 ** (-1.5 + 2 * k / count) for k in range(count)]
    return {"weight": t.normal(outside, inside), "batches": [t.normal(t.integer(3, 8), inside) for _ in range(count)], "rates": rates}


@check("range_test", points=3, seconds=30)
def check_range_losses(student, t):
    "The losses that are seen while the rate grows"
    for _ in range(2):
        case = test_case(t)
        losses, _ = t.items(student.ranks(tested, [case]).results[0], 2, "the result")
        count = len(case["rates"])
        got = torch.tensor([t.number(loss, "a loss") for loss in t.items(losses, count, "the list of losses")])
        known = {way: torch.tensor(values) for way, values in descent(**case).items()}
        accumulated = torch.allclose(got, known[ACCUMULATED], rtol=1e-4) and not torch.allclose(got, known[RIGHT], rtol=1e-3)
        t.that(not accumulated, "The gradients of earlier steps are still there: each backward adds to what .grad holds.")
        after = torch.allclose(got, known[AFTER], rtol=1e-4)
        t.that(not after, "Each loss is taken after its step, on the same batch. Note the loss that the backward begins with.")
        t.close(got, known[RIGHT], "the list of losses (w <- w - rate * gradient after each)", rtol=1e-3, atol=1e-5)


@check("range_test", points=1, seconds=30)
def check_range_weights_back(student, t):
    "The weights are afterwards what they were"
    case = test_case(t)
    _, weight = t.items(student.ranks(tested, [case]).results[0], 2, "the result")
    t.close(weight, case["weight"], "a weight after the test. It was only a test: copy the values first (clone), and put them back", rtol=0)


# -- 3 · smoothed


@check("smoothed", points=2)
def check_smoothed(student, t):
    "The exponential mean, right from the first loss on"
    for _ in range(2):
        losses, beta = [t.uniform(0.5, 3.0) for _ in range(t.integer(3, 12))], t.uniform(0.5, 0.95)
        curve = t.items(student.smoothed(losses, beta), len(losses), "smoothed(losses, beta)")
        lesson = "A mean that begins with 0 is too low at first: divide by 1 - beta ** k, k = 1, 2, ..."
        for k, (got, want) in enumerate(zip(curve, smooth(losses, beta)), 1):
            value = t.number(got, "value {k}", k=k)
            message = "value {k} is {got:.4g}, and should be {want:.4g}. " + lesson
            t.that(bool(abs(value - want) < CLOSE * 10), message, k=k, got=value, want=want)


# -- 4 · suggest


def suggested(student, t, rates: list[float], losses: list[float], name: str) -> float:
    found = student.suggest(rates, losses)
    t.that(type(found) is dict and set(found) == {"steepest", "bottom"}, 'suggest(...) should give a dict with "steepest" and "bottom"')
    return t.number(found[name], 'suggest(...)["{name}"]', name=name)


@check("suggest", points=1)
def check_bottom(student, t):
    "Where the loss is lowest"
    for _ in range(2):
        rates, losses, _, bottom = valley(t)
        got = suggested(student, t, rates, losses, "bottom")
        message = "bottom is {got:.3g}; the loss is lowest at {want:.3g}. Not every place where it rises for once is its bottom."
        t.that(bool(abs(got / rates[bottom] - 1) < 0.01), message, got=got, want=rates[bottom])


@check("suggest", points=2)
def check_steepest(student, t):
    "Where the loss falls fastest"
    for _ in range(2):
        rates, losses, steepest, bottom = valley(t)
        ends = bottom + 2  # here the loss only rises after the bottom
        got = suggested(student, t, rates[:ends], losses[:ends], "steepest")
        near = rates[steepest] / 1.31 <= got <= rates[steepest] * 1.31
        message = "steepest is {got:.3g}; on the logarithmic axis of the plot the loss falls fastest near {want:.3g}"
        t.that(bool(near), message, got=got, want=rates[steepest])


# -- 5 · decay


@check("decay", points=1)
def check_step_factor(student, t):
    "Steps"
    every, gamma = t.integer(3, 8), t.uniform(0.1, 0.7)
    lesson = f"The first {every} steps, 0 to {every - 1}, have factor 1."
    call = f"step_factor({{step}}, {every}, {gamma:.3g})"
    same_factors(t, lambda step: student.step_factor(step, every, gamma), Step(every, gamma), range(3 * every + 1), call, lesson)


@check("decay", points=2)
def check_cosine_factor(student, t):
    "Half a cosine"
    for final in (0.0, t.uniform(0.05, 0.3)):
        steps = t.integer(5, 20)
        lesson = "(1 + cos(pi x)) / 2 goes from 1 to 0: stretch it, so that it ends at `final`."
        call = f"cosine_factor({{step}}, {steps}, {final:.3g})"
        same_factors(t, lambda s: student.cosine_factor(s, steps, final), Cosine(steps, final), range(steps + 1), call, lesson)  # noqa: B023


# -- 6 · warmup


def warmed(student, t, warm: int, steps: int, which: Iterable[int], lesson: str) -> None:
    final = t.uniform(0.0, 0.2)
    call = f"warmup_cosine({{step}}, {warm}, {steps}, {final:.3g})"
    same_factors(t, lambda s: student.warmup_cosine(s, warm, steps, final), WarmUp(warm, Cosine(steps - warm, final)), which, call, lesson)


@check("warmup", points=1)
def check_rise(student, t):
    "A straight rise from 0"
    warm = t.integer(3, 8)
    warmed(student, t, warm, warm + t.integer(5, 12), range(warm), "The rise begins at 0 and would reach 1 at step `warm`.")


@check("warmup", points=2)
def check_after_rise(student, t):
    "A whole cosine in the steps that are left"
    for _ in range(2):
        warm, left = t.integer(3, 8), t.integer(5, 12)
        lesson = "The cosine begins when the warm-up ends, at 1, and has steps - warm steps."
        warmed(student, t, warm, warm + left, range(warm, warm + left + 1), lesson)


# -- 7 · cyclical


@check("cyclical", points=2)
def check_triangular(student, t):
    "Triangles of one height"
    rise, lowest = t.integer(3, 7), t.uniform(0.05, 0.4)
    lesson = "Up in `rise` steps from `lowest` to 1, down in as many, and again."
    call = f"triangular({{step}}, {rise}, {lowest:.3g}, False)"
    want = Triangular(rise, lowest)
    same_factors(t, lambda step: student.triangular(step, rise, lowest, False), want, range(5 * rise), call, lesson)


@check("cyclical", points=1)
def check_halved(student, t):
    "Each triangle half as high as the one before"
    rise, lowest = t.integer(3, 7), t.uniform(0.05, 0.4)
    lesson = "The first triangle reaches 1. What is halved is the height above `lowest`, which stays."
    call = f"triangular({{step}}, {rise}, {lowest:.3g}, True)"
    want = Triangular2(rise, lowest)
    same_factors(t, lambda step: student.triangular(step, rise, lowest, True), want, range(7 * rise), call, lesson)


# -- 8 · one_cycle


def cycle_of(student, t, place: int, which: Callable[[int, int], Iterable[int]], lesson: str) -> None:
    """``place`` 0 compares the factors, 1 the momenta, at the steps ``which(top, steps)``."""
    top, left = t.integer(3, 8), t.integer(5, 14)
    steps, start, final = top + 1 + left, t.uniform(0.03, 0.2), t.uniform(0.0001, 0.01)
    low, high = t.uniform(0.8, 0.86), t.uniform(0.9, 0.98)
    cycle = one_cycle_of(top, steps, start, final, low, high)

    def call(step: int) -> object:
        return t.items(student.one_cycle(step, top, steps, start, final, low, high), 2, "one_cycle(...): a factor and a momentum")[place]

    what = ("the factor", "the momentum")[place] + f" of step {{step}} (top {top}, steps {steps})"
    same_factors(t, call, cycle.momentum if place else cycle, which(top, steps), what, lesson)


@check("one_cycle", points=1)
def check_cycle_rise(student, t):
    "The factor rises along half a cosine"
    for _ in range(2):
        cycle_of(student, t, 0, lambda top, steps: range(top + 1), "Half a cosine from `start` at step 0 to 1 at step `top`.")


@check("one_cycle", points=2)
def check_cycle_fall(student, t):
    "The factor falls to its end in the last step"
    lesson = "Half a cosine from 1 at step `top` to `final` at step steps - 1, the last one."
    for _ in range(2):
        cycle_of(student, t, 0, lambda top, steps: range(top, steps), lesson)


@check("one_cycle", points=2)
def check_cycle_momentum(student, t):
    "The momentum does the contrary"
    lesson = "It falls from `high` to `low` while the rate rises, and comes back while the rate falls."
    for _ in range(2):
        cycle_of(student, t, 1, lambda top, steps: range(top), lesson)


# -- 9 · wsd


def wsd_of(student, t, sizes: tuple[int, int, int], which: Iterable[int], lesson: str) -> None:
    lowest = t.uniform(0.01, 0.2)
    call = f"wsd({{step}}, {', '.join(map(str, sizes))}, {lowest:.3g})"
    same_factors(t, lambda step: student.wsd(step, *sizes, lowest), WarmUpStableDecay(*sizes, lowest), which, call, lesson)


@check("wsd", points=1)
def check_stable(student, t):
    "The rise and the plateau"
    warm, stable, decay = t.integer(3, 7), t.integer(5, 10), t.integer(5, 10)
    lesson = "`warm` steps of rise from `lowest`, then `stable` steps at 1."
    wsd_of(student, t, (warm, stable, decay), range(warm + stable), lesson)


@check("wsd", points=2)
def check_cool_down(student, t):
    "The fall, as one minus a square root"
    warm, stable, decay = t.integer(3, 7), t.integer(5, 10), t.integer(5, 10)
    lesson = "x goes from 0 to 1 in `decay` steps; 1 - sqrt(x) goes from 1 to 0: stretch it, so that it ends at `lowest`."
    wsd_of(student, t, (warm, stable, decay), range(warm + stable + 1, warm + stable + decay + 3), lesson)


# -- 10 · follow


@scenario
def followed(student, rank, world, table, peaks, steps):
    """The learning rates of all groups, at first and after each step."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peak} for peak in peaks]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    follow = student.Follow(optimizer, lambda step: table[step])
    seen = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(steps):
        follow.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    return seen


def rows(t, found: object, count: int, groups: int) -> list[list[float]]:
    return [
        [t.number(value, "a learning rate") for value in t.items(row, groups, "the rates of the groups")]
        for row in t.items(found, count, "the rows")
    ]


@check("follow", points=2, seconds=30)
def check_follow(student, t):
    "After each step the rate is the peak times the factor of that step"
    table, peak = [t.uniform(0.2, 0.9) for _ in range(t.integer(4, 8))], t.uniform(0.01, 0.5)
    case = {"table": table, "peaks": [peak], "steps": len(table) - 1}
    for step, (got,) in enumerate(rows(t, student.ranks(followed, [case]).results[0], len(table), 1)):
        message = "after {step} steps the rate is {got:.4g}, and should be {want:.4g}. Multiply the peak, not what is there already."
        t.that(bool(abs(got - peak * table[step]) < CLOSE), message, step=step, got=got, want=peak * table[step])


@check("follow", points=1, seconds=30)
def check_groups(student, t):
    "Each parameter group has its own peak"
    peaks, factor = [t.uniform(0.01, 0.5) for _ in range(3)], t.uniform(0.2, 0.9)
    (got,) = rows(t, student.ranks(followed, [{"table": [factor], "peaks": peaks, "steps": 0}]).results[0], 1, 3)
    for number, (rate, peak) in enumerate(zip(got, peaks)):
        message = "group {number} begins with {got:.4g}, and should with {want:.4g}: its own peak times factor(0)"
        t.that(bool(abs(rate - peak * factor) < CLOSE), message, number=number, got=rate, want=peak * factor)


# -- 11 · snapshots


@check("snapshots", points=2)
def check_snapshot_steps(student, t):
    "A snapshot where each cosine has come down"
    for count in (t.integer(2, 5), t.integer(2, 5)):
        steps = count * t.integer(4, 9) + t.integer(1, count - 1)
        ensemble, model = SnapshotEnsemble(steps, count), torch.nn.Identity()
        want = []
        for step in range(1, steps + 1):
            taken = len(ensemble)
            ensemble.after_step(step, model)
            want += [step] * (len(ensemble) - taken)
        got = student.snapshot_steps(steps, count)
        message = "snapshot_steps({steps}, {count}) is {got}, and should be {want}: a cycle has ceil(steps / snapshots) steps, the last may have fewer"
        t.that(got == want, message, steps=steps, count=count, got=str(got)[:60], want=str(want))


@check("snapshots", points=2)
def check_ensemble(student, t):
    "The mean of the members' probabilities"
    members, images, classes = t.integer(2, 5), t.integer(2, 6), t.integer(3, 6)
    logits = 3 * t.normal(members, images, classes)
    want = logits.softmax(-1).mean(0)
    got = t.tensor(student.ensemble(logits), "ensemble(logits)", shape=tuple(want.shape))
    confident = "A member that shouts (large logits) would outvote the others: turn each member's logits into probabilities first"
    t.close(got, want, "a probability of the ensemble. " + confident, rtol=1e-4, atol=1e-5)


# -- quiz

complete_quiz = quiz_complete(QUIZ, points=1)
