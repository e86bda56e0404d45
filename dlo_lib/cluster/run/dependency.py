"""The job that another one waits for, and what has to become of it: SLURM's ``--dependency``.

``afterok``: all its elements have completed. ``afterany``: it has ended in any state. ``aftercorr``: element
i waits for element i, and both have as many elements. A job whose ``afterok`` can no longer come true is
cancelled by SLURM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.text import tr
from dlo_lib.cluster.run.records import Record
from dlo_lib.cluster.slurm.states import ElementStatus, State

KINDS = ("afterok", "afterany", "aftercorr")


@dataclass(frozen=True)
class Dependency:
    """The folder of the earlier job, and one of ``KINDS``."""

    folder: Path
    kind: str = KINDS[0]

    def allows(self, earlier: Sequence[ElementStatus], element: int) -> bool:
        """Return whether an element may run, now that the earlier job has ended."""
        if self.kind == "afterany":
            return True
        chosen = earlier if self.kind == "afterok" else [earlier[element]]
        return all(status.state is State.COMPLETED for status in chosen)


def check(kind: str, elements: int, earlier: int) -> None:
    """Check the kind of a dependency between jobs with these numbers of elements.

    Raises:
        UserError: there is no such kind, or the jobs have different numbers of elements.
    """
    if kind not in KINDS:
        raise unknown_name("after_kind", kind, KINDS)
    if kind == "aftercorr" and (elements != earlier or elements == 1):
        text = (
            "aftercorr joins the elements of two sweeps of the same size, and these jobs have {elements} and "
            "{earlier}: use afterok"
        )
        raise UserError(tr(text, elements=elements, earlier=earlier))


def words(kind: str, earlier: Record, statuses: Sequence[ElementStatus]) -> list[str]:
    """Return the options of sbatch; none if the earlier job has ended as wanted, because SLURM forgets it."""
    if all(status.state.over for status in statuses) and (
        kind == "afterany" or all(status.state is State.COMPLETED for status in statuses)
    ):
        return []
    if kind == "aftercorr" and any(turn.first for turn in earlier.turns):
        text = (
            "aftercorr joins elements of one array each, and {job} is large, so it is in several: use afterok"
        )
        raise UserError(tr(text, job=earlier.queue_name))
    latest = {element: turn.number for turn in earlier.turns for element in turn.elements}
    numbers = ":".join(map(str, dict.fromkeys(latest.values())))
    return [f"--dependency={kind}:{numbers}", "--kill-on-invalid-dep=yes"]


def also_after(number: int, words: Sequence[str]) -> list[str]:
    """Return options of sbatch for a job that waits also for the end of the job with this number.

    >>> also_after(7, ["--dependency=afterok:5", "--time=5"])
    ['--dependency=afterok:5,afterany:7', '--time=5']
    """
    if not any(word.startswith("--dependency=") for word in words):
        return [*words, f"--dependency=afterany:{number}"]
    return [f"{word},afterany:{number}" if word.startswith("--dependency=") else word for word in words]
