"""The visible checks of this lab. Schedules are compared step by step with the library's; trainings run in a
separate process."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dlo_lib.grading.checks.contract import check, scenario
from dlo_lib.labkit.compare import explaining, near, same, wrong_if
from dlo_lib.optim import schedules
from dlo_lib.optim.finder import smooth
from dlo_lib.optim.snapshots import SnapshotEnsemble

from .twins import (
    ACCUMULATED,
    AFTER,
    EVALUATED,
    RIGHT,
    descent,
    descent_with_norm,
    one_cycle_of,
    squares_of,
    valley,
)

CLOSE = 1e-6


def same_factors(
    t,
    function: Callable[..., object],
    name: str,
    args: Sequence[float],
    want: schedules.LRSchedule,
    steps: Iterable[int],
    lesson: str,
) -> None:
    """``function(step, *args)`` is the factor of ``want`` at each of ``steps``; ``name`` is shown."""
    shown = ", ".join(f"{arg:.3g}" if type(arg) is float else str(arg) for arg in args)
    for step in steps:
        values = {"name": name, "step": step, "args": shown}
        got, expected = t.number(function(step, *args), "{name}({step}, {args})", **values), want(step)
        message = "{name}({step}, {args}) is {got:.5g}, expected {want:.5g}. " + lesson
        t.that(bool(abs(got - expected) < CLOSE), message, **values, got=got, want=expected)


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
        message = "the first rate is {got:.3g}, not {want:.3g}"
        t.that(bool(abs(rates[0] / lowest - 1) < CLOSE), message, got=rates[0], want=lowest)
        message = "the last rate is {got:.3g}, not {want:.3g}: n rates have n - 1 gaps between them"
        t.that(bool(abs(rates[-1] / highest - 1) < CLOSE), message, got=rates[-1], want=highest)


@check("sweep", points=1)
def check_sweep_factor(student, t):
    "Each rate is the previous one, times a constant factor"
    rates, _, _ = rates_of(student, t)
    t.that(all(rate > 0 for rate in rates), "a learning rate must be above 0")
    factors = [later / rate for rate, later in itertools.pairwise(rates)]
    message = (
        "the second rate is {first:.3g} times the first, the last {last:.3g} times the previous one: this "
        "is not exponential"
    )
    exponential = max(factors) / min(factors) - 1 < 1e-4 and factors[0] > 1
    t.that(bool(exponential), message, first=factors[0], last=factors[-1])


# -- 2 · range_test


@scenario
def tested(student, weight, batches, rates):
    """A range test on a small model: its result, and the weight of the model afterwards."""
    net = torch.nn.Sequential(torch.nn.Linear(*reversed(weight.shape), bias=False), torch.nn.Tanh())
    net[0].weight.data.copy_(weight)
    losses = student.range_test(net, lambda model, x: (model(x) - 1).square().mean(), batches, rates)
    return [losses, net[0].weight.data]


def test_case(t) -> dict[str, Any]:
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
        losses = t.items(losses, len(case["rates"]), "the list of losses")
        got = torch.tensor([t.number(loss, "a loss") for loss in losses])
        known = {way: torch.tensor(values) for way, values in descent(**case).items()}
        right = known[RIGHT]
        accumulated = near(got, known[ACCUMULATED], 1e-4) and not near(got, right, 1e-3)
        message = "The gradients of earlier steps are still there: each backward adds to .grad."
        t.that(not accumulated, message)
        message = (
            "Each loss is taken after its step, on the same batch: record the one of which you call backward."
        )
        t.that(not near(got, known[AFTER], 1e-4), message)
        what = "the list of losses (w <- w - rate * gradient after each)"
        t.close(got, right, what, rtol=1e-3, atol=1e-5)


def tested_first(t, losses: Any, known: dict[str, list[float]]) -> None:
    """A test that was not made changes nothing: its losses are those of the twin, or of a mistake that
    another check names."""
    message = "not tested yet: range_test does not return the losses of its steps, see the first check"
    made = type(losses) is list and any(near(losses, values, 1e-3, 1e-5) for values in known.values())
    t.that(made, message)


def unchanged(t, got: object, before: torch.Tensor, what: str, message: str) -> None:
    """The test has restored a tensor, which had the value ``before``."""
    off = (t.tensor(got, what, shape=before.shape) - before).abs().max()
    t.that(bool(off < CLOSE), message, off=float(off))


@check("range_test", points=1, seconds=30)
def check_range_weights_back(student, t):
    "The weights are restored"
    case = test_case(t)
    losses, weight = t.items(student.run(tested, **case), 2, "the result")
    tested_first(t, losses, descent(**case))
    message = (
        "The test has changed a weight of the model by {off:.2g}: copy the values first (clone), and "
        "restore them at the end."
    )
    unchanged(t, weight, case["weight"], "the weight after the test", message)


@scenario
def tested_with_norm(student, weight, mean, batches, rates, training):
    """The losses of a range test on a model with a batch norm, and its running mean and mode afterwards."""
    width = weight.shape[1]
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1, bias=False))
    net[1].weight.data.copy_(weight)
    net[0].running_mean.copy_(mean)
    net.train(training)
    losses = student.range_test(net, lambda model, x: model(x).square().mean(), batches, rates)
    return [losses, net[0].running_mean, net.training]


def norm_case(t, training: bool) -> dict[str, Any]:
    width, count = t.integer(2, 5), t.integer(3, 5)
    case = {"weight": t.normal(1, width), "mean": t.normal(width), "training": training}
    case["batches"] = [t.normal(t.integer(4, 7), width) + 2 for _ in range(count)]
    return case | {"rates": [0.01 * 2**k for k in range(count)]}


def normed(case: dict[str, Any]) -> dict[str, list[float]]:
    """The losses of the twin, and of mistakes."""
    return descent_with_norm(**{name: value for name, value in case.items() if name != "training"})


@check("range_test", points=1, seconds=30)
def check_buffers_back(student, t):
    "The running means are restored"
    case = norm_case(t, True)
    losses, after, _ = t.items(student.run(tested_with_norm, **case), 3, "the result")
    tested_first(t, losses, normed(case))
    message = (
        "The test has changed the running mean of a batch norm by {off:.2g}. A model has buffers besides "
        "its parameters: restore them."
    )
    unchanged(t, after, case["mean"], "the running mean after the test", message)


@check("range_test", points=1, seconds=30)
def check_modes(student, t):
    "The model is in training mode during the test, and in its previous mode afterwards"
    for training in (True, False):
        case = norm_case(t, training)
        losses, _, mode = t.items(student.run(tested_with_norm, **case), 3, "the result")
        known = normed(case)
        evaluated = known.pop(EVALUATED)
        message = "The test runs in evaluation mode: call model.train() before the first batch."
        t.that(not near(losses, evaluated, 1e-3, 1e-5), message)
        tested_first(t, losses, known)
        message = "The model had training = {was} before the test and {now} after it: restore the mode."
        t.that(mode is training, message, was=training, now=mode)


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
    message = 'suggest(...) should return a dict with "steepest" and "bottom"'
    t.that(type(found) is dict and set(found) == {"steepest", "bottom"}, message)
    return t.number(found[name], 'suggest(...)["{name}"]', name=name)


@check("suggest", points=1)
def check_bottom(student, t):
    "The rate with the lowest loss"
    message = "bottom is {got:.3g}, the loss is lowest at {want:.3g}: a small rise is not the bottom."
    for _ in range(2):
        rates, losses, _, bottom = valley(t)
        got = suggested(student, t, rates, losses, "bottom")
        t.that(bool(abs(got / rates[bottom] - 1) < 0.01), message, got=got, want=rates[bottom])


@check("suggest", points=2)
def check_steepest(student, t):
    "The rate where the loss falls fastest"
    message = "steepest is {got:.3g}; on the logarithmic axis the loss falls fastest near {want:.3g}"
    for _ in range(2):
        rates, losses, steepest, bottom = valley(t)
        ends = bottom + 2  # here the loss only rises after the bottom
        got, want = suggested(student, t, rates[:ends], losses[:ends], "steepest"), rates[steepest]
        t.that(bool(want / 1.31 <= got <= want * 1.31), message, got=got, want=want)


@check("suggest", points=1)
def check_steepest_before_bottom(student, t):
    "A fall after the bottom does not count"
    message = (
        "steepest is {got:.3g}, above the bottom, {bottom:.3g}: after the loss has diverged it may fall "
        "again briefly. Search only before the bottom."
    )
    outside = "not tested yet: steepest is {got:.3g}, lower than each rate of the test, see the check before"
    scale = 1.0
    for _ in range(2):
        rates, losses, _, bottom = valley(t)
        rates = [scale * rate for rate in rates]
        got = suggested(student, t, rates, losses, "steepest")
        t.that(bool(got >= rates[0] * 0.99), outside, got=got)
        t.that(bool(got <= rates[bottom] * 1.01), message, got=got, bottom=rates[bottom])
        scale = 20 * rates[bottom] / 10**-5  # the rates of the second test are higher than this bottom


# -- 5 · decay


@check("decay", points=1)
def check_step_factor(student, t):
    "Steps"
    every, gamma = t.integer(3, 8), t.uniform(0.1, 0.7)
    lesson = "The first `every` steps, 0 to every - 1, have factor 1."
    steps, want = range(3 * every + 1), schedules.Step(every, gamma)
    same_factors(t, student.step_factor, "step_factor", (every, gamma), want, steps, lesson)


def same_cosine(student, t, steps: int, final: float, which: Iterable[int], lesson: str) -> None:
    want = schedules.Cosine(steps, final)
    same_factors(t, student.cosine_factor, "cosine_factor", (steps, final), want, which, lesson)


@check("decay", points=2)
def check_cosine_factor(student, t):
    "Half a cosine"
    lesson = "(1 + cos(pi x)) / 2 goes from 1 to 0: scale it, so that it ends at `final`."
    for final in (0.0, t.uniform(0.05, 0.3)):
        steps = t.integer(5, 20)
        same_cosine(student, t, steps, final, range(steps + 1), lesson)


@check("decay", points=1)
def check_cosine_after_end(student, t):
    "The cosine does not rise again after its end"
    steps, final = t.integer(4, 12), t.uniform(0.05, 0.3)
    lesson = "After its last step the factor stays at `final`."
    same_cosine(student, t, steps, final, range(steps + 1, 3 * steps), lesson)


# -- 6 · warmup


def warmed(student, t, warm: int, steps: int, which: Iterable[int], lesson: str) -> None:
    final = t.uniform(0.0, 0.2)
    args, want = (warm, steps, final), schedules.WarmUp(warm, schedules.Cosine(steps - warm, final))
    same_factors(t, student.warmup_cosine, "warmup_cosine", args, want, which, lesson)


@check("warmup", points=1)
def check_rise(student, t):
    "A linear rise from 0"
    warm = t.integer(3, 8)
    lesson = "The rise starts at 0: before step `warm` the factor of step s is s / warm."
    warmed(student, t, warm, warm + t.integer(5, 12), range(warm), lesson)


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
    after, lesson = range(warm + steps, warm + 2 * steps), "After step `steps` the factor stays at `final`."
    warmed(student, t, warm, warm + steps, after, lesson)


# -- 7 · cyclical


@check("cyclical", points=2)
def check_triangular(student, t):
    "Triangles of one height"
    rise, lowest = t.integer(3, 7), t.uniform(0.05, 0.4)
    lesson = "It rises from `lowest` to 1 in `rise` steps, falls in the same number of steps, and repeats."
    args, want = (rise, lowest, False), schedules.Triangular(rise, lowest)
    same_factors(t, student.triangular, "triangular", args, want, range(5 * rise), lesson)


@check("cyclical", points=1)
def check_halved(student, t):
    "Each triangle is half as high as the previous one"
    rise, lowest = t.integer(3, 7), t.uniform(0.05, 0.4)
    lesson = "The first triangle reaches 1. Halve the height above `lowest`; `lowest` stays unchanged."
    args, want = (rise, lowest, True), schedules.Triangular2(rise, lowest)
    same_factors(t, student.triangular, "triangular", args, want, range(7 * rise), lesson)


# -- 8 · one_cycle


COPIED = {"LibraryUsed": "This exercise asks you to write a scheduler of PyTorch: do not use one in it"}


def refused(student, name: str) -> list[str]:
    """Return the classes that an answer of one's own does not use: every scheduler inherits from this one."""
    return ["torch.optim.lr_scheduler.LRScheduler"] if student.is_own(name) else []


