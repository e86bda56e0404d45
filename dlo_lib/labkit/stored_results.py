"""Results of cells that need a GPU or a package: measured where there is one, otherwise stored figures.

``measured_or_stored`` is for a cell that computes with the figures, ``show_stored`` for one that shows them.

A stored figure never looks like a measurement: the machine, the date and the software are printed above it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, TypeVar

from dlo_lib.base.text import tr

Value = TypeVar("Value")
OUTPUTS = Path(__file__).with_name("stored")
"""What cells showed on a GPU, one file for each lab, as ``benchmarks.card_labs`` writes it."""


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


def show_stored(lab: str, cell: str, folder: Path = OUTPUTS) -> None:
    """Print what a cell showed on a GPU, with the machine, the date and the software; nothing on a machine
    that has a GPU, where the cell itself shows it.

    Args:
        lab: the name of the lab's folder.
        cell: the id of the cell.
        folder: has LAB.toml.

    Raises:
        KeyError: nothing is stored of the cell.
    """
    missing = _without_gpu(0)
    if not missing:
        return
    stored = tomllib.loads((folder / f"{lab}.toml").read_text(encoding="utf-8"))
    shown = stored["shows"][cell]
    print(
        tr(
            "STORED, not measured here ({why}). This cell on {machine}, {date}, {software}:",
            why=missing,
            machine=stored["machine"],
            date=stored["date"],
            software=stored["software"],
        )
    )
    print(shown.rstrip("\n"))


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
