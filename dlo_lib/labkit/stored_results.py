"""Results of cells that need a GPU or a package: measured where there is one, otherwise stored figures.

A stored figure never looks like a measurement: the machine, the date and the software are printed above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Generic, TypeVar

from dlo_lib.text import tr

Value = TypeVar("Value")


@dataclass(frozen=True)
class StoredResult(Generic[Value]):
    """Figures that this cell gave earlier, by name, with ``machine``, ``date`` and ``software``."""

    machine: str
    date: str
    software: str
    values: Mapping[str, Value]


def measured_or_stored(
    measurements: Mapping[str, Callable[[], Value]],
    stored: StoredResult[Value],
    *,
    gib: float | None = None,
    package: str | None = None,
) -> Mapping[str, Value]:
    """Run the measurements if this machine has what they need; print what the values are, and return them.

    Args:
        measurements: functions by name, in the order of the table.
        stored: the figures to return where something is missing.
        gib: GiB of free GPU memory that the measurements need; None if they need no GPU.
        package: the name of a package that the measurements import; None if they need none.

    Raises:
        KeyError: there is no stored figure for a measurement.
    """
    values = {name: stored.values[name] for name in measurements}
    missing = _without_gpu(gib) or _without_package(package)
    if not missing:
        print(_measured_here(gib))
        return {name: measure() for name, measure in measurements.items()}
    print(
        tr(
            "STORED, not measured here ({why}). This cell on {machine}, {date}, {software}:",
            why=missing,
            machine=stored.machine,
            date=stored.date,
            software=stored.software,
        )
    )
    return values


def _without_gpu(gib: float | None) -> str:
    """Say what is missing for measurements on a GPU; "" if nothing is."""
    if gib is None:
        return ""
    import torch  # here, because a cell of imports runs in every worker of the judge

    if not torch.cuda.is_available():
        return tr("no GPU")
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        return tr("less than {gib:g} GiB free", gib=gib)
    return ""


def _without_package(package: str | None) -> str:
    if package is None or find_spec(package) is not None:
        return ""
    return tr("{package} is not installed", package=package)


def _measured_here(gib: float | None) -> str:
    if gib is None:
        return tr("Measured on this machine:")
    import torch

    return tr("Measured on this machine, {card}:", card=torch.cuda.get_device_name())