@scenario
def cycled(student, steps, args, refused):
    """What one_cycle returns for each step, without the classes that are refused."""
    from dlo_lib.grading.checks.own_work import without

    with without(*refused):
        return [student.one_cycle(step, *args) for step in steps]


def cycle_of(student, t, place: int, which: Callable[[int, int], Iterable[int]], lesson: str) -> None:
    """``place`` 0 compares the factors, 1 the momenta, at the steps ``which(top, steps)``."""
    top, left = t.integer(3, 8), t.integer(5, 14)
    steps, start, final = top + 1 + left, t.uniform(0.03, 0.2), t.uniform(0.0001, 0.01)
    args = top, steps, start, final, t.uniform(0.8, 0.86), t.uniform(0.9, 0.98)
    cycle, wanted = one_cycle_of(*args), list(which(top, steps))
    with explaining(COPIED):
        found = student.run(cycled, steps=wanted, args=args, refused=refused(student, "one_cycle"))
    by_step = dict(zip(wanted, t.items(found, len(wanted), "the results")))

    def part(step: int, *_: float) -> object:
        return t.items(by_step[step], 2, "one_cycle(...): a factor and a momentum")[place]

    name = ("the factor", "the momentum")[place] + " of one_cycle"
    same_factors(t, part, name, args, cycle.momentum if place else cycle, wanted, lesson)


