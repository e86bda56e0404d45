"""A queue of submissions as files in a folder that several machines share. An element owns the files in its
folder.

    todo/00007.json  ->  taken/3/00007.json  ->  done/00007.0      judged by element 3, exit status 0

An element takes a submission by ``rename``, which succeeds once, also on a network file system. There are no
locks, so a lost machine leaves nothing locked. The submissions of a lost element stay in its folder; the
element judges them first when it runs again. Removing the queue's folder ends the work of all elements.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dlo_lib.base.files import write_text
from dlo_lib.grading.judge.client import JudgeJob


@dataclass(frozen=True)
class Ticket:
    """The submission number ``number`` of a queue, in the folder of an element."""

    number: int
    job: JudgeJob
    file: Path


class WorkQueue:
    """The queue in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._todo, self._taken, self._done = (folder / name for name in ("todo", "taken", "done"))

    @classmethod
    def of(cls, folder: Path, jobs: Sequence[JudgeJob]) -> WorkQueue:
        """Create a queue of ``jobs``, numbered from 0; replace an existing one."""
        shutil.rmtree(folder, ignore_errors=True)
        queue = cls(folder)
        for part in (queue._todo, queue._taken, queue._done):
            part.mkdir(parents=True)
        for number, job in enumerate(jobs):
            write_text(queue._todo / f"{number:05}.json", json.dumps(asdict(job), default=str))
        return queue

    def take(self, element: int) -> Ticket | None:
        """Return the next submission for ``element``, first those it has already taken; None if none
        is left.
        """
        own_folder = self._taken / str(element)
        with contextlib.suppress(FileNotFoundError):  # the queue was removed
            own_folder.mkdir(exist_ok=True)
            for file in sorted(own_folder.glob("*.json")):
                return _ticket(file)
            for file in sorted(self._todo.glob("*.json")):
                with contextlib.suppress(FileNotFoundError):  # another element was faster
                    return _ticket(file.rename(own_folder / file.name))
        return None

    def finish(self, ticket: Ticket, code: int) -> None:
        """Record that the judge of a submission has ended with exit status ``code``."""
        with contextlib.suppress(FileNotFoundError):  # released meanwhile, or the queue was removed
            ticket.file.rename(self._done / f"{ticket.number:05}.{code}")

    def finished(self) -> Iterator[tuple[int, int]]:
        """Yield the number and the exit status of each judged submission."""
        for file in self._done.iterdir():
            yield int(file.stem), int(file.suffix[1:])

    def release(self, element: int) -> None:
        """Return the unfinished submissions of ``element`` to the queue."""
        for file in (self._taken / str(element)).glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                file.rename(self._todo / file.name)

    def mark_failed(self, element: int, number: int) -> None:
        """Finish a submission with exit status 1, so that no element takes it again."""
        name = f"{number:05}"
        with contextlib.suppress(FileNotFoundError):
            (self._taken / str(element) / f"{name}.json").rename(self._done / f"{name}.1")

    def taken_by(self, element: int) -> list[int]:
        """Return the numbers of the unfinished submissions of ``element``."""
        return sorted(int(file.stem) for file in (self._taken / str(element)).glob("*.json"))

    def has_work_for(self, element: int) -> bool:
        """Return True if there is a submission that ``element`` can take."""
        return bool(self.taken_by(element)) or any(self._todo.glob("*.json"))

    def remove(self) -> None:
        """Remove the queue; running elements then find no more submissions."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _ticket(file: Path) -> Ticket:
    values = json.loads(file.read_text(encoding="utf-8"))
    return Ticket(
        int(file.stem),
        JudgeJob(values["student"], Path(values["notebook"]), Path(values["report"]), values["key"]),
        file,
    )
