"""Simulates a schedule with given costs of its actions: makespan, bubble, and the peak memory of each rank.

A rank executes its row in order. An action starts as soon as its inputs are available. A transfer to another
rank takes ``send`` and occupies neither rank. Because the order of each row is fixed, one pass over the
actions is sufficient: O(actions).

    bubble of a rank  = makespan - its busy time
    bubble ratio      = (makespan - ideal) / ideal,   ideal = the busy time of the busiest rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.pipeline.table import Action, ActionKind, B, F, I, Schedule, W
from dlo_lib.parallel.pipeline.validate import makes, uses, validate

Time = float
Span = tuple[Time, Time]
PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """The duration of the actions in any unit of time, as one number for all stages or a sequence with one
    number for each stage. A whole backward takes ``input_gradient + weight_gradient``."""

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    send: float = 0.0

    def of(self, stages: int) -> dict[ActionKind, list[float]]:
        """Return the costs of each kind of action, by stage.

        Raises:
            UserError: the length of a sequence is not the number of stages, or a cost is negative.
        """
        forward, inputs, weights = (
            _by_stage(value, stages, name)
            for value, name in (
                (self.forward, "forward"),
                (self.input_gradient, "input_gradient"),
                (self.weight_gradient, "weight_gradient"),
            )
        )
        return {F: forward, I: inputs, W: weights, B: [one + other for one, other in zip(inputs, weights)]}


def _by_stage(value: PerStage, stages: int, name: str) -> list[float]:
    costs = [float(value)] * stages if isinstance(value, (int, float)) else [float(cost) for cost in value]
    if len(costs) != stages:
        raise UserError(
            f"{name} has {len(costs)} costs for {stages} stages: give one number, or one for each stage"
        )
    if any(cost < 0 for cost in costs):
        raise UserError(f"{name} has a negative cost: use 0 or more")
    return costs


@dataclass(frozen=True)
class Simulation:
    """A schedule with times. ``spans[rank][i]`` is the start and the end of ``schedule.rows[rank][i]``."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> Time:
        """The end of the last action."""
        return max((row[-1][1] for row in self.spans if row), default=0.0)

    @property
    def busy(self) -> tuple[Time, ...]:
        """The time for which each rank computes."""
        return tuple(sum(end - start for start, end in row) for row in self.spans)

    @property
    def bubble(self) -> tuple[Time, ...]:
        """The time for which each rank waits, up to the end of the step."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def idle(self) -> tuple[Time, ...]:
        """The time for which each rank waits between its first and its last action.

        This is the bubble of the zero-bubble papers: if the optimiser step does not synchronise the ranks, a
        rank that ends early begins the next step immediately.
        """
        rows = zip(self.spans, self.busy)
        return tuple(row[-1][1] - row[0][0] - busy if row else 0.0 for row, busy in rows)

    @property
    def bubble_ratio(self) -> float:
        """The time in excess of the ideal, divided by the ideal."""
        ideal = max(self.busy)
        return (self.makespan - ideal) / ideal

    def in_flight(self) -> tuple[int, ...]:
        """Return, for each rank, the largest number of micro-batches whose activations it holds: from the
        start of the forward to the end of the input gradient.

        For a rank with several stages, the micro-batches of all its stages are summed.
        """
        return tuple(round(peak) for peak in self.peak_memory(activations=1.0, for_weights=0.0))

    def peak_memory(self, activations: PerStage, for_weights: PerStage) -> tuple[float, ...]:
        """Return the peak memory of activations of each rank, in the unit of the arguments.

        Args:
            activations: the memory of one micro-batch on a stage, from its forward to its input gradient.
            for_weights: the part of this memory that is kept until the weight gradient, if the backward is
                split.
        """
        tracks = self.memory_tracks(activations, for_weights)
        return tuple(max((held for _, held in track), default=0.0) for track in tracks)

    def memory_tracks(
        self,
        activations: PerStage,
        for_weights: PerStage,
    ) -> tuple[tuple[tuple[Time, float], ...], ...]:
        """Return, for each rank, the times at which its memory changes and the memory after each change. A
        forward allocates its memory at its start. The arguments are those of ``peak_memory``."""
        held = _by_stage(activations, self.schedule.stages, "activations")
        kept = _by_stage(for_weights, self.schedule.stages, "for_weights")
        tracks = []
        for row, spans in zip(self.schedule.rows, self.spans):
            now, track = 0.0, [(0.0, 0.0)]
            for (kind, stage, _), (start, end) in zip(row, spans):
                activation, kept_part = held[stage], kept[stage]
                now += {F: activation, B: -activation, I: kept_part - activation, W: -kept_part}[kind]
                track.append((start if kind is F else end, now))
            tracks.append(tuple(track))
        return tuple(tracks)


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Simulation:
    """Simulate the compute actions of ``schedule``. Sends and receives of the table are ignored;
    ``costs.send`` is the time of a transfer.

    Raises:
        UserError: the schedule cannot be executed (the message is that of ``validate``), or ``costs`` has
            another number of stages.
    """
    schedule = schedule.compute()
    cost_of = costs.of(schedule.stages)
    owner, stages = schedule.placement, schedule.stages
    ended: dict[Action, Time] = {}
    waiting: dict[Action, int] = {}  # the rank that waits for an action
    spans: list[list[Span]] = [[] for _ in schedule.rows]
    clock = [0.0] * schedule.ranks
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        row, done = schedule.rows[rank], spans[rank]
        now = clock[rank]
        for action in row[len(done) :]:
            start = now
            for need in uses(action, stages):
                end = ended.get(need)
                if end is None:
                    waiting[need] = rank
                    break
                if owner[need.stage] != rank:
                    end += costs.send
                start = max(start, end)
            else:
                now = start + cost_of[action.kind][action.stage]
                done.append((start, now))
                result = makes(action)
                if result is not None:
                    ended[result] = now
                    if (waiter := waiting.pop(result, None)) is not None:
                        ready.append(waiter)
                continue
            break
        clock[rank] = now
    if any(len(done) < len(row) for done, row in zip(spans, schedule.rows)):
        validate(schedule)  # raises an error that names the faulty cell
    return Simulation(schedule, tuple(map(tuple, spans)))
