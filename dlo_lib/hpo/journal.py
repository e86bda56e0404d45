"""The file of a search: the journal of an Optuna study, locked so that it is free and whole however a process ends.

Optuna's own locks are files that somebody removes: a process that is killed leaves them, and others wait half a minute. Here it is
``dlo_lib.hpo.lock``. A record is a line; half a line at the end, of a process that was killed while it wrote, is cut off before the next
one is written. What a trial is to the search is in two attributes: its place, which never changes, and its claim: who trains it how far.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from dlo_lib.hpo.lock import FileLock
from dlo_lib.hpo.table import Begin, Row

PLACE, CLAIM = "place", "claim"


class Journal:
    """The file at ``path``, and what lies beside it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._lock = FileLock(self.beside("lock"))

    def beside(self, what: str) -> Path:
        """The path of that name that belongs to this file."""
        return self.path.with_name(f"{self.path.name}.{what}")

    def storage(self) -> JournalStorage:
        """The file as Optuna's storage; makes it when there is none."""
        return JournalStorage(JournalFileBackend(str(self.path), lock_obj=self._lock))  # type: ignore[arg-type]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Alone with the file, which then ends with a whole record."""
        with self._lock.held():
            if self.path.exists():
                _cut_torn_end(self.path)
            yield


def _cut_torn_end(path: Path) -> None:
    with open(path, "rb+") as file:
        size = end = file.seek(0, 2)
        while end:
            file.seek(end - 1)
            if file.read(1) == b"\n":
                break
            end -= 1
        if end < size:
            file.truncate(end)


def place_of(decision: Begin) -> dict[str, Any]:
    """What never changes of the trial that ``decision`` begins."""
    return {"until": decision.until, "group": decision.group, "parent": decision.parent}


def claim_of(worker: str, resource: int, attempt: int = 1) -> dict[str, Any]:
    """Who trains, how far, and how often somebody has begun to."""
    return {"worker": worker, "resource": resource, "attempt": attempt}


def row_of(trial: FrozenTrial) -> Row:
    """The trial in the table."""
    place, claim = trial.user_attrs[PLACE], trial.user_attrs[CLAIM]
    open_goal = claim["resource"] not in trial.intermediate_values and not trial.state.is_finished()
    return Row(
        number=trial.number,
        params=trial.params,
        until=place["until"],
        reports=dict(sorted(trial.intermediate_values.items())),
        goal=claim["resource"] if open_goal else None,
        group=place["group"],
        failed=trial.state is TrialState.FAIL,
        parent=place["parent"],
    )


def for_sampler(trial: FrozenTrial) -> FrozenTrial:
    """The trial as a sampler may know it: one that waits for its promotion counts by what it has reported."""
    row = row_of(trial)
    state = TrialState.PRUNED if trial.state is TrialState.RUNNING and row.goal is None else trial.state
    return create_trial(
        state=state,
        value=trial.value if state is TrialState.COMPLETE else None,
        params=trial.params,
        distributions=trial.distributions,
        intermediate_values=trial.intermediate_values,
    )


def remove(path: Path) -> None:
    """Remove a checkpoint, file or folder, when it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
