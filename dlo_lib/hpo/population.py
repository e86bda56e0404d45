"""Population-based training: hyperparameters are searched while the models are trained, so that what is found is a schedule.

Members train side by side. After every interval a member that is in the worst part of the population *exploits*: it takes over the weights
and hyperparameters of one from the best part; then it *explores*: it perturbs these hyperparameters. A segment of a member, from one
comparison to the next, is a trial whose ``parent`` is the trial that it goes on from. A member is compared with all that have got to the
same resource so far: nobody waits.

    exploit: loss among the worst q of the population -> parent drawn from the best q
    explore: a number times 0.8 or 1.2, a category drawn anew with probability 1/4

M. Jaderberg et al., Population Based Training of Neural Networks (2017), arXiv:1711.09846 (truncation selection, perturbation).
Cost: members x interval x generations of training, and a checkpoint of each member.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from dlo_lib.hpo.table import Begin, Decision, Row, best_first, idle

FACTORS = (0.8, 1.2)
_NEW_CATEGORY = 0.25


@dataclass(frozen=True)
class PopulationBased:
    """``members`` models, compared every ``interval`` of resource, ``generations`` times; the worst and best ``quantile`` take part."""

    members: int
    interval: int
    generations: int
    quantile: float = 0.25
    seed: int = 0

    def decide(self, table: Sequence[Row]) -> Decision:
        """The next segment of the member that is furthest behind and not being trained."""
        own = [[row for row in table if row.group == member] for member in range(self.members)]
        for segments in sorted(own, key=len):
            if not segments:
                return Begin(self.interval, self.interval, group=own.index(segments))
            done = len(segments) * self.interval
            if len(segments) < self.generations and segments[-1].is_through(done):
                parent = self._parent(segments[-1], [row for row in table if row.until == done and row.is_through(done)])
                if parent is not None:
                    end, exploits = done + self.interval, parent is not segments[-1]
                    return Begin(end, end, segments[-1].group, parent.params, parent.number, explore=exploits)
        return idle(table)

    def _parent(self, row: Row, population: Sequence[Row]) -> Row | None:
        """The trial that ``row`` goes on from: itself, or one of the best when it is one of the worst. None: all have failed."""
        ranked = best_first(population, row.until)
        few = max(1, int(self.quantile * len(ranked)))
        best = [each for each in ranked[:few] if not each.failed]
        is_worst = row.failed or (row in ranked[-few:] and row not in ranked[:few])
        if not is_worst:
            return row
        return random.Random(f"{self.seed}/{row.number}").choice(best) if best else None


def explored(params: Mapping[str, Any], space: Mapping[str, BaseDistribution], seed: object) -> dict[str, Any]:
    """``params`` perturbed within ``space``; the same ``seed`` perturbs in the same way.

    Numbers are multiplied by 0.8 or 1.2 and kept within their bounds and steps; a whole number moves by at least 1.
    """
    generator = random.Random(f"explore/{seed}")
    return {name: _perturbed(params[name], distribution, generator) for name, distribution in space.items()}


def _perturbed(value: Any, distribution: BaseDistribution, generator: random.Random) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return generator.choice(distribution.choices) if generator.random() < _NEW_CATEGORY else value
    assert isinstance(distribution, (FloatDistribution, IntDistribution))
    factor, step = generator.choice(FACTORS), distribution.step
    moved = value * factor
    if step is not None:
        steps = round((moved - distribution.low) / step)
        if distribution.low + steps * step == value:
            steps += 1 if factor > 1 else -1
        moved = distribution.low + steps * step
    return min(max(moved, distribution.low), distribution.high)
