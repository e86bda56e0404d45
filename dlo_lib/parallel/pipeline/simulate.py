"""When each action of a schedule happens, given what actions cost: makespan, bubble, and what each rank holds at most.

A rank carries out its row in order, each action as soon as what it uses is there; a transfer to another rank takes ``send`` and keeps
nobody busy. With rows of fixed order one pass over the actions is enough, whatever they cost: O(actions).

    bubble of a rank  = makespan - its busy time
    bubble ratio      = (makespan - ideal) / ideal,   ideal = the busy time of the busiest rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlo_lib.errors import UserError
from dlo_lib.parallel.pipeline.table import Action, ActionKind, B, F, I, Schedule, W
from dlo_lib.parallel.pipeline.validate import makes, uses, validate

Time = float
Span = tuple[Time, Time]
PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """What actions of each stage take, in any unit of time: a number for all stages, or one for each. A whole backward takes I + W."""

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    send: float = 0.0

    def of(self, stages: int) -> dict[ActionKind, list[float]]:
        """The cost of each kind by stage.

        Raises:
            UserError: a list has another length than there are stages, or a cost is negative.
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
        raise UserError(f"{name} has {len(costs)} costs for {stages} stages: give one number, or one a stage")
    if any(cost < 0 for cost in costs):
        raise UserError(f"{name} has a negative cost: times are 0 or more")
    return costs


@dataclass(frozen=True)
class Simulation:
    """A schedule in time. ``spans[rank][i]`` is start and end of ``schedule.rows[rank][i]``."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> Time:
        return max((row[-1][1] for row in self.spans if row), default=0.0)

    @property
    def busy(self) -> tuple[Time, ...]:
        """How long each rank computes."""
        return tuple(sum(end - start for start, end in row) for row in self.spans)

    @property
    def bubble(self) -> tuple[Time, ...]:
        """How long each rank waits, up to the end of the step."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def idle(self) -> tuple[Time, ...]:
        """How long each rank waits between its first action and its last: the bubble that is left when the next step follows at once.

        The zero-bubble papers count this one: a rank that ends early may begin the next step, if the optimiser does not wait for all.
        """
        return tuple(row[-1][1] - row[0][0] - busy if row else 0.0 for row, busy in zip(self.spans, self.busy))

    @property
    def bubble_ratio(self) -> float:
        """Time beyond the ideal, as part of the ideal."""
        ideal = max(self.busy)
        return (self.makespan - ideal) / ideal

    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches whose activations a rank holds at a time: forward done (or begun), input gradient not yet done.

        A rank with several stages counts each stage's.
        """
        return tuple(round(peak) for peak in self.peak_memory(activations=1.0, for_weights=0.0))

    def peak_memory(self, activations: PerStage, for_weights: PerStage) -> tuple[float, ...]:
        """The most that each rank holds at a time, in the unit of the arguments, of compute actions alone.

        Args:
            activations: what a micro-batch holds on a stage from its forward to its input gradient.
            for_weights: what of it stays until the weight gradient where the backward is split.
        """
        return tuple(max((held for _, held in track), default=0.0) for track in self.memory_tracks(activations, for_weights))

    def memory_tracks(self, activations: PerStage, for_weights: PerStage) -> tuple[tuple[tuple[Time, float], ...], ...]:
        """For each rank, when what it holds changes, and to what; a forward takes its memory when it begins."""
        held = _by_stage(activations, self.schedule.stages, "activations")
        kept = _by_stage(for_weights, self.schedule.stages, "for_weights")
        tracks = []
        for row, spans in zip(self.schedule.rows, self.spans):
            now, track = 0.0, [(0.0, 0.0)]
            for (kind, stage, _), (start, end) in zip(row, spans):
                change = {F: held[stage], B: -held[stage], I: kept[stage] - held[stage], W: -kept[stage]}[kind]
                now += change
                track.append((start if kind is F else end, now))
            tracks.append(tuple(track))
        return tuple(tracks)


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Simulation:
    """The compute actions of ``schedule`` in time; sends and receives in the table are left out, ``costs.send`` stands for both.

    Raises:
        UserError: the schedule cannot be carried out (``validate`` says where), or the costs do not fit it.
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
        validate(schedule)  # says which cell is at fault
    return Simulation(schedule, tuple(map(tuple, spans)))
