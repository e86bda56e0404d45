"""What the library's figures have in common: how a figure is made, and rows of ranks over time.

matplotlib is imported when a figure is asked for: ranks need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """A figure of that size in inches that a notebook's cell shows once, when it returns it."""
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(width, height), layout="constrained")
    pyplot.close(figure)  # a notebook's cell shows what it returns, and would show again what is still open
    return figure


def rows_of_ranks(axes: Axes, ranks: Sequence[int], legend: Sequence[Artist]) -> None:
    """A row for each rank, the first on top, centred on its index; the legend at the right, outside."""
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=list(legend), loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
