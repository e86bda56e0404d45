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


def new_figure(width: float, height: float) -> Figure:
    """Create a figure of this size in inches; a notebook cell that returns it shows it once."""
    from dlo_lib.notebook_figure import NotebookFigure

    return NotebookFigure(figsize=(width, height), layout="constrained")


def rows_of_ranks(axes: Axes, ranks: Sequence[int], legend: Sequence[Artist]) -> None:
    """Set up one row for each rank, the first on top, centred on its index, with the legend outside at the
    right.
    """
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=list(legend), loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