@check("one_cycle", points=1)
def check_cycle_rise(student, t):
    "The factor rises along half a cosine"
    lesson = "Half a cosine from `start` at step 0 to 1 at step `top`."
    for _ in range(2):
        cycle_of(student, t, 0, lambda top, steps: range(top + 1), lesson)


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
    args = *sizes, t.uniform(0.01, 0.2)
    same_factors(t, student.wsd, "wsd", args, schedules.WarmUpStableDecay(*args), which, lesson)


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
    lesson = "x goes from 0 to 1 in `decay` steps, 1 - sqrt(x) from 1 to 0: scale it to end at `lowest`."
    top = warm + stable
    wsd_of(student, t, (warm, stable, decay), range(top + 1, top + decay + 3), lesson)


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


def sgd(peaks):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peak} for peak in peaks]
    return torch.optim.SGD(groups, lr=1.0)


def rates_while(optimizer, follow, steps):
    """The learning rates of all groups, at the start and after each step."""
    seen = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(steps):
        optimizer.step()
        follow.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    return seen


@scenario
def followed(student, table, peaks, steps, refused):
    """The learning rates at the start and after each step; ``table`` has more factors than steps."""
    from dlo_lib.grading.checks.own_work import without

    optimizer = sgd(peaks)
    with without(*refused):
        return rates_while(optimizer, student.Follow(optimizer, lambda step: table[step]), steps)


