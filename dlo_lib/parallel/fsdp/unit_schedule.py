"""When the units of an FSDP model are unsharded and freed, in forward and in backward.

Hooks on the modules of a unit gather it before it computes and free it afterwards. While a unit computes, the
next one is gathered: in forward the one that came next in the previous forward, in backward the one that came
before in this forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlo_lib.parallel.fsdp.dtensors import refuse_copy
from dlo_lib.parallel.fsdp.param import FSDPParam
from dlo_lib.parallel.fsdp.param_group import FSDPParamGroup
from dlo_lib.parallel.fsdp.wrap import CallSpan
from dlo_lib.parallel.nested import map_tensors, tensors_in
from dlo_lib.parallel.sharding.grad_reduction import GradReduceScatter


@dataclass
class PendingCalls:
    """The number of forward calls of a unit's modules whose backward has not finished."""

    all: int = 0
    reading: int = 0
    """The calls whose backward reads the weights."""


class UnitSchedule:
    """Unshards and frees ``units``, by hooks on their modules.

    Args:
        units: the units, each with the spans of modules that it covers.
        grad_reduction: averages the gradients of a unit when they are complete.
        compute_dtype: dtype of the floating-point inputs of units; None leaves them as they are.
        keep_whole: whether units remain unsharded from forward to backward, and until the last backward of
            accumulated micro-batches.
    """

    def __init__(
        self,
        units: Sequence[FSDPParamGroup],
        grad_reduction: GradReduceScatter[FSDPParam],
        compute_dtype: torch.dtype | None,
        keep_whole: bool,
    ) -> None:
        self.units = units
        self._grad_reduction = grad_reduction
        self._compute_dtype = compute_dtype
        self._keep_whole = keep_whole
        self.running = False
        """Whether a forward of the whole module is running."""
        call_spans = [(unit, span) for unit in units for span in unit.call_spans]
        # The order of calls in the previous forward; before the first one, the order of registration.
        self._previous_order = sorted(call_spans, key=lambda entry: entry[1].position)
        self._order: list[tuple[FSDPParamGroup, CallSpan]] = []  # the calls of this forward so far
        # The units whose weights backward needs, the next one last
        self._backward_order: list[FSDPParamGroup] = []
        self._in_backward: set[FSDPParamGroup] = set()
        # Whether a gradient that is not that of parameters, as the forces of a potential, was computed since
        # the last forward began. Its graph reads the weights of any unit at any time: they stay unsharded.
        self._graph_of_gradient = False
        self._pending: dict[FSDPParamGroup, PendingCalls] = {unit: PendingCalls() for unit in units}
        self._call_spans = call_spans
        for unit, span in call_spans:
            for inner in span.modules:
                # First, because the hooks of the user, as those of weight_norm, need the whole parameters.
                inner.register_forward_pre_hook(
                    functools.partial(self._pre_forward, unit, span), prepend=True, with_kwargs=True
                )
                inner.register_forward_hook(functools.partial(self._post_forward, unit, span))

    __reduce_ex__ = refuse_copy

    def begin_forward(self) -> None:
        """Begin to record the order of calls, and hide the shards from the model's code."""
        self._order, self._graph_of_gradient, self.running = [], False, True
        for unit in self.units:
            unit.hide_shards(True)

    def call(self, module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` of ``module``, with the parameters whole that its forward has whole."""
        spans = [(unit, span) for unit, span in self._call_spans if module in span.modules]
        for unit, span in spans:
            args, kwargs = self._pre_forward(unit, span, module, args, kwargs)
        out = method(*args, **kwargs)
        for unit, span in spans:
            self._post_forward(unit, span, module, args, out)
        return out

    def leave_forward(self) -> None:
        """Show the shards again, also after an exception."""
        self.running = False
        for unit in self.units:
            unit.hide_shards(False)

    def end_forward(self) -> None:
        """Keep the order of calls for the next forward, and free what backward does not begin with."""
        self._previous_order = self._order
        for unit in self.units:  # a prefetched unit may belong to a module that was not called
            if not self._stays_whole(unit):
                unit.reshard()

    def end_backward(self) -> None:
        """Free all units, unless they remain unsharded for the next micro-batch."""
        self._in_backward.clear()
        self._backward_order.clear()
        self._graph_of_gradient = False
        for unit in self.units:
            if not self._accumulates_whole:
                unit.reshard()
            self._pending[unit] = PendingCalls()

    def _pre_forward(
        self,
        unit: FSDPParamGroup,
        span: CallSpan,
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, Any]:
        """Unshard the unit, start to gather the next one, and register hooks on the inputs. The backward of
        the module ends when the gradients of all its inputs are computed."""
        recomputing = unit in self._in_backward  # the second forward of activation checkpointing
        unit.unshard()
        if module is span.modules[0] and not recomputing:
            self._begin_span(unit, span)
        inputs = 0

        def on_input_grad(gradient: Tensor) -> None:
            nonlocal inputs
            inputs -= 1
            if inputs == 0:
                self._post_backward(unit, module)

        def cast_and_hook(tensor: Tensor) -> Tensor:
            nonlocal inputs
            if not tensor.is_floating_point():
                return tensor
            if self._compute_dtype is not None:
                tensor = tensor.to(self._compute_dtype)
            if recomputing or not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            # Make a new tensor, because the hooks of one tensor run in the order of registration: the hook of
            # the previous unit would run first and gather a third unit before this one is freed.
            tensor = tensor.view_as(tensor)
            tensor.register_hook(on_input_grad)
            inputs += 1
            return tensor

        return map_tensors(cast_and_hook, (args, kwargs))

    def _begin_span(self, unit: FSDPParamGroup, span: CallSpan) -> None:
        """Record the call, and start the all-gather of the unit that came next in the previous forward."""
        position = len(self._order)
        self._order.append((unit, span))
        if torch.is_grad_enabled() and unit.trained:
            self._grad_reduction.expect(unit)
        if torch.is_grad_enabled() and not all(
            _reads_no_weight_in_backward(module) for module in span.modules
        ):
            self._backward_order.append(unit)
        expected = self._previous_order[position : position + 1]
        upcoming = self._previous_order[position + 1 :]
        if self._order[position:] == expected and upcoming:
            upcoming[0][0].start_all_gather()  # overlaps with the computation of this unit

    def _post_forward(
        self, unit: FSDPParamGroup, span: CallSpan, module: nn.Module, args: Any, out: Any
    ) -> None:
        if unit in self._in_backward:
            return
        if torch.is_grad_enabled():
            self._pending[unit].all += 1
            if not _reads_no_weight_in_backward(module):
                self._pending[unit].reading += 1
                for tensor in tensors_in(out):
                    if tensor.requires_grad:
                        tensor.register_hook(functools.partial(self._pre_backward, unit))
        if module is span.modules[-1] and not self._stays_whole(unit):
            unit.reshard(until_backward=torch.is_grad_enabled())

    def _stays_whole(self, unit: FSDPParamGroup) -> bool:
        """Return whether the unit remains unsharded until backward: with ``reshard_after_forward=False``
        every unit does, otherwise only the unit with which backward begins, unless there is the graph of a
        gradient."""
        last = len(self._order) >= len(self._previous_order) and self._backward_order[-1:] == [unit]
        return torch.is_grad_enabled() and (self._keep_whole or last or self._graph_of_gradient)

    def _pre_backward(self, unit: FSDPParamGroup, gradient: Tensor) -> None:
        """Unshard the unit again, and start to gather the unit that backward needs next."""
        if unit in self._in_backward:
            return
        if not unit.gradients_are_computed():
            self._graph_of_gradient = True
            unit.unshard()
            return
        self._grad_reduction.begin()
        self._in_backward.add(unit)
        while self._backward_order and self._backward_order.pop() is not unit:
            pass
        unit.unshard()
        if self._backward_order:
            self._backward_order[-1].start_all_gather()

    def _post_backward(self, unit: FSDPParamGroup, module: nn.Module) -> None:
        """Free the unit after its last pending call. Called when the gradients of the inputs of a call are
        computed, which is the end of the backward of this call."""
        if self._graph_of_gradient:  # the gradients of the parameters have a second part
            return
        calls = self._pending[unit]
        calls.all -= 1
        calls.reading -= not _reads_no_weight_in_backward(module)
        # The count is negative in a second pass through a retained graph. The units are then freed at the end
        # of the pass.
        if calls.reading == 0:
            self._in_backward.discard(unit)
            if not self._accumulates_whole:
                unit.reshard()
        if calls.all == 0:
            self._grad_reduction.complete(unit)  # parameters that this rank did not use will have no gradient

    @property
    def _accumulates_whole(self) -> bool:
        """Whether units remain unsharded after backward, because another micro-batch follows: in ``no_sync``
        with ``reshard_after_forward=False``. Each unit is then gathered once in a step."""
        return self._keep_whole and not self._grad_reduction.sync


def _reads_no_weight_in_backward(module: nn.Module) -> bool:
    """Return whether backward needs no weight of ``module``. The backward of an embedding needs only the
    indices."""
    return isinstance(module, nn.Embedding) and module.max_norm is None
