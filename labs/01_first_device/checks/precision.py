"""The visible checks of training in 16 bits: loss scaling, the mixed step, and master weights."""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import check, scenario
from dlo_lib.labkit.compare import near, wrong_if

from .twins import descent16, library_scales, scaled_run

# -- 3 · unscale


@scenario
def unscaled(student, gradients, scale):
    """The gradients after the student's unscale of an iterator over parameters, whether they are the same tensors, and the result."""
    import torch

    parameters = []
    for grad in gradients:
        parameter = torch.nn.Parameter(torch.zeros(3))
        if grad is not None:
            parameter.grad = grad.clone()
        parameters.append(parameter)
    before = [parameter.grad for parameter in parameters]
    found = student.unscale(iter(parameters), scale)
    same = [parameter.grad is grad for parameter, grad in zip(parameters, before)]
    values = [parameter.grad for parameter in parameters]
    return [values, same, found if type(found) is bool else str(type(found).__name__)]


def unscale_of(student, t, gradients, scale: float):
    values, same, finite = t.items(student.run(unscaled, gradients=gradients, scale=scale), 3, "the result")
    return t.items(values, len(gradients), "the gradients"), same, finite


def gradients_of(t, count: int):
    """Gradients of ``count`` parameters; one that is neither the first nor the last is frozen."""
    frozen = t.integer(1, count - 2)
    return [None if index == frozen else t.normal(3) + 3 for index in range(count)]


@check("unscale", points=2, seconds=20)
def check_unscaled(student, t):
    "All gradients are divided, in place"
    gradients, scale = gradients_of(t, t.integer(4, 6)), 2.0 ** t.integer(2, 9)
    values, same, _ = unscale_of(student, t, gradients, scale)
    for number, (got, grad) in enumerate(zip(values, gradients)):
        if grad is None:
            t.that(got is None, "the frozen parameter {number} has got a gradient", number=number)
            continue
        t.that(not near(got, grad), "the gradient of parameter {number} is unchanged", number=number)
        t.that(not near(got, grad * scale), "the gradient of parameter {number} is multiplied by the scale: divide", number=number)
        t.close(got, grad / scale, "the gradient of parameter {number}", number=number)
    message = "the gradients are new tensors: divide in place (div_), because other parts of a program may hold the old ones"
    t.that(all(same), message)


@check("unscale", points=2, seconds=20)
def check_finite(student, t):
    "An infinite gradient or a NaN is found, wherever it is"
    count, scale = t.integer(4, 6), 2.0 ** t.integer(2, 9)
    *_, finite = unscale_of(student, t, gradients_of(t, count), scale)
    t.that(finite is True, "all gradients are finite, but unscale(...) returns {got}: return True", got=finite)
    for bad in (float("inf"), float("nan")):
        for place in (0, count - 1):
            gradients = gradients_of(t, count)
            gradients[place][t.integer(0, 2)] = bad
            values, _, finite = unscale_of(student, t, gradients, scale)
            message = "parameter {place} of {count} has the gradient {bad} and unscale(...) returns {got}: return False"
            t.that(finite is False, message, place=place, count=count, bad=bad, got=finite)
            if place == 0:
                message = "the gradients behind one that is not finite are not divided: the loop ends too early"
                t.that(not near(values[-1], gradients[-1]), message)


# -- 3 · scaler


@scenario
def scaler_run(student, weight, inputs, rate, options, early, saved_at):
    """The weights and the scales after each step of a run; ``early``: unscale_ is called before step.

    At step ``saved_at`` a new scaler loads the state of the old one.
    """
    import json

    import torch

    parameter = torch.nn.Parameter(weight.clone())
    frozen = torch.nn.Parameter(torch.zeros(2))  # has no gradient
    optimizer = torch.optim.SGD([frozen, parameter], lr=rate, momentum=0.9)
    scaler = student.LossScaler(**options)
    weights, scales, scaled = [], [], []
    for number, x in enumerate(inputs):
        if number == saved_at:
            state = json.loads(json.dumps(scaler.state_dict()))
            scaler = student.LossScaler(**{**options, "init_scale": 1.0})
            scaler.load_state_dict(state)
        optimizer.zero_grad()
        loss = (parameter * x).sum()
        product = scaler.scale(loss)
        scaled.append([float(scaler.get_scale()), float((product / loss).detach())])
        product.backward()
        if early:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        weights.append(parameter.detach().clone())
        scales.append(float(scaler.get_scale()))
    return [weights, scales, scaled]


