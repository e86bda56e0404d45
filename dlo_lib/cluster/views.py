"""What the views of a job (``dashboard``, ``live``) read from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dlo_lib.cluster.records import Record
from dlo_lib.cluster.states import ElementStatus

if TYPE_CHECKING:
    from dlo_lib.train.metrics import Metrics


class JobView(Protocol):
    """The part of a job that views read; :class:`dlo_lib.cluster.job.Job` implements it."""

    folder: Path

    @property
    def name(self) -> str:
        """The job's name in the queue."""
        ...

    @property
    def record(self) -> Record:
        """What was submitted."""
        ...

    @property
    def elements(self) -> int:
        """The number of elements."""
        ...

    @property
    def state(self) -> str:
        """The states of all elements, in a few words."""
        ...

    def status(self) -> list[ElementStatus]:
        """Return the current status of each element."""
        ...

    def metrics(self, element: int = 0) -> list[Metrics]:
        """Return the metrics of an element so far, in order of step."""
        ...

    def pace(self, poll: float | None = None) -> float:
        """Return the seconds between two queries."""
        ...


def settings_text(settings: dict[str, Any]) -> str:
    """Return settings in one line: ``lr=0.1 seed=0``."""
    return " ".join(f"{name}={value}" for name, value in settings.items())
