"""Submitted jobs on disk: one folder per job, named by a hash of its request, so that any process finds it.

    <state folder>/jobs/<digest>/
        record.json         the request, the site, and the numbers that the scheduler assigned
        job.sh              the script as submitted
        call.pkl, call.json a function with its arguments, and what its process needs to find its modules
        logs/, out/         the output of each element, and the folder for its files
        ends/, results/     the exit status of each element, and the result of its function
        progress/           how far the run of each element is (dlo_lib.base.progress)
        ranks/              failures and deadlocks of the ranks of each element (dlo_lib.base.rank_failures)
        turns/              what the jobs of each submission say at their start (``submissions``)

A lock on the folder prevents two processes from submitting the same job twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from dlo_lib.base import progress
from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.files import state_dir, write_text
from dlo_lib.base.locks import file_lock
from dlo_lib.base.progress import RunProgress
from dlo_lib.base.text import tr
from dlo_lib.cluster.site.description import Scheduler
from dlo_lib.cluster.slurm.states import ElementStatus, State

RECORD = "record.json"
SCRIPT, PROGRESS = "job.sh", "progress"
SHORT = 8  # digits of a digest that users type


@dataclass(frozen=True)
class Turn:
    """One submission: the job's number at SLURM, or the process that runs it here, and its elements.

    Attributes:
        number: 0 while SLURM may have accepted it, but has not told the number.
        born: start time of that process in clock ticks since boot, because process ids are reused.
        cluster: the cluster of the number, because two clusters may share the folder of jobs.
        token: the name of the submission, which the job finds in its arguments.
        at: when it was submitted, in seconds since 1970.
        given_up: whether it has no number and gets none, and its job, if there is one, does nothing.
        before: the statuses of its elements if it is given up.
        first: the element of index 0, because a large array is submitted in parts (``array_parts``).
    """

    number: int
    elements: tuple[int, ...]
    born: int = 0
    cluster: str = ""
    token: str = ""
    at: float = 0.0
    given_up: bool = False
    before: tuple[ElementStatus, ...] = ()
    first: int = 0

    @property
    def is_unknown(self) -> bool:
        """Whether SLURM may have accepted it."""
        return self.number == 0 and not self.given_up


@dataclass(frozen=True)
class Record:
    """A job as recorded on disk.

    Attributes:
        settings: settings of each element of a sweep.
        outs: folder of each element's metrics.
        submitted: UTC, ISO 8601.
        card: GPU of the requested site, even if this machine runs the job.
        over: the statuses, once all elements have ended.
        ranks_per_node: ranks of one element on each node.
    """

    digest: str
    name: str
    site: str
    scheduler: Scheduler
    gpus: int
    settings: tuple[dict[str, Any], ...]
    outs: tuple[str, ...]
    submitted: str
    card: str | None = None
    turns: tuple[Turn, ...] = ()
    over: tuple[ElementStatus, ...] | None = None
    ranks_per_node: int = 1

    @property
    def queue_name(self) -> str:
        """The job's name in the queue, which is unique."""
        return f"{self.name}-{self.digest[:SHORT]}"

    @property
    def numbers(self) -> str:
        """The numbers of its submissions, for a table; ``?`` for one that SLURM has not told."""
        return ", ".join(str(turn.number or "?") for turn in self.turns if not turn.given_up)


def jobs_dir() -> Path:
    """Return the folder of all jobs of this user; on a cluster, compute nodes must see it (``$DLO_HOME``)."""
    folder = state_dir() / "jobs"
    folder.mkdir(exist_ok=True)
    return folder


def folders() -> list[Path]:
    """Return the folders of all submitted jobs, the newest last, without those in :func:`damaged`."""
    found = [(record.submitted, folder) for folder, record in _all().items() if record is not None]
    return [folder for _, folder in sorted(found)]


def damaged() -> list[Path]:
    """Return the folders whose record cannot be read."""
    return sorted(folder for folder, record in _all().items() if record is None)


def _all() -> dict[Path, Record | None]:
    found: dict[Path, Record | None] = {}
    for file in jobs_dir().glob(f"*/{RECORD}"):
        try:
            found[file.parent] = read(file.parent)
        except UserError:
            found[file.parent] = None
    return found


