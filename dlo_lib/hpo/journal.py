"""The journal of an Optuna study: the one file that stores a search.

Optuna's own lock is a file that its owner must remove: a killed process leaves it behind, and other processes
then wait half a minute. The journal uses ``flock`` where the file system has it; the kernel releases this
lock when its process ends. One line is one record. A process that is killed while it writes leaves an
incomplete line at the end, which is removed before the next record is written. Two attributes describe a
trial: its place, which never changes, and its claim, which names the worker and the resource to train to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import BaseFileLock
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from dlo_lib.base.locks import file_lock
from dlo_lib.hpo.table import Begin, TrialRow

PLACE, CLAIM = "place", "claim"


class Journal:
    """The journal at ``path`` and the files beside it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    @cached_property
    def _lock(self) -> BaseFileLock:
        return file_lock(self.beside("lock"))

    def beside(self, what: str) -> Path:
        """Return the path of a file or folder that belongs to this journal."""
        return self.path.with_name(f"{self.path.name}.{what}")

    def storage(self) -> JournalStorage:
        """Open the journal as an Optuna storage; create it if it does not exist."""
        return JournalStorage(JournalFileBackend(str(self.path), lock_obj=self._lock))  # type: ignore[arg-type]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of the journal, and first remove an incomplete record at its end."""
        with self._lock:
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
    """Return the constant attributes of the trial that ``decision`` starts."""
    return {"until": decision.until, "group": decision.group, "parent": decision.parent}


def claim_of(worker: str, resource: int, attempt: int = 1) -> dict[str, Any]:
    """Return the claim on a trial: the worker, the resource to train to, and the
    number of attempts so far."""
    return {"worker": worker, "resource": resource, "attempt": attempt}


def row_of(trial: FrozenTrial) -> TrialRow:
    """Return the row of ``trial`` in the table."""
    place, claim = trial.user_attrs[PLACE], trial.user_attrs[CLAIM]
    open_goal = claim["resource"] not in trial.intermediate_values and not trial.state.is_finished()
    return TrialRow(
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
    """Return the trial as the sampler sees it.

    A trial that waits for a promotion counts with its last reported loss.
    """
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
    """Remove a checkpoint, which is a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
