"""The backward of linear layers in two parts, for zero-bubble schedules: the input's gradient now, the weight's when there is time.

    y = x W^T + b      now: dL/dx = dL/dy W      later: dL/dW += (dL/dy)^T x,  dL/db += sum of dL/dy

The previous stage waits for the first alone. Until the second is computed, x and dL/dy are kept: this is the memory that a schedule pays
for its open weight parts. Everything that is not ``nn.Linear`` (norms, embeddings: a few per mille of the work) stays in the first part.

Paper: P. Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class WeightPart:
    """The weight gradients that one backward has left open."""

    def __init__(self) -> None:
        self._open: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def add(self, layer: nn.Linear, x: Tensor, grad: Tensor) -> None:
        self._open.append((layer, x.flatten(0, -2), grad.flatten(0, -2)))

    @torch.no_grad()
    def run(self) -> None:
        """Add them to ``.grad``, each freed as soon as it is done."""
        while self._open:
            layer, x, grad = self._open.pop()
            if layer.weight.requires_grad:
                _accumulate_product(layer.weight, grad, x)
            if layer.bias is not None and layer.bias.requires_grad:
                total = grad.sum(0).to(layer.bias.dtype)
                layer.bias.grad = total if layer.bias.grad is None else layer.bias.grad.add_(total)


class SplitBackward:
    """Makes the linear layers of a module able to leave their weights' gradients open.

    Hooks on these parameters' accumulation do not run for what was left open.
    """

    def __init__(self, module: nn.Module) -> None:
        self._part: WeightPart | None = None
        for layer in module.modules():
            if type(layer) is nn.Linear:
                layer.forward = functools.partial(self._forward, layer)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def leaving(self, part: WeightPart) -> Iterator[None]:
        """A backward inside leaves its weight gradients in ``part``."""
        self._part = part
        try:
            yield
        finally:
            self._part = None

    def _forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):  # as autocast does it for a linear; here autograd sees the cast of the input
            x = x.to(torch.get_autocast_dtype(device))
        return _Linear.apply(x, layer.weight, layer.bias, layer, self)

    @property
    def part(self) -> WeightPart | None:
        return self._part


class _Linear(torch.autograd.Function):
    """In the dtype of ``x``. The weight is kept as it is and cast again in backward, not kept twice for each micro-batch in flight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Linear, split: SplitBackward) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.split = layer, split
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        trained = ctx.needs_input_grad[1:3]
        if (part := ctx.split.part) is not None:
            if any(trained):
                part.add(ctx.layer, x, grad)
            return grad_x, None, None, None, None
        rows = grad.flatten(0, -2)
        grad_weight = (rows.t() @ x.flatten(0, -2)).to(weight.dtype) if trained[0] else None
        grad_bias = rows.sum(0).to(weight.dtype) if trained[1] else None
        return grad_x, grad_weight, grad_bias, None, None


def _accumulate_product(weight: Tensor, grad: Tensor, x: Tensor) -> None:
    """weight.grad += grad^T x, in one pass over the sum where the dtypes allow."""
    if weight.grad is None:
        weight.grad = (grad.t() @ x).to(weight.dtype)
    elif grad.dtype == weight.grad.dtype:
        weight.grad.addmm_(grad.t(), x)
    else:
        weight.grad.add_(grad.t() @ x)
