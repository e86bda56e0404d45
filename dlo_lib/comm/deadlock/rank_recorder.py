"""A rank's part of the explainer: it writes the rank's row, and stops before a call that does not match."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock.board import ENDED, Activity, Board, RankRow, RowView
from dlo_lib.comm.deadlock.stuck_ranks import signature
from dlo_lib.comm.tracing.call_sites import call_site
from dlo_lib.comm.tracing.group_lifetime import watched_joins
from dlo_lib.comm.tracing.listeners import listening
from dlo_lib.comm.tracing.tap import TapUnavailable

HOLD_S = 30.0
"""How long a rank waits before a call that does not match, in seconds; the watcher ends it much earlier."""
_LEAVE_POLL_S = 0.02
_HELPER_POLL_S = 0.5
_JOINS = "joins"  # the channel on which a rank publishes that it joins a process group
_PYTHON, _OURS = sysconfig.get_path("stdlib") + os.sep, str(Path(__file__).parents[2]) + os.sep
_INSTALLED = ("site-packages", "dist-packages")


class MismatchedCall(RuntimeError):
    """The other ranks issued another call at this position, and no watcher explained it in time."""


class RankRecorder:
    """The listener that writes a row.

    It ignores waits of other threads, because the rank still makes progress. If the main thread waits for
    such a thread without a limit of time, as in ``thread.join()``, the wait of that thread is that of the
    rank.
    """

    def __init__(self, row: RankRow) -> None:
        self.row = row
        self.thread = threading.get_ident()
        self._open: dict[int, Call] = {}
        self._any_source: set[tuple] = set()
        self._stopped = False
        self._communicating: set[int] = set()
        """Other threads that have issued calls."""
        self._helpers: dict[int, Call] = {}
        """The calls in which other threads wait, by thread."""
        self._standing_in: Call | None = None
        """The call of another thread that the row shows, because the main thread waits for that thread."""
        self._lock = threading.Lock()
        self._monitor: threading.Thread | None = None
        self._failed: Call | None = None
        """The last call in which this rank waited and which failed."""
        self.joins = 0
        """The number of process groups of all ranks that this rank has joined, one after the other."""
        self._joining = False

    def issued(self, call: Call) -> None:
        """Log the call, and stop here if it does not match the calls of the other ranks.

        Raises:
            MismatchedCall: the watcher has not stopped the job within ``HOLD_S`` seconds.
        """
        if self._stopped:
            return
        if not self._is_own(call):
            self._communicating.add(threading.get_ident())
        if call.is_async and not call.by_reducer:
            self._open[call.number] = call
        self.row.log(call)
        if not self._fits(call):
            # The backend would hang, crash, or return wrong numbers. The watcher explains it.
            self.row.enter(Activity.HELD, call.number)
            time.sleep(HOLD_S)
            raise MismatchedCall(f"{call.kind.value}: the other ranks issued another call at this position")

    def _fits(self, call: Call) -> bool:
        """Publish the signature of a call; return whether it agrees with all published by the other ranks."""
        if call.kind is Kind.RECV_ANY:  # the numbers of this and of later messages do not show their partners
            self._any_source.add((call.group, call.tag))
            return True
        if call.kind is Kind.RECV and (call.group, call.tag) in self._any_source:
            return True
        row, place = self.row, "/".join(map(str, call.channel(self.row.rank)))
        others = (call.peer,) if call.kind.point_to_point else call.members
        expected = {place: signature(call)}
        if call.kind is Kind.ALL_TO_ALL:  # each pair of ranks must agree on the size of its message
            expected |= {
                f"{place} {row.rank}>{other}": size & 0xFFFFFFFF
                for other, size in zip(call.members, call.send_splits)
            }
            expected |= {
                f"{place} {other}>{row.rank}": size & 0xFFFFFFFF
                for other, size in zip(call.members, call.receive_splits)
            }
        for channel, mine in expected.items():
            row.publish(channel, call.sequence, mine)
        return all(
            row.differs(channel, call.sequence, mine, others) is None for channel, mine in expected.items()
        )

    def waits(self, call: Call) -> None:
        """Write that this rank waits in ``call``."""
        if self._stopped:
            return
        if self._is_own(call):
            self.row.enter(Activity.WAITING, call.number, self._others_may_communicate())
            return
        with self._lock:
            self._helpers[threading.get_ident()] = call
            if self._monitor is None:
                self._monitor = threading.Thread(target=self._watch_helpers, name="dlo-helpers", daemon=True)
                self._monitor.start()

    def waited(self, call: Call, failed: bool) -> None:
        """Write that this rank computes again."""
        self._open.pop(call.number, None)
        if self._stopped:
            return
        if failed:
            self._failed = call
        if self._is_own(call):
            self.row.enter(Activity.COMPUTING)
            return
        with self._lock:
            self._helpers.pop(threading.get_ident(), None)
            if self._standing_in is call:
                self._standing_in = None
                self.row.enter(Activity.COMPUTING)

    def _watch_helpers(self) -> None:
        """Show the wait of another thread while the main thread waits for it, and no thread computes."""
        while not self._stopped:
            time.sleep(_HELPER_POLL_S)
            with self._lock:
                if self._standing_in is None and len(self._helpers) == 1 and self._main_waits_for_helpers():
                    (self._standing_in,) = self._helpers.values()
                    self.row.enter(Activity.WAITING, self._standing_in.number)

    def _main_waits_for_helpers(self) -> bool:
        """Whether the main thread waits for other threads without a limit of time, and all of these wait."""
        frames = sys._current_frames()
        main = frames.get(self.thread)
        if main is None or main.f_code.co_filename != threading.__file__ or _has_limit(main):
            return False
        others = _python_threads() - {self.thread, threading.get_ident()} - self._helpers.keys()
        return all(ident in frames and _is_parked(frames[ident].f_code.co_filename) for ident in others)

    def ends(self, state: Activity) -> None:
        """Record that this rank has FINISHED or RAISED."""
        self.row.enter(state, other_threads=self._others_may_communicate())

    def loses_connection(self) -> None:
        """Record that a call of this rank has failed because its connection broke."""
        if self._failed is not None and not self._stopped:
            self.row.enter(Activity.BROKEN, self._failed.number, self._others_may_communicate())

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Within this context the rank waits for all other ranks to join the process group."""
        if self._joining:
            yield
            return
        self.joins += 1
        self.row.publish(_JOINS, self.joins, 1)
        self._joining = True
        members = tuple(range(self.row.world_size))
        call = Call(0, Kind.JOIN, "", members, self.joins, site=call_site()[0], issued=time.monotonic_ns())
        self.row.log(call)
        self.row.enter(Activity.WAITING, call.number, self._others_may_communicate())
        try:
            yield
        except BaseException:
            self.joins -= 1
            self.row.log(call._replace(sequence=self.joins))  # the others, which still join, lack this rank
            raise
        finally:
            self._joining = False
            self.row.enter(Activity.COMPUTING)

    def stop_recording(self) -> None:
        """Stop recording, because the row can no longer describe what this rank does."""
        self.row.enter(Activity.COMPUTING)
        self._stopped = True

    def never_waited(self) -> list[Call]:
        """Return the asynchronous calls that this process never waited for, in the order of issue."""
        return list(self._open.values())

    def _is_own(self, call: Call) -> bool:
        """Whether the main thread made the call, or a thread of autograd on its behalf (on a GPU)."""
        ident = threading.get_ident()
        return ident == self.thread or (call.in_backward and ident not in _python_threads())

    def _others_may_communicate(self) -> bool:
        """Whether another thread of this process may communicate while this one waits.

        If so, no conclusion follows from the wait. A thread that has communicated may do so again. Of the
        other threads only those count that run user code: not an idle worker of a pool, a timer, or the
        monitor of a progress bar.
        """
        if threading.active_count() == 1:
            return False
        others = _python_threads() - {self.thread}
        if others & self._communicating:
            return True
        frames = sys._current_frames()
        return any(ident in frames and not _is_parked(frames[ident].f_code.co_filename) for ident in others)


