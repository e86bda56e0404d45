"""The visible checks of this lab. The twin of a collective is one process with all ranks' tensors; traffic is what passed the switch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dlo_lib.grading.contract import Kind, Nudge, Run, check
from dlo_lib.grading.quiz import quiz_complete

from .hints import HINTS as HINTS
from .quiz import QUIZ
from .scenarios import estimated, exchanged, from_root, gathered, reduced, scattered, to_everyone, to_zero
from .traffic import messages_only, nobody_gathers, sent
from .twins import chunks_of, estimate, same, seconds, summed


def drawn(t, world: int, size: int) -> list[Tensor]:
    """A tensor for each rank."""
    return [t.normal(size) for _ in range(world)]


def run_on(student, scenario, values: Sequence[Tensor], nudge: Nudge | None = None, **more) -> Run:
    return student.ranks(scenario, [{"value": value, **more} for value in values], nudge)


def pair(t, got, rank: int) -> list:
    """What a step returned, and its argument afterwards."""
    return t.items(got, 2, "the result of rank {rank}", rank=rank)


# -- 1 · pi


def points_of(t, sizes: Sequence[int]) -> list[Tensor]:
    return [torch.stack([torch.tensor([t.uniform(0, 1), t.uniform(0, 1)], dtype=torch.float64) for _ in range(size)]) for size in sizes]


@check("pi", points=2, seconds=30)
def check_pi(student, t):
    "All ranks get the estimate of all points"
    for world in (1, 2, 3):
        parts = points_of(t, [t.integer(8, 14)] * world)
        run = student.ranks(estimated, [{"points": part} for part in parts])
        for rank, got in enumerate(run.results):
            t.close(got, estimate(parts), "the estimate of rank {rank} of {world}", rank=rank, world=world)


# -- 2 · exchange


def shifted(student, t, values: Sequence[Tensor], distance: int) -> None:
    """Each rank sends to the one ``distance`` places on."""
    world = len(values)
    ends = [((rank + distance) % world, (rank - distance) % world) for rank in range(world)]
    run = student.ranks(
        exchanged,
        [
            {"outgoing": values[rank], "to": to, "incoming": torch.zeros_like(values[source]), "source": source}
            for rank, (to, source) in enumerate(ends)
        ],
    )
    for rank, got in enumerate(run.results):
        t.close(got, values[ends[rank][1]], "what rank {rank} of {world} has received", rank=rank, world=world)
    messages_only(t, run)


@check("exchange", points=2, seconds=30)
def check_exchange(student, t):
    "A ring of neighbours, all at once"
    for world in (2, 3):
        shifted(student, t, drawn(t, world, t.integer(3, 9)), distance=1)


# -- 3 · scatter


def same_chunks(t, run: Run, values: Sequence[Tensor], what: str) -> None:
    for rank, (got, want) in enumerate(zip(run.results, chunks_of(values))):
        t.close(pair(t, got, rank)[0], want, what, rank=rank, world=run.world)
    messages_only(t, run)


@check("scatter", points=2, seconds=30)
def check_scatter_two(student, t):
    "Two ranks: each has its chunk of the sum"
    values = drawn(t, 2, 2 * t.integer(2, 5))
    same_chunks(t, run_on(student, scattered, values), values, "the chunk of rank {rank}")


@check("scatter", points=2, seconds=40)
def check_scatter_ring(student, t):
    "Three and four ranks, by messages to the right neighbour"
    for world in (3, 4):
        values = drawn(t, world, world * t.integer(2, 4))
        run = run_on(student, scattered, values)
        what = "the chunk of rank {rank} of {world} (its sum sets out on the right neighbour, and each rank that it comes to adds a share)"
        same_chunks(t, run, values, what)
        nobody_gathers(t, run)
        for rank in range(world):
            astray = [call.peer for call in run.calls(rank, Kind.SEND) if call.peer != (rank + 1) % world]
            t.that(
                not astray, "rank {rank} of {world} sends to rank {to}: in a ring each rank sends only to its right neighbour",
                rank=rank, world=world, to=astray[0] if astray else -1,
            )  # fmt: skip


# -- 4 · gather


def gather_inputs(whole: Tensor, world: int) -> list[dict]:
    return [{"chunk": chunk.clone(), "size": whole.numel()} for chunk in whole.tensor_split(world)]


@check("gather", points=2, seconds=40)
def check_gather(student, t):
    "Every rank has all chunks in order"
    for world in (1, 2, 3, 4):
        whole = t.normal(world * t.integer(2, 4), dtype=torch.float64)
        run = student.ranks(gathered, gather_inputs(whole, world))
        for rank, got in enumerate(run.results):
            t.close(got, whole, "the whole on rank {rank} of {world} (pass on what has arrived last)", rank=rank, world=world)
        messages_only(t, run)


# -- 5 · ring all-reduce


def everywhere(t, run: Run, want: Tensor) -> None:
    """The sum on every rank; where some have it, the message says that others do not."""
    totals = [pair(t, got, rank)[0] for rank, got in enumerate(run.results)]
    right = [rank for rank, total in enumerate(totals) if same(total, want)]
    t.that(
        len(right) in (0, run.world), "the sum of {world} ranks is right on rank {right} and wrong on the others: do all ranks do all steps?",
        world=run.world, right=", ".join(map(str, right)),
    )  # fmt: skip
    for rank, total in enumerate(totals):
        t.close(total, want, "the sum on rank {rank} of {world}", rank=rank, world=run.world)


@check("ring", points=4, seconds=60)
def check_all_reduce(student, t):
    "The sum on every rank, for the bytes of a ring, also of fewer elements than ranks"
    for world in (1, 2, 3, 4):
        for size in (world * t.integer(2, 4) + t.integer(0, world - 1), t.integer(1, 2)):
            values = drawn(t, world, size)
            run, want = run_on(student, reduced, values), summed(values)
            everywhere(t, run, want)
            messages_only(t, run)
            nobody_gathers(t, run)
            most = 2 * (world - 1) * math.ceil(size / world) * want.itemsize
            for rank in range(world):
                t.that(
                    sent(run, rank) <= most,
                    "too many bytes: rank {rank} of {world} sends {got}, a ring all-reduce of {whole} bytes sends {most}, 2 (N-1) chunks of B / N",
                    rank=rank, world=world, got=sent(run, rank), whole=want.nbytes, most=most,
                )  # fmt: skip


# -- 6 · trees


def broadcast_right(student, t, world: int, root: int) -> Run:
    values = drawn(t, world, t.integer(3, 7))
    run = run_on(student, from_root, values, root=root)
    for rank, got in enumerate(run.results):
        t.close(got, values[root], "what rank {rank} of {world} has from root {root}", rank=rank, world=world, root=root)
    messages_only(t, run)
    return run


@check("broadcast", points=2, seconds=40)
def check_broadcast(student, t):
    "One, two and four ranks have the tensor of rank 0"
    for world in (1, 2, 4):
        broadcast_right(student, t, world, root=0)


def reduce_right(student, t, world: int) -> Run:
    values = drawn(t, world, t.integer(3, 7))
    run = run_on(student, to_zero, [value.clone() for value in values])
    t.close(pair(t, run.results[0], 0)[0], summed(values), "the sum on rank 0 of {world}", world=world)
    messages_only(t, run)
    return run


@check("reduce", points=2, seconds=40)
def check_reduce(student, t):
    "Rank 0 of one, two and four has the sum"
    for world in (1, 2, 4):
        reduce_right(student, t, world)


# -- 7 · everyone to everyone


def parts_right(student, t, sizes: Sequence[Sequence[int]], what: str) -> Run:
    """``sizes[source][target]``: elements of each part."""
    world = len(sizes)
    parts = [[t.normal(size) for size in row] for row in sizes]
    run = student.ranks(to_everyone, [{"parts": parts[rank], "sizes": [row[rank] for row in sizes]} for rank in range(world)])
    for rank, got in enumerate(run.results):
        for source, part in enumerate(t.items(got, world, "the parts of rank {rank}", rank=rank)):
            t.close(part, parts[source][rank], what, rank=rank, source=source)
    messages_only(t, run)
    return run


@check("everyone", points=2, seconds=40)
def check_everyone(student, t):
    "Each of one, two and four ranks has a part from every rank"
    for world in (1, 2, 4):
        run = parts_right(student, t, [[t.integer(2, 4)] * world] * world, "what rank {rank} has from rank {source}")
        for rank in range(world):
            t.that(
                all(call.peer != rank for call in run.calls(rank)), "rank {rank} sends to itself: what stays needs no message", rank=rank
            )


@check("everyone", points=1, seconds=30)
def check_everyone_steps(student, t):
    "In each step every rank sends one part and receives one"
    world = 4
    run = parts_right(student, t, [[t.integer(2, 4)] * world] * world, "what rank {rank} has from rank {source}")
    for step, peers in enumerate(zip(*([call.peer for call in run.calls(rank, Kind.SEND)] for rank in range(world)))):
        crowded = next((peer for peer in peers if peers.count(peer) > 1), None)
        t.that(
            crowded is None, "in step {step} several ranks send to rank {rank}, which is swamped while others wait", step=step, rank=crowded
        )


# -- 8 · the model


def link(t) -> tuple[float, float]:
    return t.uniform(1e-6, 1e-4), t.uniform(1e-10, 1e-8)


def same_cost(student, t, algorithm: str, ranks: int, message: str) -> None:
    alpha, beta = link(t)
    size = 1000 * t.integer(1, 5000)
    got = t.number(student.predicted_seconds(algorithm, size, ranks, alpha, beta), "predicted_seconds(...)")
    want = seconds(algorithm, size, ranks, alpha, beta)
    t.that(
        bool(abs(got - want) <= 1e-6 * want),
        'predicted_seconds("{algorithm}") of {size} bytes on {ranks} ranks is {got:.4g} s, the rounds take {want:.4g} s: ' + message,
        algorithm=algorithm, size=size, ranks=ranks, got=got, want=want,
    )  # fmt: skip


@check("cost", points=2)
def check_ring_cost(student, t):
    "The ring: 2 (N-1) messages of B / N bytes"
    for ranks in (1, 2, 5, t.integer(6, 40)):
        same_cost(student, t, "ring", ranks, "2 (N-1) messages, each with a chunk")


@check("cost", points=1)
def check_tree_cost(student, t):
    "The tree on a power of two"
    for ranks in (1, 2, 8, 2 ** t.integer(4, 7)):
        same_cost(student, t, "tree", ranks, "a reduce and a broadcast, each with the whole tensor in every round")


def timings(t, alpha: float, beta: float, noise: float) -> list[tuple]:
    """(algorithm, bytes, ranks, seconds), from 16 bytes to 16 MB."""
    cases = [(algorithm, 4**power, ranks) for algorithm in ("ring", "tree") for power in range(2, 13) for ranks in (2, 4)]
    return [(*case, seconds(*case, alpha, beta) * (1 + t.uniform(-noise, noise))) for case in cases]


@check("fit", points=2)
def check_fit(student, t):
    "Timings without noise give their link back"
    alpha, beta = link(t)
    got = t.items(student.fit_link(timings(t, alpha, beta, 0.0)), 2, "fit_link(timings)")
    for name, value, want in zip(("alpha", "beta"), got, (alpha, beta)):
        t.close(value, want, "{name} of the fit", name=name, rtol=1e-3, atol=0.0)


@check("crossover", points=2)
def check_crossover(student, t):
    "At the crossover ring and tree cost the same"
    for ranks in (4, 8, t.integer(9, 60)):
        alpha, beta = link(t)
        size = t.number(student.crossover_bytes(ranks, alpha, beta), "crossover_bytes(...)")
        ring, tree = (seconds(algorithm, size, ranks, alpha, beta) for algorithm in ("ring", "tree"))
        t.that(
            bool(size > 0 and abs(ring - tree) <= 1e-6 * tree),
            "on {ranks} ranks, {size:.0f} bytes take {ring:.4g} s by the ring, {tree:.4g} s by the tree: set the costs equal and solve for B",
            ranks=ranks, size=size, ring=ring, tree=tree,
        )  # fmt: skip


complete = quiz_complete(QUIZ, points=1)
