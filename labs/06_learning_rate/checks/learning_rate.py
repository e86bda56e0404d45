"""The visible checks of this lab. Schedules are compared step by step with the library's; trainings run in a separate process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

import torch

from dlo_lib.grading.checks.contract import check, scenario
from dlo_lib.labkit.compare import near, wrong_if
from dlo_lib.optim.finder import smooth
from dlo_lib.optim.schedules import (
    Cosine,
    LRSchedule,
    Step,
    Triangular,
    Triangular2,
    WarmUp,
    WarmUpStableDecay,
)
from dlo_lib.optim.snapshots import SnapshotEnsemble

from .twins import ACCUMULATED, AFTER, RIGHT, descent, one_cycle_of, squares_of, valley

CLOSE = 1e-6


def same_factors(t, call: Callable[[int], object], want: LRSchedule, steps: Iterable[int], what: str, lesson: str) -> None:
    """Check that the student's factor at each of ``steps`` is that of ``want``."""
    for step in steps:
        got, expected = t.number(call(step), what, step=step), want(step)
        message = what + " is {got:.5g}, expected {want:.5g}. " + lesson
        t.that(bool(abs(got - expected) < CLOSE), message, step=step, got=got, want=expected)


# -- 1 · sweep


def rates_of(student, t) -> tuple[list[float], float, float]:
    lowest, highest, count = 10 ** t.uniform(-6.0, -4.0), 10 ** t.uniform(-1.0, 1.0), t.integer(5, 40)
    rates = t.items(student.sweep(lowest, highest, count), count, "sweep(..., {count})", count=count)
    return [t.number(rate, "a rate of the sweep") for rate in rates], lowest, highest


@check("sweep", points=1)
def check_sweep_ends(student, t):
    "The first rate is the lowest, the last is the highest"
    for _ in range(2):
        rates, lowest, highest = rates_of(student, t)
        t.that(bool(abs(rates[0] / lowest - 1) < CLOSE), "the first rate is {got:.3g}, not {want:.3g}", got=rates[0], want=lowest)
        message = "the last rate is {got:.3g}, not {want:.3g}: n rates have n - 1 gaps between them"
        t.that(bool(abs(rates[-1] / highest - 1) < CLOSE), message, got=rates[-1], want=highest)


@check("sweep", points=1)
def check_sweep_factor(student, t):
    "Each rate is the previous one, times a constant factor"
    rates, _, _ = rates_of(student, t)
    t.that(all(rate > 0 for rate in rates), "a learning rate must be above 0")
    factors = [later / rate for rate, later in itertools.pairwise(rates)]
    message = "the second rate is {first:.3g} times the first, the last {last:.3g} times the previous one: this is not exponential"
    t.that(bool(max(factors) / min(factors) - 1 < 1e-4 and factors[0] > 1), message, first=factors[0], last=factors[-1])


# -- 2 · range_test


@scenario
def tested(student, weight, batches, rates):
    """A range test on a small model: its result, and the weight of the model afterwards."""
    net = torch.nn.Sequential(torch.nn.Linear(*reversed(weight.shape), bias=False), torch.nn.Tanh())
    net[0].weight.data.copy_(weight)
    losses = student.range_test(net, lambda model, x: (model(x) - 1).square().mean(), batches, rates)
    return [losses, net[0].weight.data]


def test_case(t) -> dict:
    inside, outside, count = t.integer(2, 5), t.integer(1, 4), t.integer(4, 7)
    rates = [10 ** (-1.5 + 2 * k / count) for k in range(count)]
    batches = [t.normal(t.integer(3, 8), inside) for _ in range(count + 2)]  # more than rates
    return {"weight": t.normal(outside, inside), "batches": batches, "rates": rates}


