"""The visible checks of the rings. The twin of a collective is one process with the tensors of all ranks.

Each check draws the number of ranks, and traffic is counted in runs with the sizes that the checks of the
sums use. ``wrong_if`` names the known mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Nudge, Run, check
from dlo_lib.labkit.compare import every_rank, wrong_if
from dlo_lib.labkit.memory import holds_at_most
from dlo_lib.labkit.messages import no_rank_gathers, sent, targets, to_the_right
from dlo_lib.labkit.traffic import uses_what_arrives

from .cases import (
    by_case,
    chunk_bytes,
    chunks_of,
    cut_sizes,
    drawn,
    gathered,
    messages_only,
    pair,
    reduced,
    reduced_matrices,
    run_all,
    run_on,
    same,
    scattered,
    scattered_and_held,
    summed,
    unchanged,
)

# -- 3 · scatter


OWN_SHARE = (
    "rank {rank} of {world} returns chunk {rank} with its own share only. Nothing was added to this chunk; "
    "if your loop adds, another chunk is complete here: the sum of chunk {rank} should start on rank "
    "{after} and end here"
)
WITHOUT_SHARE = "rank {rank} of {world} returns the partial sum that arrived last, without its own share"
FOLLOW = "of the sum, it should have chunk {rank}: follow chunk {rank} in the figure"
CHUNK_AFTER = "rank {rank} of {world} has chunk {after} " + FOLLOW
CHUNK_BEFORE = "rank {rank} of {world} has chunk {before} " + FOLLOW


def same_chunks(t, run: Run, values: Sequence[Tensor], what: str) -> None:
    """Check the chunk of every rank."""
    world, total, want = run.world, summed(values), chunks_of(values)
    for rank, result in enumerate(run.results):
        got, share = pair(t, result, rank)[0], values[rank].tensor_split(world)[rank]
        after, before = (rank + 1) % world, (rank - 1) % world
        where = {"rank": rank, "world": world, "after": after, "before": before}
        mistakes = {
            OWN_SHARE: share,
            WITHOUT_SHARE: want[rank] - share,
            CHUNK_AFTER: want[after],
            CHUNK_BEFORE: want[before],
            "rank {rank} of {world} returns the whole sum, it should return chunk {rank} only": total,
            "rank {rank} of {world} returns the mean, it should be the sum": want[rank] / world,
        }
        wrong_if(t, got, want[rank], mistakes, rtol=1e-4, atol=1e-6, **where)
        t.close(got, want[rank], what, rank=rank, world=world, size=total.numel())
    messages_only(t, run)


def right_before(t, run: Run, values: Sequence[Tensor]) -> None:
    """Check the chunk of every rank, for a check that tests something else; the cause is in the message of
    the checks of the sum."""
    for rank, (result, want) in enumerate(zip(run.results, chunks_of(values))):
        message = (
            "not tested yet: the chunk of rank {rank} of {world} is not the sum, see the first checks of "
            "this question"
        )
        t.that(same(pair(t, result, rank)[0], want), message, rank=rank, world=run.world)
    messages_only(t, run)


def scatters(student, t, world: int, sizes: Sequence[int], what: str, dtype=torch.float32) -> Run:
    """A run with a tensor of each size, one after another, whose chunks are right."""
    cases = [drawn(t, world, size, dtype) for size in sizes]
    run = run_all(student, scattered, cases)
    for values, case in zip(cases, by_case(t, run, len(cases))):
        same_chunks(t, case, values, what)
    return run


@check("scatter", points=2, seconds=30)
def check_scatter_two(student, t):
    "Two ranks: each has its chunk of the sum"
    scatters(student, t, 2, [2 * t.integer(2, 5)], "the chunk of rank {rank}")


@check("scatter", points=2, seconds=40)
def check_scatter_ring(student, t):
    "Three ranks and more, with messages to the right neighbour"
    for world in (3, t.integer(5, 6)):
        what = (
            "the chunk of rank {rank} of {world} (its sum starts on the right neighbour, and each rank on "
            "the way adds its share)"
        )
        run = scatters(student, t, world, [world * t.integer(2, 4)], what)
        no_rank_gathers(t, run)
        to_the_right(t, run)


@check("scatter", points=1, seconds=40)
def check_scatter_odd(student, t):
    "Sizes that the number of ranks does not divide, other dtypes, and one rank alone"
    for world in (2, t.integer(3, 4), 1):
        what = "the chunk of rank {rank} of {world}, of a tensor of {size} elements (use tensor_split)"
        dtype = t.choice([torch.float64, torch.int64])
        scatters(student, t, world, cut_sizes(t, world)[:2], what, dtype)


@check("scatter", points=1, seconds=30)
def check_scatter_input(student, t):
    "The argument stays unchanged"
    world = t.integer(2, 4)
    cases = [drawn(t, world, world * t.integer(2, 5)), drawn(t, world, 50_000 * world)]
    run = run_all(student, scattered, cases)
    for values, case in zip(cases, by_case(t, run, 2)):
        right_before(t, case, values)
        unchanged(t, case, values)


@check("scatter", points=2, seconds=30)
def check_scatter_traffic(student, t):
    "Each rank sends N - 1 chunks and uses what it receives"
    for world in (2, t.integer(5, 6), 3):
        cases = [drawn(t, world, size) for size in cut_sizes(t, world)]
        run, most = run_all(student, scattered, cases), chunk_bytes(cases)
        for values, case in zip(cases, by_case(t, run, len(cases))):
            right_before(t, case, values)
        for rank in range(world):
            t.that(
                sent(run, rank) <= most,
                "rank {rank} of {world} sends {got} bytes of tensors of {whole} in all: it should send "
                "{count} of the {world} chunks of each tensor, {most} bytes",
                rank=rank,
                world=world,
                got=sent(run, rank),
                whole=sum(values[rank].nbytes for values in cases),
                count=world - 1,
                most=most,
            )
    values = cases[-1]  # on three ranks, all chunks have the same size
    element = t.integer(0, values[0].numel() // 3 - 1)
    nudge = Nudge(Kind.RECV, rank=1, call=1, element=element, by=2.0)  # its own chunk arrives last
    want = [chunk.clone() for chunk in chunks_of(values)]
    want[1][nudge.element] += nudge.by
    (case,) = by_case(t, run_all(student, scattered, [values], nudge), 1)
    what = "the chunk of rank {rank} after a value that rank 1 receives was changed"
    every_rank(t, case, want, what, lambda got: got[0])


@check("scatter", points=1, seconds=40)
def check_scatter_memory(student, t):
    "The chunk does not keep the whole tensor alive"
    values = drawn(t, 4, 2 << 20)  # 8 MiB each; a rank also holds a copy of its input
    run = run_on(student, scattered_and_held, values)
    message = (
        "the chunk of rank {rank} is a view of the argument: the whole tensor stays in memory as long as "
        "the chunk"
    )
    want = list(chunks_of(values))
    mistakes = {message: [torch.zeros_like(chunk) for chunk in want]}
    every_rank(t, run, want, "the chunk of rank {rank} of a large tensor", mistakes=mistakes, atol=1e-5)
    messages_only(t, run)
    most = 7 * values[0].nbytes // 4
    message = (
        "rank {rank} holds {held:.0f} MiB after the call, at most {most:.0f} are expected: the chunk is a "
        "view of a whole tensor, so the whole tensor stays in memory as long as the chunk"
    )
    holds_at_most(t, run, "after the reduce-scatter", most, message)


# -- 4 · gather


def gathers(student, t, wholes: Sequence[Tensor], world: int, what: str) -> Run:
    """A run in which the ranks gather the chunks of each tensor, one after another, with right results."""
    cut = [whole.tensor_split(world) for whole in wholes]
    sizes = [whole.numel() for whole in wholes]
    own = [[chunks[rank].clone() for chunks in cut] for rank in range(world)]
    run = student.ranks(gathered, [{"chunks": chunks, "sizes": sizes} for chunks in own])
    for whole, case in zip(wholes, by_case(t, run, len(wholes))):
        same_whole(t, case, whole, what)
    return run


AGAIN = "rank {rank} of {world} has its own chunk {world} times: send on what arrived last"
AS_THEY_ARRIVE = (
    "rank {rank} of {world} has the chunks in the order in which they arrive, not in the order of the ranks"
)
TO_THE_RIGHT = "each chunk is one place too far to the right on rank {rank} of {world}"
TO_THE_LEFT = "each chunk is one place too far to the left on rank {rank} of {world}"


def same_whole(t, run: Run, whole: Tensor, what: str) -> None:
    """Check the whole tensor on every rank."""
    world, chunks = run.world, whole.tensor_split(run.world)
    for rank, got in enumerate(run.results):
        alone = torch.zeros_like(whole)
        alone.tensor_split(world)[rank].copy_(chunks[rank])
        if isinstance(got, Tensor):
            message = (
                "the whole tensor on rank {rank} of {world} is {got}, the chunk is {want}: create it with "
                "chunk.new_empty(size)"
            )
            t.that(got.dtype == whole.dtype, message, rank=rank, world=world, got=got.dtype, want=whole.dtype)
        arrived = [chunks[(rank - step) % world] for step in range(world)]
        mistakes = {
            "rank {rank} of {world} has its own chunk only, the rest is 0": alone,
            AGAIN: torch.cat([chunks[rank]] * world),
            AS_THEY_ARRIVE: torch.cat(arrived),
            TO_THE_RIGHT: torch.cat([chunks[-1], *chunks[:-1]]),
            TO_THE_LEFT: torch.cat([*chunks[1:], chunks[0]]),
        }
        wrong_if(t, got, whole, mistakes, rank=rank, world=world)
        if isinstance(got, Tensor) and got.shape == whole.shape and not torch.equal(got, whole):
            repaired = got.clone()
            repaired.tensor_split(world)[rank].copy_(chunks[rank])
            message = (
                "only the own chunk of rank {rank} of {world} is missing in its whole tensor: copy it to "
                "its place"
            )
            t.that(not torch.equal(repaired, whole), message, rank=rank, world=world)
        t.close(got, whole, what, rank=rank, world=world, size=whole.numel())
    messages_only(t, run)


@check("gather", points=2, seconds=40)
def check_gather(student, t):
    "Every rank has all chunks in order"
    for world in (1, 3, t.integer(5, 6)):
        whole = t.normal(world * t.integer(2, 4), dtype=torch.float64)
        gathers(student, t, [whole], world, "the whole tensor on rank {rank} of {world}")


@check("gather", points=1, seconds=40)
def check_gather_odd(student, t):
    "Chunks of unequal sizes, and empty ones"
    for world in (2, t.integer(3, 4)):
        wholes = [t.normal(size) for size in cut_sizes(t, world)[:2]]
        what = "the whole tensor on rank {rank} of {world}, of size {size}, which {world} does not divide"
        gathers(student, t, wholes, world, what)


@check("gather", points=2, seconds=40)
def check_gather_traffic(student, t):
    "N - 1 chunks to the right neighbour"
    for world in (2, t.integer(5, 6), 3):
        wholes = [t.normal(size) for size in cut_sizes(t, world)]
        run = gathers(student, t, wholes, world, "the whole tensor on rank {rank} of {world}")
        want = chunk_bytes([[whole] * world for whole in wholes])
        for rank in range(world):
            message = (
                "rank {rank} of {world} sends {got} bytes. Each rank sends N - 1 chunks of each tensor, "
                "{want} bytes: no rank sends for all others"
            )
            t.that(sent(run, rank) <= want, message, rank=rank, world=world, got=sent(run, rank), want=want)
        to_the_right(t, run)
    uses_what_arrives(t, run, Kind.RECV, t.integer(0, 2))


# -- 5 · ring all-reduce


def everywhere(t, run: Run, values: Sequence[Tensor]) -> None:
    """Check the sum on every rank; if only some ranks have it, the message names them."""
    want, totals = summed(values), [pair(t, got, rank)[0] for rank, got in enumerate(run.results)]
    right = [rank for rank, total in enumerate(totals) if same(total, want)]
    message = (
        "the sum of {world} ranks is right on rank {right} and wrong on the others: do all ranks take "
        "part in all steps?"
    )
    t.that(len(right) in (0, run.world), message, world=run.world, right=", ".join(map(str, right)))
    for rank, total in enumerate(totals):
        chunk = want.tensor_split(run.world)[rank]
        mistakes = {
            "rank {rank} of {world} returns its own tensor: nothing was added": values[rank],
            "rank {rank} of {world} returns the mean, it should be the sum": want / run.world,
            "rank {rank} of {world} returns one chunk of the sum: the all-gather is missing": chunk,
        }
        wrong_if(t, total, want, mistakes, rtol=1e-4, atol=1e-6, rank=rank, world=run.world)
        t.close(total, want, "the sum on rank {rank} of {world}", rank=rank, world=run.world)


def reduces(student, t, world: int, sizes: Sequence[int]) -> tuple[Run, list[list[Tensor]]]:
    """A run with a tensor of each size, one after another, with right sums and only messages; and the tensors
    of each rank."""
    cases = [drawn(t, world, size) for size in sizes]
    run = run_all(student, reduced, cases)
    for values, case in zip(cases, by_case(t, run, len(cases))):
        everywhere(t, case, values)
    messages_only(t, run)
    return run, cases


@check("ring", points=3, seconds=60)
def check_all_reduce(student, t):
    "The sum on every rank, also with fewer elements than ranks"
    for world in (1, 2, t.integer(5, 6)):
        reduces(student, t, world, [world * t.integer(2, 4) + t.integer(0, world - 1), t.integer(1, 2)])


@check("ring", points=2, seconds=60)
def check_ring_messages(student, t):
    "Only messages between neighbours, with the bytes of a ring"
    for world in (t.integer(5, 6), 3):
        run, cases = reduces(student, t, world, cut_sizes(t, world))
        no_rank_gathers(t, run)
        most = 2 * chunk_bytes(cases)
        for rank in range(world):
            neighbours = (rank - 1) % world, (rank + 1) % world
            far = next((to for to in targets(run, rank) if to not in neighbours), None)
            message = "rank {rank} of {world} sends to rank {far}, which is not its neighbour in the ring"
            t.that(far is None, message, rank=rank, world=world, far=far)
            t.that(
                sent(run, rank) <= most,
                "too many bytes: rank {rank} of {world} sends {got}, a ring all-reduce of tensors of "
                "{whole} bytes in all sends {most}, 2 (N-1) chunks of B / N of each",
                rank=rank,
                world=world,
                got=sent(run, rank),
                whole=sum(values[rank].nbytes for values in cases),
                most=most,
            )
    uses_what_arrives(t, run, Kind.RECV, t.integer(0, 2))


FLAT = "the sum of {kind}matrices of integers on rank {rank} is flat: restore the shape {shape}"
IN_MEMORY = (
    "the sum of {kind}matrices of integers on rank {rank} has its elements in the order of the memory, not "
    "of the matrix"
)


@check("ring", points=1, seconds=30)
def check_all_reduce_shape(student, t):
    "Any shape, dtype and strides"
    values = [t.integers(-50, 50, 3, 5) for _ in range(t.integer(2, 3))]
    run = run_all(student, reduced_matrices, [values])
    total = summed(values)
    for case, want, kind in zip(by_case(t, run, 2), (total, total.t()), ("", "transposed ")):
        in_memory = want.t().contiguous().view(want.shape)
        for rank, total in enumerate(case.results):
            where = {"rank": rank, "kind": kind, "shape": tuple(want.shape)}
            mistakes = {FLAT: want.reshape(-1), IN_MEMORY: in_memory}
            wrong_if(t, total, want, mistakes, **where)
            what = "the sum of {kind}matrices of integers on rank {rank}"
            total = t.tensor(total, what, shape=tuple(want.shape), dtype=want.dtype, rank=rank, kind=kind)
            t.that(torch.equal(total, want), what + " is wrong: sums of integers are exact", **where)
    messages_only(t, run)


@check("ring", points=1, seconds=30)
def check_all_reduce_argument(student, t):
    "The argument stays unchanged"
    for world in (1, t.integer(2, 3)):
        run, cases = reduces(student, t, world, [t.integer(4, 9), 10_000])
        for values, case in zip(cases, by_case(t, run, 2)):
            unchanged(t, case, values)
