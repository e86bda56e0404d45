"""Searches that train every trial to the same resource, from a sampler or from a grid.

Cost: trials x resource.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.hpo.table import Begin, Decision, TrialRow, idle


@dataclass(frozen=True)
class EveryTrial:
    """``trials`` trials with hyperparameters from the sampler, each trained to ``resource``."""

    trials: int
    resource: int

    def decide(self, table: Sequence[TrialRow]) -> Decision:
        """Return the next new trial."""
        return Begin(self.resource, self.resource) if len(table) < self.trials else idle(table)


@dataclass(frozen=True)
class Grid:
    """All combinations of ``axes`` (values by name), each trained to ``resource``.

    The last name varies fastest. The values of an axis are a list, a tuple, a range or an array; they are
    kept as a list of plain values.

    Raises:
        UserError: there is no axis, or an axis has no values.
    """

    axes: Mapping[str, Sequence[Any]]
    resource: int

    def __post_init__(self) -> None:
        if not self.axes:
            raise UserError("the grid has no axis: give a list of values for each hyperparameter")
        object.__setattr__(self, "axes", {name: _plain(name, axis) for name, axis in self.axes.items()})

    def require_in(self, space: Mapping[str, BaseDistribution]) -> None:
        """Check that the axes are the names of ``space``, and that it contains their values.

        Raises:
            UserError: they are not, or it does not.
        """
        for name, values in self.axes.items():
            if name not in space:
                raise unknown_name("axis of the grid", name, space)
            distribution = space[name]
            for value in values:
                if not _contains(distribution, value):
                    raise UserError(
                        f"axis {name} of the grid has the value {value!r}, which {distribution} does not "
                        "contain: change the axis or the space"
                    )
        missing = [name for name in space if name not in self.axes]
        if missing:
            raise UserError(
                f"the grid has no axis for {', '.join(missing)}: add one with a single value, or take the "
                "name out of the space"
            )

    def decide(self, table: Sequence[TrialRow]) -> Decision:
        """Return the next combination."""
        place, params = len(table), dict[str, Any]()
        for name, values in reversed(list(self.axes.items())):
            place, at = divmod(place, len(values))
            params[name] = values[at]
        if place:
            return idle(table)
        return Begin(self.resource, self.resource, params={name: params[name] for name in self.axes})


def _plain(name: str, axis: Any) -> list[Any]:
    """Return the values of an axis as values of Python, which JSON can store.

    Raises:
        UserError: the axis is a single value, or has no values.
    """
    values = axis.tolist() if hasattr(axis, "tolist") else axis
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise UserError(f"axis {name} of the grid is {values!r}: give a list of values")
    plain = [value.item() if hasattr(value, "item") else value for value in values]
    if not plain:
        raise UserError(f"axis {name} of the grid has no values: give at least one, or leave the axis out")
    return plain


def _contains(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return distribution._contains(distribution.to_internal_repr(value))
    except (TypeError, ValueError):  # a text for a number, or a choice that is unknown
        return False
