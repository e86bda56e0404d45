"""The rows of ranks on other machines: each machine's watcher writes those of its ranks into a shared folder.

    rows-0.json, rows-1.json    what the ranks of machine 0, of machine 1 do, written by their watchers
    failure-*.json, verdict.json    see ``dlo_lib.base.rank_failures``

A watcher writes only when one of its ranks has not moved for ``QUIET_S`` seconds, has ended or has lost its
connection, so a training whose steps are shorter writes nothing. One watcher decides for all: the one of the
first machine that still has ranks. It reads the files while one of its ranks is in such a state.

The files show different moments, and this does no harm. A waiting rank moves only after a partner has
issued its call. A rank counts as stuck only if such a partner had not issued it, and was stuck or had ended,
when its machine wrote. The first of these ranks to move after that would need a partner that had moved
before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dlo_lib.base import rank_failures
from dlo_lib.base.files import write_text
from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock.board import Activity
from dlo_lib.comm.deadlock.stuck_ranks import RankView
from dlo_lib.comm.deadlock.watcher import Watcher

QUIET_S = 5.0
"""Seconds without a move after which the row of a rank is written, and time between two readings."""
_SOON_S = 1.0  # between two readings while a rank has ended or lost its connection
_AT_ONCE = (Activity.FINISHED, Activity.RAISED, Activity.LEFT, Activity.BROKEN)


class NodeExchange:
    """The part of one machine: it writes the rows of its ranks to ``folder`` and reads the other rows."""

    def __init__(self, folder: Path, node: int, watcher: Watcher) -> None:
        self._folder, self._node, self._watcher = folder, node, watcher
        self._moved: dict[int, tuple[tuple, float]] = {}
        """For each rank of this machine what identifies its present state, and when it entered it."""
        self._written: dict[int, tuple] = {}
        self._wrote_at = self._read_at = 0.0

    def exchange(self, ranks: Iterable[int]) -> None:
        """Write the rows of ``ranks``, those of this machine, and read the other rows, when it is time to.

        Raises:
            OSError: the folder cannot be used.
            UserError: its disk is full.
        """
        now = time.monotonic()
        mine = sorted(ranks)
        for rank in mine:
            state = self._state(rank)
            if self._moved.get(rank, ((), 0.0))[0] != state:
                self._moved[rank] = (state, now)
        soon = any(self._is_final(rank) for rank in mine)
        quiet = [rank for rank in mine if now - self._moved[rank][1] >= QUIET_S]
        new = {rank for rank in mine if self._written.get(rank) != self._moved[rank][0]}
        due = bool(new.intersection(quiet)) and now - self._wrote_at >= QUIET_S
        if due or any(self._is_final(rank) for rank in new):
            self.write(mine)
        if (soon or quiet) and now - self._read_at >= (_SOON_S if soon else QUIET_S):
            self._read_at = now
            if all(_content(self._file(node)).get("over") for node in range(self._node)):
                self._read(set(mine))

    def write(self, ranks: Iterable[int], over: bool = False) -> None:
        """Write the rows of ``ranks``; ``over``: all of them have ended, and this machine writes no more.

        Raises:
            OSError: the folder cannot be used.
            UserError: its disk is full.
        """
        rows = {rank: _packed(self._watcher, rank) for rank in ranks}
        content = {"written": time.time(), "over": over, "ranks": rows}
        write_text(self._file(self._node), json.dumps(content))
        self._wrote_at = time.monotonic()
        self._written = {rank: self._state(rank) for rank in rows}

    def verdict(self) -> bool:
        """Whether a watcher has found that the ranks can make no progress."""
        return rank_failures.verdict(self._folder) is not None

    def _file(self, node: int) -> Path:
        return self._folder / f"rows-{node}.json"

    def _state(self, rank: int) -> tuple:
        return self._watcher.rows[rank].version, self._watcher.views[rank].death

    def _is_final(self, rank: int) -> bool:
        view = self._watcher.views[rank]
        return view.death is not None or view.state in _AT_ONCE

    def _read(self, mine: set[int]) -> None:
        for file in self._folder.glob("rows-*.json"):
            content = _content(file)
            ago = max(0.0, time.time() - content.get("written", 0.0))
            for rank, row in content.get("ranks", {}).items():
                if int(rank) not in mine:
                    self._watcher.see(_unpacked(int(rank), row, ago), [_call(one) for one in row["calls"]])


def _content(file: Path) -> dict[str, Any]:
    """Return the content of a file of rows; {} if it cannot be read now: it is read again later."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _packed(watcher: Watcher, rank: int) -> dict[str, Any]:
    """Return what a watcher knows about a rank of its machine, as plain data."""
    view = watcher.views[rank]
    return {
        "state": view.state.value,
        "waits_for": view.waits_for and view.waits_for.record(),
        "last": view.last and view.last.record(),
        "for": (time.monotonic_ns() - view.since) / 1e9 if view.since else None,
        "death": view.death,
        "lost": view.lost,
        "other_threads": view.other_threads,
        "issued": [(kind and kind.value, channel, n) for (kind, *channel), n in view.issued.items()],
        "calls": [call.record() for call in watcher.last_calls(rank)],
    }


def _unpacked(rank: int, row: dict[str, Any], ago: float) -> RankView:
    """Return the view of a rank from ``row``, which was written ``ago`` seconds before now."""
    view = RankView(
        rank,
        Activity(row["state"]),
        waits_for=row["waits_for"] and _call(row["waits_for"]),
        since=0 if row["for"] is None else time.monotonic_ns() - round((row["for"] + ago) * 1e9),
        death=row["death"],
        lost=row["lost"],
        other_threads=row["other_threads"],
        last=row["last"] and _call(row["last"]),
    )
    for kind, channel, count in row["issued"]:
        view.issued[(kind and Kind(kind), *channel)] = count
    return view


def _call(record: list[Any]) -> Call:
    return Call.from_record(_tuples(record))


def _tuples(value: Any) -> Any:
    """Return a value with the lists of JSON as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
