"""How a figure distinguishes the elements of a sweep: by colours and dashes, and in groups of bars.

One setting has the colours: the one with the most values, from dark to light if they are numbers. If there
is one other setting, with up to four values, it has the dashes. A legend of 12 + 3 lines explains 36 curves.
Of more than 16 values the legend shows some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlo_lib.base.text import tr
from dlo_lib.cluster.view.views import labels, short, varied

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

_DASHES = ("-", "--", ":", "-.")
# Colours that colour-blind readers can distinguish (after Okabe and Ito, 2008).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")
_MOST_LINES, _SOME = 16, 7  # lines of a legend, and of one that shows some values
_LIGHTEST = 0.9  # of the colour map, because its end is hard to see on white


@dataclass(frozen=True)
class CurveStyles:
    """The looks of the elements of a sweep.

    Attributes:
        labels: what an element has and others have not, by element.
        colours: by element, as matplotlib takes them.
        dashes: by element.
        legend: label, colour and dashes of each line of the legend.
        groups: elements side by side in a bar chart, and the label below them.
        axis: the label of that axis.
    """

    labels: tuple[str, ...]
    colours: tuple[Any, ...]
    dashes: tuple[Any, ...]
    legend: tuple[tuple[str, Any, Any], ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    axis: str

    def handles(self) -> list[Line2D]:
        """Return the lines of the legend."""
        from matplotlib.lines import Line2D

        return [
            Line2D([], [], color=colour, linestyle=dashes, label=label)
            for label, colour, dashes in self.legend
        ]

    def places(self, elements: Sequence[int]) -> tuple[list[float], list[float], list[str]]:
        """Return where a bar chart has the bars of ``elements``, and the places and labels of its groups.

        The centres of neighbours are 1 apart, and those of neighbours in two groups 1.5.
        """
        at, found, centres, names = 0.0, dict[int, float](), list[float](), list[str]()
        for name, members in self.groups:
            here = [element for element in members if element in set(elements)]
            if here:
                for element in here:
                    found[element] = at
                    at += 1
                centres.append((found[here[0]] + found[here[-1]]) / 2)
                names.append(name)
                at += 0.5 if len(here) > 1 else 0.0
        return [found[element] for element in elements], centres, names


def styles_of(settings: Sequence[dict[str, Any]], name: str) -> CurveStyles:
    """Return the looks of the elements with these settings.

    Args:
        name: of the job, the label of a single element.
    """
    names = varied(settings) if len(settings) > 1 else []
    if not names:
        said = tuple(labels(settings)) if len(settings) > 1 else (name,)
        alone = tuple((label, (element,)) for element, label in enumerate(said))
        return CurveStyles(said, (_COLOURS[0],) * len(said), ("-",) * len(said), (), alone, "")
    values = {one: _values(settings, one) for one in names}
    first = max(names, key=lambda one: len(values[one]))
    rest = [one for one in names if one != first]
    colour = dict(zip(map(short, values[first]), _colours(values[first])))
    dashed = rest[0] if len(rest) == 1 and len(values[rest[0]]) <= len(_DASHES) else None
    dashes = dict(zip(map(short, values[dashed]), _DASHES)) if dashed else {}
    of_element = [short(one.get(first)) for one in settings]
    second = [short(one.get(dashed)) if dashed else "" for one in settings]
    order = list(dashes) or [""]
    groups = tuple(
        (
            value,
            tuple(
                sorted(
                    (element for element, own in enumerate(of_element) if own == value),
                    key=lambda element: order.index(second[element]),
                )
            ),
        )
        for value in colour
    )
    return CurveStyles(
        tuple(labels(settings)),
        tuple(colour[value] for value in of_element),
        tuple(dashes.get(value, "-") for value in second),
        tuple((f"{first}={value}", colour[value], "-") for value in _some(list(colour)))
        + tuple((f"{dashed}={value}", "#555555", dash) for value, dash in dashes.items()),
        groups,
        _axis(first, rest if len(groups) < len(settings) else [], list(dashes)),
    )


def _some(values: list[str]) -> list[str]:
    """Return the values, or some of many: the first, the last, and others at equal distances."""
    if len(values) <= _MOST_LINES:
        return values
    return [values[round(place * (len(values) - 1) / (_SOME - 1))] for place in range(_SOME)]


def _axis(first: str, rest: list[str], values: list[str]) -> str:
    if not rest:
        return first
    second = f"{rest[0]}={','.join(values)}" if values else ", ".join(rest)
    return tr("{first}; in each group {second}", first=first, second=second)


def _values(settings: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """Return the values of a setting, each once, numbers in their order."""
    found = list({short(one.get(name)): one.get(name) for one in settings}.values())
    return sorted(found) if all(_is_number(value) for value in found) else found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _colours(values: list[Any]) -> list[Any]:
    """Return a colour for each value: a scale for three numbers or more, and for more values than colours."""
    if (len(values) < 3 or not all(map(_is_number, values))) and len(values) <= len(_COLOURS):
        return list(_COLOURS[: len(values)])
    from matplotlib import colormaps

    scale = colormaps["viridis"]
    return [scale(_LIGHTEST * place / max(1, len(values) - 1)) for place in range(len(values))]
