"""The table of a search, and what can be decided from it.

A trial is one configuration of hyperparameters. It is trained to a resource (epochs, steps, images: a whole number that grows), reports its
loss there, and may go on later. The rows of all trials are the whole state of a search: a policy is a function of the table, so a search
that was killed goes on by reading its table again, and several workers that share one table share one search.

    policy.decide(table) -> Begin(...) | GoOn(...) | Step.WAIT | Step.DONE
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Row:
    """What is known of one trial. Losses are finite: a trial that diverged or crashed has ``failed``."""

    number: int
    params: Mapping[str, Any]
    until: int
    """The resource at which it is complete."""
    reports: Mapping[int, float] = field(default_factory=dict)
    """Loss by resource."""
    goal: int | None = None
    """The resource that it is on its way to; None while nobody trains it."""
    group: int = 0
    """The bracket or the member of a population that it belongs to."""
    failed: bool = False
    parent: int | None = None
    """The trial whose last checkpoint it began from."""

    def loss(self, resource: int) -> float:
        """The loss at ``resource``; infinite for a trial that failed before."""
        return self.reports.get(resource, math.inf)

    def is_through(self, resource: int) -> bool:
        """Whether nothing more is to come from it at ``resource``."""
        return self.failed or resource in self.reports

    def has_begun(self, resource: int) -> bool:
        """Whether it was ever sent on its way to ``resource``."""
        return self.is_through(resource) or self.goal == resource


@dataclass(frozen=True)
class Begin:
    """A new trial: train to ``resource``; it is complete at ``until``."""

    resource: int
    until: int
    group: int = 0
    params: Mapping[str, Any] | None = None
    """None: the sampler proposes."""
    parent: int | None = None
    """The trial whose last checkpoint it begins from, with the resource that went into it."""
    explore: bool = False
    """Whether ``params`` are perturbed first."""


@dataclass(frozen=True)
class GoOn:
    """Train ``trial`` on, to ``resource``."""

    trial: int
    resource: int


class Step(enum.Enum):
    """Nothing to train now: ``WAIT`` until a running trial has reported, or ``DONE`` for good."""

    WAIT = "wait"
    DONE = "done"


Decision = Begin | GoOn | Step


class Policy(Protocol):
    """Decides who is trained next, and how far: a frozen dataclass of numbers, which can be written down."""

    def decide(self, table: Sequence[Row]) -> Decision:
        """The next step, from the rows in the order of their numbers."""
        ...


def idle(table: Sequence[Row]) -> Step:
    """``WAIT`` while a trial is trained, else ``DONE``."""
    return Step.WAIT if any(row.goal is not None for row in table) else Step.DONE


def best_first(rows: Sequence[Row], resource: int) -> list[Row]:
    """``rows`` by their loss at ``resource``; equal ones by number."""
    return sorted(rows, key=lambda row: (row.loss(resource), row.number))
