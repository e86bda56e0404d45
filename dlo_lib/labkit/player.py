"""Buttons that play a slider: the next value comes half a second after the figure of the one before is drawn.

ipywidgets' ``Play`` counts in the browser and does not wait for the kernel, so a figure that takes longer
than its interval falls behind, and its buttons have no names for a screen reader.
"""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

from dlo_lib.base.text import tr

PAUSE_S = 0.5  # between the end of a drawing and the next value


class Player:
    """The buttons of ``slider``: play or pause, back to the start, and whether it plays without end.

    A value is drawn by what observes the slider, before :meth:`advance` returns.
    """

    def __init__(self, slider: Any, ipywidgets: ModuleType) -> None:
        self._slider = slider
        self._task: asyncio.Task[None] | None = None
        wide = {"width": "auto"}
        what = slider.description
        self._play = ipywidgets.Button(
            description=tr("▶ Play"), tooltip=tr("play {what}", what=what), layout=wide
        )
        self._start = ipywidgets.Button(
            description=tr("■ Start"), tooltip=tr("return {what} to its start", what=what), layout=wide
        )
        self._loop = ipywidgets.ToggleButton(
            description=tr("↻ Loop"), tooltip=tr("play {what} without end", what=what), layout=wide
        )
        self._play.on_click(lambda _: self.pause() if self.playing else self.play())
        self._start.on_click(lambda _: self.to_start())

    @property
    def buttons(self) -> list[Any]:
        """The three buttons, in their order."""
        return [self._play, self._start, self._loop]

    @property
    def playing(self) -> bool:
        """Whether it plays."""
        return self._task is not None

    def play(self) -> None:
        """Begin to play, from the start if the slider is at its end. The kernel's event loop plays."""
        if self._slider.value >= self._slider.max:
            self._slider.value = self._slider.min
        self._task = asyncio.ensure_future(self._run())
        self._play.description = tr("❚❚ Pause")

    def pause(self) -> None:
        """Stop at the current value."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self._play.description = tr("▶ Play")

    def to_start(self) -> None:
        """Stop, and return to the first value."""
        self.pause()
        self._slider.value = self._slider.min

    def advance(self) -> bool:
        """Set the next value; return False at the end."""
        slider = self._slider
        if slider.value < slider.max:
            slider.value = min(slider.value + slider.step, slider.max)
        elif self._loop.value:
            slider.value = slider.min
        else:
            return False
        return True

    async def _run(self) -> None:
        await asyncio.sleep(PAUSE_S)
        while self.advance():
            await asyncio.sleep(PAUSE_S)
        self.pause()
