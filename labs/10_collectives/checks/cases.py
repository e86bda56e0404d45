"""The scenarios of the checks, their inputs, and the twin of each step: one process that has the tensors of
all ranks.

A scenario runs on every rank, calls one step, and returns what the checks compare.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.grading.checks.contract import Nudge, Run, scenario
from dlo_lib.labkit.compare import near

# -- scenarios


@scenario
def estimated(student, rank, world, points):
    return student.estimate_pi(points)


@scenario
def exchanged(student, rank, world, outgoing, to, incoming, source):
    student.exchange(outgoing, to, incoming, source)
    return incoming.clone()  # what has arrived when the function returns


@scenario
def exchanged_with_one_late(student, rank, world, outgoing, to, incoming, source, late):
    """One rank begins its exchange when the others have long begun theirs."""
    import time

    begins = torch.zeros(1)
    if rank == late:
        for other in range(world):
            if other != late:
                dist.recv(begins, other)
        time.sleep(0.5)
    else:
        dist.send(begins, late)
    student.exchange(outgoing, to, incoming, source)
    mark("returned")  # noqa: F821 - of the ranks
    return incoming.clone()


@scenario
def scattered(student, rank, world, values):
    return [(student.ring_reduce_scatter(value), value) for value in values]


@scenario
def scattered_and_held(student, rank, world, value):
    chunk = student.ring_reduce_scatter(value)
    value.zero_()  # a view of the argument loses its numbers
    if isinstance(chunk, torch.Tensor):
        numbers = chunk.clone()
        # All memory that the chunk keeps alive is in use.
        torch.empty(0, dtype=chunk.dtype).set_(chunk.untyped_storage()).zero_()
        chunk.copy_(numbers)
        del numbers
    mark("after the reduce-scatter")  # noqa: F821 - of the ranks
    return chunk


@scenario
def gathered(student, rank, world, chunks, sizes):
    return [student.ring_all_gather(chunk, size) for chunk, size in zip(chunks, sizes)]


@scenario
def reduced(student, rank, world, values):
    return [(student.ring_all_reduce(value), value) for value in values]


@scenario
def reduced_matrices(student, rank, world, values):
    return [student.ring_all_reduce(matrix) for value in values for matrix in (value.clone(), value.t())]


@scenario
def from_roots(student, rank, world, values, roots):
    for value, root in zip(values, roots):
        student.tree_broadcast(value, root)
    return values


@scenario
def from_root_transposed(student, rank, world, value, root):
    turned = value.t()
    student.tree_broadcast(turned, root)
    return turned


@scenario
def to_zero(student, rank, world, value):
    return student.tree_reduce(value), value


@scenario
def to_everyone(student, rank, world, parts, sizes):
    return student.everyone_to_everyone(parts, sizes)


@scenario
def in_levels(student, rank, world, value, inside):
    nodes = [list(range(first, first + inside)) for first in range(0, world, inside)]
    places = [list(range(place, world, inside)) for place in range(inside)]
    own = []
    for ranks in (*nodes, *places):
        group = dist.new_group(ranks)
        if rank in ranks:
            own.append(group)
    return student.two_level_all_reduce(value, *own), value


# -- inputs and runs


def drawn(t, world: int, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A tensor for each rank."""
    if not dtype.is_floating_point:
        return [t.integers(-50, 50, size).to(dtype) for _ in range(world)]
    return [t.normal(size, dtype=dtype) for _ in range(world)]


def cut_sizes(t, world: int) -> list[int]:
    """Sizes of tensors that are cut into ``world`` chunks: chunks of unequal sizes, empty ones where that is
    possible, equal ones."""
    rest = t.integer(1, max(1, world - 2)) if world > 1 else 0  # two chunks or more are short
    odd = world * t.integer(2, 4) + rest
    return [odd, t.integer(1, max(1, world - 1)), world * t.integer(2, 4)]


def run_on(student, scenario, values: Sequence[Tensor], nudge: Nudge | None = None, **more) -> Run:
    """Run ``scenario`` with one tensor for each rank."""
    return student.ranks(scenario, [{"value": value, **more} for value in values], nudge)


