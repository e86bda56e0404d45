"""The references of the checks: the schedules of the library, and a second range test with plain gradient
descent."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.twins import twin
from dlo_lib.optim.schedules import OneCycle

ACCUMULATED, AFTER, RIGHT, EVALUATED = "accumulated", "after", "right", "evaluated"


@twin
def descent(weight: Tensor, batches: list[Tensor], rates: list[float]) -> dict[str, list[float]]:
    """The losses of a range test on ``tanh(x w)``, and the losses of two mistakes."""

    def loss_of(w: Tensor, x: Tensor) -> Tensor:
        return (torch.tanh(x @ w.T) - 1).square().mean()

    found = {}
    for way in (RIGHT, ACCUMULATED, AFTER):
        w, total, losses = weight.clone(), torch.zeros_like(weight), []
        for x, rate in zip(batches, rates):
            leaf = w.clone().requires_grad_()
            loss = loss_of(leaf, x)
            (grad,) = torch.autograd.grad(loss, leaf)
            total = total + grad
            w = w - rate * (total if way == ACCUMULATED else grad)
            losses.append(float(loss_of(w, x)) if way == AFTER else float(loss.detach()))
        found[way] = losses
    return found


@twin
def descent_with_norm(
    weight: Tensor, mean: Tensor, batches: list[Tensor], rates: list[float]
) -> dict[str, list[float]]:
    """The losses of a range test on a linear layer behind a batch norm, whose first running mean is ``mean``,
    and those of mistakes."""
    found = {}
    for way in (RIGHT, ACCUMULATED, AFTER, EVALUATED):
        width, losses = len(mean), []
        values = [torch.ones(width), torch.zeros(width), weight.clone()]  # gain and shift of the norm
        total = [torch.zeros_like(value) for value in values]

        def loss_of(gain: Tensor, shift: Tensor, w: Tensor, x: Tensor, way: str = way) -> Tensor:
            middle, spread = (
                (mean, torch.ones_like(mean)) if way == EVALUATED else (x.mean(0), x.var(0, False))
            )
            return (((x - middle) / (spread + 1e-5).sqrt() * gain + shift) @ w.T).square().mean()

        for x, rate in zip(batches, rates):
            leaves = [value.clone().requires_grad_() for value in values]
            loss = loss_of(*leaves, x)
            grads = list(torch.autograd.grad(loss, leaves))
            total = [old + new for old, new in zip(total, grads)]
            used = total if way == ACCUMULATED else grads
            values = [value - rate * grad for value, grad in zip(values, used)]
            losses.append(float(loss_of(*values, x)) if way == AFTER else float(loss.detach()))
        found[way] = losses
    return found


def valley(t) -> tuple[list[float], list[float], int, int]:
    """A smoothed loss over exponential rates: rates, losses, and the indices of the steepest fall and of the
    minimum.

    It falls along an S after a small dip, rises, and falls again briefly and steeply, but not below the
    minimum.
    """
    before, down, up = t.integer(6, 12), t.integer(8, 14), t.integer(6, 10)
    depth, first = t.uniform(1.0, 2.0), 10 ** t.uniform(-5.0, -4.0)
    fall = [depth * min(k / down, 1.0) ** 2 * (3 - 2 * min(k / down, 1.0)) for k in range(down + 1)]
    losses = [2.3] * before + [2.3 - value for value in fall]
    steepest = before + max(range(1, down), key=lambda k: fall[k + 1] - fall[k - 1])
    losses[before - 3] -= 0.01  # a dip of noise, long before the bottom
    bottom = before + down
    losses += [losses[bottom] + 0.6 * (k + 1) for k in range(up)]
    losses += [losses[-1] - 0.4 * depth * 2, losses[-1] + 1.0]
    rates = [first * 1.3**k for k in range(len(losses))]
    return rates, losses, steepest, bottom


def one_cycle_of(top: int, steps: int, start: float, final: float, low: float, high: float) -> OneCycle:
    """The schedule of the library, whose peak is at ``rise * steps - 1``."""
    momenta = {"least_momentum": low, "most_momentum": high}
    return OneCycle(steps, rise=(top + 1) / steps, start=start, final=final, **momenta)


def squares_of(signal: float, noise: float, small_batch: int, large_batch: int) -> tuple[float, float]:
    """The mean of the squared norm of the gradient for two batch sizes; ``signal`` is that of the true
    gradient."""
    return signal + noise / small_batch, signal + noise / large_batch
