"""The answer to a query that several processes of a user share, so that many of them cost one query.

The controller of a large machine serves thousands of users. Handles of jobs, views in notebooks and waits ask
for the queue independently; within ``interval`` seconds they all get the same answer, from a file in the
state folder. A change that this user makes to the queue makes an earlier answer invalid.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import state_dir, write_text
from dlo_lib.base.locks import file_lock
from dlo_lib.base.text import tr

_log = logging.getLogger(__name__)
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
        with self._shared() as shared:  # the others wait for the answer of one process
            known = self._valid(since)
            if known is None:
                asked = time.time()
                known = query()
                if shared:
                    self._write("json", json.dumps({"asked": asked, "answer": known}))
        return known

    @contextlib.contextmanager
    def _shared(self) -> Iterator[bool]:
        """Hold the lock of the answer; without one on a full or read-only disk, where each process asks."""
        try:
            lock = file_lock(self._file("lock"))
            lock.acquire()
        except OSError as error:
            _log.warning(tr("answers of SLURM are not shared: {why}", why=error))
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _write(self, kind: str, text: str) -> bool:
        """Write a file; return False on a full or read-only disk, where the answer still counts."""
        try:
            write_text(self._file(kind), text)
        except (OSError, UserError) as error:
            _log.warning(tr("answers of SLURM are not shared: {why}", why=error))
            return False
        return True

    def invalidate(self) -> None:
        """Make earlier answers invalid, because the user has changed what they describe."""
        if not self._write("changed", repr(time.time())):
            with contextlib.suppress(OSError):  # a read-only disk: the answer is old soon
                self._file("json").unlink(missing_ok=True)

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
