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

from dlo_lib.base.drawing import new_figure
from dlo_lib.base.notebook_figure import NotebookFigure
from dlo_lib.profiling import measure_memory, plot_memory


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
        "time – ms against ranks: ring <&> from 2.5 at 1 to 20 at 8. "
        "bytes: sent, 3 bars, largest 5 at 1, smallest 1 at 0."
    )


def test_the_highest_and_the_lowest_point_between_the_ends_are_named() -> None:
    figure = new_figure(4, 3)
    axes = figure.subplots()
    axes.plot([0, 1, 2, 3], [2, 9, 1, 4], label="held")
    axes.plot([0, 1, 2, 3], [1, 2, 3, 4], label="rises")
    axes.axhline(7.5, label="usable")
    text = "held from 2 at 0 to 4 at 3, highest 9 at 1, lowest 1 at 2; rises from 1 at 0 to 4 at 3; "
    assert figure.alternative_text() == f"{text}usable, a line at 7.5."


def test_parts_of_one_bar_and_areas_are_named() -> None:
    figure = new_figure(4, 3)
    left, right = figure.subplots(1, 2)
    left.barh([0], [3], label="weights")
    left.barh([0], [5], left=[3], label="logits")
    left.set_yticks([0], ["one rank"])
    right.fill_between([0, 1], [1, 2], label="gradients")
    text = "weights 3 at one rank; logits 5 at one rank. areas, from below: gradients."
    assert figure.alternative_text() == text


def test_of_a_drawing_of_boxes_the_texts_in_it_and_the_summary_are_said() -> None:
    figure = new_figure(4, 3)
    axes = figure.subplots()
    axes.set_title("step 2")
    for rank in range(3):
        axes.text(rank, 0, f"rank {rank}\nsends")
    figure.summary = "One step of a ring."
    assert (
        figure.alternative_text() == "step 2: rank 0 sends; rank 1 sends; rank 2 sends. One step of a ring."
    )


def test_the_memory_of_a_step_begins_with_its_peak() -> None:
    report = measure_memory("tiny", batch=1, seq=16, parallel="none")
    text = plot_memory(report, limit_bytes=2**30, title="one step").alternative_text()
    peak = report.peak_bytes / 2**30
    assert re.match(
        rf"The memory held rises to a peak of {peak:.1f} GiB during \w+: [\w ]+ \d\.\d(, [\w ]+ \d\.\d)*\. "
        r"The step begins with \d\.\d and ends with \d\.\d GiB\. The peak is below the 1\.0 GiB",
        text,
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
