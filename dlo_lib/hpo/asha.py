"""ASHA: asynchronous successive halving.

A trial is promoted as soon as it is in the best 1 / eta of its rung.

A free worker searches the rungs from the top down for a trial that is in the best 1 / eta of the trials that
have reported on the rung and that is not promoted yet. If there is none, the worker starts a new trial on the
lowest rung. No worker waits for a rung to complete. Some early promotions are wrong; the paper shows that
their number is small against the size of the rung. Optuna's SuccessiveHalvingPruner decides on each rung
whether a running trial *stops*, and it never resumes a stopped trial. This module implements the version with
promotion.

L. Li et al., A System for Massively Parallel Hyperparameter Tuning (2018), arXiv:1810.05934, algorithm 2.
Cost: one checkpoint of each trial that can still be promoted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dlo_lib.hpo.halving import rungs
from dlo_lib.hpo.table import Begin, Decision, Promote, TrialRow, best_first, idle


@dataclass(frozen=True)
class Asha:
    """At most ``trials`` trials with resources from ``least`` to ``most``; each rung promotes one trial in
    ``eta``.
    """

    trials: int
    least: int
    most: int
    eta: int = 3

    def decide(self, table: Sequence[TrialRow]) -> Decision:
        """Return a promotion, from the highest rung that has one; otherwise a new trial."""
        resources = [rung.resource for rung in rungs(self.trials, self.least, self.most, self.eta)]
        for below, above in reversed(list(pairwise(resources))):
            reported = [row for row in table if row.is_through(below)]
            for row in best_first(reported, below)[: len(reported) // self.eta]:
                if not row.has_begun(above):
                    return Promote(row.number, above)
        if len(table) < self.trials:
            return Begin(resources[0], until=resources[-1])
        return idle(table)
