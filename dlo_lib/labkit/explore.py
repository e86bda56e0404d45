"""A figure with sliders, one of which can play. Without widgets the figure of the initial values stays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlo_lib.notebook_figure import NotebookFigure


def explore(draw: Callable[..., NotebookFigure], **choices: Sequence[Any]) -> None:
    """Show ``draw(...)`` with a slider for each of its arguments in ``choices``.

    The figure is an ordinary output of the cell, which the sliders replace. A saved notebook, a page without
    JavaScript and a kernel without ipywidgets therefore show the last figure that was drawn. A slider over a
    ``range`` has a button that plays its values, one each half second, and one that returns to its start.

    Args:
        draw: draws the figure. The default value of an argument is where its slider starts. A ValueError is
            shown as a sentence in place of the figure: some combinations may make no sense.
        choices: the values of each slider, in order. A ``range`` is a sequence of moments.

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

    def current() -> dict[str, str]:
        try:
            return draw(**values).mime_bundle()
        except ValueError as error:
            return {"text/plain": str(error)}

    try:
        import ipywidgets
    except ImportError:
        display(current(), raw=True)
        return
    sliders, row = [], []
    for name, options in choices.items():
        look: dict[str, Any] = {"value": values[name], "description": name.replace("_", " ")}
        look["style"] = {"description_width": "initial"}
        if isinstance(options, range):
            look |= {"min": options[0], "max": options[-1], "step": options.step}
            play = ipywidgets.Play(**look, interval=500)
            sliders.append(ipywidgets.IntSlider(**look))
            ipywidgets.link((play, "value"), (sliders[-1], "value"))
            row.append(play)
        else:
            look |= {"options": list(options), "continuous_update": False}
            sliders.append(ipywidgets.SelectionSlider(**look))
        row.append(sliders[-1])
    display(ipywidgets.HBox(row))
    shown = display(current(), raw=True, display_id=True)

    def redraw(name: str, change: dict[str, Any]) -> None:
        values[name] = change["new"]
        if shown is not None:
            shown.update(current(), raw=True)

    for name, slider in zip(choices, sliders, strict=True):
        slider.observe(partial(redraw, name), names="value")
