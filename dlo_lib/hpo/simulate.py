"""A search carried out in memory and in simulated time: what a policy trains, what that costs, who waits.

Each worker asks the policy as soon as it is free. A trial that is trained from resource a to b keeps it for (b - a) times what a unit costs
this trial; what is reported then is what ``loss`` says. The same policies run for real in ``dlo_lib.hpo.search``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlo_lib.hpo.table import Begin, GoOn, Policy, Row, Step

Loss = Callable[[Row, int], float | None]
"""The loss of a trial at a resource; None when it fails there."""

Propose = Callable[[Sequence[Row]], dict[str, Any]]
"""Hyperparameters for a new trial, from the table so far."""


@dataclass(frozen=True)
class Span:
    """What a worker did from ``start`` to ``end``: train ``trial`` up to ``resource``."""

    worker: int
    trial: int
    resource: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The table at the end and who did what when."""

    table: tuple[Row, ...]
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """When the last trial has reported."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def cost(self) -> float:
        """The time of all workers that was spent on training."""
        return sum(span.end - span.start for span in self.spans)


def simulate(
    policy: Policy, loss: Loss, propose: Propose, *, workers: int = 1, cost: Callable[[Row], float] = lambda row: 1.0
) -> Simulation:
    """Carry ``policy`` out with so many ``workers``; ``cost`` is the time of a trial for one unit of resource.

    Example: ``simulate(Asha(27, 1, 27), lambda row, resource: row.params["x"] + 1 / resource, lambda table: {"x": random.random()})``.
    """
    table, spans, now = list[Row](), list[Span](), 0.0
    free, running = list(range(workers)), list[tuple[float, int, Span]]()
    while True:
        decision = policy.decide(table) if free else Step.WAIT
        if isinstance(decision, Step):
            if not running:
                return Simulation(tuple(table), tuple(spans))
            now, worker, span = heapq.heappop(running)
            table[span.trial] = _reported(table[span.trial], loss)
            free.append(worker)
            free.sort()
            continue
        begun = _sent(decision, table, propose)
        worker, row = free.pop(0), table[begun.trial]
        span = Span(worker, begun.trial, begun.resource, now, now + (begun.resource - begun.before) * cost(row))
        spans.append(span)
        heapq.heappush(running, (span.end, worker, span))


@dataclass(frozen=True)
class _Sent:
    trial: int
    before: int
    resource: int


def _sent(decision: Begin | GoOn, table: list[Row], propose: Propose) -> _Sent:
    if isinstance(decision, GoOn):
        row = table[decision.trial]
        table[decision.trial] = replace(row, goal=decision.resource)
        return _Sent(decision.trial, max(row.reports, default=0), decision.resource)
    params = dict(decision.params) if decision.params is not None else propose(table)
    table.append(Row(len(table), params, decision.until, goal=decision.resource, group=decision.group, parent=decision.parent))
    before = 0 if decision.parent is None else max(table[decision.parent].reports)
    return _Sent(len(table) - 1, before, decision.resource)


def _reported(row: Row, loss: Loss) -> Row:
    assert row.goal is not None
    value = loss(row, row.goal)
    reports = row.reports if value is None else {**row.reports, row.goal: value}
    return replace(row, reports=reports, goal=None, failed=value is None)
