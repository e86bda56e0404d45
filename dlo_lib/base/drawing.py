"""Shared parts of the figures of the library, and the one palette: a rank and a phase of a step have the same
colour in each figure, of the labs, of the library and of the dashboard.

The colours are near those of M. Okabe and K. Ito, *Color Universal Design* (2008), and darker, so that white
text on them has a contrast of 4.5:1 or more.

matplotlib is imported on first use, because the ranks of a job do not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BLUE, VERMILLION, GREEN, WINE = "#13589A", "#C25000", "#0E8256", "#882255"
BLACK, PINK, BROWN = "#000000", "#AE4A90", "#6B4A00"
COLOURS = (BLUE, VERMILLION, GREEN, WINE, BLACK, PINK, BROWN)
"""Of lines and points."""
SKY, GREY = "#7CC4EE", "#A6A6A6"
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
"""Of lines: the number of colours of ranks and of all colours has no divisor in common with theirs."""
RANK_COLOURS = COLOURS[:4]
"""Of ranks 0, 1, 2, ..., again from the first after the last, with other dashes."""
PHASES = {
    "load": VERMILLION,
    "forward": BLUE,
    "backward": SKY,
    "optimizer": GREEN,
    "communication": WINE,
    "metrics": BROWN,
    "other": GREY,
}
"""Of the phases of a step."""
COUNTED = ("step", "steps", "epoch", "epochs", "rank", "ranks", "trial", "trials")
"""Labels of axes that have whole numbers only."""


def rank_line(rank: int) -> dict[str, Any]:
    """Return the colour and the dashes of the line of a rank, as arguments of ``Axes.plot``."""
    return {"color": RANK_COLOURS[rank % len(RANK_COLOURS)], "linestyle": DASHES[rank % len(DASHES)]}


def new_figure(width: float, height: float) -> Figure:
    """Create a figure of this size in inches; a notebook cell that returns it shows it once."""
    from dlo_lib.base.notebook_figure import NotebookFigure

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
