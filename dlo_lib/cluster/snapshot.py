"""The answer to a query that several processes of a user share, so that many of them cost one query.

The controller of a large machine serves thousands of users. Handles of jobs, views in notebooks and waits ask
for the queue independently; within ``interval`` seconds they all get the same answer, from a file in the
state folder. A change that this user makes to the queue makes an earlier answer invalid.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from dlo_lib.files import state_dir, write_text
from dlo_lib.locks import file_lock

_SETTLED_S = 60.0


class Snapshot:
    """The last answer to the query called ``name``.

    Args:
        name: the name of its files in the state folder.
        interval: returns the seconds for which an answer is valid.
    """

    def __init__(self, name: str, interval: Callable[[], float]) -> None:
        self._name, self._interval = name, interval

    def read(self, query: Callable[[], str], fresh: bool = False) -> str:
        """Return the answer of ``query``, or the last one if it is valid.

        Args:
            fresh: the answer has to be newer than this call, or than a minute after the last change: the
                clocks of two login nodes may differ, but not by as much.
        """
        since = min(time.time(), self._changed() + _SETTLED_S) if fresh else 0.0
        known = self._valid(since)
        if known is not None:
            return known
        with file_lock(self._file("lock")):  # the others wait for the answer of one process
            known = self._valid(since)
            if known is None:
                asked = time.time()
                known = query()
                write_text(self._file("json"), json.dumps({"asked": asked, "answer": known}))
        return known

    def invalidate(self) -> None:
        """Make earlier answers invalid, because the user has changed what they describe."""
        write_text(self._file("changed"), repr(time.time()))

    def _valid(self, since: float) -> str | None:
        try:
            last = json.loads(self._file("json").read_text(encoding="utf-8"))
            asked, answer = float(last["asked"]), str(last["answer"])
        except (OSError, ValueError, KeyError):
            return None
        return (
            answer
            if asked > max(since, self._changed()) and 0 <= time.time() - asked < self._interval()
            else None
        )

    def _changed(self) -> float:
        try:
            return float(self._file("changed").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0.0  # nothing was changed

    def _file(self, kind: str) -> Path:
        return state_dir() / f"{self._name}.{kind}"
