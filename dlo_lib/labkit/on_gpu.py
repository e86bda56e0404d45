"""Results of cells that need a GPU: measured where there is one, otherwise stored figures of the same cell.

A stored figure never looks like a measurement: the card, the date and the software are printed above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dlo_lib.text import tr


@dataclass(frozen=True)
class StoredResult:
    """Figures that this cell gave earlier, by name, with the ``card``, the ``date`` and the ``software``."""

    card: str
    date: str
    software: str
    values: Mapping[str, float]


def measured_or_stored(
    measurements: Mapping[str, Callable[[], float]], stored: StoredResult, gib: float
) -> Mapping[str, float]:
    """Run the measurements on the GPU of this machine; print what the values are, and return them.

    Args:
        measurements: functions by name, in the order of the table.
        stored: the figures to return where there is no GPU, or too little free memory on it.
        gib: GiB of free GPU memory that the measurements need.

    Raises:
        KeyError: there is no stored figure for a measurement.
    """
    import torch  # here, because a cell of imports runs in every worker of the judge

    values = {name: stored.values[name] for name in measurements}
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] >= gib * 2**30:
        print(tr("Measured on this machine, {card}:", card=torch.cuda.get_device_name()))
        return {name: measure() for name, measure in measurements.items()}
    why = tr("no GPU") if not torch.cuda.is_available() else tr("less than {gib:g} GiB free", gib=gib)
    print(
        tr(
            "STORED, not measured here ({why}). This cell on {card}, {date}, {software}:",
            why=why,
            card=stored.card,
            date=stored.date,
            software=stored.software,
        )
    )
    return values
