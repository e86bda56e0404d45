"""The plot shows the measured timeline."""

from __future__ import annotations

import pytest

from dlo_lib.profiling import MemoryReport, Part, measure_memory, plot_memory

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    return measure_memory("tiny", batch=2, seq=64, parallel="none")


def test_the_stack_reaches_the_peak_and_names_its_parts(report: MemoryReport):
    (ax,) = plot_memory(report, title="tiny").axes
    top = max(path.vertices[:, 1].max() for area in ax.collections for path in area.get_paths())
    assert top == pytest.approx(report.peak_bytes / 2**30, rel=0.01)  # very thin parts are not drawn
    assert {Part.WEIGHTS.value, Part.ACTIVATIONS.value, Part.LOGITS_AND_LOSS.value} <= {
        text.get_text() for text in ax.get_legend().get_texts()
    }
    assert ax.get_title() == "tiny"


def test_the_limit_of_the_gpu_is_a_line_above_or_through_the_stack(report: MemoryReport):
    limit = 2 * report.peak_bytes
    (ax,) = plot_memory(report, limit_bytes=limit).axes
    assert any(list(line.get_ydata()) == [limit / 2**30] * 2 for line in ax.lines)
    assert ax.get_ylim()[1] > limit / 2**30


def test_it_draws_into_given_axes(report: MemoryReport):
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert plot_memory(report, ax=right) is figure
    assert right.collections
    assert not left.collections


def test_every_part_has_a_different_colour():
    from dlo_lib.profiling.plot import COLOURS

    assert set(COLOURS) == set(Part)
    assert len(set(COLOURS.values())) == len(Part)