@check("range_test", points=3, seconds=30)
def check_range_losses(student, t):
    "The losses while the rate grows"
    for _ in range(2):
        case = test_case(t)
        losses, _ = t.items(student.run(tested, **case), 2, "the result")
        count = len(case["rates"])
        got = torch.tensor([t.number(loss, "a loss") for loss in t.items(losses, count, "the list of losses")])
        known = {way: torch.tensor(values) for way, values in descent(**case).items()}
        accumulated = torch.allclose(got, known[ACCUMULATED], rtol=1e-4) and not torch.allclose(got, known[RIGHT], rtol=1e-3)
        t.that(not accumulated, "The gradients of earlier steps are still there: each backward adds to .grad.")
        after = torch.allclose(got, known[AFTER], rtol=1e-4)
        t.that(not after, "Each loss is taken after its step, on the same batch. Record the loss that you call backward on.")
        t.close(got, known[RIGHT], "the list of losses (w <- w - rate * gradient after each)", rtol=1e-3, atol=1e-5)


def tested_first(t, losses) -> None:
    """A test that was not made changes nothing."""
    t.that(type(losses) is list and len(losses) > 0, "not tested yet: range_test returns no list of losses, see the first check")


@check("range_test", points=1, seconds=30)
def check_range_weights_back(student, t):
    "The weights are restored"
    case = test_case(t)
    losses, weight = t.items(student.run(tested, **case), 2, "the result")
    tested_first(t, losses)
    off = (t.tensor(weight, "the weight after the test", shape=case["weight"].shape) - case["weight"]).abs().max()
    message = "The test has changed a weight of the model by {off:.2g}: copy the values first (clone), and restore them at the end."
    t.that(bool(off < CLOSE), message, off=float(off))


@scenario
def tested_with_norm(student, batches, rates, training):
    """The running mean and the mode of a model after a range test, and its modes during the test."""
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(batches[0].shape[1]), torch.nn.Linear(batches[0].shape[1], 1))
    net.train(training)
    before, modes = net[0].running_mean.clone(), []

    def loss_of(model, x):
        modes.append(model.training)
        return model(x).square().mean()

    losses = student.range_test(net, loss_of, batches, rates)
    return [before, net[0].running_mean, net.training, modes, losses]


def norm_case(t, training: bool) -> dict:
    width, count = t.integer(2, 5), t.integer(3, 5)
    batches = [t.normal(t.integer(4, 7), width) + 2 for _ in range(count)]
    return {"batches": batches, "rates": [0.01 * 2**k for k in range(count)], "training": training}


@check("range_test", points=1, seconds=30)
def check_buffers_back(student, t):
    "The running means are restored"
    before, after, *_, losses = t.items(student.run(tested_with_norm, **norm_case(t, True)), 5, "the result")
    tested_first(t, losses)
    off = (t.tensor(after, "the running mean after the test", shape=before.shape) - before).abs().max()
    message = (
        "The test has changed the running mean of a batch norm by {off:.2g}. A model has buffers besides its parameters: restore them."
    )
    t.that(bool(off < CLOSE), message, off=float(off))


@check("range_test", points=1, seconds=30)
def check_modes(student, t):
    "The model is in training mode during the test, and in its previous mode afterwards"
    for training in (True, False):
        *_, mode, modes, losses = t.items(student.run(tested_with_norm, **norm_case(t, training)), 5, "the result")
        tested_first(t, losses)
        known = type(modes) is list and all(type(each) is bool for each in modes)
        t.that(known and all(modes), "During the test the model is in evaluation mode: call model.train() before the first batch.")
        t.that(
            mode is training, "The model had training = {was} before the test and {now} after it: restore the mode.", was=training, now=mode
        )


# -- 3 · smoothed


@check("smoothed", points=2)
def check_smoothed(student, t):
    "The exponential mean, without bias at the first losses"
    for _ in range(2):
        losses, beta = [t.uniform(0.5, 3.0) for _ in range(t.integer(3, 12))], t.uniform(0.5, 0.95)
        curve = t.items(student.smoothed(losses, beta), len(losses), "smoothed(losses, beta)")
        lesson = "A mean that starts at 0 is too low at first: divide by 1 - beta ** k, k = 1, 2, ..."
        for k, (got, want) in enumerate(zip(curve, smooth(losses, beta)), 1):
            value = t.number(got, "value {k}", k=k)
            message = "value {k} is {got:.4g}, expected {want:.4g}. " + lesson
            t.that(bool(abs(value - want) < CLOSE * 10), message, k=k, got=value, want=want)


