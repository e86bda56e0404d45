"""The gradients that known faults give, computed from the twin, and the factors that have a name."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dlo_lib.planner.parity.parts import Gradients

Call = tuple[int, int]
"""A call of the model: its rank, and its number in the step."""


class TrainerFault(enum.Enum):
    """What a trainer does otherwise than one process."""

    WORLD_SIZE = "gradients scaled by the number of ranks"
    MICRO_BATCHES = "gradients scaled by the number of micro-batches"
    SCALE = "gradients scaled"
    LAST = "only the last micro-batch"
    TIED = "tied weight counted wrongly"
    PADDING = "loss over padding"
    WEIGHTS = "mean of unequal means"
    CLIPPING = "clipping on a shard"
    OUT_OF_STEP = "a parameter out of step"
    SAME_DATA = "a rank that reads the same data"
    NOT_REDUCED = "gradients not averaged over ranks"
    STALE = "gradients of earlier steps"
    UPDATE = "another update"
    STATISTICS = "statistics of a share"
    PRECISION = "lower precision"
    UNKNOWN = "other gradients"


@dataclass(frozen=True)
class Direction:
    """Gradients up to a factor. ``of_rank``: for each rank its own."""

    fault: TrainerFault | None
    said: str
    of_rank: Callable[[int], Gradients]


@dataclass(frozen=True)
class Factor:
    """A number with a meaning."""

    value: float
    fault: TrainerFault
    said: str


@dataclass
class Reading:
    """What the ranks computed in a step, as the twin sees it.

    Attributes:
        right: the gradients of the whole batch.
        calls: for each rank the number of calls of its model; 0 for one that receives activations.
        mean_of: the gradients of the mean loss over the samples of some calls; None if the samples are not
            known.
        padded: the gradients with padding, if the loss ignores classes.
        shares: the parts of the elements of the batch that count, by their names.
        earlier: the gradients that the optimiser received in the step before, or None.
        kinds: the number of different sets of samples among the ranks.
    """

    right: Gradients
    calls: list[int]
    mean_of: Callable[[list[Call]], Gradients] | None
    padded: Gradients | None
    shares: dict[str, float]
    earlier: Gradients | None
    kinds: int


def mean(each: list[Gradients]) -> Gradients:
    """Return the mean of gradients."""
    return {name: torch.stack([one[name] for one in each]).mean(0) for name in each[0]}


def directions(reading: Reading) -> list[Direction]:
    """Return what the gradients of a trainer may be proportional to; the first is right."""
    found = [Direction(None, "", lambda rank: reading.right)]
    if (mean_of := reading.mean_of) is not None:
        readers = [rank for rank, count in enumerate(reading.calls) if count]
        everything = {rank: [(rank, call) for call in range(reading.calls[rank])] for rank in readers}
        last = {rank: calls[-1:] for rank, calls in everything.items()}
        if max(reading.calls) > 1:
            said = "only the last of the micro-batches is in the gradients: do not clear them between two"
            found += [
                Direction(TrainerFault.LAST, said, _always(mean_of([calls[0] for calls in last.values()]))),
                Direction(
                    TrainerFault.LAST, said, _always(mean([mean_of(calls) for calls in last.values()]))
                ),
            ]
        said = (
            "gradients are a mean of the means of {what}, which have unequal numbers of valid elements: "
            "divide the sum of the loss by the number in the whole batch"
        )
        parts = [[call] for calls in everything.values() for call in calls]
        for what, groups in (("ranks", list(everything.values())), ("micro-batches", parts)):
            means = mean([mean_of(group) for group in groups])
            found.append(Direction(TrainerFault.WEIGHTS, said.format(what=what), _always(means)))
        if len(readers) == len(reading.calls):
            said = "each rank has the gradients of its samples only: average them before the optimiser's step"
            own = {rank: mean_of(calls) for rank, calls in everything.items()}
            found.append(Direction(TrainerFault.NOT_REDUCED, said, own.__getitem__))
    if reading.padded is not None:
        said = "the loss counts padding: ignore the padded targets, in the sum and in the number"
        found.append(Direction(TrainerFault.PADDING, said, _always(reading.padded)))
    if (earlier := reading.earlier) is not None:
        said = "gradients of earlier steps are added: clear them after the optimiser's step"
        stale = {name: one + earlier[name] for name, one in reading.right.items()}
        found.append(Direction(TrainerFault.STALE, said, _always(stale)))
    return found


def _always(gradients: Gradients) -> Callable[[int], Gradients]:
    return lambda rank: gradients


def factors(reading: Reading) -> list[Factor]:
    """Return the factors that have a name."""
    ranks, parts = len(reading.calls), max(reading.calls, default=0)
    found: list[Factor] = []
    for count, what, fault in (
        (ranks, "ranks", TrainerFault.WORLD_SIZE),
        (parts, "micro-batches", TrainerFault.MICRO_BATCHES),
        (reading.kinds, "ranks with other samples", TrainerFault.WORLD_SIZE),
        (ranks * parts if ranks > 1 and parts > 1 else 1, "ranks times micro-batches", TrainerFault.SCALE),
    ):
        if count > 1 and not any(one.value == count and one.fault is fault for one in found):
            found += [
                Factor(
                    1 / count,
                    fault,
                    f"1/{count} of those of one process, and there are {count} {what}: divide once",
                ),
                Factor(
                    count, fault, f"{count} times those of one process, and there are {count} {what}: divide"
                ),
            ]
    found += [
        Factor(share, TrainerFault.PADDING, f"{share:.4g} of those of one process, which is the part of the "
               f"elements {name}: divide the sum of the loss by the number of those")
        for name, share in reading.shares.items() if 0 < share < 1
    ]  # fmt: skip
    return found
