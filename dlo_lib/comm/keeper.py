"""A rank's part of the dead-lock explainer: keeps its row on the board, and stops in front of a call that does not fit the others'."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dlo_lib.comm.board import Row, State
from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock import signature
from dlo_lib.comm.joining import watched_joins
from dlo_lib.comm.listening import listening
from dlo_lib.comm.sites import call_site
from dlo_lib.comm.tap import TapUnavailable

HOLD_S = 30.0
"""How long a rank stands before a call that does not fit; the watcher ends it long before."""
_PYTHON, _OURS = sysconfig.get_path("stdlib") + os.sep, str(Path(__file__).parents[1]) + os.sep
_INSTALLED = ("site-packages", "dist-packages")


class MismatchedCall(RuntimeError):
    """The other ranks called something else at this place, and nobody came to say so."""


class RowKeeper:
    """The listener that writes a row. Waits of other threads are left out: the rank goes on beside them."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.thread = threading.get_ident()
        self._open: dict[int, Call] = {}
        self._from_anybody: set[tuple] = set()
        self._silent = False
        self._talking: set[int] = set()
        """Other threads that have issued calls."""
        self._joins = 0
        self._joining = False

    def issued(self, call: Call) -> None:
        if self._silent:
            return
        if not self._is_own(call):
            self._talking.add(threading.get_ident())
        if call.is_async and not call.by_reducer:
            self._open[call.number] = call
        self.row.log(call)
        if not self._fits(call):
            # The backend would hang, crash, or return wrong numbers without a word. The watcher sees the same and explains it.
            self.row.enter(State.HELD, call.number)
            time.sleep(HOLD_S)
            raise MismatchedCall(f"{call.kind.value}: the other ranks called something else here")

    def _fits(self, call: Call) -> bool:
        """Publish what is called here, and whether it agrees with all that the others have published."""
        if call.kind is Kind.NEW_GROUP:  # which compares the groups itself
            return True
        if call.kind is Kind.RECV_ANY:  # it meets nobody in particular, and which later messages meet is then not known from their numbers
            self._from_anybody.add((call.group, call.tag))
            return True
        if call.kind is Kind.RECV and (call.group, call.tag) in self._from_anybody:
            return True
        row, place = self.row, "/".join(map(str, call.channel(self.row.rank)))
        others = (call.peer,) if call.kind.point_to_point else call.members
        expected = {place: signature(call)}
        if call.kind is Kind.ALL_TO_ALL:  # each pair must agree on what goes between them
            expected |= {f"{place} {row.rank}>{other}": size & 0xFFFFFFFF for other, size in zip(call.members, call.send_splits)}
            expected |= {f"{place} {other}>{row.rank}": size & 0xFFFFFFFF for other, size in zip(call.members, call.receive_splits)}
        for channel, mine in expected.items():
            row.publish(channel, call.sequence, mine)
        return all(row.differs(channel, call.sequence, mine, others) is None for channel, mine in expected.items())

    def waits(self, call: Call) -> None:
        if not self._silent and self._is_own(call):
            self.row.enter(State.WAITING, call.number, self._has_company())

    def waited(self, call: Call, failed: bool) -> None:
        self._open.pop(call.number, None)
        if not self._silent and self._is_own(call):
            self.row.enter(State.COMPUTING)

    def ends(self, state: State) -> None:
        """This rank has FINISHED or RAISED."""
        self.row.enter(state, company=self._has_company())

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Within this context the rank waits for all others to join the process group too."""
        if self._joining:
            yield
            return
        self._joins += 1
        self._joining = True
        members = tuple(range(self.row.world_size))
        call = Call(0, Kind.JOIN, "", members, self._joins, site=call_site()[0], issued=time.monotonic_ns())
        self.row.log(call)
        self.row.enter(State.WAITING, call.number, self._has_company())
        try:
            yield
        finally:
            self._joining = False
            self.row.enter(State.COMPUTING)

    def fall_silent(self) -> None:
        """What this rank does from now on can no longer be told from its row: nothing more is written, and nothing concluded."""
        self.row.enter(State.COMPUTING)
        self._silent = True

    def never_waited(self) -> list[Call]:
        """Asynchronous calls that nobody waited for, in the order of issue."""
        return list(self._open.values())

    def _is_own(self, call: Call) -> bool:
        """Made by this rank's main thread, or for it: on a GPU autograd has threads of its own, for which ``backward`` waits."""
        ident = threading.get_ident()
        return ident == self.thread or (call.in_backward and ident not in _python_threads())

    def _has_company(self) -> bool:
        """Whether another thread of this process may communicate while this one waits: then nothing follows from the wait.

        One that has communicated may do so again. Of the others only those count that run a person's code: not a pool's worker without
        work, a timer, or a progress bar's monitor.
        """
        if threading.active_count() == 1:
            return False
        others = _python_threads() - {self.thread}
        if others & self._talking:
            return True
        frames = sys._current_frames()
        return any(ident in frames and not _is_parked(frames[ident].f_code.co_filename) for ident in others)


def _python_threads() -> set[int]:
    return {thread.ident for thread in threading.enumerate() if thread.ident is not None}


def _is_parked(file: str) -> bool:
    return file.startswith((_PYTHON, _OURS)) or any(f"{os.sep}{folder}{os.sep}" in file for folder in _INSTALLED)


@contextmanager
def kept_row(row: Row) -> Iterator[RowKeeper]:
    """Keep ``row`` while this process runs what is inside, from before it joins its process group on.

    Where torch's internals are not as the tap knows them, the row says only that the rank computes, and a printed line that dead-locks
    are not explained.
    """
    keeper = RowKeeper(row)
    row.enter(State.COMPUTING)
    with ExitStack() as stack:
        try:
            tap = stack.enter_context(listening(keeper, row.rank))
            stack.enter_context(watched_joins(keeper, tap, row.world_size))
        except TapUnavailable as error:
            print(f"dead-locks are not explained: {error}", flush=True)
        yield keeper
