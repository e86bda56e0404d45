"""Shared parts of the figures of the library.

matplotlib is imported on first use, because the ranks of a job do not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COUNTED = ("step", "steps", "epoch", "epochs", "rank", "ranks", "trial", "trials")
"""Labels of axes that have whole numbers only."""


def new_figure(width: float, height: float) -> Figure:
    """Create a figure of this size in inches; a notebook cell that returns it shows it once."""
    from dlo_lib.notebook_figure import NotebookFigure

    return NotebookFigure(figsize=(width, height), layout="constrained")


def whole_numbers(axes: Axes) -> None:
    """Put the ticks of an axis of steps, epochs or ranks at whole numbers, unless they are chosen."""
    from matplotlib.ticker import AutoLocator, MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        counted = axis.get_label_text().partition("(")[0].strip() in COUNTED
        if counted and isinstance(axis.get_major_locator(), AutoLocator):
            axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def rows_of_ranks(axes: Axes, ranks: Sequence[int], legend: Sequence[Artist]) -> None:
    """Set up one row for each rank, the first on top, centred on its index, with the legend outside at the
    right.
    """
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=list(legend), loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
