"""Submitted jobs on disk: a folder each, named by what was asked for, so that the same call finds the same job from any process.

    <state folder>/jobs/<digest>/
        record.json         what, where, and the numbers it was given by whoever runs it
        job.sh              the script, as submitted
        call.pkl, call.json a function with its arguments, and what its process needs to find its modules
        logs/, out/         what each element printed, and the folder for what it makes
        ends/, results/     how each element ended, and what its function returned

A folder is held with a lock while something is submitted from it, so that two processes do not submit twice. flock(2).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dlo_lib.cluster.site import Scheduler
from dlo_lib.cluster.states import ElementStatus, State
from dlo_lib.errors import UserError, unknown_name
from dlo_lib.files import state_dir, write_text
from dlo_lib.text import tr

RECORD = "record.json"
SCRIPT = "job.sh"
SHORT = 8  # digits of a digest that a person types


@dataclass(frozen=True)
class Turn:
    """One submission: the job's number at SLURM, or the process that runs it here, and which elements it has.

    born: when that process started, in ticks since the machine did: numbers of processes are given again.
    """

    number: int
    elements: tuple[int, ...]
    born: int = 0


@dataclass(frozen=True)
class Record:
    """What is known of a job. settings: of each element of a sweep. outs: where each element leaves its metrics. submitted: UTC, ISO 8601.
    card: of the site that was asked for, also where this machine runs it. over: the statuses, once all have ended.
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

    @property
    def queue_name(self) -> str:
        """What the queue shows; it tells this job from all others."""
        return f"{self.name}-{self.digest[:SHORT]}"


def jobs_dir() -> Path:
    """The folder of all jobs of this user; on a cluster it must be seen by compute nodes (``$DLO_HOME``)."""
    folder = state_dir() / "jobs"
    folder.mkdir(exist_ok=True)
    return folder


def folders() -> list[Path]:
    """Of all submitted jobs, the newest last."""
    return sorted((file.parent for file in jobs_dir().glob(f"*/{RECORD}")), key=lambda folder: read(folder).submitted)


def find(name: str) -> Path:
    """The folder of a job, by the beginning of its digest, its number at SLURM, or its name when only one has it.

    Raises:
        UserError: none, or several.
    """
    known = {folder: read(folder) for folder in folders()}
    for matches in (
        lambda record: record.digest.startswith(name.lower()) and len(name) >= 4,
        lambda record: name in {str(turn.number) for turn in record.turns if record.scheduler is Scheduler.SLURM},
        lambda record: name in (record.name, record.queue_name),
    ):
        found = [folder for folder, record in known.items() if matches(record)]
        if len(found) == 1:
            return found[0]
        if found:
            choices = ", ".join(known[folder].digest[:SHORT] for folder in found)
            raise UserError(tr('several jobs are called "{name}": use one of {choices}', name=name, choices=choices))
    raise unknown_name("job", name, {record.digest[:SHORT] for record in known.values()})


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[None]:
    """No other process submits from ``folder`` meanwhile; waits for one that does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def exists(folder: Path) -> bool:
    return (folder / RECORD).exists()


def read(folder: Path) -> Record:
    """The record of a folder.

    Raises:
        UserError: it is damaged.
    """
    try:
        values = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        values["scheduler"] = Scheduler(values["scheduler"])
        values["turns"] = tuple(Turn(**(turn | {"elements": tuple(turn["elements"])})) for turn in values["turns"])
        if values["over"] is not None:
            values["over"] = tuple(ElementStatus(**(status | {"state": State(status["state"])})) for status in values["over"])
        values["settings"], values["outs"] = tuple(values["settings"]), tuple(values["outs"])
        return Record(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(tr("{file} is damaged: remove the folder {folder}", file=folder / RECORD, folder=folder)) from error


def write(folder: Path, record: Record) -> None:
    write_text(folder / RECORD, json.dumps(asdict(record), indent=1, default=lambda value: value.value) + "\n")


def add_turn(folder: Path, turn: Turn) -> Record:
    """Note a submission; the job is no longer over."""
    record = read(folder)
    record = replace(record, turns=(*record.turns, turn), over=None)
    write(folder, record)
    return record


def forget(folder: Path) -> None:
    """Remove all that a job left here."""
    shutil.rmtree(folder)


def exit_code(folder: Path, element: int) -> int | None:
    """What an element's script ended with; None when it has not, or was killed before it could say so."""
    try:
        return int((folder / "ends" / str(element)).read_text())
    except (OSError, ValueError):
        return None


def clear(folder: Path, elements: tuple[int, ...]) -> None:
    """Take away how elements ended: they are to run again."""
    for kind in ("ends", "begun", "cancelled"):
        for element in elements:
            (folder / kind / str(element)).unlink(missing_ok=True)


def mark(folder: Path, kind: str, element: int) -> None:
    """Leave a sign: ``begun`` or ``cancelled``."""
    (folder / kind).mkdir(exist_ok=True)
    (folder / kind / str(element)).touch()


def marked(folder: Path, kind: str, element: int) -> bool:
    return os.path.exists(folder / kind / str(element))
