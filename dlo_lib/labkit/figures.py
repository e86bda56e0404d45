"""One style for the figures of all labs: colour-blind safe, readable when projected and in a dark theme.

A figure function of a lab carries the decorator :func:`styled`, gets its axes from :func:`panels`, draws, and
calls :func:`finish` for each of them. A line takes its colour, dashes and marker from :data:`RANKS` or
:data:`METHODS`, so that colour is never the only difference. The import changes no setting of matplotlib.

The colours are those of ``dlo_lib.base.drawing``: white text on them has a contrast of 4.5:1 or more, as WCAG
2.1 asks, in both themes. Figures are drawn on white. In a dark theme the page inverts their lightness and
keeps their hues (``dlo_lib/base/templates/figure.html.j2``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, ParamSpec

from matplotlib import colors, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from matplotlib.typing import ColorType

from dlo_lib.base.drawing import COLOURS, DASHES, RANK_COLOURS, new_figure, whole_numbers
from dlo_lib.base.drawing import SKY as SKY
from dlo_lib.base.notebook_figure import NotebookFigure

BLUE, VERMILLION, GREEN, WINE, BLACK, PINK, BROWN = COLOURS
PALE, BACKGROUND = "#D9D9D9", "#FFFFFF"
"""Of areas, as ``SKY``: too light for a line."""
LIMIT, MUTED = "#B00020", "#666666"
"""Of what must not be exceeded, and of what explains or serves as a reference."""

KIB, MIB, GIB = 2**10, 2**20, 2**30
SMALL = 9
"""The smallest font in points: numbers in cells, notes beside lines."""
_TICKS = 10
STYLE: dict[str, Any] = (
    dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), BACKGROUND)
    | dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), _TICKS)
    | {"font.size": 11, "axes.titlesize": 11.5, "axes.titlelocation": "left"}
    | {"lines.linewidth": 2, "lines.markersize": 6, "legend.frameon": False}
)
"""Differences from matplotlib's defaults. The settings of the user are not used."""


class Style(NamedTuple):
    """How one line looks: its colour, its dashes and the marker of its points."""

    colour: str
    dashes: Any
    marker: str

    def line(self, *, marked: bool = False) -> dict[str, Any]:
        """Return arguments of ``Axes.plot`` for a line, with its markers if ``marked``."""
        return {"color": self.colour, "linestyle": self.dashes, "marker": self.marker if marked else ""}

    def points(self) -> dict[str, Any]:
        """Return arguments of ``Axes.plot`` for points without a line."""
        return {"color": self.colour, "linestyle": "", "marker": self.marker}


@dataclass(frozen=True)
class Cycle:
    """An endless sequence of styles, for ``zip`` and for any index.

    The lengths of ``colours`` and ``dashes`` have no common divisor, so that a colour
    returns with other dashes.
    """

    colours: Sequence[str]
    dashes: Sequence[Any] = DASHES
    markers: Sequence[str] = ("o", "s", "^", "D", "v", "P", "X", "*")

    def __getitem__(self, index: int) -> Style:
        return Style(*(each[index % len(each)] for each in (self.colours, self.dashes, self.markers)))

    def __iter__(self) -> Iterator[Style]:
        return map(self.__getitem__, itertools.count())


RANKS = Cycle(RANK_COLOURS)
METHODS = Cycle(COLOURS)

