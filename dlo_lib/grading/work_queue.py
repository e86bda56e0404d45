"""Submissions to judge as files in a folder that many machines share: whoever moves one to its own shelf has it.

    todo/00007.json  ->  taken/3/00007.json  ->  done/00007.0      judged by element 3, exit status 0

A file moves by ``rename``, which happens once, also where the folder is on a network file system; no lock is held, so nothing is left
locked by a machine that is gone. What a lost element had taken lies on its shelf: it begins with that when it runs again. Removing the
folder ends the work: nobody finds more.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dlo_lib.files import write_text
from dlo_lib.grading.judging import Job


@dataclass(frozen=True)
class Ticket:
    """The ``number``-th submission of a queue, on the shelf of an element."""

    number: int
    job: Job
    file: Path


class WorkQueue:
    """The queue in ``folder``, seen from whichever machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._todo, self._taken, self._done = (folder / name for name in ("todo", "taken", "done"))

    @classmethod
    def of(cls, folder: Path, jobs: Sequence[Job]) -> WorkQueue:
        """A new queue of ``jobs``, numbered from 0, instead of any that was there."""
        shutil.rmtree(folder, ignore_errors=True)
        queue = cls(folder)
        for shelf in (queue._todo, queue._taken, queue._done):
            shelf.mkdir(parents=True)
        for number, job in enumerate(jobs):
            write_text(queue._todo / f"{number:05}.json", json.dumps(asdict(job), default=str))
        return queue

    def take(self, element: int) -> Ticket | None:
        """The next submission for ``element``, first those it has taken before; None when there is nothing to do any more."""
        shelf = self._taken / str(element)
        with contextlib.suppress(FileNotFoundError):  # the folder is gone: nobody waits for the rest
            shelf.mkdir(exist_ok=True)
            for file in sorted(shelf.glob("*.json")):
                return _ticket(file)
            for file in sorted(self._todo.glob("*.json")):
                with contextlib.suppress(FileNotFoundError):  # somebody else was faster
                    return _ticket(file.rename(shelf / file.name))
        return None

    def finish(self, ticket: Ticket, code: int) -> None:
        """The judge of a submission has ended with that exit status."""
        with contextlib.suppress(FileNotFoundError):  # taken over meanwhile, or nobody waits for it
            ticket.file.rename(self._done / f"{ticket.number:05}.{code}")

    def finished(self) -> Iterator[tuple[int, int]]:
        """Number and exit status of all that were judged."""
        for file in self._done.iterdir():
            yield int(file.stem), int(file.suffix[1:])

    def give_back(self, element: int) -> None:
        """What ``element`` has taken and not finished is anybody's again."""
        for file in (self._taken / str(element)).glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                file.rename(self._todo / file.name)

    def give_up(self, element: int, number: int) -> None:
        """No element takes this one any more: it is finished with exit status 1."""
        name = f"{number:05}"
        with contextlib.suppress(FileNotFoundError):
            (self._taken / str(element) / f"{name}.json").rename(self._done / f"{name}.1")

    def held_by(self, element: int) -> list[int]:
        """What ``element`` has taken and not finished."""
        return sorted(int(file.stem) for file in (self._taken / str(element)).glob("*.json"))

    def anything_left_to(self, element: int) -> bool:
        """Whether there is something that ``element`` could take."""
        return bool(self.held_by(element)) or any(self._todo.glob("*.json"))

    def remove(self) -> None:
        """End the work: elements that still run find nothing more."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _ticket(file: Path) -> Ticket:
    values = json.loads(file.read_text(encoding="utf-8"))
    return Ticket(int(file.stem), Job(values["student"], Path(values["notebook"]), Path(values["report"]), values["key"]), file)
