"""Plots the memory of a training step, stacked by part, with the usable memory of a GPU.

matplotlib is imported only when a figure is drawn, so that measurements do not need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dlo_lib.base.drawing import new_figure
from dlo_lib.optim import Phase
from dlo_lib.profiling.report import MemoryReport
from dlo_lib.profiling.tracker import Part

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2**30

# The parts from the bottom up, the persistent ones first. The colours are distinguishable for colour-blind
# readers (after Okabe and Ito, 2008); black or white text on each is readable in a light and in a dark theme.
COLOURS = {
    Part.WEIGHTS: "#13589A",
    Part.OPTIMIZER_STATE: "#7CC4EE",
    Part.BUFFERS: "#A6A6A6",
    Part.GRADIENTS: "#0E8256",
    Part.CAST_WEIGHTS: "#3B4A6B",
    Part.UNITS: "#80601F",
    Part.ACTIVATIONS: "#F0B429",
    Part.LOGITS_AND_LOSS: "#C25000",
    Part.STEP_TEMPORARIES: "#DDA0C4",
}


def plot_memory(
    report: MemoryReport,
    limit_bytes: int | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Figure:
    """Draw the timeline of ``report``, stacked by part, in GiB. The horizontal axis counts allocations and
    frees.

    Args:
        report: the measurement.
        limit_bytes: the usable memory of a GPU, drawn as a line.
        title: the title of the axes.
        ax: the axes to draw into; by default those of a new figure.
    """
    from dlo_lib.base.notebook_figure import NotebookFigure

    if ax is None:
        ax = new_figure(9, 4.5).subplots()
    held = {part: report.timeline[part][report.begin :] / GIB for part in COLOURS}
    total = report.total[report.begin :] / GIB
    visible = 0.002 * total.max()
    events = np.arange(len(total))
    below = np.zeros_like(total)
    for part in COLOURS:
        above = below + held[part]
        seen = held[part] > visible
        if seen.any():
            colour = COLOURS[part]
            # The logits exist for a few events only, less than a pixel. The edge makes them visible.
            ax.fill_between(
                events,
                below,
                above,
                where=seen,
                label=part.value,
                facecolor=colour,
                edgecolor=colour,
                linewidth=0.8,
            )
        below = above

    top = max(total.max(), (limit_bytes or 0) / GIB) * 1.15
    peak = int(total.argmax())
    ax.plot(peak, total[peak], "v", color="black", markersize=7)
    side = "right" if peak > 0.85 * len(total) else "left" if peak < 0.15 * len(total) else "center"
    ax.annotate(
        f"peak {total[peak]:.1f} GiB",
        (peak, total[peak]),
        textcoords="offset points",
        xytext=(0, 7),
        ha=side,
        weight="bold",
    )
    if limit_bytes is not None:
        limit = limit_bytes / GIB
        ax.axhline(limit, color="#B00020", linestyle="--", linewidth=1.5, label=f"usable: {limit:.1f} GiB")
    _mark_phases(ax, report, top)
    ax.set(xlim=(0, len(total) - 1), ylim=(0, top), title=title)
    ax.set(ylabel="memory held (GiB)", xlabel="allocations and frees, in order")
    handles, labels = ax.get_legend_handles_labels()
    # Reverse the legend, so that it has the order of the stack.
    ax.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    whole = ax.get_figure(root=True)
    assert whole is not None
    if isinstance(whole, NotebookFigure) and len(whole.axes) == 1:
        whole.facts = _facts(report, held, total, limit_bytes)
    return whole


def _facts(
    report: MemoryReport, held: Mapping[Part, np.ndarray], total: np.ndarray, limit_bytes: int | None
) -> str:
    """Return sentences for the alternative text: the peak, its phase, its largest parts, and the end."""
    peak = int(total.argmax())
    phase = report.events[report.begin + peak].phase
    parts = sorted(held, key=lambda part: -held[part][peak])[:3]
    largest = ", ".join(f"{part.value} {held[part][peak]:.1f}" for part in parts if held[part][peak] > 0)
    during = f" during {phase.value}" if phase is not None else ""
    said = (
        f"The memory held rises to a peak of {total[peak]:.1f} GiB{during}: {largest}. "
        f"The step begins with {total[0]:.1f} and ends with {total[-1]:.1f} GiB."
    )
    if limit_bytes is None:
        return said
    side = "above" if total[peak] > limit_bytes / GIB else "below"
    return f"{said} The peak is {side} the {limit_bytes / GIB:.1f} GiB that are usable."


def _mark_phases(ax: Axes, report: MemoryReport, top: float) -> None:
    """Draw a thin line at the start of each phase, and the name of the phase if there is enough space."""
    phases = [event.phase for event in report.events[report.begin :]]
    for phase in Phase:
        inside = [index for index, now in enumerate(phases) if now is phase]
        if not inside:
            continue
        first, last = inside[0], inside[-1]
        ax.axvline(first, color="black", linewidth=0.6, alpha=0.5, zorder=0)
        if last - first > 0.06 * len(phases):
            ax.text((first + last) / 2, 0.985 * top, phase.value, ha="center", va="top", fontsize="small")
