"""A rank's part of the explainer: it writes the rank's row, and stops before a call that does not match."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock.board import ENDED, Activity, Board, RankRow, RowView
from dlo_lib.comm.deadlock.helper_threads import HelperThreads
from dlo_lib.comm.deadlock.stuck_ranks import signature
from dlo_lib.comm.tracing.call_sites import call_site
from dlo_lib.comm.tracing.group_lifetime import watched_joins
from dlo_lib.comm.tracing.listeners import listening
from dlo_lib.comm.tracing.tap import TapUnavailable
from dlo_lib.comm.tracing.unknown import describe_unknown

HOLD_S = 30.0
"""How long a rank waits before a call that does not match, in seconds; the watcher ends it much earlier."""
_LEAVE_POLL_S = 0.02
_JOINS = "joins"  # the channel on which a rank publishes that it joins a process group


class MismatchedCall(RuntimeError):
    """The other ranks issued another call at this position, and no watcher explained it in time."""


class RankRecorder:
    """The listener that writes a row.

    ``comm.deadlock.helper_threads`` decides which waits of other threads count.
    """

    def __init__(self, row: RankRow) -> None:
        self.row = row
        self._open: dict[int, Call] = {}
        self._any_source: set[tuple] = set()
        self._stopped = False
        self._helpers = HelperThreads[Call](lambda call: self.row.enter(Activity.WAITING, call.number))
        self._failed: Call | None = None
        """The last call in which this rank waited and which failed."""
        self.unavailable = ""
        """Why nothing is recorded: the tap does not know torch's internals. "" if calls are recorded."""
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
        if not self._helpers.is_main(call.in_backward):
            self._helpers.communicates()
        if call.kind is Kind.UNKNOWN:
            _say_once(call.operator)
            return
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
        if self._helpers.is_main(call.in_backward):
            self.row.enter(Activity.WAITING, call.number, self._helpers.may_communicate())
        else:
            self._helpers.waits(call)

    def waited(self, call: Call, failed: bool) -> None:
        """Write that this rank computes again."""
        self._open.pop(call.number, None)
        if self._stopped:
            return
        if failed:
            self._failed = call
        if self._helpers.is_main(call.in_backward):
            self.row.enter(Activity.COMPUTING)
        else:
            self._helpers.waited(call, then=lambda: self.row.enter(Activity.COMPUTING))

    def ends(self, state: Activity) -> None:
        """Record that this rank has FINISHED or RAISED."""
        self.row.enter(state, other_threads=self._helpers.may_communicate())

    def loses_connection(self) -> None:
        """Record that a call of this rank has failed because its connection broke."""
        if self._failed is not None and not self._stopped:
            self.row.enter(Activity.BROKEN, self._failed.number, self._helpers.may_communicate())

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
        self.row.enter(Activity.WAITING, call.number, self._helpers.may_communicate())
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
        self._helpers.stop()

    def never_waited(self) -> list[Call]:
        """Return the asynchronous calls that this process never waited for, in the order of issue."""
        return list(self._open.values())


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


@cache
def _say_once(operator: str) -> None:
    print(f"deadlocks in {operator} are not explained: {describe_unknown(operator)}", flush=True)


@contextmanager
def record_row(row: RankRow) -> Iterator[RankRecorder]:
    """Keep ``row`` up to date within the context. Enter it before the process joins its process group.

    If torch's internals are unknown to the tap, the row only says that the rank computes, ``unavailable``
    gives the reason, and a printed line says that deadlocks are not explained.
    """
    recorder = RankRecorder(row)
    row.enter(Activity.COMPUTING)
    with ExitStack() as stack:
        try:
            tap = stack.enter_context(listening(recorder, row.rank))
            stack.enter_context(watched_joins(recorder, tap, row.world_size))
        except TapUnavailable as error:
            recorder.unavailable = str(error)
            print(f"deadlocks are not explained: {error}", flush=True)
        yield recorder
