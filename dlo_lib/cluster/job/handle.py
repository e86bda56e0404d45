"""The handle of a submitted job. It holds only the job's folder, so any process can recreate it.

After a kernel restart or a log-out the same call, or ``job("name")``, returns the same job.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import columns, tr
from dlo_lib.cluster.code import function_job
from dlo_lib.cluster.run import causes, changes, records, submissions, turns, waiting
from dlo_lib.cluster.run.pending import explanations
from dlo_lib.cluster.run.rank_output import RankLabels, appearing, first_error, output, pieces
from dlo_lib.cluster.run.records import Record
from dlo_lib.cluster.run.waiting import JobFailed
from dlo_lib.cluster.site import cost
from dlo_lib.cluster.site.cost import JobUsage, hours_of
from dlo_lib.cluster.site.description import Scheduler
from dlo_lib.cluster.slurm import commands
from dlo_lib.cluster.slurm.states import ElementStatus, State, summary
from dlo_lib.cluster.view.views import settings_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dlo_lib.train.metrics import Metrics

_log = logging.getLogger(__name__)


class Job:
    """A submitted job with one element, or one for each setting of its sweep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def record(self) -> Record:
        """What was submitted, read from disk."""
        return records.read(self.folder)

    @property
    def elements(self) -> int:
        """The number of elements."""
        return len(self.record.settings)

    @property
    def script(self) -> str:
        """The submitted job script."""
        return (self.folder / records.SCRIPT).read_text(encoding="utf-8")

    def status(self) -> list[ElementStatus]:
        """Return the current status of each element; once all have ended, SLURM is not asked again.

        While SLURM does not answer, or may have accepted a submission, an element is UNKNOWN with the reason.
        """
        record, statuses = self.look()
        over = all(status.state.over and status.is_final for status in statuses)
        try:
            known = records.read(self.folder)
            if (over and known.over is None) or known.turns != record.turns:
                self._record(record, tuple(statuses) if over else None)
        except (UserError, OSError) as error:
            # A full or read-only disk changes no state: the next look asks again.
            _log.warning(tr("{job}: its state is not recorded: {why}", job=record.queue_name, why=error))
        return statuses

    def _record(self, found: Record, over: tuple[ElementStatus, ...] | None) -> None:
        """Write what a look has found, unless another process has submitted the job again."""
        with records.locked(self.folder):
            known = records.read(self.folder)
            if [turn.token for turn in known.turns] == [turn.token for turn in found.turns]:
                records.write(self.folder, replace(known, turns=found.turns, over=over))

    def look(self) -> tuple[Record, list[ElementStatus]]:
        """Return the record and the statuses without writing anything."""
        record = submissions.settled(self.folder, self.record)
        return record, turns.current(self.folder, record)

    @property
    def state(self) -> str:
        """The states in a few words: ``running``, or ``2 pending, 1 running`` for a sweep."""
        return summary(self.status())

    @property
    def done(self) -> bool:
        """Whether every element has ended, in any state."""
        return all(status.state.over for status in self.status())

    def wait(self, timeout: float | None = None, poll: float | None = None) -> Job:
        """Wait until all elements have completed. An interrupt ends the wait, not the job.

        ``await job`` waits without blocking the kernel.

        Args:
            timeout: seconds; None waits forever.
            poll: seconds between two queries; None: an interval that does not load SLURM's controller.

        Raises:
            JobFailed: an element ended in another state, or ``timeout`` passed.
        """
        return self._completed(waiting.wait_until(self._ended, self.pace(poll), timeout, self.name))

    def __await__(self) -> Generator[Any, None, Job]:
        return self._over().__await__()

    async def _over(self) -> Job:
        return self._completed(await waiting.wait_until_async(self._ended, self.pace))

    def _ended(self) -> list[ElementStatus] | None:
        """Return the statuses if all elements have ended, else None."""
        statuses = self.status()
        return statuses if all(status.state.over for status in statuses) else None

    def pace(self, poll: float | None = None) -> float:
        """Return the seconds between two queries: ``poll``, ``$DLO_POLL_S``, or the scheduler's default."""
        return waiting.seconds_between(self.record.scheduler, poll)

    def _completed(self, statuses: list[ElementStatus]) -> Job:
        failed = [status for status in statuses if status.state is not State.COMPLETED]
        if failed:
            raise self._failure(failed)
        return self

    @property
    def _has_several_ranks(self) -> bool:
        script = self.script
        return "--label" in script or "--tee=" in script  # which name the ranks of the lines

    def _failure(self, failed: list[ElementStatus]) -> JobFailed:
        first = failed[0]
        cause = causes.account(self.folder, first)
        if not cause and self._has_several_ranks:
            cause = first_error(self._log(first.element))
        tail = "" if cause else self.logs(first.element, waiting.TAIL_LINES)
        return waiting.failure(self.name, failed, self.elements, cause, tail)

    @property
    def name(self) -> str:
        """The job's name in the queue."""
        return self.record.queue_name

    def cancel(self, element: int | None = None) -> list[int]:
        """Stop elements that run and remove those that wait; elements that have ended do not change.

        Args:
            element: cancel only this one.

        Returns:
            The elements that are cancelled now and were not before.

        Raises:
            NoAnswer: SLURM does not confirm it: the elements may still run.
            UserError: there is no such element, or the job runs on another cluster, which shares the folder
                of jobs with this one.
        """
        if element is not None:
            self._check_element(element)
        statuses = self.status()
        left = {status.element for status in statuses if not status.state.over}
        chosen = left if element is None else left & {element}
        return changes.cancel(self.folder, self.record, sorted(chosen))

    def requeue(self, element: int) -> None:
        """Put an element back into SLURM's queue, in any state; its number does not change.

        Raises:
            NoAnswer: SLURM may have done it.
            UserError: SLURM refuses or no longer knows the element, the job runs on another cluster, or this
                machine has no queue.
        """
        if self.record.scheduler is Scheduler.LOCAL:
            raise UserError(
                tr("there is no queue on this machine: resubmit() runs elements that did not complete")
            )
        changes.requeue(self.folder, self.look()[0], element)

    def resubmit(self, time: str | timedelta | None = None, memory: str = "") -> Job:
        """Submit elements again that ended without completing. Training resumes from its newest checkpoint.

        Args:
            time: limit of this submission, for elements that reached theirs; None: that of the first one.
            memory: of a node, such as ``"64G"``, for elements that ran out of it; "": that of the first one.

        Raises:
            NoAnswer: SLURM does not answer; nothing was submitted.
            UserError: all elements have completed, none has ended yet, a limit is not valid, or SLURM refuses
                it.
        """
        statuses = self.status()
        changes.resubmit(self.folder, self.record, statuses, time, memory)
        return self

    def forget(self) -> None:
        """Remove the job's record and its folder; the same call submits it again.

        Raises:
            UserError: the job has not ended.
        """
        if not self.done:
            raise UserError(tr("{job} is not over: cancel() it first", job=self.name))
        records.forget(self.folder)

    def logs(self, element: int = 0, lines: int | None = None, rank: int | None = None) -> str:
        """Return the output of an element so far, or its last ``lines`` lines.

        Args:
            rank: only the output of this rank. With several ranks each line of the whole output begins with
                the number of its rank.
        """
        return output(self._log(element), lines, None if rank is None else self._labels().line_of(rank))

    def pieces(self, element: int = 0) -> Iterator[str]:
        """Yield the output of an element so far in pieces, so that a large log does not fill the memory."""
        return pieces(self._log(element))

    def _labels(self) -> RankLabels:
        script = self.script
        per_launcher = self.record.ranks_per_node if "--tee=" in script else 0
        return RankLabels(per_launcher, tasks="--label" in script)

    def follow(self, element: int = 0) -> Iterator[str]:
        """Yield the output of an element in pieces as it appears, until the element ends."""
        return appearing(self._log(element), lambda: self.status()[element].state.over, self.pace)

    def _log(self, element: int) -> Path:
        self._check_element(element)
        return self.folder / "logs" / f"{element}.out"

    def _check_element(self, element: int) -> None:
        if not 0 <= element < self.elements:
            raise UserError(
                tr(
                    "{job} has no element {element}: use 0 to {last}",
                    job=self.name,
                    element=element,
                    last=self.elements - 1,
                )
            )

    def out(self, element: int = 0) -> Path:
        """Return the folder of an element's files: ``$DLO_OUT`` of its process, ``--out`` of training."""
        return Path(self.record.outs[element])

    def metrics(self, element: int = 0) -> list[Metrics]:
        """Return the metrics of an element so far, in order of step.

        Training writes them; other programs can use ``dlo_lib.train.metrics``.
        """
        from dlo_lib.train.metrics import read_metrics

        return read_metrics(self.out(element))

    def result(self, element: int = 0) -> Any:
        """Return the result of the function on rank 0, without waiting.

        Raises:
            JobFailed: the element has failed; the message has the error of the rank that failed first.
            UserError: the function has not returned, or the job is not a function.
        """
        try:
            return function_job.result(self.folder, element)
        except UserError:
            status = self.status()[element]
            if status.state.over and causes.account(self.folder, status):
                raise self._failure([status]) from None
            raise

    def results(self) -> list[Any]:
        """Return the result of each element's function, in the order of the sweep."""
        return [self.result(element) for element in range(self.elements)]

    def usage(self) -> JobUsage | None:
        """Return the hours and the energy that the job has used so far; None before it has begun.

        Without accounting, it is the run time of the last turn of each element, without energy. None also if
        the accounting does not answer.
        """
        record = self.record
        of_slurm = record.scheduler is Scheduler.SLURM
        try:
            here = [turn.number for turn in record.turns if turn.number and not turns.elsewhere(turn)]
            mark = submissions.mark_of(self.folder, record)
            rows = commands.used(here, mark) if of_slurm and here else []
        except commands.NoAnswer:
            return None
        if rows:
            return cost.usage(rows, record.gpus)
        hours = sum(hours_of(one.elapsed) for one in self.status() if one.state is not State.PENDING)
        return JobUsage(hours, record.gpus) if hours else None

    def dashboard(self) -> Figure:
        """Draw loss, throughput, the parts of a step's time, and peak memory, from the metrics so far."""
        from dlo_lib.cluster.view.dashboard import plot_dashboard

        return plot_dashboard(self)

    def watch(self) -> None:
        """Show the job in the notebook and update it in the background until it ends."""
        from dlo_lib.cluster.view.live import watch

        watch(self)

    def _ipython_display_(self) -> None:
        self.watch()

    def __repr__(self) -> str:
        record = self.record
        rows = [("element", "state", "reason", "start", "elapsed", "settings")]
        statuses = self.status()
        rows += [
            (
                str(one.element),
                one.text,
                one.reason,
                one.start,
                one.elapsed,
                settings_text(record.settings[one.element]),
            )
            for one in statuses
        ]
        head = tr(
            "{name} on {site}, {gpus}, number {numbers}",
            name=self.name,
            site=record.site,
            gpus=cost.in_words(record.gpus),
            numbers=record.numbers,
        )
        return "\n".join([head, columns(rows), *explanations(statuses)])


def jobs() -> list[Job]:
    """Return all jobs of this user, the newest last."""
    return [Job(folder) for folder in records.folders()]


def job(name: str) -> Job:
    """Return a job by the digits at the end of its name, its number at SLURM, or its name.

    Raises:
        UserError: no job or several jobs match.
    """
    return Job(records.find(name))
