"""What the results are compared with: steps in plain arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear


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


class _Backward16(torch.autograd.Function):
    """A product in fp32 whose backward computes in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x.bfloat16(), weight.bfloat16())
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].bfloat16()
        return (grad @ weight).float(), (grad.T @ x).float()


def _mixed_loss(leaves: list[Tensor], images: Tensor, labels: Tensor, number: float, way: str) -> Tensor:
    """The loss of the model of the checks; ``way``: "fp32", "bf16", "loss outside" or "backward inside"."""
    first, middle, last = leaves
    low = torch.float32 if way == "fp32" else torch.bfloat16
    hidden = torch.tanh(linear(images.to(low), first.to(low))).float()
    product = _Backward16.apply if way == "backward inside" else linear
    hidden = torch.tanh(product(hidden, middle)) * (1 + number / 8)  # type: ignore[no-untyped-call]
    logits = linear(hidden.to(low), last.to(low))
    return cross_entropy(logits if way == "loss outside" else logits.float(), labels)


def mixed_steps(case: dict[str, Any], mistake: str = "") -> tuple[list[float], list[list[Tensor]]]:
    """The losses and weights of mixed steps with explicit conversions, or those of a mistake: "scaled clip",
    "no clip", "accumulated", "called twice", or a way of :func:`_mixed_loss`."""
    current = [weight.clone() for weight in case["seed_weights"]]
    total = [torch.zeros_like(weight) for weight in current]
    losses, weights = [], []
    way = mistake if mistake in ("fp32", "loss outside", "backward inside") else case["low"]
    for step, (images, labels) in enumerate(case["batches"]):
        leaves = [weight.clone().requires_grad_() for weight in current]
        number = 2 * step + 1 if mistake == "called twice" else step
        loss = _mixed_loss(leaves, images, labels, number, way)
        scaled = loss * torch.tensor(case["scale"], dtype=torch.float32)
        grads = [grad / case["scale"] for grad in torch.autograd.grad(scaled, leaves)]
        if mistake == "accumulated":  # the step before is unscaled, so the division makes it small
            grads = [old / case["scale"] + new for old, new in zip(total, grads)]
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        if mistake == "scaled clip":
            norm *= case["scale"]
        factor = 1.0 if mistake == "no clip" else min(1.0, case["max_norm"] / (norm + 1e-6))
        total = [factor * grad for grad in grads]
        current = [weight - case["rate"] * grad for weight, grad in zip(current, total)]
        losses.append(float(loss.detach()))
        weights.append(current)
    return losses, weights


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
