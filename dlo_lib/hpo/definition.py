"""What is searched, and how, as data: written into the study when it is made, so that every worker that joins searches the same.

A definition is the space (Optuna's distributions by name), the policy (who is trained how far), the sampler (what new trials look like) and
a seed. The k-th new trial depends on these and on the table alone, not on the process that asks for it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, distribution_to_json, json_to_distribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from dlo_lib.errors import UserError, unknown_name
from dlo_lib.hpo.asha import Asha
from dlo_lib.hpo.expected_improvement_sampler import ExpectedImprovementSampler
from dlo_lib.hpo.halving import Hyperband, SuccessiveHalving
from dlo_lib.hpo.plain import EveryTrial, Grid
from dlo_lib.hpo.population import PopulationBased
from dlo_lib.hpo.table import Policy

POLICIES: dict[str, Any] = {
    "EveryTrial": EveryTrial,
    "Grid": Grid,
    "SuccessiveHalving": SuccessiveHalving,
    "Hyperband": Hyperband,
    "Asha": Asha,
    "PopulationBased": PopulationBased,
}


class Sampler(enum.Enum):
    """Who proposes the hyperparameters of a new trial."""

    RANDOM = "random"
    TPE = "tpe"
    """Tree-structured Parzen estimator, Optuna's; J. Bergstra et al., NeurIPS 2011."""
    EXPECTED_IMPROVEMENT = "expected-improvement"
    """Ours, on a small Gaussian process."""
    GAUSSIAN_PROCESS = "gaussian-process"
    """Optuna's."""

    def make(self, seed: int) -> BaseSampler:
        """A sampler of its own."""
        kinds = {
            Sampler.RANDOM: RandomSampler,
            Sampler.TPE: TPESampler,
            Sampler.EXPECTED_IMPROVEMENT: ExpectedImprovementSampler,
            Sampler.GAUSSIAN_PROCESS: GPSampler,
        }
        return kinds[self](seed=seed)


@dataclass(frozen=True)
class Definition:
    """What is searched, and how."""

    space: Mapping[str, BaseDistribution]
    policy: Policy
    sampler: Sampler = Sampler.RANDOM
    seed: int = 0

    def propose(self, trials: Sequence[FrozenTrial]) -> dict[str, Any]:
        """Hyperparameters for the trial after ``trials``, whose states are what the sampler may know of them.

        The sampler is asked in a copy of the study in memory: what it proposes is stored together with who trains it, or not at all.
        """
        with quiet():
            study = optuna.create_study(sampler=self.sampler.make((self.seed * 1_000_003 + len(trials)) % 2**32))
            study.add_trials(trials)
            return study.ask(dict(self.space)).params

    def to_json(self) -> str:
        """Its text in the study."""
        kind = type(self.policy).__name__
        if kind not in POLICIES or not dataclasses.is_dataclass(self.policy):
            raise unknown_name("policy", kind, POLICIES)
        return json.dumps(
            {
                "space": {name: distribution_to_json(distribution) for name, distribution in self.space.items()},
                "policy": {"kind": kind, **dataclasses.asdict(self.policy)},
                "sampler": self.sampler.value,
                "seed": self.seed,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Definition:
        """The definition that :meth:`to_json` wrote.

        Raises:
            UserError: it is none, or one of another version.
        """
        try:
            read = json.loads(text)
            policy = dict(read["policy"])
            return cls(
                {name: json_to_distribution(each) for name, each in read["space"].items()},
                POLICIES[policy.pop("kind")](**policy),
                Sampler(read["sampler"]),
                read["seed"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the study says nothing readable about what it searches ({error!r}): begin another one") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's line for each study that is made or opened."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