def followed_by(student, table: list[float], peaks: list[float], steps: int) -> object:
    """Return what the scenario ``followed`` returns."""
    with explaining(COPIED):
        return student.run(
            followed, table=table, peaks=peaks, steps=steps, refused=refused(student, "Follow")
        )


def rows(t, found: object, count: int, groups: int) -> list[list[float]]:
    return [
        [t.number(value, "a learning rate") for value in t.items(row, groups, "the rates of the groups")]
        for row in t.items(found, count, "the rows")
    ]


@check("follow", points=2, seconds=30)
def check_follow(student, t):
    "After each step the rate is the peak times the factor of that step"
    steps, peak = t.integer(3, 7), t.uniform(0.01, 0.5)
    table = [t.uniform(0.2, 0.9) for _ in range(steps + 3)]
    found = rows(t, followed_by(student, table, [peak], steps), steps + 1, 1)
    _, *got = [rate for (rate,) in found]  # the start is another check
    want = [peak * factor for factor in table]
    compound = list(itertools.accumulate([want[0], *table[1 : steps + 1]], operator.mul))
    mistakes = {
        "Each step multiplies the current rate, so the factors of all earlier steps count too. Multiply the "
        "peak.": compound[1:],
        "The rate changes one step late: after k calls of step() it is that of factor(k), the factor of the "
        "*next* step.": want[:steps],
        "The rate changes one step early: after k calls of step() it is that of factor(k), not of factor(k "
        "+ 1).": want[2 : steps + 2],
        "The rate is the factor alone: multiply it by the peak.": table[1 : steps + 1],
        "step() does not change the rate.": found[0] * steps,
    }
    wrong_if(t, got, want[1 : steps + 1], mistakes)
    message = (
        "after {step} calls of step() the rate is {got:.4g}, not {want:.4g}, the peak times factor({step})."
    )
    for step, (rate, right) in enumerate(zip(got, want[1:]), 1):
        t.that(bool(abs(rate - right) < CLOSE), message, step=step, got=rate, want=right)


