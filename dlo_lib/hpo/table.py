"""The table of a search and the decisions of a policy.

A trial is one configuration of hyperparameters. It is trained to a resource (an increasing number of epochs,
steps or images), reports its loss there and may be promoted later. The rows of all trials are the complete
state of a search. A policy is a function of the table. A search that was killed therefore continues from its
table, and several workers share a search by sharing its table.

    policy.decide(table) -> Begin(...) | Promote(...) | NoTask.WAIT | NoTask.DONE
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class TrialRow:
    """The state of one trial. Its losses are finite; a trial that diverged or crashed has ``failed``."""

    number: int
    params: Mapping[str, Any]
    until: int
    """The resource at which the trial is complete."""
    reports: Mapping[int, float] = field(default_factory=dict)
    """The loss by resource."""
    goal: int | None = None
    """The resource to which the trial is being trained; None if it is not in training."""
    group: int = 0
    """The index of its bracket or of its member of the population."""
    failed: bool = False
    parent: int | None = None
    """The number of the trial from whose last checkpoint it started."""

    def loss(self, resource: int) -> float:
        """Return the loss at ``resource``; infinity for a trial that failed before."""
        return self.reports.get(resource, math.inf)

    def is_through(self, resource: int) -> bool:
        """Whether the trial has reported at ``resource`` or has failed."""
        return self.failed or resource in self.reports

    def has_begun(self, resource: int) -> bool:
        """Whether training to ``resource`` has started."""
        return self.is_through(resource) or self.goal == resource


@dataclass(frozen=True)
class Begin:
    """Start a new trial and train it to ``resource``; the trial is complete at ``until``."""

    resource: int
    until: int
    group: int = 0
    params: Mapping[str, Any] | None = None
    """The hyperparameters; None if the sampler draws them."""
    parent: int | None = None
    """The number of the trial from whose last checkpoint, and resource, the new trial starts."""
    explore: bool = False
    """Whether ``params`` are perturbed first."""


@dataclass(frozen=True)
class Promote:
    """Train the existing ``trial`` further, to ``resource``."""

    trial: int
    resource: int


class NoTask(enum.Enum):
    """There is nothing to train: ``WAIT`` until a running trial reports, or the search is ``DONE``."""

    WAIT = "wait"
    DONE = "done"


Decision = Begin | Promote | NoTask


class Policy(Protocol):
    """Decides which trial is trained next and to which resource.

    A policy is a frozen dataclass, which can be serialised.
    """

    def decide(self, table: Sequence[TrialRow]) -> Decision:
        """Return the next decision from the rows, which are in the order of their numbers."""
        ...


def idle(table: Sequence[TrialRow]) -> NoTask:
    """Return ``WAIT`` while a trial is in training, otherwise ``DONE``."""
    return NoTask.WAIT if any(row.goal is not None for row in table) else NoTask.DONE


def best_first(rows: Sequence[TrialRow], resource: int) -> list[TrialRow]:
    """Sort ``rows`` by their loss at ``resource``, then by number."""
    return sorted(rows, key=lambda row: (row.loss(resource), row.number))