# -- 4 · suggest


def suggested(student, t, rates: list[float], losses: list[float], name: str) -> float:
    found = student.suggest(rates, losses)
    t.that(type(found) is dict and set(found) == {"steepest", "bottom"}, 'suggest(...) should return a dict with "steepest" and "bottom"')
    return t.number(found[name], 'suggest(...)["{name}"]', name=name)


@check("suggest", points=1)
def check_bottom(student, t):
    "The rate with the lowest loss"
    for _ in range(2):
        rates, losses, _, bottom = valley(t)
        got = suggested(student, t, rates, losses, "bottom")
        message = "bottom is {got:.3g}; the loss is lowest at {want:.3g}. A small rise before it is not the bottom."
        t.that(bool(abs(got / rates[bottom] - 1) < 0.01), message, got=got, want=rates[bottom])


@check("suggest", points=2)
def check_steepest(student, t):
    "The rate where the loss falls fastest"
    for _ in range(2):
        rates, losses, steepest, bottom = valley(t)
        ends = bottom + 2  # here the loss only rises after the bottom
        got = suggested(student, t, rates[:ends], losses[:ends], "steepest")
        near = rates[steepest] / 1.31 <= got <= rates[steepest] * 1.31
        message = "steepest is {got:.3g}; on the logarithmic axis of the plot the loss falls fastest near {want:.3g}"
        t.that(bool(near), message, got=got, want=rates[steepest])


@check("suggest", points=1)
def check_steepest_before_bottom(student, t):
    "A fall after the bottom does not count"
    for _ in range(2):
        rates, losses, _, bottom = valley(t)
        got = suggested(student, t, rates, losses, "steepest")
        message = (
            "steepest is {got:.3g}, above the bottom, {bottom:.3g}: after the loss has diverged it may fall again briefly. "
            "Search only before the bottom."
        )
        t.that(bool(got <= rates[bottom] * 1.01), message, got=got, bottom=rates[bottom])


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
        lesson = "(1 + cos(pi x)) / 2 goes from 1 to 0: scale it, so that it ends at `final`."
        call = f"cosine_factor({{step}}, {steps}, {final:.3g})"
        same_factors(t, lambda s: student.cosine_factor(s, steps, final), Cosine(steps, final), range(steps + 1), call, lesson)  # noqa: B023


@check("decay", points=1)
def check_cosine_after_end(student, t):
    "The cosine does not rise again after its end"
    steps, final = t.integer(4, 12), t.uniform(0.05, 0.3)
    lesson = "After its last step the factor stays at `final`."
    call = f"cosine_factor({{step}}, {steps}, {final:.3g})"
    which = range(steps + 1, 3 * steps)
    same_factors(t, lambda s: student.cosine_factor(s, steps, final), Cosine(steps, final), which, call, lesson)


# -- 6 · warmup


def warmed(student, t, warm: int, steps: int, which: Iterable[int], lesson: str) -> None:
    final = t.uniform(0.0, 0.2)
    call = f"warmup_cosine({{step}}, {warm}, {steps}, {final:.3g})"
    same_factors(t, lambda s: student.warmup_cosine(s, warm, steps, final), WarmUp(warm, Cosine(steps - warm, final)), which, call, lesson)


@check("warmup", points=1)
def check_rise(student, t):
    "A linear rise from 0"
    warm = t.integer(3, 8)
    warmed(
        student, t, warm, warm + t.integer(5, 12), range(warm), "The rise starts at 0: before step `warm` the factor of step s is s / warm."
    )


