"""Measured values as bars, with the student's predictions on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from matplotlib.figure import Figure

from dlo_lib.labkit.figures import BLUE, finish, panels, styled
from dlo_lib.labkit.predictions import Predicted, mark_predicted, numbers


@styled
def predicted_bars(
    measured: Mapping[str, float],
    predicted: Predicted,
    ylabel: str,
    *,
    title: str = "",
    text: Callable[[float], str] = "{:.3g}".format,
    log: bool = False,
) -> Figure:
    """What was measured, as bars; diamonds are your predictions.

    Args:
        text: formats the number above a bar.
        log: a logarithmic axis, for positive values of different orders of magnitude.

    Raises:
        UserError: as for :func:`dlo_lib.labkit.predictions.compared`.
    """
    (axes,) = panels(width=max(7.0, 1.9 * len(measured)), height=3.2)
    positions = {name: place for place, name in enumerate(measured)}
    heights = [*measured.values(), *numbers(predicted, positions).values()]
    if log:
        axes.set_yscale("log")
        positive = [height for height in heights if height > 0]
        axes.set_ylim(0.3 * min(positive), 5 * max(positive))
    else:
        axes.set_ylim(0, 1.25 * max(heights) or 1)
    axes.bar(list(positions.values()), list(measured.values()), 0.5, color=BLUE, label="measured")
    for name, place in positions.items():
        at = (place, measured[name])
        axes.annotate(text(measured[name]), at, xytext=(0, 7), textcoords="offset points", ha="center")
    before = len(axes.lines)
    mark_predicted(axes, positions, predicted)
    if len(axes.lines) > before:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    axes.set_xticks(list(positions.values()), list(positions))
    axes.set_xlim(-0.6, len(measured) - 0.4)
    return finish(axes, ylabel=ylabel, title=title)
