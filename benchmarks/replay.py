"""The messages of a step again, without the step: what the bytes alone cost, however they are packed.

The calls of one traced step are made anew, in their order and with their sizes, from and into memory that is there already: no packing, no
sorting, no sums but the backend's own. With the arithmetic of the step this is the least that any program can cost which sends these
bytes through this backend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.trace import trace_collectives

_IN_FLIGHT = 8
"""Calls not waited for: about as many as sharded steps have."""


class Replay:
    """What ``step`` sends and receives on this rank, all ranks being in one group; ``run()`` does that again.

    Raises:
        ValueError: a kind of call that it does not know.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        with trace_collectives() as trace:
            step()
        self._calls: Sequence[Call] = [event.call for event in trace.events]
        if unknown := {call.kind.value for call in self._calls} - {kind.value for kind in _AGAIN}:
            raise ValueError(f"no replay of {', '.join(sorted(unknown))}: add it")
        self._memory = {call.dtype: torch.zeros(max(other.numel for other in self._calls)) for call in self._calls}
        self._memory = {dtype: memory.to(getattr(torch, dtype)) for dtype, memory in self._memory.items()}

    def run(self) -> None:
        in_flight: deque[dist.Work | None] = deque()
        for call in self._calls:
            in_flight.append(_AGAIN[call.kind](self._memory[call.dtype][: call.numel], call))
            if len(in_flight) > _IN_FLIGHT:
                _wait(in_flight.popleft())
        for work in in_flight:
            _wait(work)


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


_AGAIN: dict[Kind, Callable[[Tensor, Call], dist.Work | None]] = {
    Kind.SEND: lambda tensor, call: dist.isend(tensor, call.peer, tag=call.tag),
    Kind.RECV: lambda tensor, call: dist.irecv(tensor, call.peer, tag=call.tag),
    Kind.ALL_REDUCE: lambda tensor, call: dist.all_reduce(tensor, async_op=True),
    Kind.BROADCAST: lambda tensor, call: dist.broadcast(tensor, call.peer, async_op=True),
}