def case_of(t, overflows: list[bool], interval: int) -> dict:
    """A run whose gradients overflow in the given steps."""
    inputs = []
    for overflow in overflows:
        x = t.normal(4) + 2
        if overflow:
            x[t.integer(0, 3)] = float("inf")
        inputs.append(x)
    options = {"init_scale": 2.0 ** t.integer(4, 12), "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": interval}
    return {"weight": t.normal(4), "inputs": inputs, "rate": 0.01, "options": options}


def overflow_pattern(t, interval: int) -> list[bool]:
    """Good steps, an overflow in the middle of an interval, two intervals of good steps, two overflows, a good step."""
    first = t.integer(1, interval - 1)
    return [False] * first + [True] + [False] * (2 * interval) + [True, True] + [False]


def run_of(student, t, case: dict, early: bool = False, saved_at: int = -1):
    weights, scales, scaled = t.items(student.run(scaler_run, early=early, saved_at=saved_at, **case), 3, "the result")
    count = len(case["inputs"])
    found = [t.tensor(weight, "the weight", shape=case["weight"].shape) for weight in t.items(weights, count, "the weights")]
    return found, [t.number(scale, "a scale") for scale in t.items(scales, count, "the scales")], scaled


@check("scaler", points=2, seconds=30)
def check_true_steps(student, t):
    "The weights move as without scaling"
    for early in (False, True):
        case = case_of(t, [False] * t.integer(3, 5), interval=2)
        weights, _, scaled = run_of(student, t, case, early=early)
        for scale, ratio in scaled:
            message = "scale(loss) multiplies the loss by {ratio:.4g}; the scale is {scale:.4g}"
            t.that(abs(ratio / scale - 1) < 1e-4, message, ratio=ratio, scale=scale)
        want, _ = scaled_run(**case)
        first = case["weight"] - case["rate"] * case["inputs"][0]
        moved = (weights[0] - case["weight"]) / (first - case["weight"])
        factor = float(moved.median())
        initial = case["options"]["init_scale"]
        t.that(abs(factor) > 1e-12, "the first step changes no weight, although all gradients are finite")
        message = "the first step is {factor:.4g} times the true one: the optimiser has used the scaled gradients"
        t.that(abs(factor / initial - 1) > 1e-2, message, factor=factor)
        message = "after unscale_ and step the update is {factor:.3g} times the true one: step(...) has divided a second time"
        t.that(not early or abs(factor * initial - 1) > 1e-2, message, factor=factor)
        for step, (got, right) in enumerate(zip(weights, want), 1):
            t.close(got, right, "the weight after step {step}", rtol=1e-5, atol=1e-6, step=step)


@check("scaler", points=2, seconds=30)
def check_skipped(student, t):
    "A step with an overflow changes nothing"
    interval = t.integer(3, 5)
    case = case_of(t, overflow_pattern(t, interval), interval)
    weights, _, _ = run_of(student, t, case)
    want, _ = scaled_run(**case)
    bad = next(step for step, x in enumerate(case["inputs"]) if not torch.isfinite(x).all())
    t.that(near(weights[0], want[0], rtol=1e-4, atol=1e-5), "not tested yet: the first step is wrong, see the first check")
    t.that(bool(torch.isfinite(weights[bad]).all()), "After an overflow the weights are infinite or NaN: skip the step.")
    moved = {
        "The step was made with other gradients in place of the infinite ones: momentum moves the weights. Skip it.": scaled_run(
            **case, mistake="momentum"
        )[0][bad]
    }
    wrong_if(t, weights[bad], want[bad], moved, rtol=1e-5)
    for step, (got, right) in enumerate(zip(weights, want), 1):
        t.close(got, right, "the weight after step {step}", rtol=1e-5, atol=1e-6, step=step)


