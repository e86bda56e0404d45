"""The style of the figures of the labs, and its use: no lab keeps a private copy."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from dlo_lib.base import drawing
from dlo_lib.cluster.view import dashboard
from dlo_lib.comm.tracing import timeline
from dlo_lib.grading.lab.course import source_labs
from dlo_lib.labkit import figures
from dlo_lib.labkit.figures import (
    BACKGROUND,
    COLOURS,
    LIMIT,
    METHODS,
    MUTED,
    RANKS,
    finish,
    legend,
    panels,
    styled,
)
from dlo_lib.parallel.pipeline import draw
from dlo_lib.parallel.pipeline.schedules import one_f_one_b
from dlo_lib.parallel.pipeline.simulate import simulate
from dlo_lib.profiling import plot
from dlo_lib.profiling.technical_check import COLOURS as OF_PHASES

ROOT = Path(__file__).parents[2]
LABS = [
    *sorted((ROOT / "labs").glob("*/figures.py")),
    ROOT / "dlo_lib" / "grading" / "lab" / "template" / "figures.py.j2",
]
WHITE, BLACK, DARK_PAGE = "#FFFFFF", "#000000", "#111111"

# Linear RGB as people see it who lack one kind of cone: G. Machado et al., "A Physiologically-based Model for
# Simulation of Color Vision Deficiency" (2009), severity 1.0.
VISION = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ = [
    [0.4124564, 0.3575761, 0.1804375],
    [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
]


def lab(colour: str, vision: str) -> np.ndarray:
    """``colour`` in CIELAB, under the white point D65, as people with ``vision`` see it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array(XYZ) @ np.clip(np.array(VISION[vision]) @ linear, 0, 1) / [0.95047, 1, 1.08883]
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one: str, other: str, vision: str) -> float:
    return float(np.linalg.norm(lab(one, vision) - lab(other, vision)))


