"""The visible checks of the mixed step and of master weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check, scenario
from dlo_lib.labkit.compare import near, same, wrong_if

from .twins import descent16, mixed_steps

# -- 4 · mixed


def small_net(seed_weights, overflow_at):
    """A model whose layer in the middle computes in fp32, in autocast too. Its outputs depend on the number
    of the call, and are infinite in call ``overflow_at``."""
    linear = torch.nn.functional.linear

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList([weight.clone() for weight in seed_weights])
            self.number = 0

        def forward(self, x):
            first, middle, last = self.weights
            hidden = torch.tanh(linear(x, first))
            with torch.autocast("cpu", enabled=False):
                hidden = torch.tanh(linear(hidden.float(), middle))
            hidden = hidden * (1 + self.number / 8)
            if self.number == overflow_at:
                hidden = hidden * float("inf")
            self.number += 1
            return linear(hidden, last)

    return Net()


@scenario
def mixed(student, seed_weights, batches, low, max_norm, rate, scale, interval, overflow_at):
    """The losses, the weights and the scale after each step."""
    import warnings

    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype")
    model = small_net(seed_weights, overflow_at)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    losses, weights, scales = [], [], []
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[low]
    for images, labels in batches:
        loss = student.mixed_step(model, optimizer, scaler, images, labels, dtype, max_norm)
        losses.append(loss if isinstance(loss, (int, float)) else str(type(loss).__name__))
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        scales.append(float(scaler.get_scale()))
    return [losses, weights, scales]


@scenario
def elsewhere(student, device, sizes):
    """Run the step with tensors that say they are on ``device``, up to the model's first line: whether
    autocast is on there."""

    class There(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @staticmethod
        def __new__(cls, size, dtype):
            place = torch.device(device)
            return torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=place)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.detach.default:
                return cls(args[0].shape, args[0].dtype)
            raise RuntimeError(f"{func} before the model was called")

    class Reached(BaseException):
        pass

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(There(sizes[1:], torch.float32))

        def forward(self, x):
            raise Reached(torch.is_autocast_enabled(device))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = There(sizes[:2], torch.float32), There(sizes[:1], torch.int64)
    try:
        student.mixed_step(model, optimizer, torch.amp.GradScaler("cpu"), images, labels, torch.bfloat16, 1.0)
    except Reached as reached:
        return reached.args[0]
    return None


def mixed_case(t, low: str, steps: int = 2, overflow_at: int = -1) -> dict[str, Any]:
    inside, hidden, classes = t.integer(3, 5), t.integer(4, 6), t.integer(3, 4)
    sizes = [t.integer(5, 8) for _ in range(steps)]
    batches = [[t.normal(size, inside), t.integers(0, classes - 1, size)] for size in sizes]
    return {
        "seed_weights": [t.normal(hidden, inside), t.normal(hidden, hidden), t.normal(classes, hidden)],
        "batches": batches,
        "low": low,
        "max_norm": t.uniform(0.05, 0.1),  # below the norm of the gradients here
        "rate": 4.0,  # so that a small wrong part of a gradient moves the weights visibly
        "scale": 2.0 ** t.integer(1, 2),
        "interval": 1000,
        "overflow_at": overflow_at,
    }


def mixed_of(student, t, case: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the scenario ``mixed`` returns, after a check of its lengths."""
    losses, weights, scales = t.items(student.run(mixed, **case), 3, "the result")
    count = len(case["batches"])
    t.items(losses, count, "the losses")
    return losses, t.items(weights, count, "the weights"), t.items(scales, count, "the scales")


@check("mixed", points=3, seconds=30)
def check_mixed_weights(student, t):
    "The weights move by the true, clipped gradients"
    case = mixed_case(t, "fp32")
    _, weights, _ = mixed_of(student, t, case)
    _, want = mixed_steps(case)
    wrong = {
        "The scaled gradients were clipped, and divided by the scale afterwards: call scaler.unscale_ "
        "before clipping.": "scaled clip",
        "The gradients are not clipped.": "no clip",
        "The gradients of the step before are still there: clear them first.": "accumulated",
        "The model is called twice in a step: once is enough.": "called twice",
    }
    mistakes = {message: mixed_steps(case, mistake)[1] for message, mistake in wrong.items()}
    message = "The layers ran in bfloat16 with dtype=torch.float32: pass `dtype` to torch.autocast."
    mistakes[message] = mixed_steps(case | {"low": "bf16"})[1]
    mistakes["The weights do not change."] = [case["seed_weights"]] * len(want)
    wrong_if(t, weights, want, mistakes, rtol=1e-3, atol=1e-5)
    for step, (got, right) in enumerate(zip(weights, want), 1):
        same(t, got, right, "weight {i} after step {step}", rtol=1e-3, atol=1e-5, step=step)


IN_AUTOCAST = {
    "The layers ran in float32, not bfloat16: the forward belongs inside of torch.autocast(..., dtype).": (
        "fp32"
    ),
    "The loss is computed outside of autocast: F.cross_entropy belongs inside of the `with` "
    "block.": "loss outside",
    "The backward ran inside of autocast: end the `with` block before it.": "backward inside",
}


Steps = list[list[Tensor]]