P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Run a figure function in the style of the labs; afterwards the settings of matplotlib are as before.

    The first paragraph of its docstring begins the alternative text of the figure.
    """

    @functools.wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with style.context(["default", STYLE]):
            figure = draw(*args, **kwargs)
        if isinstance(figure, NotebookFigure):
            figure.summary = " ".join((draw.__doc__ or "").strip().partition("\n\n")[0].split())
        return figure

    return inside


def panels(
    columns: int = 1,
    rows: int = 1,
    *,
    width: float = 9,
    height: float = 3.8,
    **options: Any,
) -> list[Axes]:
    """Create a figure, in inches, and return its axes, row by row; ``options`` are those of ``subplots``."""
    axes = list(new_figure(width, height).subplots(rows, columns, squeeze=False, **options).flat)
    for each in axes:  # a tick can be created when the figure is drawn, outside of the style
        each.tick_params(which="both", labelsize=_TICKS, colors=BLACK)
    return axes


def finish(axes: Axes, grid: Literal["x", "y", "both"] | None = "y", **labels: Any) -> Figure:
    """Call ``Axes.set`` with ``labels``, remove the frame, draw the grid; return the figure.

    An axis of steps or ranks gets ticks at whole numbers only.
    """
    axes.set(**labels)
    whole_numbers(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=False)
    if grid:
        axes.grid(visible=True, axis=grid, color=PALE, alpha=0.7, linewidth=0.8)
    axes.set_axisbelow(True)
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


PLACES: dict[str, dict[str, Any]] = {
    "right": {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)},
    "above": {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": 4},
    "below": {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "ncols": 4},
}


def legend(axes: Axes, place: Literal["right", "above", "below"], **options: Any) -> None:
    """Place the legend outside of the axes; ``reverse=True`` gives it the order of stacked bars. If nothing
    that is drawn has a label, there is no legend.
    """
    if "handles" in options or axes.get_legend_handles_labels()[0]:
        axes.legend(**PLACES[place] | options)


def stacked(
    axes: Axes,
    bars: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, ColorType] | None = None,
    unit: float = 1.0,
) -> list[float]:
    """Draw a horizontal bar for each name of ``bars``, from the top, with its parts side by side. Return the
    ends of the bars.

    Args:
        bars: numbers by part; all bars have the same parts.
        colours: of the parts; by default those of ``METHODS``.
        unit: what is 1 on the axis, such as ``GIB``.
    """
    ends = []
    for row, parts in enumerate(bars.values()):
        left = 0.0
        for (name, value), method in zip(parts.items(), METHODS):
            colour = colours[name] if colours else method.colour
            axes.barh(row, value / unit, 0.6, left=left, color=colour, label=None if row else name)
            left += value / unit
        ends.append(left)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    return ends


def stacked_gib(axes: Axes, bars: Mapping[str, Mapping[str, float]], totals: Sequence[float] = ()) -> None:
    """Draw :func:`stacked` bars of bytes in GiB, with the total at the end of each, and the legend.

    Args:
        bars: bytes by part; all bars have the same parts.
        totals: the bytes written at the ends; by default the sums of the parts.
    """
    totals = totals or [sum(parts.values()) for parts in bars.values()]
    for row, (end, total) in enumerate(zip(stacked(axes, bars, unit=GIB), totals, strict=True)):
        axes.text(end, row, " " + (gib(total) if total >= GIB / 20 else mib(total)), va="center")
    axes.margins(x=0.15)
    legend(axes, "above")


def log_ticks(
    axes: Axes,
    which: Literal["x", "y"],
    values: Sequence[float],
    text: Callable[[float], str] = "{:g}".format,
    base: float = 2,
) -> None:
    """Make an axis logarithmic, with ticks at ``values`` only, written as plain numbers or by ``text``."""
    axes.set_xscale("log", base=base) if which == "x" else axes.set_yscale("log", base=base)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(list(values), [text(value) for value in values])
    axis.set_minor_locator(NullLocator())


def text_on(fill: str) -> str:
    """Return the colour of text on ``fill``, black or white: the one with the higher contrast."""
    return BLACK if contrast(BLACK, fill) >= contrast(BACKGROUND, fill) else BACKGROUND


def contrast(one: ColorType, other: ColorType) -> float:
    """Return the contrast ratio of two colours by WCAG 2.1, from 1 to 21."""

    def luminance(colour: ColorType) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colors.to_rgb(colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def size(nbytes: float, position: int | None = None) -> str:
    """Return ``nbytes`` in the largest unit of which it holds one; a formatter of an axis too."""
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
    unit, name = next((each for each in units if nbytes >= each[0]), units[-1])
    return f"{nbytes / unit:.3g} {name}"


def gib(nbytes: float, position: int | None = None) -> str:
    """Return ``nbytes`` as GiB with one decimal; a formatter of an axis too."""
    return f"{nbytes / GIB:.1f} GiB"


def mib(nbytes: float, position: int | None = None) -> str:
    """Return ``nbytes`` as MiB with one decimal; a formatter of an axis too."""
    return f"{nbytes / MIB:.1f} MiB"


def ms(seconds: float, position: int | None = None) -> str:
    """Return ``seconds`` as ms with one decimal; a formatter of an axis too."""
    return f"{1e3 * seconds:.1f} ms"
