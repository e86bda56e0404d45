"""A figure with sliders. Where there are no widgets the figure stays, drawn with the initial values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dlo_lib.grading.checks.verdict import Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def explore(draw: Callable[..., Figure], **choices: Sequence[Any]) -> None:
    """Show ``draw(...)`` with a slider for each of its arguments in ``choices``.

    The figure is an ordinary output of the cell, which the sliders replace. A saved notebook, a page without
    JavaScript and a kernel without ipywidgets therefore show the last figure that was drawn.

    Args:
        draw: draws the figure. The default value of an argument is where its slider starts. A ValueError is
            shown as a sentence in place of the figure: some combinations may make no sense.
        choices: the values of each slider, in order.

    Raises:
        TypeError: an argument has no default value, or its default is no choice.
    """
    from IPython.display import display

    parameters = inspect.signature(draw).parameters
    values = {}
    for name, options in choices.items():
        if name not in parameters or parameters[name].default not in options:
            raise TypeError(f"the default of {name!r} should be one of {list(options)}")
        values[name] = parameters[name].default

    def current() -> Figure | Shown:
        try:
            return draw(**values)
        except ValueError as error:
            return Shown(str(error))

    try:
        from ipywidgets import HBox, SelectionSlider
    except ImportError:
        display(current())
        return
    sliders = [
        SelectionSlider(
            description=name.replace("_", " "), options=list(options), value=values[name],
            continuous_update=False, style={"description_width": "initial"},
        )
        for name, options in choices.items()
    ]  # fmt: skip
    display(HBox(sliders))
    shown = display(current(), display_id=True)

    def redraw(name: str, change: dict[str, Any]) -> None:
        values[name] = change["new"]
        if shown is not None:
            shown.update(current())

    for name, slider in zip(choices, sliders, strict=True):
        slider.observe(partial(redraw, name), names="value")
