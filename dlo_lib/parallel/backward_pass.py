"""The begin and the end of a backward pass, for wrappers that work in autograd hooks. A pass begins with its
first gradient and ends when the autograd engine has finished.

The engine calls the queued callbacks at the end of a pass. If an exception ends the pass, the engine discards
them without a call. Only the engine holds a reference to the callback. The next forward or gradient therefore
detects an interrupted pass by a dead weak reference.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class BackwardPass:
    """The state of a backward pass: not begun, ``running``, or ``interrupted`` by an exception."""

    def __init__(self) -> None:
        self._at_end: weakref.ref[Callable[[], None]] | None = None

    @property
    def running(self) -> bool:
        return self._at_end is not None and self._at_end() is not None

    @property
    def interrupted(self) -> bool:
        return self._at_end is not None and self._at_end() is None

    def begin(self, at_end: Callable[[], None]) -> None:
        """Begin a pass, from inside a backward hook. The engine calls ``at_end`` at the end of the pass;
        ``at_end`` must call ``end``."""
        callback = functools.partial(at_end)  # a new object, so that only the engine holds a reference to it
        self._at_end = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def end(self) -> None:
        """End the pass, or mark an interrupted one as handled."""
        self._at_end = None


class Synchronising(Protocol):
    """An object that averages gradients in backward passes while ``sync`` is True."""

    sync: bool


@contextlib.contextmanager
def without_sync(gradients: Synchronising) -> Iterator[None]:
    """Backward passes inside the context do not communicate gradients."""
    before, gradients.sync = gradients.sync, False
    try:
        yield
    finally:
        gradients.sync = before


def used_on_any_rank(
    used: Sequence[bool], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> Tensor:
    """Return which parameters at least one rank used, (len(used),) int32 of 0 and 1; called by every rank.

    Cost: one all-reduce of this tensor for each group.
    """
    flags = torch.tensor(used, dtype=torch.int32, device=device)
    for ranks in groups:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=ranks)
    return flags
