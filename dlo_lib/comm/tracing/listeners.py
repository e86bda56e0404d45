"""Listeners to the communication of a process: they share the one tap of the process.

The tap is a kernel in the dispatcher, and a process has one dispatcher. A second listener therefore joins the
tap of the first.

To install the tap costs a process 8 ms. A process that forks ranks installs it once (:func:`prepare_tap`),
and each rank has it from the start: the first listener of a rank takes it, or the rank drops it.
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
_prepared: Tap | None = None


def prepare_tap() -> None:
    """Install a tap without a listener, for the processes that this one forks.

    Raises:
        TapUnavailable: the tap does not know the internals of this version of torch.
    """
    global _prepared
    tap = Tap(rank=-1)
    tap.install()
    _prepared = tap


def drop_prepared_tap() -> None:
    """Remove the prepared tap, if no listener has taken it. Call this before the process joins its group."""
    tap = _take_prepared()
    if tap is not None:
        tap.remove()


def _take_prepared() -> Tap | None:
    global _prepared
    tap, _prepared = _prepared, None
    return tap


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
    own_rank = dist.get_rank() if rank is None else rank
    prepared = _take_prepared()
    tap = Tap(own_rank) if prepared is None else prepared
    tap.rank = own_rank
    tap.add(listener)
    with ExitStack() as stack:
        if prepared is None:
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
