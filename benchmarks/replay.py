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

from dlo_lib.base.torch_compat import all_gather_single, reduce_scatter_single
from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.tracing.recorder import trace_collectives

_IN_FLIGHT = 8
"""The number of calls in flight, approximately that of sharded steps."""


class Replay:
    """Traces the messages of ``step`` on this rank; created by all ranks. ``run()`` repeats them.

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
        self._groups = _groups({call.members for call in self._calls})
        self._memory = {name: torch.zeros(largest, dtype=getattr(torch, name)) for name in dtypes}

    def run(self) -> None:
        in_flight: deque[dist.Work | None] = deque()
        for call in self._calls:
            in_flight.append(self._repeat(call))
            if len(in_flight) > _IN_FLIGHT:
                _wait(in_flight.popleft())
        for work in in_flight:
            _wait(work)

    def _repeat(self, call: Call) -> dist.Work | None:
        sent = self._memory[call.dtype][: _elements(call)]
        return _REPEAT[call.kind](sent, call, self._groups[call.members])


def _groups(ours: set[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return a process group for the members of each call of this rank. Every rank creates those of all."""
    by_rank: list[set[tuple[int, ...]]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, ours)
    made = {members: dist.new_group(list(members)) for members in sorted(set().union(*by_rank))}
    return {members: group for members, group in made.items() if members in ours}


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


_REPEAT: dict[Kind, Callable[[Tensor, Call, dist.ProcessGroup], dist.Work | None]] = {
    Kind.SEND: lambda tensor, call, group: dist.isend(tensor, call.peer, group=group, tag=call.tag),
    Kind.RECV: lambda tensor, call, group: dist.irecv(tensor, call.peer, group=group, tag=call.tag),
    Kind.ALL_REDUCE: lambda tensor, call, group: dist.all_reduce(tensor, group=group, async_op=True),
    Kind.ALL_TO_ALL: lambda tensor, call, group: dist.all_to_all_single(
        tensor.new_empty(sum(call.receive_splits)),
        tensor,
        list(call.receive_splits),
        list(call.send_splits),
        group=group,
        async_op=True,
    ),
    Kind.BROADCAST: lambda tensor, call, group: dist.broadcast(tensor, call.peer, group=group, async_op=True),
    # The results of these two are allocated anew, as in a step.
    Kind.ALL_GATHER: lambda tensor, call, group: all_gather_single(
        tensor.new_empty(len(call.members) * tensor.numel()), tensor, group=group, async_op=True
    ),
    Kind.REDUCE_SCATTER: lambda tensor, call, group: reduce_scatter_single(
        tensor.new_empty(tensor.numel() // len(call.members)), tensor, group=group, async_op=True
    ),
}
