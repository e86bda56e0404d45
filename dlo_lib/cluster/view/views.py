"""What the views of a job (``dashboard``, ``live``) read from it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dlo_lib.base.text import tr
from dlo_lib.cluster.run.records import Record
from dlo_lib.cluster.slurm.states import ElementStatus

_FEW = 3  # values that are listed

if TYPE_CHECKING:
    from dlo_lib.train.metrics import Metrics


class JobView(Protocol):
    """The part of a job that views read; :class:`dlo_lib.cluster.job.handle.Job` implements it."""

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


def local_time(utc: str) -> str:
    """Return a recorded time (UTC, ISO 8601) in the zone of this machine, in which SLURM's times are too:
    ``2026-11-27 14:05``.
    """
    return datetime.fromisoformat(utc).replace(tzinfo=UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def varied(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the settings that differ between elements; all names if there is one element.

    >>> varied([{"lr": 0.1, "seed": 0, "batch": 4}, {"lr": 0.1, "seed": 1}])
    ['seed', 'batch']
    """
    names = list(dict.fromkeys(name for one in settings for name in one))
    if len(settings) == 1:
        return names
    return [name for name in names if len({(name in one, repr(one.get(name))) for one in settings}) > 1]


def labels(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return a label for each element: the settings in which the elements differ, in short numbers.

    >>> labels([{"lr": 0.0003, "seed": 0}, {"lr": 0.001, "seed": 0}])
    ['lr=0.0003', 'lr=0.001']
    """
    names = varied(settings)
    return [
        " ".join(f"{name}={short(one[name])}" for name in names if name in one) or str(number)
        for number, one in enumerate(settings)
    ]


def sweep_text(settings: Sequence[dict[str, Any]]) -> str:
    """Return what a sweep varies, in a few words: its values if they are few, otherwise their number.

    >>> sweep_text([{"lr": 0.1, "seed": seed} for seed in range(12)]), sweep_text([{"lr": 0.1}])
    ('seed: 12 values', 'lr=0.1')
    >>> sweep_text([{"lr": 0.1}, {"lr": 0.3}]), sweep_text([{}])
    ('lr=0.1,0.3', '')
    """
    said = []
    for name in varied(settings):
        values = list(dict.fromkeys(short(one[name]) for one in settings if name in one))
        few = len(values) <= _FEW
        said.append(
            f"{name}={','.join(values)}"
            if few
            else tr("{name}: {count} values", name=name, count=len(values))
        )
    return " ".join(said)


def short(value: Any) -> str:
    """Return a value of a setting as text, a number with at most four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def settings_text(settings: dict[str, Any]) -> str:
    """Return settings in one line: ``lr=0.1 seed=0``."""
    return " ".join(f"{name}={value}" for name, value in settings.items())
