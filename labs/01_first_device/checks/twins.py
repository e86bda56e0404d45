"""What the results are compared with: a simulated device, the library's scaler, and the steps in plain
arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.optim.precision.loss_scaling import DynamicLossScaler

LAUNCH = 0.001
"""Seconds in which a call of the simulated device puts its work into the queue."""


def queue_times(
    costs: list[float], busy: float, warmup: int, repeats: int, before: bool = True, after: bool = True
) -> list[float]:
    """The times that a clock shows around the steps of a device with a queue.

    ``costs``: the seconds of work of each step; ``busy``: the work in the queue at the start; ``before`` and
    ``after``: whether the device is waited for at that end of a measurement.
    """
    now, free = 0.0, busy

    def wait() -> None:
        nonlocal now
        now = max(now, free)

    def step(cost: float) -> None:
        nonlocal now, free
        now += LAUNCH
        free = max(free, now) + cost

    times = []
    for cost in costs[:warmup]:
        step(cost)
    for cost in costs[warmup : warmup + repeats]:
        if before:
            wait()
        begin = now
        step(cost)
        if after:
            wait()
        times.append(now - begin)
    return times


def scaled_run(
    weight: Tensor, inputs: list[Tensor], rate: float, options: dict, mistake: str = ""
) -> tuple[list[Tensor], list[float]]:
    """The weights and the scales after each step of a run with momentum 0.9; the loss is the sum of weight
    times input.

    ``mistake``: "momentum" steps with zero gradients after an overflow, "no count" lets the count of good
    steps run on.
    """
    weight, velocity = weight.clone(), None
    scale, good = options["init_scale"], 0
    weights, scales = [], []
    for x in inputs:
        grad = x * scale / scale
        finite = bool(torch.isfinite(x * scale).all())
        if not finite and mistake == "momentum":
            grad = torch.zeros_like(x)
        if finite or mistake == "momentum":
            velocity = grad.clone() if velocity is None else 0.9 * velocity + grad
            weight = weight - rate * velocity
        if finite:
            good += 1
            if good == options["growth_interval"]:
                scale *= options["growth_factor"]
                good = 0
        else:
            scale *= options["backoff_factor"]
            good = good if mistake == "no count" else 0
        weights.append(weight)
        scales.append(scale)
    return weights, scales


def library_scales(overflows: list[bool], options: dict) -> list[float]:
    """The scales after each step by the library's scaler, which equals PyTorch's."""
    scaler = DynamicLossScaler(**options)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scales = []
    for overflow in overflows:
        parameter.grad = torch.full_like(parameter, float("inf") if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def descent16(
    starts: list[Tensor], gradients: list[list[Tensor | None]], rate: float, way: str = "right"
) -> list[Tensor]:
    """The 16-bit weights after all steps; ``gradients[step][i]`` is that of weight i, or None.

    ``way``: "right", or a mistake: "no master" updates the weights themselves, "new master" makes the master
    anew from the weight in each step, "product in 16 bits" multiplies before the conversion.
    """
    weights = [start.clone() for start in starts]
    masters = [start.float() for start in starts]
    for row in gradients:
        for index, grad in enumerate(row):
            if grad is None:
                continue
            if way == "no master":
                weights[index] = weights[index] - rate * grad
                continue
            if way == "new master":
                masters[index] = weights[index].float()
            product = (rate * grad).float() if way == "product in 16 bits" else rate * grad.float()
            masters[index] = masters[index] - product
            weights[index] = masters[index].to(weights[index].dtype)
    return weights
