"""A slider draws the figure again; without widgets the figure of the defaults stays."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import IPython.display
import pytest

from dlo_lib.base.drawing import new_figure
from dlo_lib.labkit.explore import explore


class Screen:
    """What was displayed, and what replaced it."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.script = ""

    def __call__(self, thing: Any, raw: bool = False, display_id: bool = False) -> Screen:
        if raw and "application/javascript" in thing:
            self.script = thing["application/javascript"]
        else:
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
    assert 'setAttribute("aria-label", label.textContent)' in screen.script


def test_a_combination_without_sense_keeps_the_last_figure(screen: Screen) -> None:
    explore(draw, micro_batches=[1, 4, 8], ranks=[2, 4])
    box, _ = screen.shown
    first, _ = box.children
    first.value = 1
    said = "fewer micro-batches than ranks. The figure still shows micro batches 4, ranks 2."
    assert screen.shown[1] == f"{said}\n2 ranks, 4 micro-batches."
    first.value = 8
    assert screen.shown[1] == "2 ranks, 8 micro-batches."


def test_a_range_that_depends_on_another_slider_follows_it(screen: Screen) -> None:
    def moment(ranks: int = 4, step: int = 0) -> Any:
        assert step < ranks
        drawn.append((ranks, step))
        return draw(8, ranks)

    drawn: list[tuple[int, int]] = []
    explore(moment, ranks=[2, 4, 6], step=lambda ranks: range(ranks))
    ranks, *_, step = screen.shown[0].children
    assert step.max == 3
    step.value = 3
    ranks.value = 2  # there is no step 3 now
    ranks.value = 6
    assert (step.value, step.max) == (1, 5)
    assert drawn == [(4, 0), (4, 3), (2, 1), (6, 1)]  # each figure once


def play_all(buttons: list[Any], clicks: Callable[[int], None]) -> None:
    """Click on Play, and call ``clicks`` with the number of the pause, until it does not play any more."""

    async def run() -> None:
        buttons[0].click()
        for number in range(20):
            await asyncio.sleep(0)
            clicks(number)
            if "Play" in buttons[0].description:
                return
        raise AssertionError("it plays without end")

    asyncio.run(run())


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlo_lib.labkit.player.PAUSE_S", 0)


@pytest.mark.usefixtures("no_pause")
def test_a_range_of_moments_can_be_played(screen: Screen) -> None:
    """The next value comes after the figure of the one before: the drawing is part of a step."""
    seen: list[int] = []

    def moment(step: int = 1) -> Any:
        seen.append(step)
        return draw(8, 2)

    explore(moment, step=range(1, 4))
    *buttons, slider = screen.shown[0].children
    play_all(buttons, lambda number: None)
    assert seen == [1, 2, 3]
    play_all(buttons, lambda number: None)  # again, from the start
    assert seen == [1, 2, 3, 1, 2, 3]
    play_all(buttons, lambda number: buttons[1].click() if number == 2 else None)
    assert (slider.value, buttons[0].description) == (1, "▶ Play")
    buttons[2].value = True  # without end: pause it
    seen.clear()
    play_all(buttons, lambda number: buttons[0].click() if number == 8 else None)
    assert seen[:5] == [2, 3, 1, 2, 3]


def test_every_button_has_a_name(screen: Screen) -> None:
    explore(draw, ranks=range(2, 6))
    *buttons, slider = screen.shown[0].children
    assert [button.description for button in buttons] == ["▶ Play", "■ Start", "↻ Loop"]
    assert all("ranks" in button.tooltip for button in buttons)
    assert slider.description == "ranks"


def test_without_widgets_the_figure_stays(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    explore(draw, micro_batches=[4, 8])
    assert screen.shown == ["2 ranks, 4 micro-batches."]


def test_a_start_that_is_no_choice_is_refused(screen: Screen) -> None:
    with pytest.raises(TypeError, match="'ranks'"):
        explore(draw, ranks=[4, 8])