@check("mixed", points=2, seconds=30)
def check_autocast(student, t):
    "Forward runs in the low precision, backward outside of autocast"

    def draw() -> tuple[dict[str, Any], list[float], Steps, dict[str, Steps]]:
        case = mixed_case(t, "bf16", steps=1) | {"max_norm": 1e6}  # clipping is another check
        mistakes = {message: mixed_steps(case, way)[1] for message, way in IN_AUTOCAST.items()}
        return case, *mixed_steps(case), mistakes

    def tells(drawn: tuple[dict[str, Any], list[float], Steps, dict[str, Steps]]) -> bool:
        return not any(near(wrong, drawn[2], 0, 2e-5) for wrong in drawn[3].values())

    case, (right,), want, mistakes = t.draw_until(draw, tells)
    losses, weights, _ = mixed_of(student, t, case)
    value = t.number(losses[0], "the loss of the first step")
    t.that(abs(value / right / case["scale"] - 1) > 0.2, "the loss that is returned is the scaled one")
    wrong_if(t, weights, want, mistakes, rtol=0, atol=1e-6)
    same(t, weights[0], want[0], "weight {i} after the step in bf16", rtol=1e-5, atol=5e-6)
    t.close(value, right, "the loss of the first step", rtol=1e-4)
    device = t.choice(("hpu", "xpu", "mtia"))
    on = student.run(elsewhere, device=device, sizes=[t.integer(3, 5), 4, 3])
    message = (
        "With images on the device {device} autocast is off in the model: pass the type of the device of "
        "the images to torch.autocast."
    )
    t.that(on is True, message, device=device)


@check("mixed", points=1, seconds=30)
def check_updated(student, t):
    "After an overflow the scale falls and the weights stay"
    case = mixed_case(t, "fp32", steps=3, overflow_at=1)
    _, weights, scales = mixed_of(student, t, case)
    message = "not tested yet: the first step changes no weight, see the first check"
    t.that(not near(weights[0], case["seed_weights"]), message)
    message = "an overflow in step 2 changed the weights: use scaler.step(optimizer)"
    t.that(near(weights[1], weights[0], rtol=0, atol=0), message)
    message = (
        "after an overflow the scale is {got:.4g}, expected {want:.4g}: call scaler.update() after the step"
    )
    t.that(scales[1] == case["scale"] / 2, message, got=scales[1], want=case["scale"] / 2)


# -- 5 · masters


@scenario
def mastered(student, starts, gradients, rate):
    """The weights and the masters after all steps, and whether they are the same tensors as before."""
    weights = [torch.nn.Parameter(start.clone()) for start in starts]
    masters = [start.float() for start in starts]
    places = [value.data_ptr() for value in [*weights, *masters]]
    for row in gradients:
        for weight, grad in zip(weights, row):
            weight.grad = None if grad is None else grad.clone()
        student.master_step(weights, masters, rate)
    same = [value.data_ptr() for value in [*weights, *masters]] == places
    return [[weight.detach() for weight in weights], masters, same]


def masters_case(t, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Updates that are smaller than the resolution of the weights; the second weight has no gradient in some
    steps."""

    def drawn(size: int) -> Tensor:
        return (1 + 0.3 * t.normal(size)).to(dtype)

    steps = t.integer(30, 50)
    starts = [(1 + t.normal(4).abs()).to(dtype), (1 + t.normal(3).abs()).to(dtype)]
    frozen = {t.integer(1, steps - 1) for _ in range(5)}
    gradients = [[drawn(4), None if step in frozen else drawn(3)] for step in range(steps)]
    return {"starts": starts, "gradients": gradients, "rate": 0.0013}


def in_fp32(case: dict[str, Any]) -> dict[str, Any]:
    """The same case with weights in fp32, which are what masters should be."""
    return case | {"starts": [start.float() for start in case["starts"]]}


ROUNDED_AWAY = (
    "Each update is below the resolution of bf16 and is rounded away: update the master itself, and never "
    "make it anew from the weight."
)


@check("masters", points=2, seconds=30)
def check_masters(student, t):
    "Small updates are kept"
    case = masters_case(t)
    weights, masters, _ = t.items(student.run(mastered, **case), 3, "the result")
    found = t.items(weights, 2, "the weights")
    message = (
        "The masters move, and the weights do not: `weight = ...` gives the name to another tensor. Use "
        "weight.copy_(master)."
    )
    moved = near(masters, descent16(**in_fp32(case)), rtol=1e-4)
    t.that(not moved or not near(found, case["starts"]), message)
    mistakes = {
        ROUNDED_AWAY: descent16(**case, way="no master"),
        ROUNDED_AWAY + " It is lost again in each step.": descent16(**case, way="new master"),
        "The weight is that of the start: round the master into it.": case["starts"],
    }
    same(
        t, found, descent16(**case), "weight {i} after {steps} steps", mistakes, steps=len(case["gradients"])
    )


@check("masters", points=1, seconds=30)
def check_product(student, t):
    "The masters are updated in fp32"
    case = masters_case(t)
    _, masters, in_place = t.items(student.run(mastered, **case), 3, "the result")
    exact = {"rtol": 2e-6, "atol": 0}
    want, rounded = (descent16(**in_fp32(case), way=way) for way in ("right", "product in 16 bits"))
    for got, start in zip(t.items(masters, 2, "the masters"), case["starts"]):
        message = "not tested yet: the masters do not change, see the first check"
        t.that(not near(got, start.float()), message)
    message = "The product of rate and gradient was rounded to bf16: convert the gradient to fp32 first."
    same(t, masters, want, "master {i}", {message: rounded}, **exact)
    message = (
        "weights or masters are new tensors: change them in place (sub_, copy_), because a model and a "
        "checkpoint hold them"
    )
    t.that(in_place is True, message)
