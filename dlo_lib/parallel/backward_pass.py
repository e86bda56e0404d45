"""What is done once in each backward pass, by those who work in its hooks: begin with the first gradient, end when the engine has done.

The engine calls what was queued in a pass when the pass is over, and drops it without a call when an exception ended the pass. It alone
keeps the callback alive, so the callback's death tells the next forward, or the next gradient, that there is something to recover from.
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
    """Where a backward pass is: not begun, ``running``, or ``interrupted`` by an exception and nothing done about it yet."""

    def __init__(self) -> None:
        self._at_end: weakref.ref[Callable[[], None]] | None = None

    @property
    def running(self) -> bool:
        return self._at_end is not None and self._at_end() is not None

    @property
    def interrupted(self) -> bool:
        return self._at_end is not None and self._at_end() is None

    def begin(self, at_end: Callable[[], None]) -> None:
        """Within a pass: ``at_end`` is called when the engine has done. It says ``end()``."""
        callback = functools.partial(at_end)  # an object of its own, which nobody else keeps alive
        self._at_end = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def end(self) -> None:
        """The pass is over, or has been recovered from."""
        self._at_end = None


class Synchronising(Protocol):
    """Averages gradients in backward passes, while ``sync``."""

    sync: bool


@contextlib.contextmanager
def without_sync(gradients: Synchronising) -> Iterator[None]:
    """Backward passes inside do not communicate."""
    before, gradients.sync = gradients.sync, False
    try:
        yield
    finally:
        gradients.sync = before


def used_on_any_rank(used: Sequence[bool], groups: Sequence[dist.ProcessGroup], device: torch.device) -> Tensor:
    """Which parameters some rank of ``groups`` used: int32, as many. None can know by itself, so it costs a small all-reduce each."""
    flags = torch.tensor(used, dtype=torch.int32, device=device)
    for ranks in groups:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=ranks)
    return flags
