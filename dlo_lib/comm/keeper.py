"""A rank's part of the dead-lock explainer: keeps its row on the board, and stops in front of a call that does not fit the others'."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dlo_lib.comm.board import Row, State
from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock import signature
from dlo_lib.comm.tap import Tap, TapUnavailable
from dlo_lib.comm.waits import watched_waits

HOLD_S = 30.0
"""How long a rank stands before a call that does not fit; the parent ends it long before."""


class MismatchedCall(RuntimeError):
    """The other ranks called something else at this place, and nobody came to say so."""


class RowKeeper:
    """The listener that writes a row. Waits of other threads are left out: the rank goes on beside them."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.thread = threading.get_ident()
        self.failed_in: Call | None = None
        """The call that raised, when the backend did: its cause is likely on another rank."""

    def issued(self, call: Call) -> None:
        self.row.log(call)
        if call.kind in (Kind.RECV_ANY, Kind.NEW_GROUP):
            return  # the one meets nobody in particular; the other compares the groups itself
        place = "/".join(map(str, call.channel(self.row.rank)))
        ranks = (call.peer,) if call.kind.point_to_point else call.members
        mine = signature(call)
        self.row.publish(place, call.sequence, mine)
        if self.row.differs(place, call.sequence, mine, ranks) is not None:
            # The backend would hang, crash, or return wrong numbers without a word. The parent sees the same and explains it.
            self.row.enter(State.HELD, call.number)
            time.sleep(HOLD_S)
            raise MismatchedCall(f"{call.kind.value}: the other ranks called something else here")

    def waits(self, call: Call) -> None:
        if threading.get_ident() == self.thread:
            self.row.enter(State.WAITING, call.number)

    def waited(self, call: Call, failed: bool) -> None:
        if failed:
            self.failed_in = call
        elif threading.get_ident() == self.thread:
            self.row.enter(State.COMPUTING)


@contextmanager
def kept_row(row: Row) -> Iterator[RowKeeper]:
    """Keep ``row`` while this process, which has a process group, runs what is inside.

    Where torch's internals are not as the tap knows them, the row says only that the rank computes, and a printed line that dead-locks
    are not explained.
    """
    keeper = RowKeeper(row)
    tap = Tap(dist.get_rank(), keeper)
    row.enter(State.COMPUTING)
    try:
        tap.install()
    except TapUnavailable as error:
        print(f"dead-locks are not explained: {error}", flush=True)
        yield keeper
        return
    try:
        with watched_waits(tap):
            yield keeper
    finally:
        tap.remove()
