"""`dlo grade --slurm`: the judges of a class are an array of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlo_lib import cluster
from dlo_lib.cluster import slurm
from dlo_lib.errors import UserError
from dlo_lib.grading.array import ArrayOfJudges, Elements, End
from dlo_lib.grading.course import LabInfo
from dlo_lib.text import tr


@dataclass(frozen=True)
class Wanted:
    """What each element gets, and where."""

    elements: int
    cores: int = 2
    time: str = "2:00:00"
    site: str | None = None
    account: str = ""


def array_of_judges(lab: LabInfo, course: Path, wanted: Wanted, unsafe: bool) -> ArrayOfJudges:
    """Judges on the nodes of a cluster.

    Raises:
        UserError: there is no SLURM here.
    """
    if not slurm.is_available():
        raise UserError(tr("there is no SLURM on this machine: leave --slurm out, and the class is judged here"))

    def start(command: Sequence[str], elements: int) -> Elements:
        job = cluster.submit(
            list(command),
            gpus=0,
            cores=wanted.cores,
            time=wanted.time,
            site=wanted.site,
            account=wanted.account,
            sweep=[{"element": number} for number in range(elements)],
            name=f"dlo-grade-{lab.directory}",
        )
        assert isinstance(job, cluster.Job)
        return SlurmElements(job)

    return ArrayOfJudges(lab, course, start, wanted.elements, unsafe=unsafe)


_ENDS = {cluster.State.COMPLETED: End.WELL, cluster.State.CANCELLED: End.CANCELLED}


class SlurmElements:
    """The elements of a submitted array."""

    def __init__(self, job: cluster.Job) -> None:
        self.job = job

    def ended(self) -> dict[int, End]:
        """How each ended that is over; nobody is known to be while SLURM does not answer."""
        try:
            statuses = self.job.status()
        except slurm.NoAnswer:
            return {}
        return {status.element: _ENDS.get(status.state, End.LOST) for status in statuses if status.state.over}

    def pace(self) -> float:
        """One that the cluster's controller does not feel, or ``$DLO_POLL_S``."""
        return self.job.pace()

    def again(self, element: int) -> None:
        """Back into the queue."""
        self.job.requeue(element)

    def last_words(self, element: int) -> str:
        """The last line of its log."""
        return self.job.logs(element, 1).strip() or tr("it has printed nothing: dlo jobs show {job}", job=self.job.name)

    def cancel(self) -> None:
        """End what runs, take back what waits."""
        self.job.cancel()
