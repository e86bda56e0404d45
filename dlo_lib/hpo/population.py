"""Population-based training: search the hyperparameters while the models train. The result is a schedule.

The members train in parallel. After every interval, a member in the worst part of the population *exploits*:
it copies the weights and the hyperparameters of a member from the best part. It then *explores*: it perturbs
these hyperparameters. A segment of a member, from one comparison to the next, is a trial; its ``parent`` is
the trial that it continues. A member is compared with all members that have reached the same resource so far,
so no member waits.

    exploit: loss among the worst q of the population -> parent drawn from the best q
    explore: a number times 0.8 or 1.2, a category drawn anew with probability 1/4

M. Jaderberg et al., Population Based Training of Neural Networks (2017), arXiv:1711.09846 (truncation
selection, perturbation). Cost: members x interval x generations of training, and a checkpoint of each member.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from dlo_lib.hpo.table import Begin, Decision, TrialRow, best_first, idle

FACTORS = (0.8, 1.2)
_NEW_CATEGORY = 0.25


@dataclass(frozen=True)
class PopulationBased:
    """``members`` models, compared after every ``interval`` of resource for ``generations`` intervals.

    A member in the worst ``quantile`` copies a member from the best ``quantile``.
    """

    members: int
    interval: int
    generations: int
    quantile: float = 0.25
    seed: int = 0

    def decide(self, table: Sequence[TrialRow]) -> Decision:
        """Return the next segment of the member that is furthest behind and not in training."""
        own = [[row for row in table if row.group == member] for member in range(self.members)]
        for segments in sorted(own, key=len):
            if not segments:
                return Begin(self.interval, self.interval, group=own.index(segments))
            done = len(segments) * self.interval
            if len(segments) < self.generations and segments[-1].is_through(done):
                parent = self._parent(
                    segments[-1], [row for row in table if row.until == done and row.is_through(done)]
                )
                if parent is not None:
                    end, exploits = done + self.interval, parent is not segments[-1]
                    return Begin(end, end, segments[-1].group, parent.params, parent.number, explore=exploits)
        return idle(table)

    def _parent(self, row: TrialRow, population: Sequence[TrialRow]) -> TrialRow | None:
        """Return the trial that the next segment continues: ``row``, or one of the best if ``row`` is one of
        the worst.

        Return None if all trials have failed.
        """
        ranked = best_first(population, row.until)
        few = max(1, int(self.quantile * len(ranked)))
        best = [each for each in ranked[:few] if not each.failed]
        is_worst = row.failed or (row in ranked[-few:] and row not in ranked[:few])
        if not is_worst:
            return row
        return random.Random(f"{self.seed}/{row.number}").choice(best) if best else None


def explore(params: Mapping[str, Any], space: Mapping[str, BaseDistribution], seed: object) -> dict[str, Any]:
    """Perturb ``params`` within ``space``; the result is deterministic for a given ``seed``.

    A number is multiplied by 0.8 or 1.2 and kept within its bounds and steps. An integer changes by at least
    1."""
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
