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
backward. With asynchronous tensor parallelism, these are cut into pieces that travel during the products
(``async_tp``), in forward and in backward.

Memory per rank: 1/t of the weight, its gradient and its optimiser state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.parallel.tensor.async_tp import compute_and_scatter, gather_and_use
from dlo_lib.parallel.tensor.exchange import Result, TensorGroup, check_divides
from dlo_lib.parallel.tensor.functions import (
    SEQUENCE,
    gather_from_group,
    reduce_from_group,
    scatter_sequence,
)


class ColumnLinear(nn.Module):
    """Computes this rank's output features of a linear layer.

    Args:
        weight: (out / t, in), the rows of this rank; (in, out / t) if it is stored ``transposed``, as by
            the Conv1D of transformers.
        bias: (out / t,) or None.
        group: the ranks.
        sequence_parallel: whether the input is this rank's part of the sequence.
        async_tp: whether the parts of the sequence travel during the products; with ``sequence_parallel``.
        gather_output: whether the output has the features of all ranks. Their numbers must be equal.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: TensorGroup,
        *,
        sequence_parallel: bool = False,
        async_tp: bool = False,
        gather_output: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.transposed = transposed
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = self.matrix.shape
        self.group = group
        self.sequence_parallel, self.async_tp = sequence_parallel, async_tp
        self.gather_output = gather_output
        self.shared = SharedColumns([self])

    @property
    def matrix(self) -> Tensor:
        """The weight as (out / t, in)."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared.output_of(self, x)
        return gather_from_group(y, self.group) if self.gather_output else y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features} of this rank"


class RowLinear(nn.Module):
    """Computes the sum over the ranks of the products with this rank's input features. The bias is added
    once, after the sum.

    Args:
        weight: (out, in / t), the columns of this rank; (in / t, out) if it is stored ``transposed``.
        bias: (out,), whole, or None.
        group: the ranks.
        sequence_parallel: whether the output is this rank's part of the sequence.
        async_tp: whether the parts of the sequence travel during the products; with ``sequence_parallel``.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: TensorGroup,
        *,
        sequence_parallel: bool = False,
        async_tp: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.transposed = transposed
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = self.matrix.shape
        self.group, self.sequence_parallel, self.async_tp = group, sequence_parallel, async_tp

    @property
    def matrix(self) -> Tensor:
        """The weight as (out, in / t)."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.async_tp:
            x, weight = _in_autocast_dtype(x, self.matrix)
            y: Tensor = _AsyncRow.apply(x, weight, self.group)
        elif self.sequence_parallel:
            y = scatter_sequence(F.linear(x, self.matrix), self.group)  # (..., seq, in / t) @ (in / t, out)
        else:
            y = reduce_from_group(F.linear(x, self.matrix), self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features} of this rank, out_features={self.out_features}"


class SharedColumns:
    """Column linears that are called with the same input tensor, one after another. The first call computes
    the outputs of all, and the later calls return theirs.

    With sequence parallelism, attention takes the number of tokens from its input, so ``gather_for`` gathers
    the input of the module around the linears and computes their outputs before the module is called.

    Args:
        linears: members with the same ``group``, ``sequence_parallel`` and ``async_tp``.
    """

    def __init__(self, linears: Sequence[ColumnLinear]) -> None:
        self.linears = list(linears)
        self._input: Tensor | None = None
        self._outputs: dict[ColumnLinear, Tensor] = {}

    def gather_for(self, module: nn.Module) -> None:
        """Gather the first tensor in the arguments of ``module`` along the sequence before each forward."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            for index, value in enumerate(args):
                if isinstance(value, Tensor):
                    return (*args[:index], self._compute(value), *args[index + 1 :]), kwargs
            for key, value in kwargs.items():
                if isinstance(value, Tensor):
                    return args, {**kwargs, key: self._compute(value)}
            return args, kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)

    def output_of(self, linear: ColumnLinear, x: Tensor) -> Tensor:
        """Return the output of ``linear`` for the input ``x``."""
        if x is not self._input or linear not in self._outputs:
            self._compute(x)
            self._input = x
        output = self._outputs.pop(linear)
        if not self._outputs:
            self._input = None
        return output

    def _compute(self, x: Tensor) -> Tensor:
        """Compute the outputs of all linears, and return the input of the whole sequence."""
        params: list[Tensor | None] = [each.matrix for each in self.linears]
        params += [each.bias for each in self.linears]
        x, *params = _in_autocast_dtype(x, *params)
        first = self.linears[0]
        self._input, *outputs = _Columns.apply(
            x, first.group, first.sequence_parallel, first.async_tp, *params
        )
        self._outputs = dict(zip(self.linears, outputs))
        return self._input


def _in_autocast_dtype(x: Tensor, *params: Tensor | None) -> Any:
    """Return the tensors in the dtype of products under autocast, if it is on."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, *params
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), *(None if param is None else param.to(dtype) for param in params)


