"""A slider draws the figure again; without widgets the figure of the defaults stays."""

from __future__ import annotations

import sys
from typing import Any

import IPython.display
import pytest

from dlo_lib.drawing import new_figure
from dlo_lib.labkit.explore import explore


class Screen:
    """What was displayed, and what replaced it."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def __call__(self, thing: Any, raw: bool = False, display_id: bool = False) -> Screen:
        self.shown.append(thing["text/plain"] if raw else thing)
        return self

    def update(self, thing: Any, raw: bool) -> None:
        assert raw
        self.shown[-1] = thing["text/plain"]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    monkeypatch.setattr(IPython.display, "display", screen)
    return screen


def draw(micro_batches: int = 4, ranks: int = 2) -> Any:
    if micro_batches < ranks:
        raise ValueError("fewer micro-batches than ranks")
    figure = new_figure(1, 1)
    figure.suptitle(f"{ranks} ranks, {micro_batches} micro-batches")
    return figure


def test_a_slider_replaces_the_figure(screen: Screen) -> None:
    explore(draw, micro_batches=[1, 4, 8], ranks=[2, 4])
    box, figure = screen.shown
    assert figure == "2 ranks, 4 micro-batches."
    first, second = box.children
    first.value = 8
    second.value = 4
    assert screen.shown[1] == "4 ranks, 8 micro-batches."
    first.value = 1
    assert screen.shown[1] == "fewer micro-batches than ranks"


def test_a_range_of_moments_can_be_played(screen: Screen) -> None:
    explore(draw, ranks=range(2, 6), micro_batches=[4, 8])
    box, _ = screen.shown
    play, slider, _ = box.children
    assert (play.min, play.max, slider.min, slider.max) == (2, 5, 2, 5)
    play.value = 4  # as the page does while it plays
    assert slider.value == 4
    assert screen.shown[1] == "4 ranks, 4 micro-batches."
    slider.value = 3
    assert play.value == 3
    assert screen.shown[1] == "3 ranks, 4 micro-batches."


def test_without_widgets_the_figure_stays(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    explore(draw, micro_batches=[4, 8])
    assert screen.shown == ["2 ranks, 4 micro-batches."]


def test_a_start_that_is_no_choice_is_refused(screen: Screen) -> None:
    with pytest.raises(TypeError, match="'ranks'"):
        explore(draw, ranks=[4, 8])