def run_all(student, scenario, cases: Sequence[Sequence[Tensor]], nudge: Nudge | None = None) -> Run:
    """Run ``scenario`` with several tensors for each rank, one after another on the same ranks.
    ``cases[number][rank]``: a tensor."""
    return student.ranks(scenario, [{"values": list(values)} for values in zip(*cases)], nudge)


def by_case(t, run: Run, number: int) -> list[Run]:
    """The run with the results of each of ``number`` tensors alone; the traffic is that of all."""
    what = "the results of rank {rank}"
    results = [t.items(got, number, what, rank=rank) for rank, got in enumerate(run.results)]
    return [dataclasses.replace(run, results=list(case)) for case in zip(*results)]


def pair(t, got, rank: int) -> list:
    """The return value of a step, and its argument after the call."""
    return t.items(got, 2, "the result of rank {rank}", rank=rank)


def unchanged(t, run: Run, values: Sequence[Tensor]) -> None:
    """Check that the argument of each rank has its values after the call."""
    for rank, got in enumerate(run.results):
        what, want = "the argument of rank {rank}", values[rank]
        after = t.tensor(pair(t, got, rank)[1], what, shape=want.shape, rank=rank)
        same_values = bool(torch.equal(after, want))
        message = "the argument of rank {rank} of {world} has other values after the call: work on a copy"
        t.that(same_values, message, rank=rank, world=run.world)


def chunk_bytes(cases: Sequence[Sequence[Tensor]]) -> int:
    """The bytes that a rank sends at most if it sends N - 1 chunks of each of its tensors."""
    world = len(cases[0])
    return sum((world - 1) * math.ceil(values[0].numel() / world) * values[0].itemsize for values in cases)


def messages_only(t, run: Run) -> None:
    """Check that the step uses messages only, and no collective of torch.distributed."""
    for rank in range(run.world):
        others = sorted({call.kind.value for call in run.calls(rank) if not call.kind.point_to_point})
        message = "rank {rank} calls {names}: use exchange, send and recv only"
        t.that(not others, message, rank=rank, names=", ".join(others))


# -- twins


def estimate(parts: Sequence[Tensor]) -> float:
    """π from the points of all ranks, computed with norms instead of squares."""
    inside = float((torch.linalg.vector_norm(torch.cat(list(parts)), dim=1) <= 1).double().sum())
    return 4 * inside / sum(map(len, parts))


def summed(values: Sequence[Tensor]) -> Tensor:
    """The sum over ranks."""
    return torch.stack(list(values)).sum(0)


def chunks_of(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The chunks of the sum, by rank."""
    return summed(values).tensor_split(len(values))


def same(got: object, want: Tensor) -> bool:
    """Whether ``got`` is the tensor ``want``, up to rounding."""
    return near(got, want, rtol=1e-4, atol=1e-6)


def tree_rounds(ranks: int) -> int:
    """The rounds of a tree: each doubles the ranks that have the tensor."""
    have, rounds = 1, 0
    while have < ranks:
        have, rounds = 2 * have, rounds + 1
    return rounds


def seconds(algorithm: str, size: float, ranks: int, alpha: float, beta: float) -> float:
    """The seconds of an all-reduce of ``size`` bytes."""
    total = 0.0
    if algorithm == "ring":
        for _ in range(2):
            for _ in range(1, ranks):
                total += alpha + beta * size / ranks
        return total
    for _ in range(2 * tree_rounds(ranks)):  # a reduce and a broadcast
        total += alpha + beta * size
    return total


def least_squares(timings: Sequence[tuple[str, int, int, float]]) -> tuple[float, float]:
    """α and β with the smallest sum of the squares of the relative errors, from the normal equations."""
    rows = [(seconds(*case, 1.0, 0.0) / time, seconds(*case, 0.0, 1.0) / time) for *case, time in timings]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    return (a * bb - b * ab) / (aa * bb - ab * ab), (aa * b - ab * a) / (aa * bb - ab * ab)