class _Columns(torch.autograd.Function):
    """Returns the input of the whole sequence, which others may use too, and the outputs of the linears."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: TensorGroup,
        sequence_parallel: bool,
        async_tp: bool,
        *params: Tensor | None,
    ) -> tuple[Tensor, ...]:
        count = len(params) // 2
        weights, biases = params[:count], params[count:]
        ctx.group, ctx.sequence_parallel, ctx.async_tp = group, sequence_parallel, async_tp
        ctx.set_materialize_grads(False)
        if async_tp:
            tokens = x.shape[SEQUENCE]
            shape = (*x.shape[:SEQUENCE], group.ranks * tokens)
            outputs = [x.new_empty(*shape, weight.shape[0]) for weight in weights if weight is not None]

            def use(number: int, part: Tensor) -> None:
                for output, weight, bias in zip(outputs, weights, biases):
                    place = output.narrow(SEQUENCE, number * tokens, tokens)
                    place.copy_(F.linear(part, weight, bias))  # type: ignore[arg-type]

            whole = gather_and_use(x, group, use)
        else:
            whole = group.all_gather(x, SEQUENCE)() if sequence_parallel else x  # (..., seq, in)
            outputs = [F.linear(whole, weight, bias) for weight, bias in zip(weights, biases)]  # type: ignore[arg-type]
        if whole is x:
            whole = x.view_as(x)
        ctx.save_for_backward(whole, *weights)
        return whole, *outputs

    @staticmethod
    def backward(ctx: Any, grad_whole: Tensor | None, *grads: Tensor | None) -> Any:
        whole, *weights = ctx.saved_tensors
        group: TensorGroup = ctx.group
        terms = [(grad, weight) for grad, weight in zip(grads, weights) if grad is not None]

        def grad_of(tokens: slice) -> Tensor:
            """The gradient of these tokens of the input, on this rank alone."""
            found = None if grad_whole is None else grad_whole[..., tokens, :].clone().flatten(0, -2)
            for grad, weight in terms:
                row = grad[..., tokens, :].reshape(-1, grad.shape[-1])
                found = row @ weight if found is None else found.addmm_(row, weight)
            like = whole[..., tokens, :]
            return torch.zeros_like(like) if found is None else found.view(like.shape)

        grad_x: Tensor | None = None
        exchange: Result | None = None
        if ctx.needs_input_grad[0] and ctx.async_tp:
            size = whole.shape[SEQUENCE] // group.ranks
            grad_x = compute_and_scatter(
                lambda number: grad_of(slice(number * size, (number + 1) * size)), group
            )
        elif ctx.needs_input_grad[0]:
            # The gradients of the weights below are computed during this exchange.
            partial = grad_of(slice(None))
            exchange = (
                group.reduce_scatter(partial, SEQUENCE)
                if ctx.sequence_parallel
                else group.all_reduce(partial)
            )
        needed = ctx.needs_input_grad[4:]
        count = len(weights)
        flat = whole.flatten(0, -2)  # (tokens, in)
        rows = [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_weights = [
            _grad_of_weight(row, flat, weight) if row is not None and needs else None
            for row, weight, needs in zip(rows, weights, needed[:count])
        ]
        grad_biases = [
            row.sum(0) if row is not None and needs else None for row, needs in zip(rows, needed[count:])
        ]
        if exchange is not None:
            grad_x = exchange()
        return grad_x, None, None, None, *grad_weights, *grad_biases


def _grad_of_weight(row: Tensor, flat: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a weight, in the order of its memory, so that autograd need not copy it."""
    if weight.is_contiguous():
        return row.t() @ flat  # (out / t, tokens) @ (tokens, in)
    return (flat.t() @ row).t()


class _AsyncRow(torch.autograd.Function):
    """The product and the reduce-scatter of a row linear, in pieces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: TensorGroup) -> Tensor:
        check_divides(x.shape[SEQUENCE], group.ranks)
        ctx.group = group
        ctx.save_for_backward(x, weight)
        size = x.shape[SEQUENCE] // group.ranks
        return compute_and_scatter(
            lambda number: F.linear(x.narrow(SEQUENCE, number * size, size), weight), group
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        size = grad.shape[SEQUENCE]

        def use(number: int, part: Tensor) -> None:
            if grad_x is not None:
                grad_x.narrow(SEQUENCE, number * size, size).copy_(part @ weight)

        whole = gather_and_use(grad, ctx.group, use)  # (..., seq, out)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _grad_of_weight(whole.flatten(0, -2), x.reshape(-1, x.shape[-1]), weight)
        return grad_x, grad_weight, None
