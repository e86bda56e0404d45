"""The handle of a submitted job. It holds nothing but the job's folder, so it can be had again from any process: after a kernel restart
or a log-out the same call, or ``job("name")``, gives the same job.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlo_lib.cluster import local, records, shipped, slurm, turns
from dlo_lib.cluster.records import Record
from dlo_lib.cluster.site import Scheduler
from dlo_lib.cluster.states import ElementStatus, State, summary
from dlo_lib.errors import UserError
from dlo_lib.text import columns, tr

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dlo_lib.train.metrics import Metrics

SLURM_POLL_S, LOCAL_POLL_S = 5.0, 0.5
_TAIL_LINES = 20


class JobFailed(Exception):
    """A job did not complete: which elements, how they ended, and the end of what the first of them printed."""


class Job:
    """A submitted job: one element, or as many as its sweep has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def record(self) -> Record:
        return records.read(self.folder)

    @property
    def elements(self) -> int:
        return len(self.record.settings)

    @property
    def script(self) -> str:
        """The job script, as it was submitted."""
        return (self.folder / records.SCRIPT).read_text(encoding="utf-8")

    def status(self) -> list[ElementStatus]:
        """How each element is, now; what is over is not asked for again."""
        record, statuses = self.look()
        if record.over is None and all(status.state.over for status in statuses):
            with records.holding(self.folder):
                if records.read(self.folder).turns == record.turns:  # else it has been submitted again meanwhile
                    records.write(self.folder, replace(record, over=tuple(statuses)))
        return statuses

    def look(self) -> tuple[Record, list[ElementStatus]]:
        """The record and the statuses, and nothing is noted."""
        record = self.record
        if record.over is not None:
            return record, list(record.over)
        found: dict[int, ElementStatus] = {}
        for turn in record.turns:  # a later one has what it took over from those before
            found |= turns.statuses(self.folder, record, turn)
        return record, [found[element] for element in sorted(found)]

    @property
    def state(self) -> str:
        """In a few words: ``running``, or ``2 pending, 1 running`` for a sweep."""
        return summary(self.status())

    @property
    def done(self) -> bool:
        """Whether every element is over, however it ended."""
        return all(status.state.over for status in self.status())

    def wait(self, timeout: float | None = None, poll: float | None = None) -> Job:
        """Wait until all elements have completed; an interrupt ends the wait, not the job. ``await job`` waits without holding the kernel.

        Args:
            timeout: seconds; None waits for ever.
            poll: seconds between two questions; None: a pace that the cluster's controller does not feel.

        Raises:
            JobFailed: an element ended otherwise, or ``timeout`` passed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_over():
            if deadline is not None and time.monotonic() > deadline:
                raise JobFailed(tr("{job} is not over after {seconds:g} s", job=self.name, seconds=timeout))
            time.sleep(self.pace(poll))
        return self._completed()

    def __await__(self) -> Generator[Any, None, Job]:
        return self._over().__await__()

    async def _over(self) -> Job:
        while not await asyncio.to_thread(self._is_over):
            await asyncio.sleep(self.pace())
        return self._completed()

    def _is_over(self) -> bool:
        """Whether it is known to be; somebody who waits does not mind that SLURM is silent for a while."""
        try:
            return self.done
        except slurm.NoAnswer:
            return False

    def pace(self, poll: float | None = None) -> float:
        """Seconds between two questions: ``poll``, ``$DLO_POLL_S``, or what a controller does not feel."""
        chosen = os.environ.get("DLO_POLL_S")
        default = LOCAL_POLL_S if self.record.scheduler is Scheduler.LOCAL else SLURM_POLL_S
        return poll if poll is not None else float(chosen) if chosen else default

    def _completed(self) -> Job:
        failed = [status for status in self.status() if status.state is not State.COMPLETED]
        if failed:
            first = failed[0]
            code = tr(" with status {code}", code=first.exit_code) if first.exit_code is not None else ""
            reason = f" ({first.reason})" if first.reason else ""
            raise JobFailed(
                tr(
                    "{job}: element {element} {state}{code}{reason}; {count} of {all} did not complete. resubmit() runs them again. "
                    "The end of what it printed:\n{tail}",
                    job=self.name,
                    element=first.element,
                    state=first.state.value,
                    code=code,
                    reason=reason,
                    count=len(failed),
                    all=self.elements,
                    tail=self.logs(first.element, _TAIL_LINES),
                )
            )
        return self

    @property
    def name(self) -> str:
        return self.record.queue_name

    def cancel(self) -> None:
        """End what runs and take back what waits; what is over stays as it is."""
        record = self.record
        left = {status.element for status in self.status() if not status.state.over}
        for turn in record.turns:
            mine = tuple(element for element in turn.elements if element in left)
            if not mine:
                continue
            if record.scheduler is Scheduler.LOCAL:
                local.cancel(self.folder, turn, mine)
            else:
                slurm.cancel(turn.number, mine if len(record.settings) > 1 else None)

    def requeue(self, element: int) -> None:
        """Put an element back into SLURM's queue, whether it runs, is over or was lost; its number stays.

        Raises:
            UserError: SLURM refuses, or there is none.
        """
        record = self.record
        if record.scheduler is Scheduler.LOCAL:
            raise UserError(tr("there is no queue on this machine: resubmit() runs again what did not complete"))
        turn = next(turn for turn in reversed(record.turns) if element in turn.elements)
        records.clear(self.folder, (element,))
        slurm.requeue(turn.number, element if len(record.settings) > 1 else None)
        with records.holding(self.folder):  # after it, or a look in between would note the old end again
            records.write(self.folder, replace(records.read(self.folder), over=None))

    def resubmit(self) -> Job:
        """Submit again what is over and did not complete. Training goes on from its newest checkpoint.

        Raises:
            UserError: everything has completed, or nothing is over yet.
        """
        statuses = self.status()
        again = tuple(status.element for status in statuses if status.state.over and status.state is not State.COMPLETED)
        if not again:
            what = tr("has completed") if all(status.state.over for status in statuses) else tr("is not over: cancel() it first")
            raise UserError(tr("{job} {what}; nothing is submitted again", job=self.name, what=what))
        before = self.record.turns
        with records.holding(self.folder):
            if self.record.turns == before:  # else another process has just done it
                turns.start(self.folder, again)
        return self

    def forget(self) -> None:
        """Remove the job's record and all that lies in its folder; the same call will submit it anew.

        Raises:
            UserError: it is not over.
        """
        if not self.done:
            raise UserError(tr("{job} is not over: cancel() it first", job=self.name))
        records.forget(self.folder)

    def logs(self, element: int = 0, lines: int | None = None) -> str:
        """What an element has printed so far, or the last ``lines`` of it."""
        try:
            text = self._log(element).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return text if lines is None else "".join(text.splitlines(keepends=True)[-lines:])

    def follow(self, element: int = 0) -> Iterator[str]:
        """What an element prints, piece by piece as it comes, until it is over."""
        read = 0
        over = False
        while True:
            file = self._log(element)
            if file.exists() and file.stat().st_size > read:
                with file.open("rb") as log:
                    log.seek(read)
                    data = log.read()
                read += len(data)
                yield data.decode(errors="replace")
            elif over:
                return
            else:
                over = self.status()[element].state.over
                if not over:
                    time.sleep(min(1.0, self.pace()))

    def _log(self, element: int) -> Path:
        if not 0 <= element < self.elements:
            raise UserError(tr("{job} has no element {element}: use 0 to {last}", job=self.name, element=element, last=self.elements - 1))
        return self.folder / "logs" / f"{element}.out"

    def out(self, element: int = 0) -> Path:
        """The folder for what an element makes: ``$DLO_OUT`` of its process, and ``--out`` of training."""
        return Path(self.record.outs[element])

    def metrics(self, element: int = 0) -> list[Metrics]:
        """The lines of metrics of an element so far, in order of step. Training writes them; others may (``dlo_lib.train.metrics``)."""
        from dlo_lib.train.metrics import read_metrics

        return read_metrics(self.out(element))

    def result(self, element: int = 0) -> Any:
        """What the function returned, on rank 0; waits for nothing.

        Raises:
            UserError: it has not returned, or the job is no function.
        """
        return shipped.result(self.folder, element)

    def results(self) -> list[Any]:
        """What each element's function returned, in the order of the sweep."""
        return [self.result(element) for element in range(self.elements)]

    def dashboard(self) -> Figure:
        """Loss, throughput, where the time of a step goes, and memory against the card's limit, from the metrics so far."""
        from dlo_lib.cluster.dashboard import plot_dashboard

        return plot_dashboard(self)

    def watch(self) -> None:
        """Show how the job is, in the notebook, kept up to date beside the kernel until it is over."""
        from dlo_lib.cluster.live import watch

        watch(self)

    def _ipython_display_(self) -> None:
        self.watch()

    def __repr__(self) -> str:
        record = self.record
        rows = [("element", "state", "reason", "start", "elapsed", "settings")]
        rows += [
            (str(one.element), one.state.value, one.reason, one.start, one.elapsed, settings_text(record.settings[one.element]))
            for one in self.status()
        ]
        numbers = ", ".join(str(turn.number) for turn in record.turns)
        head = tr("{name} on {site}, {gpus} GPUs, number {numbers}", name=self.name, site=record.site, gpus=record.gpus, numbers=numbers)
        return f"{head}\n{columns(rows)}"


def settings_text(settings: dict[str, Any]) -> str:
    """``lr=0.1 seed=0``."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


def jobs() -> list[Job]:
    """All jobs submitted by this user, the newest last."""
    return [Job(folder) for folder in records.folders()]


def job(name: str) -> Job:
    """A job submitted before, by the digits at the end of its name, its number at SLURM, or its name.

    Raises:
        UserError: none is called so, or several.
    """
    return Job(records.find(name))
