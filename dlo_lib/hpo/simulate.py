"""Simulate a search in memory: the tasks of each worker, their cost and the waiting time.

A worker requests a decision of the policy as soon as it is free. Training a trial from resource a to resource
b takes (b - a) times the cost of one unit for this trial; the trial then reports the value of ``loss``.
``dlo_lib.hpo.search`` runs the same policies on real trials."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlo_lib.hpo.table import Begin, NoTask, Policy, Promote, TrialRow

Loss = Callable[[TrialRow, int], float | None]
"""The loss of a trial at a resource; None if the trial fails there."""

Propose = Callable[[Sequence[TrialRow]], dict[str, Any]]
"""Returns the hyperparameters of a new trial, given the table so far."""


@dataclass(frozen=True)
class Span:
    """One task: ``worker`` trains ``trial`` up to ``resource``, from time ``start`` to time ``end``."""

    worker: int
    trial: int
    resource: int
    start: float
    end: float


@dataclass(frozen=True)
class SimulatedSearch:
    """The final table and the tasks of all workers."""

    table: tuple[TrialRow, ...]
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """The time at which the last trial reports."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def cost(self) -> float:
        """The training time, summed over all workers."""
        return sum(span.end - span.start for span in self.spans)


def simulate(
    policy: Policy,
    loss: Loss,
    propose: Propose,
    *,
    workers: int = 1,
    cost: Callable[[TrialRow], float] = lambda row: 1.0,
) -> SimulatedSearch:
    """Simulate ``policy`` with this number of ``workers``; ``cost`` is the time of one unit of resource for a
    trial.

    Example: ``simulate(Asha(27, 1, 27), lambda row, resource: row.params["x"] + 1 / resource, lambda table:
    {"x": random.random()})``."""
    table, spans, now = list[TrialRow](), list[Span](), 0.0
    free, running = list(range(workers)), list[tuple[float, int, Span]]()
    while True:
        decision = policy.decide(table) if free else NoTask.WAIT
        if isinstance(decision, NoTask):
            if not running:
                return SimulatedSearch(tuple(table), tuple(spans))
            now, worker, span = heapq.heappop(running)
            table[span.trial] = _reported(table[span.trial], loss)
            free.append(worker)
            free.sort()
            continue
        begun = _start(decision, table, propose)
        worker, row = free.pop(0), table[begun.trial]
        span = Span(
            worker, begun.trial, begun.resource, now, now + (begun.resource - begun.before) * cost(row)
        )
        spans.append(span)
        heapq.heappush(running, (span.end, worker, span))


@dataclass(frozen=True)
class _Started:
    trial: int
    before: int
    resource: int


def _start(decision: Begin | Promote, table: list[TrialRow], propose: Propose) -> _Started:
    if isinstance(decision, Promote):
        row = table[decision.trial]
        table[decision.trial] = replace(row, goal=decision.resource)
        return _Started(decision.trial, max(row.reports, default=0), decision.resource)
    params = dict(decision.params) if decision.params is not None else propose(table)
    table.append(
        TrialRow(
            len(table),
            params,
            decision.until,
            goal=decision.resource,
            group=decision.group,
            parent=decision.parent,
        )
    )
    before = 0 if decision.parent is None else max(table[decision.parent].reports)
    return _Started(len(table) - 1, before, decision.resource)


def _reported(row: TrialRow, loss: Loss) -> TrialRow:
    assert row.goal is not None
    value = loss(row, row.goal)
    reports = row.reports if value is None else {**row.reports, row.goal: value}
    return replace(row, reports=reports, goal=None, failed=value is None)
