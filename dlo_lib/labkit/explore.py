"""A figure with sliders, one of which can play. Without widgets the figure of the initial values stays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dlo_lib.base.markup import render
from dlo_lib.base.text import tr
from dlo_lib.labkit.player import Player

if TYPE_CHECKING:
    from dlo_lib.base.notebook_figure import NotebookFigure

Choices = Sequence[Any] | Callable[..., range]


def explore(draw: Callable[..., NotebookFigure], **choices: Choices) -> None:
    """Show ``draw(...)`` with a slider for each of its arguments in ``choices``.

    The figure is an ordinary output of the cell, which the sliders replace. A saved notebook, a page without
    JavaScript and a kernel without ipywidgets therefore show the last figure that was drawn. A slider over a
    ``range`` has a button that plays its values: the next one half a second after the figure of the one
    before is drawn. Two more buttons return to its start, and play without end.

    Args:
        draw: draws the figure. The default value of an argument is where its slider starts. After a
            ValueError, because some combinations may make no sense, the last figure stays, with a sentence.
        choices: the values of each slider, in order. A ``range`` is a sequence of moments. A function returns
            a range for the values of other sliders, which it takes by name: ``step=lambda ranks:
            range(ranks)``.

    Raises:
        TypeError: an argument has no default value, or its default is no choice.
    """
    from IPython.display import display

    parameters = inspect.signature(draw).parameters
    values = {name: parameters[name].default for name in choices if name in parameters}
    for name, options in choices.items():
        if name not in values or values[name] not in (offered := _offered(options, values)):
            raise TypeError(
                f"the default of {name!r} should be one of {list(offered) if name in values else []}"
            )
    picture = _Picture(draw)
    try:
        import ipywidgets
    except ImportError:
        display(picture.of(values), raw=True)
        return
    sliders: dict[str, Any] = {}
    row = []
    for name, options in choices.items():
        look: dict[str, Any] = {"value": values[name], "description": name.replace("_", " ")}
        look |= {"style": {"description_width": "initial"}, "continuous_update": False}
        offered = _offered(options, values)
        if isinstance(offered, range):
            look |= {"min": offered[0], "max": offered[-1], "step": offered.step}
            sliders[name] = ipywidgets.IntSlider(**look)
            row += Player(sliders[name], ipywidgets).buttons
        else:
            sliders[name] = ipywidgets.SelectionSlider(**look, options=list(offered))
        row.append(sliders[name])
    box = ipywidgets.HBox(row, layout={"flex_flow": "row wrap"})
    box.add_class("dlo-explore")
    display(box)
    display({"application/javascript": render("explore"), "text/plain": ""}, raw=True)
    shown = display(picture.of(values), raw=True, display_id=True)

    def redraw(name: str, change: dict[str, Any]) -> None:
        if values[name] == change["new"]:  # the range of another slider became shorter, see below
            return
        values[name] = change["new"]
        for other, options in choices.items():
            if callable(options):
                offered = _offered(options, values)
                values[other] = min(values[other], offered[-1])
                sliders[other].max = offered[-1]
        if shown is not None:
            shown.update(picture.of(values), raw=True)

    for name, slider in sliders.items():
        slider.observe(partial(redraw, name), names="value")


def _offered(options: Choices, values: Mapping[str, Any]) -> Sequence[Any]:
    """The choices of a slider, for the values of the other ones."""
    if not callable(options):
        return options
    return options(**{name: values[name] for name in inspect.signature(options).parameters})


class _Picture:
    """Draws, and keeps the last figure for combinations that make no sense."""

    def __init__(self, draw: Callable[..., NotebookFigure]) -> None:
        self._draw = draw
        self._last: dict[str, str] = {}
        self._of = ""

    def of(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the output for ``values``: the figure, or a sentence and the last figure."""
        try:
            self._last = self._draw(**values).mime_bundle()
        except ValueError as error:
            if not self._last:
                return {"text/plain": str(error)}
            says = tr(
                "{error}. The figure still shows {values}.", error=str(error).rstrip("."), values=self._of
            )
            html = render("lines", lines=[says]) + self._last.get("text/html", "")
            return self._last | {"text/html": html, "text/plain": f"{says}\n{self._last['text/plain']}"}
        self._of = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
        return self._last
