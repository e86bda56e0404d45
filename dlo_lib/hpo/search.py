"""A search that several processes share.

It continues after any of them is killed and loses or repeats no trial.

One file, the journal of an Optuna study, stores the whole state. :meth:`Search.ask` and :meth:`Search.tell`
each write one record: the claim on a trial (with its hyperparameters, if it is new) and the reported loss. A
killed process leaves a trial with a goal and no report, and its lease ends with it (``dlo_lib.hpo.lease``).
The next worker that calls ``ask`` resumes this trial from its last checkpoint, with the same number and the
same hyperparameters.

    search = Search.make("lr.journal", Definition({"lr": FloatDistribution(1e-4, 1, log=True)}, Asha(27, 1,
        9), seed=1))
    search.work(objective)                              # first process
    Search.join("lr.journal").work(objective)           # other processes

Cost: ``ask`` and ``tell`` take a lock and read the new records of the journal, which takes milliseconds. Each
trial keeps its last checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.hpo.definition import Definition, quiet
from dlo_lib.hpo.journal import CLAIM, PLACE, Journal, claim_of, for_sampler, place_of, remove, row_of
from dlo_lib.hpo.lease import Lease, is_alive
from dlo_lib.hpo.population import explore
from dlo_lib.hpo.table import Begin, NoTask, Promote, TrialRow

_DEFINITION = "definition"  # an attribute of the study
_POLL_S = 0.2

ATTEMPTS = 3
"""The number of killed workers after which a trial counts as failed.

The trial itself may exhaust the memory.
"""


@dataclass(frozen=True)
class Task:
    """Train ``trial`` from ``begin`` to ``resource``: load the checkpoint ``resume`` (None: start anew), save
    ``checkpoint``.
    """

    trial: int
    params: Mapping[str, Any]
    begin: int
    resource: int
    resume: Path | None
    checkpoint: Path
    """The path of the new checkpoint, a file or a folder; its parent folder exists."""


Objective = Callable[[Task], float]
"""Runs a task and returns the loss at ``task.resource``; lower is better.

