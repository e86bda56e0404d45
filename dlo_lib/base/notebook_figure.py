"""A matplotlib figure that a notebook shows with an alternative text, and dark in a dark theme.

JupyterLab shows an ``image/png`` output without an alternative text and cannot change its colours. This
figure is therefore shown as HTML, with the PNG beside it for pages that show images only.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from numbers import Number
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from dlo_lib.base.markup import render

_SERIES, _TEXTS = 8, 16  # of a plot, in an alternative text: more are too many to listen to


class NotebookFigure(Figure):
    """A figure with an alternative text.

    Attributes:
        facts: sentences on what this picture shows, such as its peak; at the start of the alternative text.
        summary: one sentence on what such a figure shows. The alternative text has it where the series of a
            plot do not tell, as in a drawing of boxes.
    """

    facts: str = ""
    summary: str = ""

    def alternative_text(self) -> str:
        """Return the title and the facts, and for each plot its title, axes, and the ends and the extremes
        of each series; of a plot without series, the texts in it."""
        plots = [_Plot(axes) for axes in self.axes if axes.get_visible()]
        drawn = any(not plot.series for plot in plots) and not self.facts
        parts = [self.get_suptitle(), self.facts, *(plot.text for plot in plots)]
        parts += [self.summary] if drawn else []
        sentences = [" ".join(part.split()).rstrip(".") for part in parts if part]
        return ". ".join(sentences) + "." if sentences else ""

    def mime_bundle(self) -> dict[str, str]:
        """Return the output of a notebook cell: HTML, PNG and text."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", bbox_inches="tight", facecolor=self.get_facecolor())
        png = base64.b64encode(buffer.getvalue()).decode()
        text = self.alternative_text()
        return {"text/html": render("figure", png=png, text=text), "image/png": png, "text/plain": text}

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.mime_bundle(), raw=True)


class _Plot:
    """What one plot of a figure shows, in words."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        self.series = [*_line_texts(axes), *_bar_texts(axes), *_area_texts(axes)]

    @property
    def text(self) -> str:
        """The title, the axes and the series."""
        axes = self._axes
        title = " ".join(filter(None, (axes.get_title("left"), axes.get_title(), axes.get_title("right"))))
        against = " against ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel())))
        heading = " – ".join(filter(None, (title, against)))
        return ": ".join(filter(None, (heading, "; ".join(self._said()))))

    def _said(self) -> list[str]:
        if self.series:
            more = len(self.series) - _SERIES
            return [*self.series[:_SERIES], *([f"and {more} more"] if more > 0 else [])]
        texts = [text.get_text() for text in self._axes.texts if text.get_visible()]
        return list(dict.fromkeys(" ".join(text.split()) for text in texts if text.strip()))[:_TEXTS]


def _line_texts(axes: Axes) -> Iterator[str]:
    lines = [line for line in axes.lines if np.asarray(line.get_xdata()).size > 1]
    named = [line for line in axes.lines if not _label(line).startswith("_")]
    names = _tick_names(axes.xaxis)
    for line in named or (lines if len(lines) == 1 else []):
        across, along = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        if not along.size:
            continue
        if line.get_transform() is not axes.transData:  # a limit, across the whole plot
            level = f", a line at {_number(along.tolist()[0])}" if along[0] == along[-1] else ""
            yield _label(line) + level
            continue
        said = [
            f"{_number(y)} at {names.get(x) or _number(x)}" for x, y in zip(across.tolist(), along.tolist())
        ]
        name = "the line" if _label(line).startswith("_") else _label(line)
        yield f"{name} from {said[0]} to {said[-1]}{_extremes(along, said)}"


def _extremes(along: np.ndarray, said: Sequence[str]) -> str:
    """The highest and the lowest point between the ends of a line, if the ends are not."""
    if along.size < 3 or along.dtype.kind not in "fiu" or not np.isfinite(along).all():
        return ""
    ends = sorted((along[0], along[-1]))
    highest = f", highest {said[int(along.argmax())]}" if along.max() > ends[1] else ""
    lowest = f", lowest {said[int(along.argmin())]}" if along.min() < ends[0] else ""
    return highest + lowest


def _tick_names(axis: Axis) -> dict[float, str]:
    """What is written at the places of an axis whose ticks were set one by one."""
    if not isinstance(axis.get_major_locator(), FixedLocator):
        return {}
    places = np.asarray(axis.get_majorticklocs()).tolist()
    return dict(zip(places, axis.get_major_formatter().format_ticks(places)))


def _bar_texts(axes: Axes) -> Iterator[str]:
    for bars in axes.containers:
        if not isinstance(bars, BarContainer) or not bars.patches:
            continue
        long = bars.orientation == "horizontal"
        names = _tick_names(axes.yaxis if long else axes.xaxis)
        said = []
        for bar in bars.patches:
            length = bar.get_width() if long else bar.get_height()
            middle = bar.get_y() + bar.get_height() / 2 if long else bar.get_x() + bar.get_width() / 2
            near = min(names, key=lambda x: abs(x - middle), default=np.inf)
            place = " ".join(names[near].split()) if abs(near - middle) < 0.5 else _number(middle)
            said.append((float(length), f"{_number(float(length))} at {place}"))
        label = "" if _label(bars).startswith("_") else _label(bars)
        if len(said) > 1:
            name = f"{label}, " if label else ""
            yield f"{name}{len(said)} bars, largest {max(said)[1]}, smallest {min(said)[1]}"
        elif label:
            yield f"{label} {said[0][1]}"


def _area_texts(axes: Axes) -> Iterator[str]:
    names = [str(area.get_label()) for area in axes.collections]
    if named := [name for name in names if name and not name.startswith("_")]:
        yield f"areas, from below: {', '.join(named)}"


def _label(artist: Line2D | BarContainer) -> str:
    return str(artist.get_label())


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, Number) else str(value)