@check("follow", points=1, seconds=30)
def check_groups(student, t):
    "The constructor sets each parameter group to its own peak times factor(0)"
    peaks, factor = [t.uniform(0.01, 0.5) for _ in range(3)], t.uniform(0.2, 0.9)
    table = [factor, t.uniform(0.2, 0.9)]
    (got,) = rows(t, followed_by(student, table, peaks, 0), 1, 3)
    want, second = ([peak * factor for peak in peaks] for factor in table)
    mistakes = {
        "The constructor leaves the rates unchanged: it has to set each to peak × factor(0).": peaks,
        "The constructor already uses factor(1): the first step has factor(0).": second,
    }
    wrong_if(t, got, want, mistakes)
    message = "group {number} starts with {got:.4g}, expected {want:.4g}: its own peak times factor(0)"
    for number, (rate, right) in enumerate(zip(got, want)):
        t.that(bool(abs(rate - right) < CLOSE), message, number=number, got=rate, want=right)


@scenario
def stopped(student, table, peaks, steps, refused):
    """The state of a run that stops after some steps: as a text in JSON, and as the bytes of a file."""
    import io
    import json

    from dlo_lib.grading.checks.own_work import without

    optimizer, file = sgd(peaks), io.BytesIO()
    with without(*refused):
        first = student.Follow(optimizer, lambda step: table[step])
        rates_while(optimizer, first, steps)
        state = first.state_dict()
    try:
        stored = json.dumps(state)
    except (TypeError, ValueError) as error:
        stored = f"! {error}"
    torch.save(state, file)
    return [stored, torch.tensor(list(file.getvalue()), dtype=torch.uint8)]


@scenario
def resumed(student, file, table, peaks, steps):
    """The rates of a new optimiser and schedule that load this state."""
    import io

    optimizer = sgd(peaks)
    second = student.Follow(optimizer, lambda step: table[step])
    second.load_state_dict(torch.load(io.BytesIO(bytes(file.tolist())), weights_only=False))
    return rates_while(optimizer, second, steps)


def resume_of(student, t, other_peaks: bool) -> tuple[object, list[list[float]], dict[str, Any]]:
    """What a run stored, its rates after the resume in another process, and the case."""
    before, after, peaks = t.integer(2, 4), t.integer(2, 4), [t.uniform(0.01, 0.5) for _ in range(2)]
    others = [t.uniform(0.01, 0.5) for _ in range(2)] if other_peaks else peaks
    table = [t.uniform(0.2, 0.9) for _ in range(before + after + 3)]  # two more, for a run that is ahead
    case = {"table": table, "peaks": peaks, "other_peaks": others, "before": before, "after": after}
    with explaining(COPIED):
        result = student.fresh(
            stopped, table=table, peaks=peaks, steps=before, refused=refused(student, "Follow")
        )
    stored, file = t.items(result, 2, "the result")
    t.tensor(file, "the file", dtype=torch.uint8)
    seen = student.fresh(resumed, file=file, table=table, peaks=others, steps=after)
    return stored, rows(t, seen, after + 1, 2), case


