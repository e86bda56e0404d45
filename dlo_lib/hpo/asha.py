"""ASHA: successive halving in which nobody waits, because a trial goes on as soon as it is among the best part of its rung so far.

A free worker looks from the top rung down for a trial that is in the best 1 / eta of those that have reported on its rung and has not gone
on; if there is none it begins a new trial at the bottom. Early promotions may be wrong ones: the paper shows their number to be small
against the rung. Optuna's SuccessiveHalvingPruner decides at each rung whether a running trial *stops*, and never takes one up again; this
is the version with promotion.

L. Li et al., A System for Massively Parallel Hyperparameter Tuning (2018), arXiv:1810.05934, algorithm 2. Cost: a checkpoint of every trial
that may still go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dlo_lib.hpo.halving import rungs
from dlo_lib.hpo.table import Begin, Decision, GoOn, Row, best_first, idle


@dataclass(frozen=True)
class Asha:
    """At most ``trials`` trials, from ``least`` to ``most``, of which each rung lets one in ``eta`` go on at once."""

    trials: int
    least: int
    most: int
    eta: int = 3

    def decide(self, table: Sequence[Row]) -> Decision:
        """A promotion, from the top; else a new trial."""
        resources = [rung.resource for rung in rungs(self.trials, self.least, self.most, self.eta)]
        for below, above in reversed(list(pairwise(resources))):
            told = [row for row in table if row.is_through(below)]
            for row in best_first(told, below)[: len(told) // self.eta]:
                if not row.has_begun(above):
                    return GoOn(row.number, above)
        if len(table) < self.trials:
            return Begin(resources[0], until=resources[-1])
        return idle(table)
