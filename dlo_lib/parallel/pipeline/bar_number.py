"""A number in a bar that is shown only where it fits.

Whether it fits is known when the figure is drawn, because the limits of the time axis can change until then:
several drawings may share the axis of the slowest one, in which the bars of the others are narrow.
"""

from __future__ import annotations

from typing import Any

from matplotlib.text import Text

_DIGIT = 0.6  # width of a digit, in units of the font size


class BarNumber(Text):
    """The text ``number`` in the middle of a horizontal bar from ``start`` to ``end`` at height ``y``, all in
    data coordinates."""

    def __init__(self, start: float, end: float, y: float, number: str, **options: Any) -> None:
        super().__init__((start + end) / 2, y, number, ha="center", va="center", clip_on=True, **options)
        self._bar = [(start, y), (end, y)]

    def get_visible(self) -> bool:
        """Return whether the bar is at least as wide as the number."""
        if not super().get_visible() or self.axes is None:
            return super().get_visible()
        (left, _), (right, _) = self.axes.transData.transform(self._bar)
        points = 72 * (right - left) / self.axes.figure.dpi
        return bool(points >= _DIGIT * float(self.get_fontsize()) * len(self.get_text()))
