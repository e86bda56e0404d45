"""A figure in a notebook: one drawing, an alternative text with what it shows, and a dark theme by CSS."""

from __future__ import annotations

import base64
import io
import json
import re

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from PIL import Image

from dlo_lib.drawing import new_figure
from dlo_lib.notebook_figure import NotebookFigure


@pytest.fixture
def figure() -> NotebookFigure:
    figure = new_figure(4, 3)
    left, right = figure.subplots(1, 2)
    left.plot([1, 8], [2.5, 20], label="ring <&>")
    left.set(title="time", xlabel="ranks", ylabel="ms")
    right.bar([0, 1, 2], [1, 5, 3], label="sent")
    right.set_title("bytes", loc="left")
    figure.summary = "Plot the time of a ring."
    return figure


def test_the_alternative_text_says_what_each_plot_shows(figure: NotebookFigure) -> None:
    assert figure.alternative_text() == (
        "Plot the time of a ring. time – ms against ranks: ring <&> from 2.5 at 1 to 20 at 8. "
        "bytes: sent, 3 bars from 1 to 5."
    )


def test_more_series_than_one_listens_to_are_counted() -> None:
    figure = new_figure(4, 3)
    axes = figure.subplots()
    for line in range(12):
        axes.plot([0, 1], [line, 1], label=f"line {line}")
    assert figure.alternative_text().endswith("line 7 from 7 at 0 to 1 at 1; and 4 more.")


def test_dates_and_names_on_an_axis_are_written_as_they_are() -> None:
    figure = new_figure(4, 3)
    figure.subplots().plot(["day one", "day two"], [1, 2], label="loss")
    assert figure.alternative_text() == "loss from 1 at day one to 2 at day two."


def test_places_with_names_are_called_by_their_names() -> None:
    figure = new_figure(4, 3)
    axes = figure.subplots()
    axes.plot([0, 1, 2], [0, 4, 6], label="sent")
    axes.set_xticks([0, 1, 2], ["1 rank", "2 ranks", "4 ranks"])
    assert figure.alternative_text() == "sent from 0 at 1 rank to 6 at 4 ranks."


def test_the_output_is_html_with_the_text_and_a_png_of_the_size(figure: NotebookFigure) -> None:
    bundle = figure.mime_bundle()
    alternative = re.search(r'alt="([^"]+)"', bundle["text/html"])
    assert alternative
    assert "ring &lt;&amp;&gt; from 2.5" in alternative[1]
    assert bundle["image/png"] in bundle["text/html"]
    width, height = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))).size
    assert 350 < width < 450
    assert 250 < height < 350
    assert '[data-jp-theme-light="false"]' in bundle["text/html"]


def test_a_cell_shows_the_figure_once(figure: NotebookFigure) -> None:
    shell = InteractiveShell.instance()
    with capture_output(display=True) as shown:
        shell.displayhook(figure)
    (output,) = shown.outputs
    assert set(output.data) == {"text/html", "image/png", "text/plain"}
    assert json.dumps(output.data)