def pixels(figure: matplotlib.figure.Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


@styled
def two_lines(**labels) -> matplotlib.figure.Figure:
    (axes,) = panels(width=4, height=3)
    for index, look in zip(range(2), METHODS):
        axes.plot([0, 1], [index, 2], **look.line(marked=True), label=f"line {index}")
    axes.legend()
    return finish(axes, **labels)


def test_a_rank_has_one_colour_in_each_figure() -> None:
    """In the labs by RANKS, in the drawing of a pipeline, and for more ranks than there are colours."""
    axes = drawing.new_figure(4, 3).subplots()
    draw.draw_memory(axes, simulate(one_f_one_b(6, 8)), activations=1.0)
    for rank, line in enumerate(axes.lines):
        assert (line.get_color(), drawing.rank_line(rank)) == (
            RANKS[rank].colour,
            {"color": RANKS[rank].colour, "linestyle": RANKS[rank].dashes},
        )
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 6


def test_a_phase_has_one_colour_in_the_dashboard_and_in_the_technical_check() -> None:
    assert dashboard.PARTS.items() <= OF_PHASES.items()
    assert set(dashboard.PARTS.values()) <= {*COLOURS, drawing.SKY}


def test_contrast_is_that_of_wcag() -> None:
    assert figures.contrast(BLACK, WHITE) == pytest.approx(21)
    assert figures.contrast("#777777", WHITE) == pytest.approx(4.48, abs=0.01)
    assert figures.contrast(WHITE, "#777777") == figures.contrast("#777777", WHITE)


@pytest.mark.parametrize("colour", [*COLOURS, LIMIT, MUTED])
def test_lines_stand_out_from_the_background(colour: str) -> None:
    assert figures.contrast(colour, BACKGROUND) >= 3


@pytest.mark.parametrize("colour", [LIMIT, MUTED, figures.BLUE])
def test_colours_of_notes_are_readable(colour: str) -> None:
    assert figures.contrast(colour, BACKGROUND) >= 4.5


@pytest.mark.parametrize("vision", VISION)
def test_colours_differ_for_every_vision(vision: str) -> None:
    pairs = list(itertools.combinations(COLOURS[:4], 2))
    assert min(distance(one, other, vision) for one, other in pairs) > 15, "of four ranks"
    pairs = list(itertools.combinations(COLOURS, 2))
    assert min(distance(one, other, vision) for one, other in pairs) > 11, "of all lines"


def test_the_simulation_of_vision_finds_red_and_green() -> None:
    assert distance("#C00000", "#5A5A00", "normal") > 50
    assert distance("#C00000", "#5A5A00", "deuteranopia") < 20


FILLS = [*COLOURS, LIMIT, MUTED, figures.SKY, figures.PALE, *plot.COLOURS.values(), *draw.COLOURS.values()]
FILLS += [timeline.COMPUTING, timeline.WAITING, *timeline.KINDS.values()]


@pytest.mark.parametrize("fill", dict.fromkeys(FILLS))
def test_text_on_a_fill_is_readable(fill: str) -> None:
    assert figures.contrast(figures.text_on(fill), fill) >= 4.5


@pytest.mark.parametrize("cycle", [RANKS, METHODS])
def test_styles_differ_without_colour_and_never_repeat_early(cycle: figures.Cycle) -> None:
    first = [cycle[index] for index in range(20)]
    assert len(set(first)) == 20
    assert len({look.dashes for look in first[:5]}) == 5
    assert len({look.marker for look in first[:8]}) == 8
    assert [look for look, _ in zip(cycle, range(20))] == first


def test_a_line_and_its_points_share_colour_and_marker() -> None:
    look = METHODS[1]
    assert look.line() == {"color": look.colour, "linestyle": "--", "marker": ""}
    assert look.line(marked=True) == {**look.line(), "marker": "s"}
    assert look.points() == {**look.line(marked=True), "linestyle": ""}


def test_settings_of_matplotlib_stay() -> None:
    with style.context({"font.size": 17, "figure.facecolor": "black"}):
        two_lines(title="one")
        assert (matplotlib.rcParams["font.size"], matplotlib.rcParams["figure.facecolor"]) == (17, "black")


def test_a_figure_looks_the_same_under_a_dark_style() -> None:
    labels = {"title": "title", "xlabel": "x", "ylabel": "y"}
    usual = pixels(two_lines(**labels))
    with style.context("dark_background"):
        assert np.array_equal(pixels(two_lines(**labels)), usual)


def test_a_figure_is_opaque_so_that_its_text_is_readable_on_any_page() -> None:
    drawn = pixels(two_lines(title="title"))
    assert (drawn[..., 3] == 255).all()
    assert figures.contrast(BLACK, BACKGROUND) > 15 > 3 > figures.contrast(BLACK, DARK_PAGE)


def in_dark_theme(colour: str) -> tuple[float, ...]:
    """The colour after the CSS filters ``invert(a)`` and ``hue-rotate(180deg)`` of a figure.

    The matrix of hue-rotate is that of the W3C's Filter Effects Module.
    """
    page = (ROOT / "dlo_lib" / "base" / "templates" / "figure.html.j2").read_text()
    found = re.search(r"filter: invert\(([0-9.]+)\) hue-rotate\(180deg\);", page)
    assert found
    amount = float(found[1])
    inverted = amount - np.array(to_rgb(colour)) * (2 * amount - 1)
    rotate = [[-0.574, 1.430, 0.144], [0.426, 0.430, 0.144], [0.426, 1.430, -0.856]]
    return tuple(np.clip(np.array(rotate) @ inverted, 0, 1))


@pytest.mark.parametrize("colour", [*COLOURS, LIMIT, MUTED])
def test_lines_and_notes_stand_out_in_a_dark_theme(colour: str) -> None:
    background = in_dark_theme(BACKGROUND)
    assert figures.contrast(background, DARK_PAGE) < 1.1, "the figure has the ground of the page"
    needed = 4.5 if colour in (BLACK, LIMIT, MUTED) else 3
    assert figures.contrast(in_dark_theme(colour), background) >= needed


@pytest.mark.parametrize("fill", dict.fromkeys(FILLS))
def test_text_on_a_fill_is_readable_in_a_dark_theme(fill: str) -> None:
    text, ground = (in_dark_theme(each) for each in (figures.text_on(fill), fill))
    assert figures.contrast(text, ground) >= 4.5


def test_the_summary_of_a_figure_is_the_docstring_of_its_function() -> None:
    @styled
    def documented() -> matplotlib.figure.Figure:
        """Draw nothing
        at all.

        More.
        """
        return finish(*panels())

    assert documented().summary == "Draw nothing at all."


def test_ticks_that_appear_later_keep_the_style() -> None:
    with style.context({"xtick.labelsize": 3, "xtick.color": "yellow", "grid.color": "red"}):
        figure = two_lines()
        figure.axes[0].set_xlim(0, 1000)
        figure.axes[0].set_xticks(range(0, 1000, 20))
        pixels(figure)
        labels = figure.axes[0].get_xticklabels()
    assert len(labels) == 50
    assert {(text.get_fontsize(), text.get_color()) for text in labels} == {(10, BLACK)}


def test_no_font_is_smaller_than_the_smallest() -> None:
    figure = two_lines(title="title", xlabel="x", ylabel="y")
    pixels(figure)
    sizes = [text.get_fontsize() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]
    assert min(sizes) >= figures.SMALL


def test_panels_come_row_by_row() -> None:
    every = panels(3, 2, width=6, height=4, sharex=True)
    rows = [axes.get_subplotspec().rowspan.start for axes in every]
    assert (rows, tuple(every[0].get_figure().get_size_inches())) == ([0, 0, 0, 1, 1, 1], (6, 4))


def test_a_finished_panel_has_labels_no_frame_and_the_grid_asked_for() -> None:
    (axes,) = panels()
    assert finish(axes, "x", xlabel="steps", title="loss") is axes.get_figure()
    assert (axes.get_xlabel(), axes.get_title(loc="left") or axes.get_title()) == ("steps", "loss")
    assert [name for name in axes.spines if axes.spines[name].get_visible()] == ["left", "bottom"]
    assert [axes.xaxis.get_tick_params()["gridOn"], axes.yaxis.get_tick_params()["gridOn"]] == [True, False]
    finish(axes, None)
    assert [axes.xaxis.get_tick_params()["gridOn"], axes.yaxis.get_tick_params()["gridOn"]] == [False, False]


def test_a_figure_without_labels_has_no_legend_and_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    (axes,) = panels()
    axes.plot([1, 2])
    legend(axes, "right")
    assert axes.get_legend() is None
    assert not recwarn.list


@pytest.mark.parametrize("place", ["right", "above", "below"])
def test_a_legend_outside_covers_no_data(place: str) -> None:
    figure = two_lines()
    legend(figure.axes[0], place, reverse=True)
    pixels(figure)
    box, inside = figure.axes[0].get_legend().get_window_extent(), figure.axes[0].get_window_extent()
    assert not box.overlaps(inside) or box.y0 >= inside.y1 - 1
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["line 1", "line 0"]


def test_a_logarithmic_axis_has_the_ticks_asked_for() -> None:
    (axes,) = panels()
    axes.plot([1, 64], [1e-3, 2])
    figures.log_ticks(axes, "x", [1, 8, 64])
    figures.log_ticks(axes, "y", [0.01, 1], "{:.0%}".format, base=10)
    pixels(axes.get_figure())
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "8", "64"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["1%", "100%"]
    assert len(axes.get_xticks(minor=True)) == 0


def test_sizes_and_times_have_units() -> None:
    sizes = [figures.size(nbytes) for nbytes in (4, 1024, 25 << 20, 3 << 29, 5 << 40)]
    assert sizes == ["4 B", "1 KiB", "25 MiB", "1.5 GiB", "5.12e+03 GiB"]
    assert (figures.gib(3 << 29), figures.mib(3 << 19), figures.ms(0.0123)) == (
        "1.5 GiB",
        "1.5 MiB",
        "12.3 ms",
    )


def test_units_are_formatters_of_an_axis() -> None:
    (axes,) = panels()
    axes.set_ylim(0, 4 << 30)
    axes.yaxis.set_major_formatter(figures.gib)
    axes.set_yticks([0, 2 << 30])
    pixels(axes.get_figure())
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0.0 GiB", "2.0 GiB"]


PRIVATE = re.compile(
    r"['\"]#[0-9A-Fa-f]{3,8}['\"]|new_figure|rcParams|\bplt\b|"
    r"def _(clean|plain|axes|panels)\(|fontsize=[0-8]\b",
)


def private_style(source: str) -> list[str]:
    """Return the parts of a private style in ``source``, and the public functions without ``styled``."""
    bare = [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if node.returns is not None and ast.unparse(node.returns) == "Figure"
        if "styled" not in map(ast.unparse, node.decorator_list)
    ]
    return [match[0] for match in PRIVATE.finditer(source)] + bare


def test_a_private_style_is_found() -> None:
    source = 'BLUE = "#4c78a8"\n\ndef draw() -> Figure:\n    ax.text(0, 0, "", fontsize=8)\n'
    assert private_style(source) == ['"#4c78a8"', "fontsize=8", "draw"]


@pytest.mark.parametrize("file", LABS, ids=lambda file: file.parent.name)
def test_no_lab_keeps_a_private_style(file: Path) -> None:
    assert private_style(file.read_text(encoding="utf-8")) == []


def test_every_lab_has_figures() -> None:
    folders = {lab.directory for lab in source_labs()}
    # The library draws those of two labs: the map of the course and the memory of a step; plans.
    own = folders - {"00_start_here", "22_best_compromise"}
    assert own == {file.parent.name for file in LABS if file.suffix == ".py"}
