"""The visible checks of training in 16 bits: the loss scaling."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check, scenario
from dlo_lib.labkit.compare import explaining, near, same, wrong_if

from .twins import scaled_run

# -- 3 · unscale


@scenario
def unscaled(student, gradients, scale):
    """The gradients after the student's unscale of an iterator over parameters, whether they are the same
    tensors, and the result, a word if it is no bool."""
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in gradients]
    for parameter, grad in zip(parameters, gradients):
        parameter.grad = grad
    found = student.unscale(iter(parameters), scale)
    if isinstance(found, torch.Tensor) and found.dtype is torch.bool and found.numel() == 1:
        found = bool(found)  # of torch.isfinite(...).all()
    after = [parameter.grad for parameter in parameters]
    same = all(mine is grad for mine, grad in zip(after, gradients))
    return [after, same, found if type(found) is bool else type(found).__name__]


def unscale_of(student, t, gradients: list[Tensor | None], scale: float) -> list[Any]:
    """Return what the scenario ``unscaled`` returns."""
    return t.items(student.run(unscaled, gradients=gradients, scale=scale), 3, "the result")


def gradients_of(t, count: int) -> list[Tensor | None]:
    """Gradients of ``count`` parameters; one that is neither the first nor the last is frozen."""
    frozen = t.integer(1, count - 2)
    return [None if index == frozen else t.normal(3) + 3 for index in range(count)]


@check("unscale", points=2, seconds=20)
def check_unscaled(student, t):
    "All gradients are divided, in place"
    gradients, scale = gradients_of(t, t.integer(4, 6)), 2.0 ** t.integer(2, 9)
    values, same_tensors, _ = unscale_of(student, t, gradients, scale)
    values = t.items(values, len(gradients), "the gradients")
    for number, (got, grad) in enumerate(zip(values, gradients)):
        if grad is None:
            t.that(got is None, "the frozen parameter {number} has got a gradient", number=number)
            continue
        mistakes = {
            "the gradient of parameter {number} is unchanged": grad,
            "the gradient of parameter {number} is multiplied by the scale: divide": grad * scale,
        }
        same(t, got, grad / scale, "the gradient of parameter {number}", mistakes, number=number)
    message = "the gradients are new tensors: divide in place (div_), because others may hold the old ones"
    t.that(same_tensors is True, message)


@check("unscale", points=2, seconds=20)
def check_finite(student, t):
    "An infinite gradient or a NaN is found, wherever it is"
    count, scale = t.integer(4, 6), 2.0 ** t.integer(2, 9)
    *_, finite = unscale_of(student, t, gradients_of(t, count), scale)
    message = "all gradients are finite, but unscale(...) returns {got}: return True"
    t.that(finite is True, message, got=finite)
    found = []
    for bad, place in itertools.product((math.inf, math.nan), (0, count - 1)):
        gradients = gradients_of(t, count)
        gradients[place][t.integer(0, 2)] = bad
        values, _, finite = unscale_of(student, t, gradients, scale)
        found.append((bad, place, finite, near(values[-1:], gradients[-1:])))
    message = (
        "unscale(...) returns True for an infinite gradient and for a NaN. A second loop over `parameters` "
        "finds none: an iterator can be read once."
    )
    t.that(any(finite is not True for _, _, finite, _ in found), message)
    message = "unscale(...) finds a NaN, and returns True for an infinite gradient: torch.isfinite tests both"
    t.that(any(finite is not True for bad, _, finite, _ in found if bad == math.inf), message)
    for bad, place, finite, undivided in found:
        message = "parameter {place} of {count} has the gradient {bad}: unscale(...) is {got}, return False"
        t.that(finite is False, message, place=place, count=count, bad=bad, got=finite)
        message = "the gradients after one that is not finite are not divided: the loop ends too early"
        t.that(place > 0 or not undivided, message)


# -- 3 · scaler


def run_steps(scaler, weight, inputs, rate, early):
    """The weights and the scales after each step of a run; ``early``: unscale_ is called before step.

    Half of the weights are in the second param group of the optimiser.
    """
    parameter, other = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    frozen = torch.nn.Parameter(torch.zeros(2))  # has no gradient
    optimizer = torch.optim.SGD([{"params": [frozen, parameter]}, {"params": [other]}], lr=rate, momentum=0.9)
    weights, scales, scaled, others = [], [], [], []
    for x in inputs:
        optimizer.zero_grad()
        loss = (parameter * x).sum() + (other * x).sum()
        plain, product = loss.detach().clone(), scaler.scale(loss)
        scaled.append([float(value.detach()) for value in (product / plain, loss / plain)])
        scaled[-1].append(float(scaler.get_scale()))
        product.backward()
        if early:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        weights.append(parameter.detach().clone())
        scales.append(float(scaler.get_scale()))
        others.append(other.detach().clone())
    return [weights, scales, scaled, others]


@scenario
def scaler_run(student, options, refused, **case):
    """The run of a scaler without the classes that are refused."""
    from dlo_lib.grading.checks.own_work import without

    with without(*refused):
        return run_steps(student.LossScaler(**options), **case)


@scenario
def saved_scaler(student, options, refused, **case):
    """The same, and the bytes of a file with the state of the scaler."""
    import io

    from dlo_lib.grading.checks.own_work import without

    with without(*refused):
        scaler, file = student.LossScaler(**options), io.BytesIO()
        found = run_steps(scaler, **case)
        torch.save(scaler.state_dict(), file)
    return [*found, torch.tensor(list(file.getvalue()), dtype=torch.uint8)]


@scenario
def resumed_scaler(student, options, refused, file, **case):
    """The run of a new scaler, with another first scale, that loads this state: numbers and tensors."""
    import io

    from dlo_lib.grading.checks.own_work import without

    with without(*refused):
        scaler = student.LossScaler(**{**options, "init_scale": 1.0})
        scaler.load_state_dict(torch.load(io.BytesIO(bytes(file.tolist())), weights_only=True))
        return run_steps(scaler, **case)


def case_of(t, overflows: list[bool], interval: int) -> dict[str, Any]:
    """A run whose gradients overflow in the given steps."""
    inputs = []
    for overflow in overflows:
        inputs.append(t.normal(4) + 2)
        if overflow:
            inputs[-1][t.integer(0, 3)] = math.inf
    options = {"init_scale": 2.0 ** t.integer(4, 12), "growth_interval": interval}
    options |= {"growth_factor": t.choice((1.5, 3.0, 4.0)), "backoff_factor": t.choice((0.25, 0.75))}
    return {"weight": t.normal(4), "inputs": inputs, "rate": 0.01, "options": options}


def overflow_case(t) -> dict[str, Any]:
    """Good steps, an overflow in the middle of an interval, two intervals of good steps, two overflows, a
    good step."""
    interval = t.integer(3, 5)
    overflows = [False] * t.integer(1, interval - 1) + [True] + [False] * (2 * interval)
    return case_of(t, [*overflows, True, True, False], interval)


def overflowed(case: dict[str, Any]) -> list[bool]:
    return [not bool(torch.isfinite(x).all()) for x in case["inputs"]]


HIDDEN = "An attribute, such as `self.scale`, hides the method of the same name: call it `self._scale`"
COPIED = "This exercise asks you to write torch.amp.GradScaler: neither inherit from it, nor keep one inside"
CAUSES = {"LibraryUsed": COPIED, "object is not callable": HIDDEN}


def refused(student) -> list[str]:
    """Return the classes that an answer of one's own does not use."""
    return ["torch.amp.GradScaler"] if student.is_own("LossScaler") else []


