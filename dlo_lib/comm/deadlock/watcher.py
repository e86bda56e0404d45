"""The watcher of the deadlock explainer: it follows the rows of a board and explains missing progress.

It reads the rows every ``POLL_S`` seconds and decides from them alone (``comm.deadlock.stuck_ranks``). A
mismatch is certain at once. A deadlock is reported when the same ranks have been stuck, with unchanged rows,
for ``SETTLE_S`` seconds: by then the watcher has seen every call that was issued just before.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from dlo_lib.comm.calls import Call
from dlo_lib.comm.deadlock import explanation
from dlo_lib.comm.deadlock.board import Board, RowView
from dlo_lib.comm.deadlock.stuck_ranks import CallMatcher, Mismatch, RankView, stuck_ranks
from dlo_lib.comm.deadlock.vocabulary import NameFile

POLL_S = 0.05
SETTLE_S = 0.2
_REMEMBERED = 4096  # number of calls that a rank may have issued since the one that it waits in

_COMPARED = 16  # number of its last calls that a rank of another machine is compared by


class Watcher:
    """Follows the rows of ``board``; ``name_file`` maps the file of a notebook's cell to its number."""

    def __init__(self, board: Board, name_file: NameFile) -> None:
        self.rows = [RowView(board, rank) for rank in range(board.world_size)]
        self.views = {rank: RankView(rank) for rank in range(board.world_size)}
        self._calls: dict[int, OrderedDict[int, Call]] = {rank: OrderedDict() for rank in self.views}
        self._matcher = CallMatcher()
        self._mismatch: Mismatch | None = None
        self._mismatched_at = 0.0
        self._stuck: tuple = ()
        self._stuck_since = 0.0
        self._name_file = name_file

    def died(self, rank: int, how: str) -> None:
        """Record that the process of ``rank`` ended without recording it; ``how`` says how, in words."""
        self.views[rank].death = how

    @property
    def mismatched(self) -> bool:
        """Whether calls that meet do not agree."""
        return self._mismatch is not None

    def last_calls(self, rank: int) -> list[Call]:
        """Return the last calls of a rank, the newest last."""
        return list(islice(reversed(self._calls[rank].values()), _COMPARED))[::-1]

    def see(self, view: RankView, calls: Sequence[Call]) -> None:
        """Take over the view of a rank on another machine, and compare its last calls with other ranks'."""
        known = self._calls[view.rank]
        self.views[view.rank] = view
        for call in calls:
            if call.number not in known:
                known[call.number] = call
                if not call.kind.point_to_point:  # an earlier receive from any rank may not be in ``calls``
                    self._mismatch = self._mismatch or self._matcher.add(view.rank, call)

    def table(self) -> str:
        """Return a table of what every rank does now."""
        for row in self.rows:
            self._follow(row)
        return explanation.table(self.views, self._name_file)

    def look(self) -> str | None:
        """Read the rows; return the explanation if no progress is possible."""
        for row in self.rows:
            self._follow(row)
        now = time.monotonic()
        if self._mismatch is not None:
            self._mismatched_at = self._mismatched_at or now
            # Give the other ranks that meet there time to arrive, so that the table shows them too.
            return (
                explanation.mismatch(self._mismatch, self._name_file)
                if now - self._mismatched_at >= SETTLE_S / 2
                else None
            )
        stuck = stuck_ranks(self.views)
        state = tuple((rank, self.rows[rank].version) for rank in sorted(stuck))
        if not stuck or state != self._stuck:
            self._stuck, self._stuck_since = state, now
            return None
        return (
            explanation.deadlock(self.views, stuck, self._name_file)
            if now - self._stuck_since >= SETTLE_S
            else None
        )

    def _follow(self, row: RowView) -> None:
        if not row.look() and row.read == row.logged:
            return
        view, remembered = self.views[row.rank], self._calls[row.rank]
        for call in row.calls():
            view.note(call)
            remembered[call.number] = call
            if len(remembered) > _REMEMBERED:
                remembered.popitem(last=False)
            # After a first mismatch too: it collects the other calls that meet there.
            found = self._matcher.add(row.rank, call)
            self._mismatch = self._mismatch or found
        view.lost = row.incomplete
        view.state, view.since, view.other_threads = row.state, row.since, row.other_threads
        view.waits_for = remembered.get(row.waits_in) if view.in_call else None