def wait_for_other_ranks(
    recorder: RankRecorder, board: Board, needed: Callable[[], bool] = lambda: True
) -> None:
    """Keep the connections of this rank, which leaves its process group, until every other rank has ended or
    leaves too.

    Otherwise ranks that still wait for it would fail with a broken connection before the watcher could
    explain why. After an error, leave at once.

    Args:
        needed: returns False when waiting has become useless.
    """
    if sys.exc_info()[0] is not None:
        return
    recorder.row.enter(Activity.LEFT)
    rows = [RowView(board, rank) for rank in range(board.world_size)]
    while any(not _has_left(row, recorder) for row in rows) and needed():
        time.sleep(_LEAVE_POLL_S)
    recorder.row.enter(Activity.COMPUTING)


def _has_left(row: RowView, recorder: RankRecorder) -> bool:
    """Whether the rank of ``row`` has ended, or has left the process group in which ``recorder`` still is."""
    row.look()
    joined_again = recorder.row.differs(_JOINS, recorder.joins + 1, 0, (row.rank,)) is not None
    return joined_again or row.state in (Activity.STARTING, *ENDED)


def _python_threads() -> set[int]:
    return {thread.ident for thread in threading.enumerate() if thread.ident is not None}


def _has_limit(frame: FrameType) -> bool:
    """Whether a wait in the module ``threading`` ends after a time."""
    return frame.f_locals.get("timeout", None) not in (None, -1)


def _is_parked(file: str) -> bool:
    return file.startswith((_PYTHON, _OURS)) or any(
        f"{os.sep}{folder}{os.sep}" in file for folder in _INSTALLED
    )


@contextmanager
def record_row(row: RankRow) -> Iterator[RankRecorder]:
    """Keep ``row`` up to date within the context. Enter it before the process joins its process group.

    If torch's internals are unknown to the tap, the row only says that the rank computes, and a printed line
    says that deadlocks are not explained.
    """
    recorder = RankRecorder(row)
    row.enter(Activity.COMPUTING)
    with ExitStack() as stack:
        try:
            tap = stack.enter_context(listening(recorder, row.rank))
            stack.enter_context(watched_joins(recorder, tap, row.world_size))
        except TapUnavailable as error:
            print(f"deadlocks are not explained: {error}", flush=True)
        yield recorder
