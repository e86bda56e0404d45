"""`dlo grade --slurm`: judge a class on a cluster, in an array of jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.cluster.job import login_node
from dlo_lib.cluster.run import changes, records, turns
from dlo_lib.cluster.site.limits import time_of_site
from dlo_lib.cluster.slurm import commands
from dlo_lib.grading.judge.array import ArrayOfJudges, ElementEnd, Elements
from dlo_lib.grading.lab.course import LabInfo

TIME = timedelta(hours=2)


@dataclass(frozen=True)
class Wanted:
    """The number of elements and the resources of each element.

    ``time`` is None for two hours, or for the longest time of the site if that is less.
    """

    elements: int
    cores: int = 2
    time: str | None = None
    site: str | None = None
    account: str = ""


def array_of_judges(lab: LabInfo, course: Path, wanted: Wanted, unsafe: bool) -> ArrayOfJudges:
    """Create the judges on the nodes of a cluster.

    Raises:
        UserError: this machine has no SLURM.
    """
    if not commands.is_available():
        raise UserError(tr("there is no SLURM on this machine: omit --slurm to judge the class here"))

    def start(command: Sequence[str], elements: int) -> Elements:
        job = cluster.submit(
            list(command),
            gpus=0,
            cores=wanted.cores,
            time=wanted.time or _longest(login_node.wanted_site(wanted.site)),
            site=wanted.site,
            account=wanted.account,
            options={"requeue": True},  # after a preemption or a failed node, also where JobRequeue=0
            sweep=[{"element": number} for number in range(elements)],
            name=f"dlo-grade-{lab.directory}",
        )
        assert isinstance(job, cluster.Job)
        return SlurmElements(job)

    return ArrayOfJudges(lab, course, start, wanted.elements, unsafe=unsafe)


_ENDS = {cluster.State.COMPLETED: ElementEnd.FINISHED, cluster.State.CANCELLED: ElementEnd.CANCELLED}


def _longest(where: cluster.Site) -> timedelta:
    """Return two hours, or what the site's first QOS and its partition allow if that is less."""
    time = time_of_site(where, TIME)
    return min(time, commands.longest_time(where.partition) or time)


class SlurmElements:
    """The elements of a submitted array."""

    def __init__(self, job: cluster.Job) -> None:
        self.job = job

    def ended(self) -> dict[int, ElementEnd]:
        """Return how each ended element has ended; empty if SLURM does not answer."""
        try:
            statuses = self.job.status()
        except commands.NoAnswer:
            return {}
        over = [status for status in statuses if status.state.over]
        return {status.element: _ENDS.get(status.state, ElementEnd.LOST) for status in over}

    def pace(self) -> float:
        """Return the seconds between two polls, which keep the load of the controller small; ``$DLO_POLL_S``
        sets them.
        """
        return self.job.pace()

    def requeue(self, element: int) -> None:
        """Requeue an element, or submit it again if SLURM does not requeue it.

        Raises:
            UserError: SLURM refuses both, or does not answer now.
        """
        try:
            self.job.requeue(element)
        except commands.NoAnswer:
            raise
        except UserError:  # the site forbids it (JobRequeue=0), or SLURM no longer knows the element
            with records.locked(self.job.folder):
                turns.start(self.job.folder, (element,))

    def last_line(self, element: int) -> str:
        """Return the last line of the log of an element."""
        return self.job.logs(element, 1).strip() or tr(
            "it has printed nothing: dlo jobs show {job}", job=self.job.name
        )

    def cancel(self) -> None:
        """Cancel all running and pending elements. They end without a queue of submissions in any case."""
        self._cancel(lambda state: not state.over)

    def cancel_waiting(self) -> None:
        """Cancel the elements that have not begun."""
        self._cancel(lambda state: state in (cluster.State.PENDING, cluster.State.UNKNOWN))

    def _cancel(self, chosen: Callable[[cluster.State], bool]) -> None:
        try:
            left = [status.element for status in self.job.status() if chosen(status.state)]
            changes.cancel(self.job.folder, self.job.record, left)
        except commands.NoAnswer as error:  # the table of the class is worth more
            text = "the array may still be in the queue ({why}): dlo jobs cancel {job}"
            print(tr(text, why=error, job=self.job.name), file=sys.stderr)