def scales_wrong(t, scales, want, overflows, interval) -> None:
    for step, (got, right) in enumerate(zip(scales, want), 1):
        word = "overflowed" if overflows[step - 1] else "was good"
        message = (
            "step {step} {word}; after it the scale is {got:.4g}, expected {want:.4g} (growth after {interval} good steps in succession)"
        )
        t.that(abs(got / right - 1) < 1e-9, message, step=step, word=word, got=got, want=right, interval=interval)


@check("scaler", points=3, seconds=30)
def check_scales(student, t):
    "The scale falls after an overflow and grows after good steps in succession"
    interval = t.integer(3, 5)
    overflows = overflow_pattern(t, interval)
    case = case_of(t, overflows, interval)
    _, scales, _ = run_of(student, t, case)
    want = library_scales(overflows, case["options"])
    mistakes = {
        "An overflow does not restart the count: the good steps before it and after it are not in succession.": scaled_run(
            **case, mistake="no count"
        )[1],
        "The scale never changes.": [case["options"]["init_scale"]] * len(want),
    }
    wrong_if(t, scales, want, mistakes, rtol=1e-9)
    first = overflows.index(True)
    message = "after the first overflow the scale is {got:.4g}, {ratio:.3g} times as large as before; the backoff factor is 0.5"
    before = case["options"]["init_scale"]
    t.that(abs(scales[first] / before - 0.5) < 1e-6, message, got=scales[first], ratio=scales[first] / before)
    scales_wrong(t, scales, want, overflows, interval)


@check("scaler", points=1, seconds=30)
def check_resume(student, t):
    "A resumed run continues with the scale and the count"
    interval = t.integer(4, 6)
    overflows = [True] + [False] * (2 * interval)
    case = case_of(t, overflows, interval)
    saved_at = 1 + t.integer(2, interval - 1)  # between two changes of the scale
    _, scales, _ = run_of(student, t, case, saved_at=saved_at)
    want = library_scales(overflows, case["options"])
    t.that(
        near(scales[:saved_at], want[:saved_at], rtol=1e-6), "not tested yet: the scale is wrong before the resume, see the check before"
    )
    forgotten = library_scales([False] * (len(want) - saved_at), {**case["options"], "init_scale": want[saved_at - 1]})
    mistakes = {
        "The resumed scaler counts its good steps from 0: the count belongs to the state.": want[:saved_at] + forgotten,
    }
    wrong_if(t, scales, want, mistakes, rtol=1e-9)
    scales_wrong(t, scales, want, overflows, interval)


# -- 4 · mixed


