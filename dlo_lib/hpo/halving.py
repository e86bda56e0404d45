"""Successive halving and Hyperband.

Successive halving starts many trials with a small resource, keeps the best part and trains it further. A rung
is a resource at which trials are compared. With n trials that start with resource r, rung k has

    n_k = floor(n / eta^k) trials with r_k = r eta^k          as long as r_k <= R and n_k >= 1

so every rung costs about n r. It is not known beforehand how well the loss at r predicts the loss at R.
Hyperband therefore runs s_max + 1 brackets of equal cost, from the most aggressive one (s = s_max: most
trials, least resource) to random search (s = 0):

    s_max = floor(log_eta R)      n = ceil((s_max + 1) / (s + 1) eta^s)      r = R eta^-s

K. Jamieson and A. Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (2016),
arXiv:1502.07943; L. Li et al., Hyperband (2017), arXiv:1603.06560. Cost: a rung waits for its slowest trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dlo_lib.base.errors import UserError
from dlo_lib.hpo.table import Begin, Decision, NoTask, Promote, TrialRow, best_first, idle


@dataclass(frozen=True)
class Rung:
    """``trials`` trials, each trained to a total of ``resource``."""

    trials: int
    resource: int


def rungs(trials: int, least: int, most: int, eta: int) -> tuple[Rung, ...]:
    """Return the rungs of successive halving, from ``trials`` trials at ``least`` up to ``most`` or until no
    trial is left.

    Raises:
        UserError: ``trials`` or ``least`` is below 1, ``most`` is below ``least``, or ``eta`` is below 2.
    """
    if trials < 1 or least < 1 or most < least or eta < 2:
        raise UserError(
            f"{trials} trials from {least} to {most} with eta {eta}: "
            "use trials >= 1, 1 <= least <= most, eta >= 2"
        )
    found = [Rung(trials, least)]
    while (count := found[-1].trials // eta) >= 1 and (resource := found[-1].resource * eta) <= most:
        found.append(Rung(count, resource))
    return tuple(found)


def brackets(most: int, eta: int) -> tuple[tuple[Rung, ...], ...]:
    """Return the brackets of Hyperband, the most aggressive one first. Resources are
    rounded down, at least 1.

    Raises:
        UserError: ``most`` is below 1, or ``eta`` is below 2.
    """
    if most < 1 or eta < 2:
        raise UserError(f"Hyperband to {most} with eta {eta}: use most >= 1 and eta >= 2")
    s_max = 0
    while eta ** (s_max + 1) <= most:
        s_max += 1

    def bracket(s: int) -> tuple[Rung, ...]:
        trials = -(-(s_max + 1) * eta**s // (s + 1))
        return tuple(Rung(max(1, trials // eta**k), most * eta**k // eta**s) for k in range(s + 1))

    return tuple(bracket(s) for s in range(s_max, -1, -1))


@dataclass(frozen=True)
class SuccessiveHalving:
    """``trials`` trials with resources from ``least`` to ``most``; each rung keeps one trial in ``eta``.

    A rung starts when the rung below is complete.
    """

    trials: int
    least: int
    most: int
    eta: int = 3

    def decide(self, table: Sequence[TrialRow]) -> Decision:
        """Return the next trial of the lowest rung that is not complete."""
        return _in_bracket(rungs(self.trials, self.least, self.most, self.eta), table, group=0)


@dataclass(frozen=True)
class Hyperband:
    """All brackets of Hyperband for ``most`` and ``eta``.

    A worker that would wait in one bracket starts the next one.
    """

    most: int
    eta: int = 3

    def decide(self, table: Sequence[TrialRow]) -> Decision:
        """Return the next trial of the first bracket that has one."""
        for group, bracket in enumerate(brackets(self.most, self.eta)):
            decision = _in_bracket(bracket, [row for row in table if row.group == group], group)
            if not isinstance(decision, NoTask):
                return decision
        return idle(table)


def _in_bracket(bracket: Sequence[Rung], rows: Sequence[TrialRow], group: int) -> Decision:
    if len(rows) < bracket[0].trials:
        return Begin(bracket[0].resource, until=bracket[-1].resource, group=group)
    on_rung = list(rows)
    for below, above in pairwise(bracket):
        if not all(row.is_through(below.resource) for row in on_rung):
            return NoTask.WAIT
        on_rung = best_first(on_rung, below.resource)[: above.trials]
        for row in on_rung:
            if not row.has_begun(above.resource):
                return Promote(row.number, above.resource)
    return idle(rows)
