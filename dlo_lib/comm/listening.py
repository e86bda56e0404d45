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
def listening(listener: Listener) -> Iterator[None]:
    """Within the context ``listener`` is told of every communication call of this process, which has a process group.

    Raises:
        TapUnavailable: torch's internals are not as the tap knows them.
    """
    global _tap
    if _tap is not None:
        _tap.listeners.append(listener)
        try:
            yield
        finally:
            _tap.listeners.remove(listener)
        return
    tap = Tap(dist.get_rank(), listener)
    tap.install()
    _tap = tap
    try:
        with watched_waits(tap):
            yield
    finally:
        _tap = None
        tap.remove()
