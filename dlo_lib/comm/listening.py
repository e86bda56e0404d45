"""Listening to a process's communication: the one tap it may have, shared by all who want to hear.

A tap is in the dispatcher, of which a process has one, so a second listener joins the tap of the first instead of bringing its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dlo_lib.comm.tap import Listener, Tap
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
        _tap.listeners.append(listener)
        try:
            yield _tap
        finally:
            _tap.listeners.remove(listener)
        return
    tap = Tap(dist.get_rank() if rank is None else rank, listener)
    tap.install()
    _tap = tap
    try:
        with watched_waits(tap):
            yield tap
    finally:
        _tap = None
        tap.remove()