def at(case: dict, step: int, peaks: str = "peaks", extra: float = 1.0) -> list[float]:
    return [extra * peak * case["table"][step] for peak in case[peaks]]


CURRENT = "The saved peaks are the current rates, which contain a factor: save those of the constructor."


def shown(rates: list[float]) -> str:
    return ", ".join(f"{rate:.4g}" for rate in rates)


OTHER_RATES = "after {step} steps in all, the resumed run has the rates {got}, expected {want}"


@check("follow", points=2, seconds=30)
def check_resume(student, t):
    "A resumed run has the right rate in its first step and in all later ones"
    _, seen, case = resume_of(student, t, other_peaks=False)
    before, table = case["before"], case["table"]
    mistakes = {
        "After load_state_dict the groups still have the first rates of the run: set them at once, not in "
        "the next step().": at(case, 0),
        "The resume counts one step too many: load_state_dict must not call step().": at(case, before + 1),
        CURRENT: at(case, before, extra=table[before]),
        "load_state_dict multiplies the current rate of the group: multiply the peak.": at(
            case, before, extra=table[0]
        ),
    }
    wrong_if(t, seen[0], at(case, before), mistakes)
    for step, row in enumerate(seen, before):
        want = at(case, step)
        t.that(near(row, want), OTHER_RATES, step=step, got=shown(row), want=shown(want))


@check("follow", points=1, seconds=30)
def check_saved_peaks(student, t):
    "The peaks are those of the saved run"
    _, seen, case = resume_of(student, t, other_peaks=True)
    message = "The rates of the new optimiser are now the peaks: save the peaks and load them."
    before = case["before"]
    for step, row in enumerate(seen[1:], before + 1):
        counts = (step - 1, step, step + 1)  # the count is another check
        saved, others = (
            any(near(row, at(case, count, peaks)) for count in counts) for peaks in ("peaks", "other_peaks")
        )
        want = at(case, step)
        t.that(saved or not others, message)
        wrong_if(t, row, want, {CURRENT: at(case, step, extra=case["table"][before])})
        t.that(saved, OTHER_RATES, step=step, got=shown(row), want=shown(want))


@check("follow", points=1, seconds=30)
def check_plain_state(student, t):
    "The state is a dict of plain numbers"
    stored, seen, _ = resume_of(student, t, other_peaks=False)
    changes = any(not near(row, seen[0]) for row in seen[1:])
    t.that(changes, "not tested yet: step() does not change the rates, see the first check")
    t.that(stored != "{}", "not tested yet: state_dict() is empty, see the check of the resumed run")
    message = "state_dict() has to be a dict of numbers and lists of numbers, as plain data. {error}"
    t.that(type(stored) is str and stored[:1] == "{", message, error=str(stored)[2:80])


# -- 11 · snapshots


@check("snapshots", points=2)
def check_snapshot_steps(student, t):
    "A snapshot at the end of each cycle"
    message = (
        "snapshot_steps({steps}, {count}) is {got}, expected {want}: a cycle has ceil(steps / snapshots) "
        "steps, the last may have fewer"
    )
    fewer = t.integer(4, 7)  # cycles of two steps: there are fewer of them than snapshots
    cases = [(t.integer(low, 5), t.integer(21, 40)) for low in (2, 3)]
    for count, steps in (*cases, (fewer, fewer + 1)):
        ensemble, want = SnapshotEnsemble(steps, count), []
        for step in range(1, steps + 1):
            taken = len(ensemble)
            ensemble.after_step(step, torch.nn.Identity())
            want += [step] * (len(ensemble) - taken)
        got = student.snapshot_steps(steps, count)
        t.that(got == want, message, steps=steps, count=count, got=str(got)[:60], want=str(want))


@check("snapshots", points=2)
def check_ensemble(student, t):
    "The mean of the members' probabilities"
    members, images, classes = t.integer(2, 5), t.integer(2, 6), t.integer(3, 6)
    logits = 3 * t.normal(members, images, classes)
    what = (
        "a probability of the ensemble. A member with large logits would outvote the others: convert the "
        "logits of each member to probabilities first"
    )
    t.close(student.ensemble(logits), logits.softmax(-1).mean(0), what, atol=1e-5)


