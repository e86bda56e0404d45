"""A matplotlib figure that a notebook shows with an alternative text, and dark in a dark theme.

JupyterLab shows an ``image/png`` output without an alternative text and cannot change its colours. This
figure is therefore shown as HTML, with the PNG beside it for pages that show images only.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from numbers import Number
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from dlo_lib.markup import render

_SERIES = 8  # of a plot, in an alternative text: more are too many to listen to


class NotebookFigure(Figure):
    """A figure with an alternative text.

    Attributes:
        summary: one sentence that says what the figure shows, at the start of the alternative text.
    """

    summary: str = ""

    def alternative_text(self) -> str:
        """Return the summary, and for each plot its title, axes, and first and last value of each series."""
        title = self.get_suptitle()
        plots = [text for axes in self.axes if axes.get_visible() and (text := _plot_text(axes))]
        sentences = [part.rstrip(".") for part in (self.summary, title, *plots) if part]
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


def _plot_text(axes: Axes) -> str:
    title = " ".join(filter(None, (axes.get_title("left"), axes.get_title(), axes.get_title("right"))))
    across, along = axes.get_ylabel(), axes.get_xlabel()
    against = " against ".join(filter(None, (across, along)))
    series = [*_line_texts(axes), *_bar_texts(axes)]
    if len(series) > _SERIES:
        series = [*series[:_SERIES], f"and {len(series) - _SERIES} more"]
    heading = " ".join(" – ".join(filter(None, (title, against))).split())
    return ": ".join(filter(None, (heading, "; ".join(series))))


def _line_texts(axes: Axes) -> Iterator[str]:
    for line in axes.lines:
        across, along = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        if along.size and not _label(line).startswith("_"):
            ends, names = zip(across[[0, -1]].tolist(), along[[0, -1]].tolist()), _tick_names(axes.xaxis)
            first, last = (f"{_number(y)} at {names.get(x) or _number(x)}" for x, y in ends)
            yield f"{_label(line)} from {first} to {last}"


def _tick_names(axis: Axis) -> dict[float, str]:
    """What is written at the places of an axis whose ticks were set one by one."""
    if not isinstance(axis.get_major_locator(), FixedLocator):
        return {}
    places = np.asarray(axis.get_majorticklocs()).tolist()
    return dict(zip(places, axis.get_major_formatter().format_ticks(places)))


def _bar_texts(axes: Axes) -> Iterator[str]:
    for bars in axes.containers:
        if isinstance(bars, BarContainer) and len(bars.patches) > 1:
            long = bars.orientation == "horizontal"
            lengths = [bar.get_width() if long else bar.get_height() for bar in bars.patches]
            name = "" if _label(bars).startswith("_") else f"{_label(bars)}, "
            yield f"{name}{len(lengths)} bars from {_number(min(lengths))} to {_number(max(lengths))}"


def _label(artist: Line2D | BarContainer) -> str:
    return str(artist.get_label())


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, Number) else str(value)