@check("warmup", points=2)
def check_after_rise(student, t):
    "A whole half cosine in the remaining steps"
    for _ in range(2):
        warm, left = t.integer(3, 8), t.integer(5, 12)
        lesson = "The cosine starts when the warm-up ends, at 1, and has steps - warm steps."
        warmed(student, t, warm, warm + left, range(warm, warm + left + 1), lesson)


@check("warmup", points=1)
def check_no_warm_up(student, t):
    "No warm-up at all, and no rise after the end"
    steps, warm = t.integer(4, 12), t.integer(2, 4)
    warmed(student, t, 0, steps, range(steps + 1), "With `warm` = 0 the first step has factor 1.")
    warmed(student, t, warm, warm + steps, range(warm + steps, warm + 2 * steps), "After step `steps` the factor stays at `final`.")


# -- 7 · cyclical


@check("cyclical", points=2)
def check_triangular(student, t):
    "Triangles of one height"
    rise, lowest = t.integer(3, 7), t.uniform(0.05, 0.4)
    lesson = "It rises from `lowest` to 1 in `rise` steps, falls in the same number of steps, and repeats."
    call = f"triangular({{step}}, {rise}, {lowest:.3g}, False)"
    want = Triangular(rise, lowest)
    same_factors(t, lambda step: student.triangular(step, rise, lowest, False), want, range(5 * rise), call, lesson)


@check("cyclical", points=1)
def check_halved(student, t):
    "Each triangle is half as high as the previous one"
    rise, lowest = t.integer(3, 7), t.uniform(0.05, 0.4)
    lesson = "The first triangle reaches 1. Halve the height above `lowest`; `lowest` stays unchanged."
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
    "The factor falls to `final` in the last step"
    lesson = "Half a cosine from 1 at step `top` to `final` at step steps - 1, the last one."
    for _ in range(2):
        cycle_of(student, t, 0, lambda top, steps: range(top, steps), lesson)


@check("one_cycle", points=2)
def check_cycle_momentum(student, t):
    "The momentum changes in the opposite direction"
    lesson = "It falls from `high` to `low` while the rate rises, and rises again while the rate falls."
    for _ in range(2):
        cycle_of(student, t, 1, lambda top, steps: range(top), lesson)


@check("one_cycle", points=1)
def check_cycle_end(student, t):
    "The momentum returns to `high`, and both keep their final values"
    lesson = "Momentum: back at `high` in the last step. After the last step nothing changes."
    cycle_of(student, t, 1, lambda top, steps: range(top + 1, steps + 5), lesson)
    cycle_of(student, t, 0, lambda top, steps: range(steps, steps + 5), lesson)


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
    lesson = "x goes from 0 to 1 in `decay` steps; 1 - sqrt(x) goes from 1 to 0: scale it, so that it ends at `lowest`."
    wsd_of(student, t, (warm, stable, decay), range(warm + stable + 1, warm + stable + decay + 3), lesson)


@check("wsd", points=1)
def check_empty_phases(student, t):
    "Phases without steps"
    lesson = "A phase may have no steps: then the next one starts immediately."
    stable, decay = t.integer(3, 6), t.integer(3, 6)
    wsd_of(student, t, (0, stable, decay), range(stable), lesson)
    warm = t.integer(2, 4)
    wsd_of(student, t, (warm, stable, 0), range(warm, warm + stable + 3), lesson)
    wsd_of(student, t, (warm, 0, decay), (warm, warm + decay), lesson)


# -- 10 · follow


