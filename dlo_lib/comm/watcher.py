"""The watcher's part of the dead-lock explainer: follows all rows of a board and says when no progress is possible, and why.

It looks a few times a second and decides from the rows alone (``comm.deadlock``). A mismatch is certain at once. A dead-lock is told when
the same ranks have been stuck, their rows untouched, for ``SETTLE_S``: a rank that has just issued what another waits for has by then been
seen.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from dlo_lib.comm import explain
from dlo_lib.comm.board import Board, RowView, State
from dlo_lib.comm.calls import Call
from dlo_lib.comm.deadlock import Meetings, Mismatch, RankView, stuck_ranks
from dlo_lib.comm.vocabulary import NameFile

POLL_S = 0.05
SETTLE_S = 0.2
_REMEMBERED = 4096  # calls a rank may have issued since the one it waits in


class Watcher:
    """Follows the rows of ``board``; ``name_file`` shows a notebook's cells by their number."""

    def __init__(self, board: Board, name_file: NameFile) -> None:
        self.rows = [RowView(board, rank) for rank in range(board.world_size)]
        self.views = {rank: RankView(rank) for rank in range(board.world_size)}
        self._calls: dict[int, OrderedDict[int, Call]] = {rank: OrderedDict() for rank in self.views}
        self._meetings = Meetings()
        self._mismatch: Mismatch | None = None
        self._mismatched_at = 0.0
        self._stuck: tuple = ()
        self._stuck_since = 0.0
        self._name_file = name_file

    def died(self, rank: int, how: str) -> None:
        """Its process ended without a word."""
        self.views[rank].death = how

    def table(self) -> str:
        """What every rank does now, as rows of a table."""
        for row in self.rows:
            self._follow(row)
        return explain.table(self.views, self._name_file)

    def look(self) -> str | None:
        """Read the rows; the explanation when no progress is possible."""
        for row in self.rows:
            self._follow(row)
        now = time.monotonic()
        if self._mismatch is not None:
            self._mismatched_at = self._mismatched_at or now
            # The others that meet there have a moment to come: the table shows them too.
            return explain.mismatch(self._mismatch, self._name_file) if now - self._mismatched_at >= SETTLE_S / 2 else None
        stuck = stuck_ranks(self.views)
        state = tuple((rank, self.rows[rank].version) for rank in sorted(stuck))
        if not stuck or state != self._stuck:
            self._stuck, self._stuck_since = state, now
            return None
        return explain.deadlock(self.views, stuck, self._name_file) if now - self._stuck_since >= SETTLE_S else None

    def _follow(self, row: RowView) -> None:
        if not row.look() and row.read == row.logged:
            return
        view, remembered = self.views[row.rank], self._calls[row.rank]
        for call in row.calls():
            view.note(call)
            remembered[call.number] = call
            if len(remembered) > _REMEMBERED:
                remembered.popitem(last=False)
            found = self._meetings.add(row.rank, call)  # also after a first mismatch: it fills in the others that meet there
            self._mismatch = self._mismatch or found
        view.lost = row.incomplete
        view.state, view.since, view.company = row.state, row.since, row.company
        view.waits_for = remembered.get(row.waits_in) if row.state is State.WAITING else None
