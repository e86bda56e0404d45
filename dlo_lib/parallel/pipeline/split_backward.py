"""Splits the backward of linear layers into two parts, for zero-bubble schedules: the input gradient is
computed immediately, the weight gradient later.

    y = x W^T + b      now: dL/dx = dL/dy W      later: dL/dW += (dL/dy)^T x,  dL/db += sum of dL/dy

The previous stage waits for the input gradient only. Until the weight gradient is computed, x and dL/dy are
kept in memory. Modules other than ``nn.Linear``, such as norms and embeddings, compute all gradients in the
first part; they are less than 1 % of the work. So do linear layers whose weight is computed (``weight_norm``,
``spectral_norm``, parametrizations) or has hooks, because autograd has to see their gradient.

The weight gradient is accumulated by the matrix product itself. Autograd would instead add each gradient in a
separate pass over all weights, for every micro-batch except the first. With few tokens in a micro-batch, this
pass costs as much as the product. Megatron-LM calls this method gradient accumulation fusion.

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
    """The weight part of one backward: the weight gradients that it has deferred."""

    def __init__(self) -> None:
        self._deferred: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        """Defer ``work``. The tensors that it references are kept in memory until ``run``."""
        self._deferred.append(work)

    def run(self) -> None:
        """Compute the weight gradients, and free the tensors of each one."""
        while self._deferred:
            self._deferred.pop()()


class SplitBackward:
    """Replaces the forward of the linear layers of ``module``, such that their backward adds the weight
    gradients in place, either immediately or inside ``WeightPart.run``.

    Post-accumulate-grad hooks of these parameters do not run, so a wrapper must communicate the gradients
    after the backward passes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._deferred: WeightPart | None = None
        for layer in module.modules():
            if type(layer) is nn.Linear:
                layer.forward = functools.partial(self._forward, layer)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def defer_to(self, deferred: WeightPart) -> Iterator[None]:
        """Backward passes inside the context add their weight gradients to ``deferred``."""
        self._deferred = deferred
        try:
            yield
        finally:
            self._deferred = None

    def _forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if not all(map(_accumulates, (layer.weight, layer.bias))):
            return nn.Linear.forward(layer, x)
        device = x.device.type
        if torch.is_autocast_enabled(device):  # cast as autocast does, and record the cast in autograd
            x = x.to(torch.get_autocast_dtype(device))
        return _Linear.apply(x, layer.weight, layer.bias, layer, self)

    @property
    def deferred(self) -> WeightPart | None:
        """The argument of ``defer_to``; None outside."""
        return self._deferred


class _Linear(torch.autograd.Function):
    """A linear layer in the dtype of ``x``. The weight is saved in its own dtype and cast again in backward,
    so that no copy of it is saved for each micro-batch in flight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: nn.Linear,
        split: SplitBackward,
    ) -> Tensor:
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
            rows, grad_rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, grad))
            add = functools.partial(add_weight_gradients, ctx.layer, rows, grad_rows)
            if ctx.split.deferred is None:
                add()
            else:
                ctx.split.deferred.add(add)
        return grad_x, None, None, None, None


def _accumulates(param: Tensor | None) -> bool:
    """Return True if the gradient of ``param`` is only accumulated: it is a leaf without hooks."""
    return param is None or (param.is_leaf and not param._backward_hooks)


@torch.no_grad()
def add_weight_gradients(layer: nn.Linear, x: Tensor, grad: Tensor) -> None:
    """Add the gradients of a linear layer: weight.grad += grad^T x, in one kernel if the dtypes are equal,
    and bias.grad += the sum of grad.

    Args:
        x: the input, (tokens, in_features).
        grad: the gradient of the output, (tokens, out_features).
    """
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
