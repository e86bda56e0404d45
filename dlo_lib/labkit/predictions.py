"""Predictions: numbers that students write before a measurement, shown beside what was measured.

matplotlib is imported on first use, because a cell of imports runs in every worker of the judge.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.text import columns, tr

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Predicted = Mapping[str, float | None]
"""What is measured → the student's prediction; None is no prediction."""


def require_numbers(*predictions: Predicted) -> None:
    """Raise if a prediction is not a number, before a measurement takes its time.

    A cell that measures begins with it. A prediction cell that has not run is a NameError at this place.

    Raises:
        UserError: a prediction is neither a number nor None.
    """
    for predicted in predictions:
        numbers(predicted, predicted)


def compared(
    predicted: Predicted, measured: Mapping[str, float], text: Callable[[float], str] = "{:.3g}".format
) -> str:
    """Return a table with a row for each measured value: predicted, measured, and their ratio.

    Args:
        text: formats a value, such as ``labkit.figures.mib``.

    Raises:
        UserError: a prediction is not a number, or nothing is measured under its name.
    """
    guesses = numbers(predicted, measured)
    rows = [("", tr("predicted"), tr("measured"), tr("measured / predicted"))]
    for name, value in measured.items():
        guess = guesses.get(name)
        ratio = f"{value / guess:.2f}" if guess else "-"
        rows.append((name, "-" if guess is None else text(guess), text(value), ratio))
    return columns(rows)


def mark_predicted(
    axes: Axes,
    positions: Mapping[str, float],
    predicted: Predicted,
    *,
    horizontal: bool = False,
    **options: Any,
) -> None:
    """Draw a diamond at each prediction, and name them in the legend; no predictions draw nothing.

    Args:
        positions: the x coordinate of each measured value, with ``horizontal`` the y coordinate.
        horizontal: the values are along the x axis, as in a figure of horizontal bars.
        options: arguments of ``Axes.plot``, such as another ``label``.

    Raises:
        UserError: as for :func:`compared`.
    """
    from dlo_lib.labkit.figures import BACKGROUND, BLACK

    guesses = numbers(predicted, positions)
    if not guesses:
        return
    diamond: dict[str, Any] = {"linestyle": "", "marker": "D", "markersize": 8, "markeredgecolor": BLACK}
    diamond |= {"markerfacecolor": BACKGROUND, "markeredgewidth": 1.6, "zorder": 5}
    diamond["label"] = tr("your prediction")
    places, values = [positions[name] for name in guesses], list(guesses.values())
    points = (values, places) if horizontal else (places, values)
    axes.plot(*points, **diamond | options)


def scaled(predicted: Predicted, factor: float) -> dict[str, float | None]:
    """Return the predictions times ``factor``, for a figure in another unit; what is no number stays.

    A figure that draws them refuses what is no number.
    """
    return {name: guess * factor if _is_number(guess) else guess for name, guess in predicted.items()}


def numbers(predicted: Predicted, known: Collection[str]) -> dict[str, float]:
    """Return the predictions that are numbers; ``known`` has the names that may be predicted."""
    if not isinstance(predicted, Mapping):
        cure = 'write a dict, such as {"DDP": 12.5}'
        raise UserError(tr("the predictions are {got!r}: {cure}", got=predicted, cure=cure))
    found: dict[str, float] = {}
    for name, guess in predicted.items():
        if name not in known:
            raise unknown_name("prediction", name, list(known))
        if guess is None or guess is ...:
            continue
        if not _is_number(guess):
            raise UserError(
                tr("the prediction of {name} is {got!r}: write a number, or None", name=name, got=guess)
            )
        found[name] = float(guess)
    return found


def _is_number(guess: object) -> TypeGuard[float]:
    return isinstance(guess, int | float) and not isinstance(guess, bool)
