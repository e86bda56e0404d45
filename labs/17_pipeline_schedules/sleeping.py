"""Stages that sleep on real ranks, and what a run of them shows: spans, the fastest step, memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.labkit.measured_step import peak_of_a_step
from dlo_lib.optim import train_step
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.pipeline.simulate import Simulation
from dlo_lib.parallel.pipeline.table import Action, ActionKind, Schedule, in_a_loop, read_csv

Event = tuple[str, float, float]  # "F" or "B", start, end


class Sleep(torch.autograd.Function):
    """Sleep one unit in forward and two units in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: Sleepy) -> Tensor:
        ctx.layer = layer
        layer.sleep("F", 1)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.layer.sleep("B", 2)
        return grad, None


class Sleepy(nn.Module):
    """A stage that multiplies by a parameter, sleeps, and records when."""

    def __init__(self, width: int, unit: float) -> None:
        super().__init__()
        self.scale, self.unit = nn.Parameter(torch.ones(width)), unit
        self.events: list[Event] = []

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.scale, self)

    def sleep(self, kind: str, units: int) -> None:
        began = time.monotonic()
        time.sleep(units * self.unit)
        self.events.append((kind, began, time.monotonic()))


def events_of(layer: Sleepy) -> list[Event]:
    """Return the events since the last call."""
    events, layer.events = layer.events, []
    return events


Step = tuple[Sleepy, Callable[[], object]]  # the layer of this rank, and a function that runs a step


def table_step(rows: list[list[str]], width: int, unit: float) -> Step:
    """Return the layer of this rank, and a function that runs a step by the table."""
    layer = Sleepy(width, unit)
    pipeline = Pipeline({dist.get_rank(): layer}, read_csv("\n".join(",".join(row) for row in rows)))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    batch = [
        (torch.ones(1, 1, width), torch.ones(1, 1, dtype=torch.int64))
        for _ in range(pipeline.schedule.micro_batches)
    ]
    return layer, lambda: train_step(pipeline, optimizer, batch)


def recorded(make: Callable[[], Step], steps: int = 3) -> list[list[Event]]:
    """Return what each step does on this rank, with a barrier before each."""
    layer, step = make()
    done = []
    for _ in range(steps):
        dist.barrier()
        step()
        done.append(events_of(layer))
    return done


def peak_memory(make: Callable[[], Step]) -> int:
    """Return the most bytes that the tensors of this rank take in a step."""
    return peak_of_a_step(lambda: make()[1])


def fastest(ranks: Sequence[Sequence[list[Event]]]) -> list[list[Event]]:
    """Return the events of each rank in the fastest step."""

    def seconds(step: Sequence[list[Event]]) -> float:
        return max(row[-1][2] for row in step) - min(row[0][1] for row in step)

    return list(min(zip(*ranks), key=seconds))


def measured_run(ranks: Sequence[list[Event]], unit: float = 1.0) -> Simulation:
    """Return the step as a table with measured times, in ``unit`` seconds from its first action."""
    began = min(start for row in ranks for _, start, _ in row)
    rows, spans = [], []
    for rank, row in enumerate(ranks):
        count = {"F": 0, "B": 0}
        actions = []
        for kind, _, _ in row:
            actions.append(Action(ActionKind(kind), rank, count[kind]))
            count[kind] += 1
        rows.append(tuple(actions))
        spans.append(tuple(((start - began) / unit, (end - began) / unit) for _, start, end in row))
    micro_batches = 1 + max(action.micro_batch for action in rows[0])
    return Simulation(Schedule("measured", in_a_loop(len(rows)), micro_batches, tuple(rows)), tuple(spans))
