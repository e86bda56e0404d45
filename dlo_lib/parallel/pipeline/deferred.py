"""The backward of linear layers in two parts, for zero-bubble schedules: the input's gradient now, the weight's when there is time.

    y = x W^T + b      now: dL/dx = dL/dy W      later: dL/dW += (dL/dy)^T x,  dL/db += sum of dL/dy

The previous stage waits for the first alone. Until the second is computed, x and dL/dy are kept: this is the memory that a schedule pays
for its open weight parts. Everything that is not ``nn.Linear`` (norms, embeddings: a few per mille of the work) stays in the first part.

The product is added to the gradient as it is computed, which saves the pass over all weights that autograd makes for every micro-batch
but the first (Megatron-LM's gradient accumulation fusion); with few tokens in a micro-batch that pass costs as much as the product.

Paper: P. Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class WeightPart:
    """The work that one backward has left open."""

    def __init__(self) -> None:
        self._open: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        """Leave ``work`` open; what it holds is freed once it is done."""
        self._open.append(work)

    def run(self) -> None:
        """Do it."""
        while self._open:
            self._open.pop()()


class SplitBackward:
    """Makes the linear layers of a module add their weights' gradients in place, at once or when asked.

    Hooks on these parameters' accumulation do not run, so whoever communicates gradients must do it after the backward passes.
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
        if any(ctx.needs_input_grad[1:3]):
            add = functools.partial(add_weight_gradients, ctx.layer, x.flatten(0, -2), grad.flatten(0, -2))
            if ctx.split.part is None:
                add()
            else:
                ctx.split.part.add(add)
        return grad_x, None, None, None, None


@torch.no_grad()
def add_weight_gradients(layer: nn.Linear, x: Tensor, grad: Tensor) -> None:
    """weight.grad += grad^T x, in one pass over the sum where the dtypes allow; bias.grad += the sum of grad."""
    weight, bias = layer.weight, layer.bias
    if weight.requires_grad:
        if weight.grad is not None and weight.grad.dtype == grad.dtype:
            weight.grad.addmm_(grad.t(), x)
        else:
            _add(weight, grad.t() @ x)
    if bias is not None and bias.requires_grad:
        _add(bias, grad.sum(0))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)