def run_of(student, t, case: dict[str, Any], early: bool = False) -> tuple[Any, ...]:
    """Return the weights, the scales, what ``scale`` does, and the weights of the second group."""
    with explaining(CAUSES):
        result = student.run(scaler_run, early=early, refused=refused(student), **case)
    return checked(t, case, result)


def checked(t, case: dict[str, Any], result: object) -> tuple[Any, ...]:
    """Return the parts of a result after a check of their types."""
    weights, scales, scaled, others = t.items(result, 4, "the result")
    count, shape = len(case["inputs"]), case["weight"].shape
    for weight in t.items(weights, count, "the weights"):
        t.tensor(weight, "the weight", shape=shape)
    numbers = [t.number(scale, "a scale") for scale in t.items(scales, count, "the scales")]
    return weights, numbers, scaled, others


STEP = {"rtol": 1e-5, "atol": 1e-6}
STILL_UNSCALED = (
    "The second step uses the scaled gradients: the scaler still takes them for unscaled, as in the first "
    "one. Forget it in update()."
)
OTHER_GROUP = (
    "The weights of the second param group move by other steps than those of the first: unscale the "
    "gradients of all groups."
)


@check("scaler", points=2, seconds=30)
def check_true_steps(student, t):
    "The weights move as without scaling"
    for early in (False, True):
        case = case_of(t, [False] * t.integer(3, 5), interval=2)
        start, rate, initial = case["weight"], case["rate"], case["options"]["init_scale"]
        weights, _, scaled, others = run_of(student, t, case, early=early)
        for ratio, unchanged, scale in scaled:
            message = "scale(loss) has changed the loss itself: `*=` works in place, so return loss * scale"
            t.that(abs(unchanged - 1) < 1e-4, message)
            message = "scale(loss) multiplies the loss by {ratio:.4g}; the scale is {scale:.4g}"
            t.that(abs(ratio / scale - 1) < 1e-4, message, ratio=ratio, scale=scale)
        want, _ = scaled_run(**case)
        factor = float(((weights[0] - start) / (-rate * case["inputs"][0])).median())
        t.that(abs(factor) > 1e-12, "the first step changes no weight, although all gradients are finite")
        message = (
            "the first step is {factor:.4g} times the right one: the optimiser has used the scaled gradients"
        )
        t.that(abs(factor / initial - 1) > 1e-2, message, factor=factor)
        message = "the update is {factor:.3g} times the true one: step(...) has divided a second time"
        t.that(not early or abs(factor * initial - 1) > 1e-2, message, factor=factor)
        scaled_again = weights[0] - rate * (0.9 * case["inputs"][0] + initial * case["inputs"][1])
        wrong_if(t, weights[1], want[1], {STILL_UNSCALED: scaled_again}, rtol=1e-4)
        same(t, weights, want, "the weight after step {i}, counted from 0,", **STEP)
        t.that(near(others, want, **STEP), OTHER_GROUP)


