"""What a job may cost, shown before it is submitted, and what it has used, read from the accounting.

    GPU hours = GPUs · hours · elements        energy = GPU hours · power limit of the GPU

Before, the hours are the time limit, so both are upper bounds; the energy is that of the GPUs alone. After,
the accounting gives the elapsed time and, where the nodes measure it, the energy of the whole nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlo_lib.base.text import tr
from dlo_lib.cluster.site.duration import parse_duration, short_duration
from dlo_lib.cluster.site.request import Allocation
from dlo_lib.hardware.nodes import JOULES_PER_KWH, energy_kwh


@dataclass(frozen=True)
class JobUsage:
    """What a job has used.

    Attributes:
        hours: elapsed hours of all its elements and turns together.
        gpus: GPUs of one element.
        joules: measured energy; None if the nodes do not measure it.
    """

    hours: float
    gpus: int
    joules: float | None = None

    @property
    def gpu_hours(self) -> float:
        """Hours of one GPU."""
        return self.hours * self.gpus

    def __str__(self) -> str:
        if self.gpus:
            text = tr("used {hours} GPU hours", hours=_number(self.gpu_hours))
        else:
            text = tr("used {hours} hours without GPUs", hours=_number(self.hours))
        if self.joules is None:
            return text
        return tr("{text}, {energy} kWh measured", text=text, energy=_number(self.joules / JOULES_PER_KWH))


def in_words(gpus: int) -> str:
    """Return a number of GPUs in words.

    >>> in_words(0), in_words(1), in_words(2)
    ('no GPU', '1 GPU', '2 GPUs')
    """
    if gpus > 1:
        return tr("{gpus} GPUs", gpus=gpus)
    return tr("1 GPU") if gpus else tr("no GPU")


def estimate(want: Allocation, elements: int) -> str:
    """Return what a job may cost, in a few words."""
    hours = want.time.total_seconds() / 3600 * elements
    limit = short_duration(want.time)
    each = tr("{count} elements with ", count=elements) if elements > 1 else ""
    if want.gpus_per_node == 0:
        cores = want.ranks * want.cores
        text = "{each}{cores} cores for at most {limit}: {hours} core hours"
        if cores == 1:
            text = "{each}1 core for at most {limit}: {hours} core hours"
        return tr(text, each=each, cores=cores, limit=limit, hours=_number(cores * hours))
    gpus = want.nodes * want.gpus_per_node
    text = "{each}{gpus} for at most {limit}: {hours} GPU hours"
    said = tr(text, each=each, gpus=in_words(gpus), limit=limit, hours=_number(gpus * hours))
    if want.site.gpu is None:
        return said
    kwh = energy_kwh(want.site.gpu, gpus, hours)
    return tr("{said}, at most {kwh} kWh for the GPUs", said=said, kwh=_number(kwh))


def usage(rows: Iterable[tuple[str, float, float]], gpus: int) -> JobUsage | None:
    """Return what a job has used, None without rows.

    Args:
        rows: of sacct: name of a job, element or step; elapsed seconds; joules, 0 if not measured.
        gpus: GPUs of one element.
    """
    seconds, energy = 0.0, dict[str, list[tuple[str, float]]]()
    found = False
    for name, elapsed, joules in rows:
        job, _, step = name.partition(".")
        if not step:
            found, seconds = True, seconds + elapsed
        energy.setdefault(job, []).append((step, joules))
    if not found or not seconds:
        return None
    joules = sum(_energy_of(steps) for steps in energy.values())
    return JobUsage(seconds / 3600, gpus, joules or None)


def _energy_of(steps: list[tuple[str, float]]) -> float:
    """Return the energy of one element. Steps measure whole nodes, so those that overlap are not added: the
    batch step measures the first node, the external step all nodes, numbered steps theirs one after another.
    """
    numbered = sum(joules for step, joules in steps if step.isdigit())
    return max([numbered, *(joules for step, joules in steps if not step.isdigit())])


def hours_of(elapsed: str) -> float:
    """Return a run time in SLURM's format as hours, 0 if it is not known.

    >>> hours_of("1-06:30:00"), hours_of("0:36"), hours_of("")
    (30.5, 0.01, 0.0)
    """
    if not any(digit in elapsed for digit in "123456789"):
        return 0.0
    return parse_duration(elapsed).total_seconds() / 3600


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