NaN or infinity marks the trial as failed.
"""


class Search:
    """One worker's connection to a search.

    Create it with :meth:`make` or :meth:`join`. Then call :meth:`work`, or :meth:`ask` and :meth:`tell`.
    """

    def __init__(self, journal: Journal, definition: Definition, study: optuna.Study) -> None:
        self.path, self.definition, self.study = journal.path, definition, study
        self._journal, self._workers = journal, journal.beside("workers")
        self._lease = Lease(self._workers)

    @classmethod
    def make(cls, path: str | Path, definition: Definition) -> Search:
        """Open the search at ``path``; create it if it does not exist.

        Raises:
            UserError: the search at ``path`` has another definition.
        """
        journal, text = Journal(path), definition.to_json()
        journal.path.parent.mkdir(parents=True, exist_ok=True)
        with journal.held(), quiet():
            study = optuna.create_study(
                storage=journal.storage(), study_name=journal.path.stem, load_if_exists=True
            )
            if (known := study.user_attrs.get(_DEFINITION)) is None:
                study.set_user_attr(_DEFINITION, text)
            elif known != text:
                raise UserError(
                    tr(
                        "{path} holds another search: join it, or create this one in another file",
                        path=journal.path,
                    )
                )
        return cls(journal, definition, study)

    @classmethod
    def join(cls, path: str | Path) -> Search:
        """Open the existing search at ``path`` with its stored definition.

        Raises:
            UserError: there is no search at ``path``.
        """
        journal = Journal(path)
        if not journal.path.is_file():
            raise UserError(
                tr("there is no search at {path}: create it with Search.make, then join", path=journal.path)
            )
        with journal.held(), quiet():
            storage = journal.storage()
            if journal.path.stem not in [each.study_name for each in storage.get_all_studies()]:
                raise UserError(
                    tr("{path} holds no search called {name}", path=journal.path, name=journal.path.stem)
                )
            study = optuna.load_study(storage=storage, study_name=journal.path.stem)
        return cls(journal, Definition.from_json(study.user_attrs.get(_DEFINITION, "")), study)

    def table(self) -> list[TrialRow]:
        """Return the rows of all trials so far."""
        return [row_of(trial) for trial in self._trials()]

    @property
    def best(self) -> TrialRow:
        """The trial with the lowest loss among those with the largest resource.

        Raises:
            UserError: no trial has reported yet.
        """
        reported = [row for row in self.table() if row.reports]
        if not reported:
            raise UserError(tr("no trial of {path} has reported yet", path=self.path))
        return min(reported, key=lambda row: (-max(row.reports), row.reports[max(row.reports)]))

    def ask(self) -> Task | NoTask:
        """Return the next task of this process: one that a killed worker has left, otherwise the policy's
        decision.
        """
        with self._journal.held():
            trials = self._trials()
            self._settle(trials)
            for trial in trials:
                row = row_of(trial)
                if row.goal is not None and not self._is_claimed(trial):
                    begun = trial.user_attrs[CLAIM]["attempt"]
                    if begun < ATTEMPTS:
                        return self._claim(trial, row.goal, begun + 1)
                    self.study.tell(trial.number, state=TrialState.FAIL)
            decision = self.definition.policy.decide(self.table())
            if isinstance(decision, Begin):
                return self._begin(decision, trials)
            if isinstance(decision, Promote):
                return self._claim(trials[decision.trial], decision.resource)
            if decision is NoTask.DONE:
                self._close(trials)
            return decision

    def tell(self, task: Task, loss: float) -> None:
        """Report the loss of ``task``; NaN or infinity marks the trial as failed.

        Raises:
            UserError: another process has claimed the task, or its loss is already reported.
        """
        with self._journal.held():
            trial = self._trials()[task.trial]
            is_mine = trial.user_attrs[CLAIM]["worker"] == self._lease.id
            if not is_mine or row_of(trial).goal != task.resource:
                raise UserError(
                    tr(
                        "trial {trial} at {at} is not claimed by this process: report a task once",
                        trial=task.trial,
                        at=task.resource,
                    )
                )
            if math.isfinite(loss):
                self.study._storage.set_trial_intermediate_value(trial._trial_id, task.resource, float(loss))
                self._settle([self._trials()[task.trial]])
            else:
                self.study.tell(task.trial, state=TrialState.FAIL)
        for older in self._folder(task.trial).glob("at-*"):
            if int(older.name.removeprefix("at-")) < task.resource:
                remove(older)

    def give_back(self, task: Task) -> None:
        """Release ``task``, so that the next worker that calls :meth:`ask` gets it."""
        with self._journal.held():
            self._set_claim(self._trials()[task.trial], claim_of("", task.resource, attempt=0))

    def work(self, objective: Objective) -> int:
        """Run tasks until the search is complete; return the number of tasks that this process has run.

        An ``ArithmeticError`` in the objective (a loss that overflows) marks the trial as failed. Any other
        exception is an error in the objective or an interrupt: the task is released and the exception is
        raised again."""
        done = 0
        while (task := self.ask()) is not NoTask.DONE:
            if not isinstance(task, Task):
                time.sleep(_POLL_S)
                continue
            try:
                loss = float(objective(task))
            except ArithmeticError:
                loss = math.nan
            except BaseException:
                self.give_back(task)
                raise
            self.tell(task, loss)
            done += 1
        return done

    def leave(self) -> None:
        """End the lease of this process; its unreported tasks go to other workers."""
        self._lease.end()

    def _trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _begin(self, decision: Begin, trials: list[FrozenTrial]) -> Task:
        number = len(trials)
        if decision.params is None:
            params = self.definition.propose([for_sampler(trial) for trial in trials])
        elif decision.explore:
            params = explore(decision.params, self.definition.space, f"{self.definition.seed}/{number}")
        else:
            params = dict(decision.params)
        self.study.add_trial(  # one record, so that a trial is stored with all its attributes or not at all
            create_trial(
                state=TrialState.RUNNING,
                params=params,
                distributions={name: self.definition.space[name] for name in params},
                user_attrs={PLACE: place_of(decision), CLAIM: claim_of(self._lease.id, decision.resource)},
            )
        )
        return self._task(self._trials()[number])

    def _claim(self, trial: FrozenTrial, resource: int, attempt: int = 1) -> Task:
        self._set_claim(trial, claim_of(self._lease.id, resource, attempt))
        return self._task(self._trials()[trial.number])

    def _set_claim(self, trial: FrozenTrial, claim: dict[str, Any]) -> None:
        self.study._storage.set_trial_user_attr(trial._trial_id, CLAIM, claim)

    def _is_claimed(self, trial: FrozenTrial) -> bool:
        worker = trial.user_attrs[CLAIM]["worker"]
        return worker == self._lease.id or (worker != "" and is_alive(self._workers, worker))

    def _task(self, trial: FrozenTrial) -> Task:
        row = row_of(trial)
        assert row.goal is not None
        source, begin = row.number, max(row.reports, default=0)
        if not row.reports and row.parent is not None:
            source, begin = row.parent, max(row_of(self._trials()[row.parent]).reports)
        resume, checkpoint = self._folder(source) / f"at-{begin}", self._folder(row.number) / f"at-{row.goal}"
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        remove(checkpoint)  # a killed worker may have left an incomplete one
        if not resume.exists():
            return Task(row.number, row.params, 0, row.goal, None, checkpoint)
        return Task(row.number, row.params, begin, row.goal, resume, checkpoint)

    def _folder(self, trial: int) -> Path:
        return self._journal.beside("trials") / f"{trial:05d}"

    def _settle(self, trials: list[FrozenTrial]) -> None:
        """Complete the trials that have reported their last loss.

        A worker may be killed between the report and this call.
        """
        for trial in trials:
            until = trial.user_attrs[PLACE]["until"]
            if not trial.state.is_finished() and until in trial.intermediate_values:
                self.study.tell(trial.number, trial.intermediate_values[until])

    def _close(self, trials: list[FrozenTrial]) -> None:
        for trial in trials:
            if (
                not trial.state.is_finished()
                and trial.user_attrs[PLACE]["until"] not in trial.intermediate_values
            ):
                self.study.tell(trial.number, state=TrialState.PRUNED)
