"""The shared parts of figures."""

import pytest
from matplotlib import pyplot
from matplotlib.patches import Patch

from dlo_lib.base.drawing import new_figure, rows_of_ranks, whole_numbers


def test_a_figure_is_shown_once_by_the_cell_that_returns_it():
    before = pyplot.get_fignums()
    assert tuple(new_figure(4, 2).get_size_inches()) == (4, 2)
    assert pyplot.get_fignums() == before, "pyplot would show an open figure a second time"


def test_ranks_are_rows_with_the_first_on_top():
    axes = new_figure(4, 2).subplots()
    rows_of_ranks(axes, (0, 2), [Patch(label="computing")])
    bottom, top = axes.get_ylim()
    assert bottom > 1 > 0 > top
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 2"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["computing"]


@pytest.mark.parametrize(("label", "whole"), [("step", True), ("ranks", True), ("ms", False)])
def test_an_axis_that_counts_has_whole_numbers(label: str, whole: bool) -> None:
    axes = new_figure(6, 3).subplots()
    axes.plot([0, 1, 2], [0, 1, 2])
    axes.set_xlabel(label)
    whole_numbers(axes)
    assert all(float(tick).is_integer() for tick in axes.get_xticks()) == whole


def test_ticks_that_were_chosen_stay() -> None:
    axes = new_figure(6, 3).subplots()
    axes.set_xticks([0.5, 1.5], ["first", "second"])
    axes.set_xlabel("step")
    whole_numbers(axes)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["first", "second"]
