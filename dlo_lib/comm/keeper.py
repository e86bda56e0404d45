"""A rank's part of the dead-lock explainer: keeps its row on the board, and stops in front of a call that does not fit the others'."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dlo_lib.comm.board import Row, State
from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock import signature
from dlo_lib.comm.listening import listening
from dlo_lib.comm.tap import TapUnavailable

HOLD_S = 30.0
"""How long a rank stands before a call that does not fit; the parent ends it long before."""


class MismatchedCall(RuntimeError):
    """The other ranks called something else at this place, and nobody came to say so."""


class RowKeeper:
    """The listener that writes a row. Waits of other threads are left out: the rank goes on beside them."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.thread = threading.get_ident()
        self._open: dict[int, Call] = {}
        self.failed_in: Call | None = None
        """The call that raised, when the backend did: its cause is likely on another rank."""

    def issued(self, call: Call) -> None:
        if call.is_async and not call.by_reducer:
            self._open[call.number] = call
        self.row.log(call)
        if call.kind in (Kind.RECV_ANY, Kind.NEW_GROUP):
            return  # the one meets nobody in particular; the other compares the groups itself
        if not self._fits(call):
            # The backend would hang, crash, or return wrong numbers without a word. The parent sees the same and explains it.
            self.row.enter(State.HELD, call.number)
            time.sleep(HOLD_S)
            raise MismatchedCall(f"{call.kind.value}: the other ranks called something else here")

    def _fits(self, call: Call) -> bool:
        """Publish what is called here, and whether it agrees with all that the others have published."""
        row, place = self.row, "/".join(map(str, call.channel(self.row.rank)))
        others = (call.peer,) if call.kind.point_to_point else call.members
        expected = {place: signature(call)}
        if call.kind is Kind.ALL_TO_ALL:  # each pair must agree on what goes between them
            expected |= {f"{place} {row.rank}>{other}": size for other, size in zip(call.members, call.send_splits)}
            expected |= {f"{place} {other}>{row.rank}": size for other, size in zip(call.members, call.receive_splits)}
        for channel, mine in expected.items():
            row.publish(channel, call.sequence, mine)
        return all(row.differs(channel, call.sequence, mine, others) is None for channel, mine in expected.items())

    def waits(self, call: Call) -> None:
        if threading.get_ident() == self.thread:
            self.row.enter(State.WAITING, call.number)

    def waited(self, call: Call, failed: bool) -> None:
        self._open.pop(call.number, None)
        if failed:
            self.failed_in = call
        elif threading.get_ident() == self.thread:
            self.row.enter(State.COMPUTING)

    def never_waited(self) -> list[Call]:
        """Asynchronous calls that nobody waited for, in the order of issue."""
        return list(self._open.values())


@contextmanager
def kept_row(row: Row) -> Iterator[RowKeeper]:
    """Keep ``row`` while this process, which has a process group, runs what is inside.

    Where torch's internals are not as the tap knows them, the row says only that the rank computes, and a printed line that dead-locks
    are not explained.
    """
    keeper = RowKeeper(row)
    row.enter(State.COMPUTING)
    with ExitStack() as stack:
        try:
            stack.enter_context(listening(keeper))
        except TapUnavailable as error:
            print(f"dead-locks are not explained: {error}", flush=True)
        yield keeper
