"""Listening to a process's communication: the one tap it may have, shared by all who want to hear.

A tap is in the dispatcher, of which a process has one, so a second listener joins the tap of the first instead of bringing its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from dlo_lib.comm.tap import Listener, Tap, TapUnavailable
from dlo_lib.comm.waits import watched_waits

_tap: Tap | None = None


@contextmanager
def listening(listener: Listener, rank: int | None = None) -> Iterator[Tap]:
    """Within the context ``listener`` is told of every communication call of this process.

    ``rank`` is this process's in its job, needed while it has no process group yet.

    Raises:
        TapUnavailable: torch's internals are not as the tap knows them.
    """
    global _tap
    if _tap is not None:
        _tap.add(listener)
        try:
            yield _tap
        finally:
            _tap.leave(listener)
        return
    tap = Tap(dist.get_rank() if rank is None else rank, listener)
    with ExitStack() as stack:
        tap.install()
        stack.callback(tap.remove)
        try:
            stack.enter_context(watched_waits(tap))
        except (AttributeError, RuntimeError, TypeError) as error:
            raise TapUnavailable(f"torch {torch.__version__} waits otherwise than this tap knows: {error}") from error
        _tap = tap
        try:
            yield tap
        finally:
            _tap = None
