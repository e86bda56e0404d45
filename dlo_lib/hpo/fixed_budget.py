"""Searches that train every trial to the same resource, from a sampler or from a grid.

Cost: trials x resource.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

    The last name varies fastest.
    """

    axes: Mapping[str, Sequence[Any]]
    resource: int

    def decide(self, table: Sequence[TrialRow]) -> Decision:
        """Return the next combination."""
        place, params = len(table), dict[str, Any]()
        for name, values in reversed(list(self.axes.items())):
            place, at = divmod(place, len(values))
            params[name] = values[at]
        if place:
            return idle(table)
        return Begin(self.resource, self.resource, params={name: params[name] for name in self.axes})