@scenario
def followed(student, table, peaks, steps):
    """The learning rates of all groups, at the start and after each step; ``table`` has more factors than steps."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peak} for peak in peaks]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    follow = student.Follow(optimizer, lambda step: table[step])
    seen = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(steps):
        optimizer.step()
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
    steps, peak = t.integer(3, 7), t.uniform(0.01, 0.5)
    further = [t.uniform(0.2, 0.9) for _ in range(steps + 3)]
    table = further[: steps + 1]
    found = rows(t, student.run(followed, table=further, peaks=[peak], steps=steps), steps + 1, 1)
    flat, running = [row[0] for row in found], peak * table[0]
    compound = [running := running * factor if step else running for step, factor in enumerate(table)]
    late = [peak * table[max(0, step - 1)] for step in range(len(table))]
    early = [peak * further[step + 1] for step in range(len(table))]
    mistakes = {
        "Each step multiplies the current rate, so the factors of all earlier steps count too. Multiply the peak.": compound,
        "The rate changes one step late: after k calls of step() it is that of factor(k), the factor of the *next* step.": late,
        "The rate changes one step early: after k calls of step() it is that of factor(k), not of factor(k + 1).": early,
        "The rate is the factor alone: multiply it by the peak.": table,
        "step() does not change the rate.": [flat[0]] * len(table),
    }
    want = [peak * factor for factor in table]
    wrong_if(t, flat[1:], want[1:], {message: wrong[1:] for message, wrong in mistakes.items()})  # the start is another check
    for step, (got,) in list(enumerate(found))[1:]:
        message = "after {step} calls of step() the rate is {got:.4g}, expected {want:.4g}: the peak times factor({step})."
        t.that(bool(abs(got - peak * table[step]) < CLOSE), message, step=step, got=got, want=peak * table[step])


@check("follow", points=1, seconds=30)
def check_groups(student, t):
    "The constructor sets each parameter group to its own peak times factor(0)"
    peaks, factor = [t.uniform(0.01, 0.5) for _ in range(3)], t.uniform(0.2, 0.9)
    table = [factor, t.uniform(0.2, 0.9)]
    (got,) = rows(t, student.run(followed, table=table, peaks=peaks, steps=0), 1, 3)
    mistakes = {
        "The constructor leaves the rates unchanged: it has to set each to peak × factor(0).": peaks,
        "The constructor already uses factor(1): the first step has factor(0).": [peak * table[1] for peak in peaks],
    }
    wrong_if(t, got, [peak * factor for peak in peaks], mistakes)
    for number, (rate, peak) in enumerate(zip(got, peaks)):
        message = "group {number} starts with {got:.4g}, expected {want:.4g}: its own peak times factor(0)"
        t.that(bool(abs(rate - peak * factor) < CLOSE), message, number=number, got=rate, want=peak * factor)


@scenario
def resumed(student, table, peaks, other_peaks, before, after):
    """The rates after a resume: a run stops after some steps, and a new optimiser and schedule load its state."""
    import json

    def fresh(peaks):
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peak} for peak in peaks]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        return optimizer, student.Follow(optimizer, lambda step: table[step])

    optimizer, first = fresh(peaks)
    for _ in range(before):
        optimizer.step()
        first.step()
    state = first.state_dict()
    try:
        stored = json.dumps(state)
    except (TypeError, ValueError) as error:
        stored = f"! {error}"
    optimizer, second = fresh(other_peaks)
    second.load_state_dict(state)
    seen = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(after):
        optimizer.step()
        second.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    return [stored, seen]


def resume_of(student, t, other_peaks: bool) -> tuple[object, list[list[float]], dict]:
    """What a run stored, its rates after the resume, and the case."""
    before, after, peaks = t.integer(2, 4), t.integer(2, 4), [t.uniform(0.01, 0.5) for _ in range(2)]
    others = [t.uniform(0.01, 0.5) for _ in range(2)] if other_peaks else peaks
    table = [t.uniform(0.2, 0.9) for _ in range(before + after + 3)]  # two more, for a run that is ahead
    case = {"table": table, "peaks": peaks, "other_peaks": others, "before": before, "after": after}
    stored, seen = t.items(student.run(resumed, **case), 2, "the result")
    return stored, rows(t, seen, after + 1, 2), case


def at(case: dict, step: int, peaks: str = "peaks", extra: float = 1.0) -> list[float]:
    return [extra * peak * case["table"][step] for peak in case[peaks]]


CURRENT = "The saved peaks are the current rates, which already contain a factor: save the peaks of the constructor."


def shown(rates: list[float]) -> str:
    return ", ".join(f"{rate:.4g}" for rate in rates)


@check("follow", points=2, seconds=30)
def check_resume(student, t):
    "A resumed run has the right rate in its first step and in all later ones"
    _, seen, case = resume_of(student, t, other_peaks=False)
    first, want = seen[0], at(case, case["before"])
    mistakes = {
        "After load_state_dict the groups still have the first rates of the run: set them at once, not in the next step().": at(case, 0),
        "The resume counts one step too many: load_state_dict must not call step().": at(case, case["before"] + 1),
        CURRENT: at(case, case["before"], extra=case["table"][case["before"]]),
        "load_state_dict multiplies the current rate of the group: multiply the peak.": at(case, case["before"], extra=case["table"][0]),
    }
    wrong_if(t, first, want, mistakes)
    for step, row in enumerate(seen, case["before"]):
        message = "{step} steps after the start of the first run, the resumed one has the rates {got}, expected {want}"
        t.that(near(row, at(case, step)), message, step=step, got=shown(row), want=shown(at(case, step)))


@check("follow", points=1, seconds=30)
def check_saved_peaks(student, t):
    "The peaks are those of the saved run"
    _, seen, case = resume_of(student, t, other_peaks=True)
    message = "The new optimiser was created with other rates, and these are now the peaks: save the peaks and load them."
    general = "{step} steps after the start of the first run, the resumed one has the rates {got}, expected {want}"
    for step, row in enumerate(seen[1:], case["before"] + 1):

        def has(peaks: str, row=row, step=step) -> bool:
            return any(near(row, at(case, step + shift, peaks)) for shift in (-1, 0, 1))  # the count is another check

        t.that(has("peaks") or not has("other_peaks"), message)
        wrong_if(t, row, at(case, step), {CURRENT: at(case, step, extra=case["table"][case["before"]])})
        t.that(has("peaks"), general, step=step, got=shown(row), want=shown(at(case, step)))


@check("follow", points=1, seconds=30)
def check_plain_state(student, t):
    "The state is a dict of plain numbers"
    stored, _, _ = resume_of(student, t, other_peaks=False)
    message = "state_dict() has to be a dict of numbers and lists of numbers, which every program can read. {error}"
    t.that(type(stored) is str and stored[:1] == "{", message, error=str(stored)[2:80])


# -- 11 · snapshots


@check("snapshots", points=2)
def check_snapshot_steps(student, t):
    "A snapshot at the end of each cycle"
    fewer = t.integer(4, 7)  # cycles of two steps: there are fewer of them than snapshots
    for count, steps in ((t.integer(2, 5), t.integer(21, 40)), (t.integer(3, 5), t.integer(21, 40)), (fewer, fewer + 1)):
        ensemble, model = SnapshotEnsemble(steps, count), torch.nn.Identity()
        want = []
        for step in range(1, steps + 1):
            taken = len(ensemble)
            ensemble.after_step(step, model)
            want += [step] * (len(ensemble) - taken)
        got = student.snapshot_steps(steps, count)
        message = (
            "snapshot_steps({steps}, {count}) is {got}, expected {want}: a cycle has ceil(steps / snapshots) steps, the last may have fewer"
        )
        t.that(got == want, message, steps=steps, count=count, got=str(got)[:60], want=str(want))


@check("snapshots", points=2)
def check_ensemble(student, t):
    "The mean of the members' probabilities"
    members, images, classes = t.integer(2, 5), t.integer(2, 6), t.integer(3, 6)
    logits = 3 * t.normal(members, images, classes)
    want = logits.softmax(-1).mean(0)
    got = t.tensor(student.ensemble(logits), "ensemble(logits)", shape=tuple(want.shape))
    confident = "A member with large logits would outvote the others: convert the logits of each member to probabilities first"
    t.close(got, want, "a probability of the ensemble. " + confident, rtol=1e-4, atol=1e-5)


# -- 12 · batch


@check("batch", points=2)
def check_rules(student, t):
    "The peak by both rules"
    for base in (t.choice((16, 32)), t.choice((64, 128))):
        batch, peak = 4 * base * t.choice((1, 4)), t.uniform(0.01, 0.5)
        found = {
            rule: t.number(t.items(student.rescaled(batch, base, peak, 5000, 3, rule), 2, "rescaled(...)")[0], "the peak")
            for rule in ("linear", "sqrt")
        }
        for rule, factor in (("linear", batch / base), ("sqrt", math.sqrt(batch / base))):
            mistakes = {
                "A batch {ratio:g} times as large gets a *smaller* peak: divide `batch` by `base_batch`, not the reverse.": peak / factor,
                "The peak does not depend on the batch.": peak,
            }
            wrong_if(t, found[rule], peak * factor, mistakes, ratio=batch / base)
            message = "for {batch} images instead of {base}, the rule {rule} gives {got:.4g} from {peak:.4g}, expected {want:.4g}"
            ok = near(found[rule], peak * factor)
            t.that(ok, message, batch=batch, base=base, rule=rule, got=found[rule], peak=peak, want=peak * factor)


@check("batch", points=1)
def check_batch_steps(student, t):
    "The number of steps"
    for _ in range(2):
        batch, whole, epochs = t.integer(20, 60), t.integer(4, 9), t.integer(3, 6)
        rest = batch - t.integer(1, 4)  # together, the incomplete batches of the epochs are several batches
        images = whole * batch + rest
        got = t.items(student.rescaled(batch, 16, 0.1, images, epochs, "linear"), 2, "rescaled(...)")[1]
        mistakes = {
            "The incomplete batches of several epochs were joined: each epoch drops its own. Divide first, then multiply by the epochs.": (
                images * epochs // batch
            ),
            "The incomplete last batch of each epoch is dropped: round down.": epochs * (whole + 1),
            "These are the steps of one epoch.": whole,
        }
        wrong_if(t, got, float(epochs * whole), mistakes)
        message = "{epochs} epochs of {images} images in batches of {batch} have {want} whole batches, not {got}"
        t.that(type(got) is int and got == epochs * whole, message, epochs=epochs, images=images, batch=batch, want=epochs * whole, got=got)


@check("batch", points=2)
def check_noise_scale(student, t):
    "The noise scale, from gradients of two batch sizes"
    for _ in range(2):
        signal, noise, small_batch = t.uniform(0.1, 2.0), t.uniform(20.0, 90.0), t.integer(4, 16)
        large_batch = small_batch * t.integer(4, 20)
        small, large = squares_of(signal, noise, small_batch, large_batch)
        got = t.number(student.noise_scale(small, large, small_batch, large_batch), "noise_scale(...)")
        mistakes = {
            "The norm for the large batch is taken as that of the true gradient, but it still contains S / B. Solve both equations.": noise
            / large,
            "This is S, the variance of the noise of one image: divide it by the squared norm of the true gradient.": noise,
            "The result is the reciprocal: the noise divided by the gradient.": signal / noise,
        }
        wrong_if(t, got, noise / signal, mistakes, rtol=1e-4)
        message = "noise_scale({small:.4g}, {large:.4g}, {b}, {B}) is {got:.4g}, expected {want:.4g}"
        t.that(
            near(got, noise / signal, rtol=1e-4),
            message,
            small=small,
            large=large,
            b=small_batch,
            B=large_batch,
            got=got,
            want=noise / signal,
        )


@check("batch", points=1)
def check_hidden_gradient(student, t):
    "A gradient that the noise hides"
    small_batch = t.integer(4, 16)
    large_batch = small_batch * t.integer(4, 20)
    small, large = squares_of(-t.uniform(0.01, 0.05), t.uniform(20.0, 90.0), small_batch, large_batch)
    got = student.noise_scale(small, large, small_batch, large_batch)
    message = "The estimate of |G|² is negative here, so the noise is larger than any gradient that it hides: return math.inf, not {got}."
    t.that(type(got) is float and got == math.inf, message, got=got)
