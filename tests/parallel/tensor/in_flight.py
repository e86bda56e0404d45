"""Counts the messages that are in flight when a matrix product starts, by the order of events alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from dlo_lib.comm.calls import Call
from dlo_lib.comm.tracing.listeners import listening

MATMULS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")


class _InFlight(TorchDispatchMode):
    """A message is in flight from its call until this rank begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: set[int] = set()
        self.found: list[int] = []

    def issued(self, call: Call) -> None:
        self.messages.add(call.number)

    def waits(self, call: Call) -> None:
        self.messages.discard(call.number)

    def waited(self, call: Call, failed: bool) -> None:
        pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in MATMULS:
            self.found.append(len(self.messages))
        return func(*args, **(kwargs or {}))


@contextmanager
def matmuls_in_flight() -> Iterator[list[int]]:
    """Within this context, append the number of messages in flight at the start of each matrix product."""
    mode = _InFlight()
    with listening(mode), mode:
        yield mode.found