def find(name: str) -> Path:
    """Return the folder of a job by the start of its digest, its number at SLURM, or its unique name.

    Raises:
        UserError: no job or several jobs match.
    """
    known = {folder: read(folder) for folder in folders()}
    for matches in (
        lambda record: record.digest.startswith(name.lower()) and len(name) >= 4,
        lambda record: (
            name in {str(turn.number) for turn in record.turns if record.scheduler is Scheduler.SLURM}
        ),
        lambda record: name in (record.name, record.queue_name),
    ):
        found = [folder for folder, record in known.items() if matches(record)]
        if len(found) == 1:
            return found[0]
        if found:
            choices = ", ".join(known[folder].digest[:SHORT] for folder in found)
            raise UserError(
                tr('several jobs are called "{name}": use one of {choices}', name=name, choices=choices)
            )
    raise unknown_name("job", name, {record.digest[:SHORT] for record in known.values()})


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, so that no other process submits from it; wait for it if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / "lock"):
        yield


def exists(folder: Path) -> bool:
    """Whether ``folder`` holds a job."""
    return (folder / RECORD).exists()


def read(folder: Path) -> Record:
    """Return the record of a folder.

    Raises:
        UserError: the record is missing or damaged.
    """
    try:
        values = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        values["scheduler"] = Scheduler(values["scheduler"])
        values["turns"] = tuple(map(_turn, values["turns"]))
        over = values["over"]
        values["over"] = None if over is None else tuple(map(_status, over))
        values["settings"], values["outs"] = tuple(values["settings"]), tuple(values["outs"])
        return Record(**_known(Record, values))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        text = (
            "{file} is damaged: the job may still be at SLURM, under the name that ends with {digest}; "
            "remove the folder {folder} when it has ended"
        )
        said = tr(text, file=folder / RECORD, digest=folder.name[:SHORT], folder=folder)
        raise UserError(said) from error


def _known(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that this version of the library knows; a newer one may have written more."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def _turn(values: dict[str, Any]) -> Turn:
    lists = {"elements": tuple(values["elements"]), "before": tuple(map(_status, values.get("before", ())))}
    return Turn(**_known(Turn, values | lists))


def _status(values: dict[str, Any]) -> ElementStatus:
    return ElementStatus(**_known(ElementStatus, values | {"state": State(values["state"])}))


def write(folder: Path, record: Record) -> None:
    """Write the record of a folder."""
    write_text(
        folder / RECORD, json.dumps(asdict(record), indent=1, default=lambda value: value.value) + "\n"
    )


def add_turn(folder: Path, turn: Turn) -> Record:
    """Add a submission to the record, so that its elements count as not ended; return the new record."""
    record = read(folder)
    record = replace(record, turns=(*record.turns, turn), over=None)
    write(folder, record)
    return record


def replace_turn(folder: Path, turn: Turn) -> Record:
    """Write what has become known about the submission with this token; return the new record."""
    record = read(folder)
    turns = tuple(turn if known.token == turn.token else known for known in record.turns)
    record = replace(record, turns=turns)
    write(folder, record)
    return record


def forget(folder: Path) -> None:
    """Remove a job's folder."""
    shutil.rmtree(folder)


def exit_code(folder: Path, element: int) -> int | None:
    """Return the exit status of an element's script.

    None if it has not ended, or was killed before it recorded it.
    """
    file = folder / "ends" / str(element)
    try:
        return int(os.readlink(file) if file.is_symlink() else file.read_text())  # a file: an older script
    except (OSError, ValueError):
        return None


def progress_of(folder: Path, element: int) -> RunProgress | None:
    """Return the progress that an element has recorded; None if there is none."""
    return progress.read(folder / PROGRESS / str(element))


def clear(folder: Path, elements: tuple[int, ...]) -> None:
    """Remove the marks of elements that will run again."""
    for kind in ("ends", "begun", "cancelled", PROGRESS):
        for element in elements:
            (folder / kind / str(element)).unlink(missing_ok=True)


def mark(folder: Path, kind: str, element: int) -> None:
    """Mark an element; ``kind`` is ``begun`` or ``cancelled``."""
    (folder / kind).mkdir(exist_ok=True)
    (folder / kind / str(element)).touch()


def marked(folder: Path, kind: str, element: int) -> bool:
    """Whether an element has this mark."""
    return os.path.exists(folder / kind / str(element))