# -- 12 · batch


@check("batch", points=2)
def check_rules(student, t):
    "The peak by both rules"
    smaller = "A batch {ratio:g} times as large gets a *smaller* peak: divide `batch` by `base_batch`."
    for base in (t.choice((16, 32)), t.choice((64, 128))):
        batch, peak = 4 * base * t.choice((1, 4)), t.uniform(0.01, 0.5)
        for rule, power in (("linear", 1.0), ("sqrt", 0.5)):
            factor = (batch / base) ** power
            got, _ = t.items(student.rescaled(batch, base, peak, 5000, 3, rule), 2, "rescaled(...)")
            mistakes = {smaller: peak / factor, "The peak does not depend on the batch.": peak}
            wrong_if(t, t.number(got, "the peak"), peak * factor, mistakes, ratio=batch / base)
            message = (
                "for {batch} images instead of {base}, the rule {rule} gives {got:.4g} from {peak:.4g}, "
                "expected {want:.4g}"
            )
            values = {"batch": batch, "base": base, "rule": rule, "peak": peak}
            t.that(near(got, peak * factor), message, **values, got=got, want=peak * factor)


@check("batch", points=1)
def check_batch_steps(student, t):
    "The number of steps"
    message = "{epochs} epochs of {images} images in batches of {batch} have {want} whole batches, not {got}"
    for _ in range(2):
        batch, whole, epochs = t.integer(20, 60), t.integer(4, 9), t.integer(3, 6)
        rest = batch - t.integer(1, 4)  # together, the incomplete batches of the epochs are several batches
        images, want = whole * batch + rest, epochs * whole
        _, got = t.items(student.rescaled(batch, 16, 0.1, images, epochs, "linear"), 2, "rescaled(...)")
        mistakes = {
            "The incomplete batches of several epochs were joined: each epoch drops its own. Divide first, "
            "then multiply by the epochs.": images * epochs // batch,
            "The incomplete last batch of each epoch is dropped: round down.": epochs * (whole + 1),
            "These are the steps of one epoch.": whole,
        }
        wrong_if(t, got, float(want), mistakes)
        values = {"epochs": epochs, "images": images, "batch": batch}
        t.that(type(got) is int and got == want, message, **values, want=want, got=got)


@check("batch", points=2)
def check_noise_scale(student, t):
    "The noise scale, from gradients of two batch sizes"
    for _ in range(2):
        signal, noise, small_batch = t.uniform(0.1, 2.0), t.uniform(20.0, 90.0), t.integer(4, 16)
        large_batch = small_batch * t.integer(4, 20)
        small, large = squares_of(signal, noise, small_batch, large_batch)
        mistakes = {
            "The norm for the large batch is taken as that of the true gradient, but it still contains S / "
            "B. Solve both equations.": noise / large,
            "This is S, the variance of the noise of one image: divide it by the squared norm of the true "
            "gradient.": noise,
            "The result is the reciprocal: the noise divided by the gradient.": signal / noise,
        }
        got = student.noise_scale(small, large, small_batch, large_batch)
        what = "noise_scale({small:.4g}, {large:.4g}, {b}, {B})"
        values = {"small": small, "large": large, "b": small_batch, "B": large_batch}
        same(t, got, noise / signal, what, mistakes, **values)


@check("batch", points=1)
def check_hidden_gradient(student, t):
    "A gradient that the noise hides"
    small_batch = t.integer(4, 16)
    large_batch = small_batch * t.integer(4, 20)
    small, large = squares_of(-t.uniform(0.01, 0.05), t.uniform(20.0, 90.0), small_batch, large_batch)
    got = student.noise_scale(small, large, small_batch, large_batch)
    message = (
        "The estimate of |G|² is negative here, so the noise is larger than any gradient that it hides: "
        "return math.inf, not {got}."
    )
    t.that(type(got) is float and got == math.inf, message, got=got)
