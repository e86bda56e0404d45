"""Repeats the messages of a training step without its computation, to measure the cost of the communication
alone.

The calls of one traced step are repeated in the same order and with the same sizes, with memory that is
allocated already: no packing, no rearranging, and no sums except those of the backend. The sum of this cost
and of the arithmetic of the step is approximately the minimal cost of a program that sends these bytes
through this backend. The overlap of computation and communication may change it by some percent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.torch_compat import all_gather_single, reduce_scatter_single

_IN_FLIGHT = 8
"""The number of calls in flight, approximately that of sharded steps."""


class Replay:
    """Traces the messages of ``step`` on this rank, whose calls use the group of all ranks. ``run()`` repeats
    them.

    Raises:
        ValueError: the step contains a kind of call that cannot be repeated.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        with trace_collectives() as trace:
            step()
        self._calls: Sequence[Call] = [event.call for event in trace.events]
        if unknown := {call.kind.value for call in self._calls} - {kind.value for kind in _REPEAT}:
            raise ValueError(f"no replay of {', '.join(sorted(unknown))}: add it")
        largest = max(_elements(call) for call in self._calls)
        dtypes = {call.dtype for call in self._calls}
        self._memory = {name: torch.zeros(largest, dtype=getattr(torch, name)) for name in dtypes}

    def run(self) -> None:
        in_flight: deque[dist.Work | None] = deque()
        for call in self._calls:
            in_flight.append(_REPEAT[call.kind](self._memory[call.dtype][: _elements(call)], call))
            if len(in_flight) > _IN_FLIGHT:
                _wait(in_flight.popleft())
        for work in in_flight:
            _wait(work)


def _elements(call: Call) -> int:
    """Return the number of elements that this rank gives to the call."""
    match call.kind:
        case Kind.ALL_TO_ALL:
            return sum(call.send_splits)
        case Kind.REDUCE_SCATTER:  # of which ``numel`` is this rank's part of the result
            return len(call.members) * call.numel
    return call.numel


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


_REPEAT: dict[Kind, Callable[[Tensor, Call], dist.Work | None]] = {
    Kind.SEND: lambda tensor, call: dist.isend(tensor, call.peer, tag=call.tag),
    Kind.RECV: lambda tensor, call: dist.irecv(tensor, call.peer, tag=call.tag),
    Kind.ALL_REDUCE: lambda tensor, call: dist.all_reduce(tensor, async_op=True),
    Kind.ALL_TO_ALL: lambda tensor, call: dist.all_to_all_single(
        tensor.new_empty(sum(call.receive_splits)),
        tensor,
        list(call.receive_splits),
        list(call.send_splits),
        async_op=True,
    ),
    Kind.BROADCAST: lambda tensor, call: dist.broadcast(tensor, call.peer, async_op=True),
    # The results of these two are allocated anew, as in a step.
    Kind.ALL_GATHER: lambda tensor, call: all_gather_single(
        tensor.new_empty(dist.get_world_size() * tensor.numel()), tensor, async_op=True
    ),
    Kind.REDUCE_SCATTER: lambda tensor, call: reduce_scatter_single(
        tensor.new_empty(tensor.numel() // dist.get_world_size()), tensor, async_op=True
    ),
}
