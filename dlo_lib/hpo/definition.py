"""The definition of a search, as data. The study stores it, so that every worker runs the same search.

A definition consists of the space (Optuna's distributions by name), the policy (which trial is trained to
which resource), the sampler (which hyperparameters a new trial gets) and a seed. The hyperparameters of the
k-th trial depend only on the definition and the table, not on the process that requests the trial."""

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

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.hpo.asha import Asha
from dlo_lib.hpo.expected_improvement_sampler import ExpectedImprovementSampler
from dlo_lib.hpo.fixed_budget import EveryTrial, Grid
from dlo_lib.hpo.halving import Hyperband, SuccessiveHalving
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
    """The sampler that draws the hyperparameters of a new trial."""

    RANDOM = "random"
    TPE = "tpe"
    """Optuna's tree-structured Parzen estimator; J. Bergstra et al., NeurIPS 2011."""
    EXPECTED_IMPROVEMENT = "expected-improvement"
    """Expected Improvement on the Gaussian process of this room; see ``expected_improvement_sampler``."""
    GAUSSIAN_PROCESS = "gaussian-process"
    """Optuna's Gaussian process sampler."""

    def make(self, seed: int) -> BaseSampler:
        """Create a new Optuna sampler with this seed."""
        kinds = {
            Sampler.RANDOM: RandomSampler,
            Sampler.TPE: TPESampler,
            Sampler.EXPECTED_IMPROVEMENT: ExpectedImprovementSampler,
            Sampler.GAUSSIAN_PROCESS: GPSampler,
        }
        return kinds[self](seed=seed)


@dataclass(frozen=True)
class Definition:
    """The space, the policy, the sampler and the seed of a search.

    Raises:
        UserError: the axes of a grid do not fit the space; population-based training would choose the
            optimiser.
    """

    space: Mapping[str, BaseDistribution]
    policy: Policy
    sampler: Sampler = Sampler.RANDOM
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.policy, Grid):
            self.policy.require_in(self.space)
        if isinstance(self.policy, PopulationBased) and "optimizer" in self.space:
            raise UserError(
                "PopulationBased continues the checkpoints of other trials and cannot choose the optimizer: "
                "leave it out of the space, or use Asha or Hyperband"
            )

    def propose(self, trials: Sequence[FrozenTrial]) -> dict[str, Any]:
        """Sample the hyperparameters of the next trial, given the states and values of ``trials``.

        The sampler runs on a copy of the study in memory. The caller stores the hyperparameters and the claim
        of the worker in one record, so that a new trial is never stored without its worker."""
        with quiet():
            study = optuna.create_study(
                sampler=self.sampler.make((self.seed * 1_000_003 + len(trials)) % 2**32)
            )
            study.add_trials(trials)
            return study.ask(dict(self.space)).params

    def to_json(self) -> str:
        """Serialise the definition for the study."""
        kind = type(self.policy).__name__
        if kind not in POLICIES or not dataclasses.is_dataclass(self.policy):
            raise unknown_name("policy", kind, POLICIES)
        return json.dumps(
            {
                "space": {
                    name: distribution_to_json(distribution) for name, distribution in self.space.items()
                },
                "policy": {"kind": kind, **dataclasses.asdict(self.policy)},
                "sampler": self.sampler.value,
                "seed": self.seed,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Definition:
        """Read a definition that :meth:`to_json` wrote.

        Raises:
            UserError: ``text`` is not a definition, or another version wrote it.
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
            raise UserError(
                f"the study has no readable definition ({error!r}): create a new search in another file"
            ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Optuna's log line for each study that is created or opened."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
