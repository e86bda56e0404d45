"""What is wrong with a figure as a reader sees it: its size, overlapping texts, small digits, an axis without
a label, a legend on a bar, no alternative text.

:func:`record_faults` runs in the kernel of a notebook and writes one line for each figure shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import BarContainer
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from dlo_lib.base.notebook_figure import NotebookFigure

WIDTH, HEIGHT = 1400, 1400  # pixels: a notebook on a screen is about 1000 wide
SMALLEST = 9  # pixels: the height of a font
OVERLAP = 0.15  # of the smaller one of two texts: boxes are a little larger than the letters


def faults(figure: NotebookFigure) -> list[str]:
    """Return one sentence for each fault of a figure that was shown."""
    FigureCanvasAgg(figure)
    figure.set_layout_engine("none")  # each text and each plot stays where the reader has seen it
    figure.draw_without_rendering()
    texts = _texts(figure)
    return [
        *_size(figure), *_alternative(figure), *_fonts(texts, figure.dpi), *_overlaps(texts),
        *(fault for axes in figure.axes if axes.get_visible() for fault in (*_labels(axes), *_legend(axes))),
    ]  # fmt: skip


def _size(figure: NotebookFigure) -> Iterator[str]:
    width, height = figure.get_size_inches() * figure.dpi
    if width > WIDTH or height > HEIGHT:
        yield f"it is {width:.0f} x {height:.0f} pixels"


def _alternative(figure: NotebookFigure) -> Iterator[str]:
    text = figure.alternative_text()
    if len(text.split()) < 5:
        yield f"its alternative text is {text!r}"


def _texts(figure: NotebookFigure) -> list[tuple[Text, Bbox]]:
    found = []
    for text in figure.findobj(Text):
        hidden = not text.get_visible() or not text.get_text().strip()
        if hidden or (text.axes is not None and not text.axes.get_visible()):
            continue
        box = text.get_window_extent()
        if text.get_clip_on() and text.axes is not None and not text.axes.bbox.overlaps(box):
            continue
        found.append((text, box))
    for axes in figure.axes:  # a tick outside of the limits is an object that is not drawn
        drawn = {id(tick.label1) for axis in (axes.xaxis, axes.yaxis) for tick in axis._update_ticks()}
        every = {
            id(tick.label1)
            for axis in (axes.xaxis, axes.yaxis)
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        }
        found = [(text, box) for text, box in found if id(text) in drawn or id(text) not in every]
    return found


def _fonts(texts: list[tuple[Text, Bbox]], dpi: float) -> Iterator[str]:
    for text, _ in texts:
        pixels = text.get_fontsize() * dpi / 72
        if pixels < SMALLEST:
            yield f"{text.get_text()!r} is {pixels:.1f} pixels high"


def _overlaps(texts: list[tuple[Text, Bbox]]) -> Iterator[str]:
    upright = [(text, box) for text, box in texts if not text.get_rotation() % 90]
    low = np.array([box.min for _, box in upright]).reshape(-1, 2)
    high = np.array([box.max for _, box in upright]).reshape(-1, 2)
    sides = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    areas, both = (high - low).prod(1), sides.clip(min=0).prod(2)  # of each text, of each pair
    least = np.minimum(areas[:, None], areas)
    for one, other in np.argwhere(np.triu(both > OVERLAP * least, k=1)):
        share = both[one, other] / least[one, other]
        names = (repr(upright[place][0].get_text()) for place in (one, other))
        yield f" covers {100 * share:.0f} % of ".join(names)


def _labels(axes: Axes) -> Iterator[str]:
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        ticks = [tick.label1 for tick in axis._update_ticks() if tick.label1.get_visible()]
        texts = [label.get_text().replace("\N{MINUS SIGN}", "-") for label in ticks if label.get_text()]
        numbers = [text for text in texts if _is_number(text)]
        shared = axes.get_shared_x_axes() if name == "x" else axes.get_shared_y_axes()
        labels = {other.xaxis.get_label_text() if name == "x" else other.yaxis.get_label_text()
                  for other in shared.get_siblings(axes)}  # fmt: skip
        if numbers and axes.axison and not any(labels):
            yield f"the {name} axis of {axes.get_title('left') or axes.get_title()!r} has no label"
        counted = any(label.split("(")[0].strip() in ("rank", "ranks", "step", "steps") for label in labels)
        if counted and any(not float(text).is_integer() for text in numbers):
            yield f"the {name} axis has parts of a rank or a step: {numbers}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _legend(axes: Axes) -> Iterator[str]:
    legend = axes.get_legend()
    if legend is None:
        return
    place = legend.get_window_extent()
    for bars in axes.containers:
        if isinstance(bars, BarContainer) and any(place.overlaps(bar.get_window_extent()) for bar in bars):
            yield "the legend lies on a bar"
            return


def record_faults(target: str) -> None:
    """Write the alternative text and the faults of each figure that is shown to the file ``target``."""
    shown = NotebookFigure.mime_bundle

    def recorded(figure: NotebookFigure) -> dict[str, str]:
        bundle = shown(figure)
        line = {"text": figure.alternative_text(), "faults": faults(figure)}
        with Path(target).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return bundle

    NotebookFigure.mime_bundle = recorded  # type: ignore[method-assign]
