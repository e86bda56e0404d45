"""Listeners to the communication of a process: they share the one tap of the process.

The tap is a kernel in the dispatcher, and a process has one dispatcher. A second listener therefore joins the
tap of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from dlo_lib.comm.tracing.reductions import noted_reductions
from dlo_lib.comm.tracing.tap import Listener, Tap, TapUnavailable
from dlo_lib.comm.tracing.waits import watched_waits

_tap: Tap | None = None


@contextmanager
def listening(listener: Listener, rank: int | None = None) -> Iterator[Tap]:
    """Within this context, ``listener`` receives every communication call of this process.

    Args:
        listener: its methods are called on the thread that makes the call.
        rank: this process's rank in its job, required while it has no process group.

    Raises:
        TapUnavailable: the tap does not know the internals of this version of torch.
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
            stack.enter_context(noted_reductions())
            stack.enter_context(watched_waits(tap))
        except (AttributeError, RuntimeError, TypeError) as error:
            raise TapUnavailable(
                f"torch {torch.__version__} waits in another way than this tap knows: {error}"
            ) from error
        _tap = tap
        try:
            yield tap
        finally:
            _tap = None
