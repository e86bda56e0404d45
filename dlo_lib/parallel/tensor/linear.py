"""Linear layers whose weight is cut over the ranks: by rows of W (output features, ``ColumnLinear``) or by
columns of W (input features, ``RowLinear``). The names are Megatron's, for W transposed.

    column   y_r = x W_r^T + b_r          x (..., in) on every rank, y_r (..., out / t)
    row      y   = sum of x_r W_r^T + b   x_r (..., in / t), y (..., out) on every rank

A column linear and a row linear with any function of single features between them need one all-reduce in
forward, after the row linear, and one in backward, of the gradient of the input of the column linear. In
backward, the column linear starts this all-reduce first and computes the gradient of its weight during it.

Several column linears with the same input (queries, keys and values; gate and up) compute together
(``SharedColumns``): the gradient of the input is the sum of theirs, and is all-reduced once.

With sequence parallelism, x of a column linear and y of a row linear are parts (..., seq / t, hidden): an
all-gather before, and a reduce-scatter after, replace the all-reduces. The gathered input is kept for
backward.

Memory per rank: 1/t of the weight, its gradient and its optimiser state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.parallel.tensor.exchange import TensorGroup
from dlo_lib.parallel.tensor.functions import (
    SEQUENCE,
    gather_from_group,
    gather_sequence,
    reduce_from_group,
    scatter_sequence,
)


class ColumnLinear(nn.Module):
    """Computes this rank's output features of a linear layer.

    Args:
        weight: (out / t, in), the rows of this rank.
        bias: (out / t,) or None.
        group: the ranks.
        sequence_parallel: whether the input is this rank's part of the sequence.
        gather_output: whether the output has the features of all ranks. Their numbers must be equal.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: TensorGroup,
        *,
        sequence_parallel: bool = False,
        gather_output: bool = False,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias
        self.group = group
        self.sequence_parallel, self.gather_output = sequence_parallel, gather_output
        self.shared = SharedColumns([self])

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared.output_of(self, x)
        return gather_from_group(y, self.group) if self.gather_output else y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features} of this rank"


class RowLinear(nn.Module):
    """Computes the sum over the ranks of the products with this rank's input features. The bias is added
    once, after the sum.

    Args:
        weight: (out, in / t), the columns of this rank.
        bias: (out,), whole, or None.
        group: the ranks.
        sequence_parallel: whether the output is this rank's part of the sequence.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: TensorGroup,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        partial = F.linear(x, self.weight)  # (..., seq, in / t) @ (in / t, out)
        if self.sequence_parallel:
            y = scatter_sequence(partial, self.group)
        else:
            y = reduce_from_group(partial, self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features} of this rank, out_features={self.out_features}"


class SharedColumns:
    """Column linears that are called with the same input tensor, one after another. The first call computes
    the outputs of all, and the later calls return theirs.

    With sequence parallelism, ``gather_for`` gathers the input of the module around them, because attention
    takes the number of tokens from its input.

    Args:
        linears: members with the same ``group`` and ``sequence_parallel``.
    """

    def __init__(self, linears: Sequence[ColumnLinear]) -> None:
        self.linears = list(linears)
        self._input: Tensor | None = None
        self._part: Tensor | None = None  # of the sequence, if ``_gathered`` is the whole input
        self._gathered: Tensor | None = None
        self._outputs: dict[ColumnLinear, Tensor] = {}

    def gather_for(self, module: nn.Module) -> None:
        """Gather the first tensor in the arguments of ``module`` along the sequence before each forward."""

        def gather(tensor: Tensor) -> Tensor:
            if torch.is_autocast_enabled(tensor.device.type):
                tensor = tensor.to(torch.get_autocast_dtype(tensor.device.type))
            self._part = tensor
            self._gathered = gather_sequence(tensor, self.linears[0].group)
            return self._gathered

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            for index, value in enumerate(args):
                if isinstance(value, Tensor):
                    return (*args[:index], gather(value), *args[index + 1 :]), kwargs
            for key, value in kwargs.items():
                if isinstance(value, Tensor):
                    return args, {**kwargs, key: gather(value)}
            return args, kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)

    def output_of(self, linear: ColumnLinear, x: Tensor) -> Tensor:
        """Return the output of ``linear`` for the input ``x``."""
        if x is not self._input or linear not in self._outputs:
            self._input, self._outputs = x, dict(zip(self.linears, self._compute(x)))
        output = self._outputs.pop(linear)
        if not self._outputs:
            self._input = self._part = self._gathered = None
        return output

    def _compute(self, x: Tensor) -> tuple[Tensor, ...]:
        params: list[Tensor | None] = [each.weight for each in self.linears]
        params += [each.bias for each in self.linears]
        whole = None
        if self._part is not None and x is self._gathered:
            # The gradient of the part does not pass through ``gather_sequence``, so that ``_Columns`` reduces
            # it during the computation of the gradients of the weights.
            x, whole = self._part, x.detach()
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
            params = [None if param is None else param.to(dtype) for param in params]
        first = self.linears[0]
        outputs: tuple[Tensor, ...] = _Columns.apply(x, whole, first.group, first.sequence_parallel, *params)
        return outputs


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        whole: Tensor | None,
        group: TensorGroup,
        sequence_parallel: bool,
        *params: Tensor | None,
    ) -> tuple[Tensor, ...]:
        count = len(params) // 2
        weights, biases = params[:count], params[count:]
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.set_materialize_grads(False)
        if sequence_parallel:
            x = group.all_gather(x, SEQUENCE)() if whole is None else whole  # (..., seq, in)
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, *weights = ctx.saved_tensors
        group: TensorGroup = ctx.group
        flat_x = x.flatten(0, -2)  # (tokens, in)
        rows = [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in grads]
        wait = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.zeros_like(flat_x) if all(row is None for row in rows) else None
            for row, weight in zip(rows, weights):
                if row is not None:
                    grad_x = row @ weight if grad_x is None else grad_x.addmm_(row, weight)
            assert grad_x is not None
            grad_x = grad_x.view(x.shape)
            # The gradients of the weights below are computed during this exchange.
            wait = (
                group.reduce_scatter(grad_x, SEQUENCE) if ctx.sequence_parallel else group.all_reduce(grad_x)
            )
        needed = ctx.needs_input_grad[4:]
        count = len(weights)
        grad_weights = [
            row.t() @ flat_x if row is not None and needs else None  # (out / t, tokens) @ (tokens, in)
            for row, needs in zip(rows, needed[:count])
        ]
        grad_biases = [
            row.sum(0) if row is not None and needs else None for row, needs in zip(rows, needed[count:])
        ]
        return (None if wait is None else wait(), None, None, None, *grad_weights, *grad_biases)