@check("scaler", points=2, seconds=30)
def check_skipped(student, t):
    "A step with an overflow changes nothing"
    case = overflow_case(t)
    bad, (weights, *_), (want, _) = overflowed(case).index(True), run_of(student, t, case), scaled_run(**case)
    message = "not tested yet: the first step is wrong, see the first check"
    t.that(near(weights[0], want[0], rtol=1e-4, atol=1e-5), message)
    message = "After an overflow the weights are infinite or NaN: skip the step."
    t.that(bool(torch.isfinite(weights[bad]).all()), message)
    message = "The step was made without the infinite gradients: momentum moves the weights. Skip it."
    moved = {message: scaled_run(**case, mistake="momentum")[0][bad]}
    wrong_if(t, weights[bad], want[bad], moved, rtol=1e-5)
    same(t, weights, want, "the weight after step {i}, counted from 0,", **STEP)


def same_scales(t, scales: list[float], case: dict[str, Any], mistakes: dict[str, list[float]]) -> None:
    """The scale after each step is right."""
    want, interval = scaled_run(**case)[1], case["options"]["growth_interval"]
    wrong_if(t, scales, want, mistakes, rtol=1e-9)
    message = (
        "step {step} {word}; after it the scale is {got:.4g}, expected {want:.4g} (growth after {interval} "
        "good steps in succession)"
    )
    for step, (got, right, bad) in enumerate(zip(scales, want, overflowed(case)), 1):
        values = {"step": step, "word": "overflowed" if bad else "was good", "interval": interval}
        t.that(abs(got / right - 1) < 1e-9, message, **values, got=got, want=right)


@check("scaler", points=3, seconds=30)
def check_scales(student, t):
    "The scale falls after an overflow and grows after good steps in succession"
    case = overflow_case(t)
    initial, factor = case["options"]["init_scale"], case["options"]["backoff_factor"]
    _, scales, *_ = run_of(student, t, case)
    no_count = "An overflow does not restart the count: good steps before and after it are not in succession."
    mistakes = {no_count: scaled_run(**case, mistake="no count")[1]}
    mistakes["The scale never changes."] = [initial] * len(scales)
    wrong_if(t, scales, scaled_run(**case)[1], mistakes, rtol=1e-9)
    first = scales[overflowed(case).index(True)]  # the scale has not grown before
    message = (
        "after the first overflow the scale is {got:.4g}, {ratio:.3g} times as large as before; the backoff "
        "factor is {factor:g}"
    )
    t.that(abs(first / initial - factor) < 1e-6, message, got=first, ratio=first / initial, factor=factor)
    same_scales(t, scales, case, {})


@check("scaler", points=1, seconds=30)
def check_resume(student, t):
    "A resumed run continues with the scale and the count"
    interval = t.integer(4, 6)
    case = case_of(t, [True] + [False] * (2 * interval), interval)
    saved_at = 1 + t.integer(2, interval - 1)  # between two changes of the scale
    before, after = (
        case | {"inputs": part} for part in (case["inputs"][:saved_at], case["inputs"][saved_at:])
    )
    how = {"early": False, "refused": refused(student)}
    with explaining(CAUSES):
        *first, file = t.items(student.fresh(saved_scaler, **how, **before), 5, "the result")
        t.tensor(file, "the file", dtype=torch.uint8)
        second = student.fresh(resumed_scaler, **how, file=file, **after)
    scales, resumed = checked(t, before, first)[1], checked(t, after, second)[1]
    want = scaled_run(**before)[1]
    message = "not tested yet: the scale is wrong before the resume, see the check before"
    t.that(near(scales, want, rtol=1e-6), message)
    after["options"] = case["options"] | {"init_scale": want[-1]}
    message = "The resumed scaler counts its good steps from 0: the count belongs to the state."
    same_scales(t, [*scales, *resumed], case, {message: want + scaled_run(**after)[1]})