@scenario
def mixed(student, seed_weights, batches, low, max_norm, rate, scale, interval, overflow_at):
    """The losses, the weights after each step, the scales, and what a layer saw: its dtype, and autocast in its backward."""
    import warnings

    import torch

    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype")
    seen, backward = [], []

    class Watched(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(seed_weights[0].shape[1], seed_weights[0].shape[0], bias=False)
            self.second = torch.nn.Linear(seed_weights[1].shape[1], seed_weights[1].shape[0], bias=False)
            self.number = 0

        def forward(self, x):
            hidden = self.first(x)
            seen.append(str(hidden.dtype))
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: backward.append(torch.is_autocast_enabled("cpu")))
            hidden = torch.tanh(hidden)
            if self.number == overflow_at:
                hidden = hidden * float("inf")
            self.number += 1
            return self.second(hidden)

    model = Watched()
    with torch.no_grad():
        model.first.weight.copy_(seed_weights[0])
        model.second.weight.copy_(seed_weights[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    losses, weights, scales = [], [], []
    for images, labels in batches:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[low]
        loss = student.mixed_step(model, optimizer, scaler, images, labels, dtype, max_norm)
        losses.append(loss if isinstance(loss, (int, float)) else str(type(loss).__name__))
        weights.append([model.first.weight.detach().clone(), model.second.weight.detach().clone()])
        scales.append(float(scaler.get_scale()))
    return [losses, weights, scales, seen, backward]


def mixed_case(t, low: str, steps: int = 2, overflow_at: int = -1) -> dict:
    inside, hidden, classes = t.integer(3, 5), t.integer(4, 6), t.integer(3, 4)
    batches = [[t.normal(6, inside), torch.tensor([t.integer(0, classes - 1) for _ in range(6)])] for _ in range(steps)]
    return {
        "seed_weights": [t.normal(hidden, inside), t.normal(classes, hidden)],
        "batches": batches,
        "low": low,
        "max_norm": t.uniform(0.05, 0.1),  # below the norm of the gradients here
        "rate": 4.0,  # so that a small wrong part of a gradient moves the weights visibly
        "scale": 2.0 ** t.integer(1, 2),
        "interval": 1000,
        "overflow_at": overflow_at,
    }


def fp32_twin(case: dict, mistake: str = "") -> tuple[list[float], list[list[torch.Tensor]]]:
    """The losses and weights of the same steps in fp32, or those of a mistake."""
    first, second = (weight.clone() for weight in case["seed_weights"])
    total = [torch.zeros_like(first), torch.zeros_like(second)]
    losses, weights = [], []
    for images, labels in case["batches"]:
        leaves = [first.clone().requires_grad_(), second.clone().requires_grad_()]
        loss = torch.nn.functional.cross_entropy(torch.tanh(images @ leaves[0].T) @ leaves[1].T, labels)
        grads = list(torch.autograd.grad(loss, leaves))
        if mistake == "accumulated":  # what is left of the step before is no longer scaled, so the division makes it small
            grads = [old / case["scale"] + new for old, new in zip(total, grads)]
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        factor = min(1.0, case["max_norm"] / (norm + 1e-6))
        if mistake == "scaled clip":
            factor = min(1.0, case["max_norm"] / (norm * case["scale"] + 1e-6))
        if mistake == "no clip":
            factor = 1.0
        total = [factor * grad for grad in grads]
        first, second = (weight - case["rate"] * step for weight, step in zip((first, second), total))
        losses.append(float(loss.detach()))
        weights.append([first, second])
    return losses, weights


def mixed_of(student, t, case: dict):
    losses, weights, scales, seen, backward = t.items(student.run(mixed, **case), 5, "the result")
    count = len(case["batches"])
    t.that(
        type(seen) is list and len(seen) == count,
        "the model was called {got} times in {count} steps: once a step",
        got=len(seen),
        count=count,
    )
    return t.items(losses, count, "the losses"), t.items(weights, count, "the weights"), scales, seen, backward


@check("mixed", points=3, seconds=30)
def check_mixed_weights(student, t):
    "The weights move by the true, clipped gradients"
    case = mixed_case(t, "fp32")
    _, weights, _, _, _ = mixed_of(student, t, case)
    _, want = fp32_twin(case)
    clipped_scaled = "The scaled gradients were clipped, and divided by the scale afterwards: call scaler.unscale_ before clipping."
    mistakes = {
        clipped_scaled: fp32_twin(case, "scaled clip")[1],
        "The gradients are not clipped.": fp32_twin(case, "no clip")[1],
        "The gradients of the step before are still there: clear them first.": fp32_twin(case, "accumulated")[1],
        "The weights do not change.": [case["seed_weights"]] * len(want),
    }
    flat = [value for row in weights for value in row]
    wrong_if(
        t,
        flat,
        [value for row in want for value in row],
        {text: [v for row in wrong for v in row] for text, wrong in mistakes.items()},
        rtol=1e-3,
        atol=1e-5,
    )
    for step, (got, right) in enumerate(zip(weights, want), 1):
        for name, mine, twin in zip(("first", "second"), got, right):
            t.close(mine, twin, "the {name} weight after step {step}", rtol=1e-3, atol=1e-5, name=name, step=step)


@check("mixed", points=2, seconds=30)
def check_autocast(student, t):
    "Forward runs in the low precision, backward outside of autocast"
    case = mixed_case(t, "bf16")
    losses, _, _, seen, backward = mixed_of(student, t, case)
    message = "the layers ran in {dtype}, expected bfloat16: the forward belongs inside of torch.autocast(..., dtype=dtype)"
    t.that(all(dtype == "torch.bfloat16" for dtype in seen), message, dtype=seen[0].removeprefix("torch."))
    t.that(len(backward) == len(seen), "there were {got} backwards in {want} steps", got=len(backward), want=len(seen))
    t.that(not any(backward), "backward ran inside of autocast: end the `with` block before it")
    want, _ = fp32_twin(case)
    value, right = t.number(losses[0], "the loss of the first step"), want[0]
    t.that(abs(value / right / case["scale"] - 1) > 0.2, "the loss that is returned is the scaled one")
    t.close(value, right, "the loss of the first step", rtol=0.1, atol=0.05)


@check("mixed", points=1, seconds=30)
def check_updated(student, t):
    "After an overflow the scale falls and the weights stay"
    case = mixed_case(t, "fp32", steps=3, overflow_at=1)
    _, weights, scales, _, _ = mixed_of(student, t, case)
    t.that(not near(weights[0], case["seed_weights"]), "not tested yet: the first step changes no weight, see the first check")
    t.that(near(weights[1], weights[0], rtol=0, atol=0), "an overflow in step 2 changed the weights: use scaler.step(optimizer)")
    message = "after an overflow the scale is {got:.4g}, expected {want:.4g}: call scaler.update() at the end of the step"
    t.that(scales[1] == case["scale"] / 2, message, got=scales[1], want=case["scale"] / 2)


# -- 5 · masters


@scenario
def mastered(student, starts, gradients, rate):
    """The weights and the masters after all steps, and whether they are the same tensors as before."""
    import torch

    weights = [torch.nn.Parameter(start.clone()) for start in starts]
    masters = [start.float() for start in starts]
    places = [value.data_ptr() for value in [*weights, *masters]]
    for row in gradients:
        for weight, grad in zip(weights, row):
            weight.grad = None if grad is None else grad.clone()
        student.master_step(weights, masters, rate)
    same = [value.data_ptr() for value in [*weights, *masters]] == places
    return [[weight.detach() for weight in weights], masters, same]


def masters_case(t, dtype: torch.dtype = torch.bfloat16) -> dict:
    """Updates that are smaller than the resolution of the weights; the second weight has no gradient in some steps."""
    steps = t.integer(30, 50)
    starts = [(1 + t.normal(4).abs()).to(dtype), (1 + t.normal(3).abs()).to(dtype)]
    frozen = {t.integer(1, steps - 1) for _ in range(5)}
    gradients = [
        [(1 + 0.3 * t.normal(4)).to(dtype), None if step in frozen else (1 + 0.3 * t.normal(3)).to(dtype)] for step in range(steps)
    ]
    return {"starts": starts, "gradients": gradients, "rate": 0.0013}


ROUNDED_AWAY = (
    "Each update is below the resolution of bf16 and is rounded away: update the master itself, and never make it anew from the weight."
)


@check("masters", points=2, seconds=30)
def check_masters(student, t):
    "Small updates are kept"
    case = masters_case(t)
    weights, *_ = t.items(student.run(mastered, **case), 3, "the result")
    found = t.items(weights, 2, "the weights")
    want = descent16(**case)
    for index, (got, right) in enumerate(zip(found, want)):
        mistakes = {
            ROUNDED_AWAY: descent16(**case, way="no master")[index],
            ROUNDED_AWAY + " It is lost again in each step.": descent16(**case, way="new master")[index],
            "The weight is that of the start: round the master into it.": case["starts"][index],
        }
        wrong_if(t, got, right, mistakes)
        t.close(got, right, "weight {index} after {steps} steps", index=index, steps=len(case["gradients"]))


@check("masters", points=1, seconds=30)
def check_product(student, t):
    "The masters are updated in fp32"
    case = masters_case(t)
    _, masters, same = t.items(student.run(mastered, **case), 3, "the result")
    masters = t.items(masters, 2, "the masters")
    want = descent16([start.float() for start in case["starts"]], case["gradients"], case["rate"])
    rounded = descent16([start.float() for start in case["starts"]], case["gradients"], case["rate"], way="product in 16 bits")
    for index, (got, right) in enumerate(zip(masters, want)):
        t.that(not near(got, case["starts"][index].float()), "not tested yet: the masters do not change, see the first check")
        message = "The product of rate and gradient was rounded to bf16: convert the gradient to fp32 first."
        wrong_if(t, got, right, {message: rounded[index]}, rtol=2e-6, atol=0)
        t.close(got, right, "master {index}", rtol=2e-6, atol=0, index=index)
    t.that(
        same is True, "weights or masters are new tensors: change them in place (sub_, copy_), because a model and a checkpoint hold them"
    )
