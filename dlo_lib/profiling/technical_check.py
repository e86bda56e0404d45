"""The technical check of a training before it gets many GPUs, on one page: the throughput, the parts of a
step, and the memory against the batch.

It answers three questions. How far is the throughput from what the device can do? The scale of the gauge ends
at the throughput of the same step without waiting for data and without communication. Where does a step spend
its time? And which batch fits on the card, with how much room?

The phases come from ``Chronometer``, so the device is synchronised at their ends. The memory comes from
``batch_memory``. matplotlib is imported only when a figure is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dlo_lib.base.drawing import PHASES as PHASE_COLOURS
from dlo_lib.base.drawing import new_figure
from dlo_lib.base.errors import UserError, require_count
from dlo_lib.hardware import Gpu
from dlo_lib.profiling.batch_memory import memory_of_batches
from dlo_lib.profiling.chronometer import Chronometer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = ("load", "forward", "backward", "optimizer", "communication", "metrics")
"""The phases of a step, in the order of the bars; ``other`` follows."""
HIDEABLE = ("load", "communication")
"""The phases that a step can hide behind its computation."""
COLOURS = PHASE_COLOURS
MIB, GIB = 2**20, 2**30
MakeStep = Callable[[int], Callable[[Chronometer], object]]
"""Creates the model and a loader for this batch; what it returns trains one step, with its phases named."""


@dataclass(frozen=True)
class TechnicalCheck:
    """The measurements.

    Attributes:
        batch: the samples of a step.
        phases: the median seconds of each phase of ``PHASES`` that occurred, and ``"other"``.
        memory: the peak of a step in bytes for each batch; None where it did not fit.
        limit_bytes: the memory for tensors of the card; None if it is not known.
        card: the name of the card.
    """

    batch: int
    phases: dict[str, float]
    memory: dict[int, int | None]
    limit_bytes: int | None = None
    card: str = "this device"

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(self.phases.values())

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch / self.seconds

    @property
    def attainable(self) -> float:
        """The samples per second of the same step if it waited neither for data nor for communication."""
        hidden = sum(self.phases.get(name, 0.0) for name in HIDEABLE)
        return self.batch / (self.seconds - hidden) if self.seconds > hidden else self.throughput

    @property
    def largest_fitting(self) -> int | None:
        """The largest measured batch that is within the limit; None without a limit, 0 if none is."""
        if self.limit_bytes is None:
            return None
        fitting = [
            batch for batch, peak in self.memory.items() if peak is not None and peak <= self.limit_bytes
        ]
        return max(fitting, default=0)

    def text(self) -> str:
        """Return the page as text, for a terminal and for the log of a job."""
        reached = self.throughput / self.attainable
        lines = [
            (
                f"throughput    {_bar(reached)} {self.throughput:.0f} of {self.attainable:.0f} samples/s "
                f"({reached:.0%}) at batch {self.batch}"
            )
        ]
        lines += [
            f"{name:13} {_bar(seconds / self.seconds)} {1e3 * seconds:.1f} ms ({seconds / self.seconds:.0%})"
            for name, seconds in self.phases.items()
        ]
        unit, name = self._unit()
        scale = self.limit_bytes or max((peak or 0 for peak in self.memory.values()), default=0) or 1
        for batch, peak in self.memory.items():
            shown = "does not fit" if peak is None else f"{peak / unit:.3g} {name}"
            if peak is not None and self.limit_bytes is not None and peak > self.limit_bytes:
                shown += f", above the {self.limit_bytes / unit:.3g} {name} of {self.card}"
            lines.append(f"batch {batch:<7} {_bar(1.0 if peak is None else peak / scale)} {shown}")
        return "\n".join([*lines, self.explained()])

    def explained(self) -> str:
        """Return one sentence: the largest phase, and what hiding data and communication would gain."""
        name = max(self.phases, key=lambda phase: self.phases[phase])
        share = self.phases[name] / self.seconds
        sentence = f"The largest part of a step is {name}, {share:.0%} of {1e3 * self.seconds:.1f} ms."
        waiting = {phase: self.phases.get(phase, 0.0) / self.seconds for phase in HIDEABLE}
        if max(waiting.values()) >= 0.05:
            worst = max(waiting, key=lambda phase: waiting[phase])
            gain = self.attainable / self.throughput
            sentence += f" Hide {worst} behind the computation: a step can be {gain:.1f} times as fast."
        if self.limit_bytes is not None and self.memory:
            fits = self.largest_fitting
            sentence += (
                f" Of the measured batches, {fits} is the largest that fits on {self.card}."
                if fits
                else f" No measured batch fits on {self.card}: try activation checkpointing."
            )
        return sentence

    def plot(self) -> Figure:
        """Draw the page: the gauge, the parts of a step, and the memory against the batch."""
        figure = new_figure(10, 4.6)
        grid = figure.add_gridspec(2, 2, height_ratios=(1, 1), width_ratios=(1.25, 1))
        self._draw_gauge(figure.add_subplot(grid[0, 0]))
        self._draw_phases(figure.add_subplot(grid[1, 0]))
        self._draw_memory(figure.add_subplot(grid[:, 1]))
        return figure

    def _draw_gauge(self, axes: Axes) -> None:
        axes.barh(0, self.attainable, color="#D9D9D9", label="without waiting")
        axes.barh(0, self.throughput, height=0.45, color=COLOURS["forward"], label="measured")
        axes.set_title(f"{self.throughput:.0f} samples/s at batch {self.batch}", loc="left")
        axes.set(xlabel="samples per second", yticks=[], xlim=(0, 1.02 * self.attainable))
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
        _plain(axes)

    def _draw_phases(self, axes: Axes) -> None:
        left = 0.0
        for name, seconds in self.phases.items():
            axes.barh(
                0, 1e3 * seconds, left=left, color=COLOURS[name], edgecolor="white", linewidth=0.5, label=name
            )
            left += 1e3 * seconds
        axes.set_title("One step", loc="left")
        axes.set(xlabel="time (ms)", yticks=[], xlim=(0, 1.02 * left))
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
        _plain(axes)

    def _unit(self) -> tuple[int, str]:
        """The unit in which the memory is shown, and its name."""
        largest = max([self.limit_bytes or 0, *(peak or 0 for peak in self.memory.values())])
        return (GIB, "GiB") if largest >= GIB // 2 else (MIB, "MiB")

    def _draw_memory(self, axes: Axes) -> None:
        unit, name = self._unit()
        fitting = [(batch, peak / unit) for batch, peak in sorted(self.memory.items()) if peak is not None]
        if fitting:
            batches, peaks = zip(*fitting)
            axes.plot(batches, peaks, "o-", color=COLOURS["forward"], label="peak of a step")
        top = max((peak for _, peak in fitting), default=0.0)
        for batch, peak in self.memory.items():
            if peak is None:
                axes.axvline(batch, color="#B00020", linestyle=":", label=f"batch {batch} does not fit")
        if self.limit_bytes is not None:
            limit = self.limit_bytes / unit
            axes.axhline(limit, color="#B00020", linestyle="--", label=f"{self.card}: {limit:.3g} {name}")
            top = max(top, limit)
        axes.set_title("Memory", loc="left")
        axes.set(xlabel="batch", ylabel=f"peak ({name})", xlim=(0, None), ylim=(0, 1.3 * top or 1))
        axes.legend(loc="upper left", frameon=False, fontsize=9)
        axes.grid(alpha=0.25)
        _plain(axes)


def technical_check(
    make_step: MakeStep,
    batch: int,
    batches: Iterable[int] = (),
    device: torch.device | str = "cpu",
    card: Gpu | None = None,
    limit_bytes: int | None = None,
    steps: int = 10,
    warmup: int = 2,
) -> TechnicalCheck:
    """Measure the phases of a step with ``batch``, and the memory of a step with each of ``batches``.

    Args:
        make_step: see ``MakeStep``; the phases are named as in ``PHASES``.
        card: the GPU whose usable memory is the limit; it need not be the one that measures.
        limit_bytes: another limit, such as that of a part of a card.

    Raises:
        UserError: a count is below 1, no phase was named, or a name is not in ``PHASES``.
    """
    for name, count in (("batch", batch), ("steps", steps)):
        require_count(name, count)
    chronometer = Chronometer(device)
    step = make_step(batch)
    for _ in range(warmup + steps):
        with chronometer.step(samples=batch):
            step(chronometer)
    measured = {name: time.median for name, time in chronometer.phases(skip=warmup).items()}
    unknown = [name for name in measured if name not in COLOURS]
    if unknown or not measured:
        found = f"the phase {unknown[0]!r} is unknown" if unknown else "the step names no phase"
        raise UserError(f"{found}: use {', '.join(PHASES)}")

    def build(size: int) -> Callable[[], object]:
        one, silent = make_step(size), Chronometer(synchronise=False)

        def run() -> None:
            with silent.step():
                one(silent)

        return run

    return TechnicalCheck(
        batch,
        {name: max(0.0, measured[name]) for name in COLOURS if name in measured},
        memory_of_batches(build, batches, device),
        limit_bytes if limit_bytes is not None else (card.usable_bytes if card else None),
        card.title if card else "the given limit" if limit_bytes is not None else "this device",
    )


def _bar(share: float, width: int = 24) -> str:
    filled = round(width * min(1.0, max(0.0, share)))
    return "█" * filled + "·" * (width - filled)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
