"""The visible checks of pi, messages and rings. The twin of a collective is one process with the tensors of all ranks.

Traffic is counted where the calls of the student's ranks pass the switch. ``wrong_if`` names the known mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Nudge, Run, check
from dlo_lib.labkit.compare import every_rank, wrong_if
from dlo_lib.labkit.memory import holds_at_most
from dlo_lib.labkit.traffic import uses_what_arrives

from .scenarios import (
    estimated,
    exchanged,
    gathered,
    reduced,
    reduced_transposed,
    scattered,
    scattered_and_held,
)
from .twins import chunks_of, estimate, same, summed


def drawn(t, world: int, size: int) -> list[Tensor]:
    """A tensor for each rank."""
    return [t.normal(size) for _ in range(world)]


def run_on(student, scenario, values: Sequence[Tensor], nudge: Nudge | None = None, **more) -> Run:
    return student.ranks(scenario, [{"value": value, **more} for value in values], nudge)


def pair(t, got, rank: int) -> list:
    """The return value of a step, and its argument after the call."""
    return t.items(got, 2, "the result of rank {rank}", rank=rank)


def unchanged(t, run: Run, values: Sequence[Tensor]) -> None:
    """Check that the argument of each rank has its values after the call."""
    for rank, got in enumerate(run.results):
        after = t.tensor(pair(t, got, rank)[1], "the argument of rank {rank}", shape=values[rank].shape, rank=rank)
        same_values = bool(torch.equal(after, values[rank]))
        t.that(
            same_values,
            "the argument of rank {rank} of {world} has other values after the call: work on a copy",
            rank=rank,
            world=run.world,
        )


# -- messages: they show mistakes that right sums do not show


def sent(run: Run, rank: int) -> int:
    """Bytes."""
    return run.bytes(rank, Kind.SEND)


def targets(run: Run, rank: int) -> list[int]:
    """The ranks to which ``rank`` sends, in order."""
    return [call.peer for call in run.calls(rank, Kind.SEND)]


def messages_only(t, run: Run) -> None:
    """Check that the step uses messages only, and no collective of torch.distributed."""
    for rank in range(run.world):
        others = sorted({call.kind.value for call in run.calls(rank) if not call.kind.point_to_point})
        t.that(not others, "rank {rank} calls {names}: use exchange, send and recv only", rank=rank, names=", ".join(others))


def no_rank_gathers(t, run: Run) -> None:
    """Check that no rank receives from all others while they receive only from it."""
    sources = [{call.peer for call in run.calls(rank, Kind.RECV)} for rank in range(run.world)]
    for rank, found in enumerate(sources):
        star = run.world > 2 and len(found) == run.world - 1 and all(other <= {rank} for other in sources if other is not found)
        t.that(not star, "everything is gathered on rank {rank}: in a ring each rank communicates only with its two neighbours", rank=rank)


def to_the_right(t, run: Run) -> None:
    """Check that each rank sends to its right neighbour only."""
    for rank in range(run.world):
        astray = [to for to in targets(run, rank) if to != (rank + 1) % run.world]
        t.that(
            not astray, "rank {rank} of {world} sends to rank {to}: in a ring each rank sends only to its right neighbour",
            rank=rank, world=run.world, to=astray[0] if astray else -1,
        )  # fmt: skip


# -- 1 · pi


def points_of(t, sizes: Sequence[int]) -> list[Tensor]:
    return [torch.stack([torch.tensor([t.uniform(0, 1), t.uniform(0, 1)], dtype=torch.float64) for _ in range(size)]) for size in sizes]


def shares(t, sizes: Sequence[int]) -> list[Tensor]:
    """The points of each rank, such that its own estimate and the mean of the ranks' estimates are not the right one. (With equal numbers of
    points the mean is right.)"""

    def tells(parts: list[Tensor]) -> bool:
        estimates = [estimate(parts), *(estimate([part]) for part in parts)]
        if len(set(sizes)) > 1:
            estimates.append(sum(estimates[1:]) / len(parts))
        return len(parts) == 1 or len({round(each, 3) for each in estimates}) == len(estimates)

    return t.draw_until(lambda: points_of(t, sizes), tells)


def same_estimate(t, run: Run, parts: Sequence[Tensor]) -> None:
    """Check the estimate of every rank."""
    want, alone, total = estimate(parts), [estimate([part]) for part in parts], sum(map(len, parts))
    for rank, got in enumerate(run.results):
        where = {"rank": rank, "world": run.world}
        t.number(got, "the estimate of rank {rank} of {world}", **where)
        mistakes = {
            "rank {rank} of {world} returns the estimate from its own points only: sum the counts over the ranks": alone[rank],
            "rank {rank} of {world} returns the mean of the ranks' estimates. Every point should have the same weight: "
            "sum the points inside and all points over the ranks, then divide": sum(alone) / run.world,
            "rank {rank} of {world} divides the points inside of all ranks by the points of one rank, or adds the ranks' estimates: "
            "divide by the points of all ranks": want * total / len(parts[rank]),
            "rank {rank} of {world} returns the sum of the ranks' estimates: sum the points inside and all points, then divide": sum(alone),
            "rank {rank} of {world} returns the fraction of points inside, π / 4: the factor 4 is missing": want / 4,
        }
        wrong_if(t, got, want, mistakes, **where)
        t.close(got, want, "the estimate of rank {rank} of {world}", **where)


@check("pi", points=2, seconds=30)
def check_pi(student, t):
    "All ranks have the estimate from all points"
    for world in (1, 2, 3):
        parts = shares(t, [t.integer(8, 14)] * world)
        same_estimate(t, student.ranks(estimated, [{"points": part} for part in parts]), parts)


@check("pi", points=1, seconds=30)
def check_unequal_shares(student, t):
    "Ranks with unequal numbers of points"
    parts = shares(t, [t.integer(3, 5), t.integer(16, 24), t.integer(30, 40)])
    same_estimate(t, student.ranks(estimated, [{"points": part} for part in parts]), parts)


@check("pi", points=1, seconds=30)
def check_one_all_reduce(student, t):
    "One all-reduce of the counts"
    parts = shares(t, [t.integer(8, 14)] * 2)
    run = student.ranks(estimated, [{"points": part} for part in parts])
    same_estimate(t, run, parts)
    for rank in range(run.world):
        kinds = [call.kind for call in run.calls(rank)]
        t.that(
            kinds == [Kind.ALL_REDUCE], "rank {rank} makes {count} calls ({kinds}): put the two counts into one tensor and call all_reduce once",
            rank=rank, count=len(kinds), kinds=", ".join(kind.value for kind in kinds) or "none",
        )  # fmt: skip
        most = 2 * parts[rank].itemsize
        t.that(
            run.bytes(rank) <= most, "rank {rank} passes {got} bytes to the all-reduce: two counts have {most}, the points stay where they are",
            rank=rank, got=run.bytes(rank), most=most,
        )  # fmt: skip
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 1))


# -- 2 · exchange


def routed(student, values: Sequence[Tensor], to: Sequence[int]) -> Run:
    """Each rank ``r`` sends its tensor to rank ``to[r]``."""
    sources = [to.index(rank) for rank in range(len(values))]
    return student.ranks(
        exchanged,
        [
            {"outgoing": values[rank], "to": to[rank], "incoming": torch.zeros_like(values[source]), "source": source}
            for rank, source in enumerate(sources)
        ],
    )


def same_received(t, run: Run, values: Sequence[Tensor], to: Sequence[int]) -> None:
    for rank, got in enumerate(run.results):
        source = to.index(rank)
        want, where = values[source], {"rank": rank, "world": run.world, "to": to[rank], "source": source}
        mistakes = {
            "`incoming` is unchanged on rank {rank} of {world}: receive the tensor of rank {source} into it, and return only after the "
            "`wait()` of the receive": torch.zeros_like(want),
            "rank {rank} of {world} has the tensor of rank {to}, to which it sends: it receives from rank {source}": values[to[rank]],
        }
        wrong_if(t, got, want, mistakes, **where)
        t.close(got, want, "the tensor that rank {rank} of {world} received", **where)
    messages_only(t, run)


def shift(world: int, distance: int) -> list[int]:
    """Each rank sends to the rank at ``distance`` to its right."""
    return [(rank + distance) % world for rank in range(world)]


@check("exchange", points=1, seconds=30)
def check_exchange(student, t):
    "All ranks of a ring send at the same time"
    for world in (2, 3):
        values, to = drawn(t, world, t.integer(3, 9)), shift(world, 1)
        same_received(t, routed(student, values, to), values, to)


@check("exchange", points=1, seconds=30)
def check_exchange_waits(student, t):
    "It returns when its send and its receive are done"
    values, to = drawn(t, 2, t.integer(3, 9)), shift(2, 1)
    run = routed(student, values, to)
    sends = all(run.calls(rank, Kind.SEND) for rank in range(2))
    t.that(sends, "not tested yet: `exchange` sends nothing, see the first check")
    t.that(run.forgotten_wait() == "", "`exchange` returns before its messages are done.")


@check("exchange", points=1, seconds=40)
def check_any_pattern(student, t):
    "Any pattern: 0 and 2 send to each other, 1 and 3 too (an order by the number of the rank fits one pattern only)"
    values, to = drawn(t, 4, t.integer(3, 9)), shift(4, 2)
    run = routed(student, values, to)
    same_received(t, run, values, to)
    uses_what_arrives(t, run, Kind.RECV, t.integer(0, 3))


# -- 3 · scatter


def same_chunks(t, run: Run, values: Sequence[Tensor], what: str) -> None:
    """Check the chunk of every rank."""
    world, total, want = run.world, summed(values), chunks_of(values)
    for rank, result in enumerate(run.results):
        got, share = pair(t, result, rank)[0], values[rank].tensor_split(world)[rank]
        after, before = (rank + 1) % world, (rank - 1) % world
        where = {"rank": rank, "world": world, "after": after, "before": before}
        mistakes = {
            "rank {rank} of {world} returns chunk {rank} with its own share only. Nothing was added to this chunk; if your loop adds, "
            "another chunk is complete here: the sum of chunk {rank} should start on rank {after} and end here": share,
            "rank {rank} of {world} returns the partial sum that arrived last, without its own share": want[rank] - share,
            "rank {rank} of {world} has chunk {after} of the sum, it should have chunk {rank}: follow chunk {rank} in the figure": want[
                after
            ],
            "rank {rank} of {world} has chunk {before} of the sum, it should have chunk {rank}: follow chunk {rank} in the figure": want[
                before
            ],
            "rank {rank} of {world} returns the whole sum, it should return chunk {rank} only": total,
            "rank {rank} of {world} returns the mean, it should be the sum": want[rank] / world,
        }
        wrong_if(t, got, want[rank], mistakes, rtol=1e-4, atol=1e-6, **where)
        t.close(got, want[rank], what, rank=rank, world=world, size=total.numel())
    messages_only(t, run)


def right_before(t, run: Run, values: Sequence[Tensor]) -> None:
    """Check the chunk of every rank, for a check that tests something else; the cause is in the message of the checks of the sum."""
    for rank, (result, want) in enumerate(zip(run.results, chunks_of(values))):
        message = "not tested yet: the chunk of rank {rank} of {world} is not the sum, see the first checks of this question"
        t.that(same(pair(t, result, rank)[0], want), message, rank=rank, world=run.world)
    messages_only(t, run)


@check("scatter", points=2, seconds=30)
def check_scatter_two(student, t):
    "Two ranks: each has its chunk of the sum"
    values = drawn(t, 2, 2 * t.integer(2, 5))
    same_chunks(t, run_on(student, scattered, values), values, "the chunk of rank {rank}")


@check("scatter", points=2, seconds=40)
def check_scatter_ring(student, t):
    "Three and four ranks, with messages to the right neighbour"
    for world in (3, 4):
        values = drawn(t, world, world * t.integer(2, 4))
        run = run_on(student, scattered, values)
        what = "the chunk of rank {rank} of {world} (its sum starts on the right neighbour, and each rank on the way adds its share)"
        same_chunks(t, run, values, what)
        no_rank_gathers(t, run)
        to_the_right(t, run)


@check("scatter", points=1, seconds=40)
def check_scatter_odd(student, t):
    "Sizes that the number of ranks does not divide, and one rank alone"
    for world, size in ((2, 2 * t.integer(2, 5) + 1), (2, 1), (3, 3 * t.integer(2, 4) + 1), (1, t.integer(3, 7))):
        values = drawn(t, world, size)
        what = "the chunk of rank {rank} of {world}, of a tensor of {size} elements (cut it with tensor_split)"
        same_chunks(t, run_on(student, scattered, values), values, what)


@check("scatter", points=1, seconds=30)
def check_scatter_input(student, t):
    "The argument stays unchanged"
    values = drawn(t, 2, 2 * t.integer(2, 5))
    run = run_on(student, scattered, values)
    right_before(t, run, values)
    unchanged(t, run, values)


@check("scatter", points=2, seconds=30)
def check_scatter_traffic(student, t):
    "Each rank sends N - 1 chunks and uses what it receives"
    world = 3
    size = world * t.integer(3, 6)
    values = drawn(t, world, size)
    run = run_on(student, scattered, values)
    right_before(t, run, values)
    most = values[0].nbytes * (world - 1) // world
    for rank in range(world):
        t.that(
            sent(run, rank) == most, "rank {rank} of {world} sends {got} bytes of a tensor of {whole}: it should send two of three chunks, {most} bytes",
            rank=rank, world=world, got=sent(run, rank), whole=values[0].nbytes, most=most,
        )  # fmt: skip
    nudge = Nudge(Kind.RECV, rank=1, call=1, element=t.integer(0, size // world - 1), by=2.0)  # the last chunk to arrive is its own
    want = [chunk.clone() for chunk in chunks_of(values)]
    want[1][nudge.element] += nudge.by
    for rank, got in enumerate(run_on(student, scattered, values, nudge).results):
        t.close(pair(t, got, rank)[0], want[rank], "the chunk of rank {rank} after a value that rank 1 receives was changed", rank=rank)


@check("scatter", points=1, seconds=40)
def check_scatter_memory(student, t):
    "The chunk does not keep the whole tensor alive"
    values = drawn(t, 4, 2 << 20)  # 8 MiB each; a rank also holds a copy of its input
    run = student.ranks(scattered_and_held, [{"value": value} for value in values])
    every_rank(t, run, list(chunks_of(values)), "the chunk of rank {rank} of a large tensor", atol=1e-5)
    messages_only(t, run)
    most = 7 * values[0].nbytes // 4
    message = (
        "rank {rank} holds {held:.0f} MiB after the call, at most {most:.0f} are expected: the chunk is a view of a whole tensor, "
        "so the whole tensor stays in memory as long as the chunk"
    )
    holds_at_most(t, run, "after the reduce-scatter", most, message)


# -- 4 · gather


def gather_inputs(whole: Tensor, world: int) -> list[dict]:
    return [{"chunk": chunk.clone(), "size": whole.numel()} for chunk in whole.tensor_split(world)]


def same_whole(t, run: Run, whole: Tensor, what: str) -> None:
    """Check the whole tensor on every rank."""
    world, chunks = run.world, whole.tensor_split(run.world)
    for rank, got in enumerate(run.results):
        alone = torch.zeros_like(whole)
        alone.tensor_split(world)[rank].copy_(chunks[rank])
        if isinstance(got, Tensor):
            message = "the whole tensor on rank {rank} of {world} is {got}, the chunk is {want}: create it with chunk.new_empty(size)"
            t.that(got.dtype == whole.dtype, message, rank=rank, world=world, got=got.dtype, want=whole.dtype)
        mistakes = {
            "rank {rank} of {world} has its own chunk only, the rest is 0": alone,
            "rank {rank} of {world} has its own chunk {world} times: send on what arrived last": torch.cat([chunks[rank]] * world),
            "rank {rank} of {world} has the chunks in the order in which they arrive, not in the order of the ranks": torch.cat(
                [chunks[(rank - step) % world] for step in range(world)]
            ),
            "each chunk is one place too far to the right on rank {rank} of {world}": torch.cat(
                [chunks[place - 1] for place in range(world)]
            ),
            "each chunk is one place too far to the left on rank {rank} of {world}": torch.cat([*chunks[1:], chunks[0]]),
        }
        wrong_if(t, got, whole, mistakes, rank=rank, world=world)
        t.close(got, whole, what, rank=rank, world=world, size=whole.numel())
    messages_only(t, run)


@check("gather", points=2, seconds=40)
def check_gather(student, t):
    "Every rank has all chunks in order"
    for world in (1, 2, 3, 4):
        whole = t.normal(world * t.integer(2, 4), dtype=torch.float64)
        run = student.ranks(gathered, gather_inputs(whole, world))
        same_whole(t, run, whole, "the whole tensor on rank {rank} of {world} (send on what arrived last)")


@check("gather", points=1, seconds=40)
def check_gather_odd(student, t):
    "Chunks of unequal sizes, and empty ones"
    for world, size in ((2, 2 * t.integer(2, 4) + 1), (3, 3 * t.integer(2, 4) + 1), (4, 6), (3, 2)):
        whole = t.normal(size)
        run = student.ranks(gathered, gather_inputs(whole, world))
        same_whole(t, run, whole, "the whole tensor on rank {rank} of {world}, of size {size}, which {world} does not divide")


@check("gather", points=2, seconds=40)
def check_gather_traffic(student, t):
    "N - 1 chunks to the right neighbour"
    world = 4
    whole = t.normal(world * t.integer(2, 4))
    run = student.ranks(gathered, gather_inputs(whole, world))
    same_whole(t, run, whole, "the whole tensor on rank {rank} of {world}")
    want = whole.nbytes * (world - 1) // world
    for rank in range(run.world):
        t.that(
            sent(run, rank) == want, "rank {rank} of {world} sends {got} bytes. Each rank sends N - 1 chunks, {want} bytes: no rank sends for all others",
            rank=rank, world=world, got=sent(run, rank), want=want,
        )  # fmt: skip
    to_the_right(t, run)
    uses_what_arrives(t, run, Kind.RECV, t.integer(0, 3))


# -- 5 · ring all-reduce


def everywhere(t, run: Run, values: Sequence[Tensor]) -> None:
    """Check the sum on every rank; if only some ranks have it, the message names them."""
    want, totals = summed(values), [pair(t, got, rank)[0] for rank, got in enumerate(run.results)]
    right = [rank for rank, total in enumerate(totals) if same(total, want)]
    t.that(
        len(right) in (0, run.world), "the sum of {world} ranks is right on rank {right} and wrong on the others: do all ranks take part in all steps?",
        world=run.world, right=", ".join(map(str, right)),
    )  # fmt: skip
    for rank, total in enumerate(totals):
        mistakes = {
            "rank {rank} of {world} returns its own tensor: nothing was added": values[rank],
            "rank {rank} of {world} returns the mean, it should be the sum": want / run.world,
            "rank {rank} of {world} returns one chunk of the sum: the all-gather is missing": want.tensor_split(run.world)[rank],
        }
        wrong_if(t, total, want, mistakes, rtol=1e-4, atol=1e-6, rank=rank, world=run.world)
        t.close(total, want, "the sum on rank {rank} of {world}", rank=rank, world=run.world)


@check("ring", points=3, seconds=60)
def check_all_reduce(student, t):
    "The sum on every rank, also with fewer elements than ranks"
    for world in (1, 2, 3, 4):
        for size in (world * t.integer(2, 4) + t.integer(0, world - 1), t.integer(1, 2)):
            values = drawn(t, world, size)
            run = run_on(student, reduced, values)
            everywhere(t, run, values)
            messages_only(t, run)


@check("ring", points=2, seconds=60)
def check_ring_messages(student, t):
    "Only messages between neighbours, with the bytes of a ring"
    for world in (3, 4):
        size = world * t.integer(2, 4) + t.integer(0, world - 1)
        values = drawn(t, world, size)
        run = run_on(student, reduced, values)
        everywhere(t, run, values)
        messages_only(t, run)
        no_rank_gathers(t, run)
        most = 2 * (world - 1) * math.ceil(size / world) * values[0].itemsize
        for rank in range(world):
            far = next((to for to in targets(run, rank) if to not in ((rank - 1) % world, (rank + 1) % world)), None)
            t.that(
                far is None,
                "rank {rank} of {world} sends to rank {far}, which is not its neighbour in the ring",
                rank=rank,
                world=world,
                far=far,
            )
            t.that(
                sent(run, rank) <= most,
                "too many bytes: rank {rank} of {world} sends {got}, a ring all-reduce of {whole} bytes sends {most}, 2 (N-1) chunks of B / N",
                rank=rank, world=world, got=sent(run, rank), whole=values[0].nbytes, most=most,
            )  # fmt: skip
    uses_what_arrives(t, run, Kind.RECV, t.integer(0, 3))


@check("ring", points=1, seconds=30)
def check_all_reduce_shape(student, t):
    "Any shape, dtype and strides"
    values = [t.integers(-50, 50, 3, 5) for _ in range(2)]
    for scenario, want, kind in ((reduced, summed(values), ""), (reduced_transposed, summed(values).t(), "transposed ")):
        run = run_on(student, scenario, values)
        for rank, got in enumerate(run.results):
            total = pair(t, got, rank)[0]
            where = {"rank": rank, "kind": kind, "shape": tuple(want.shape)}
            mistakes = {
                "the sum of {kind}matrices of integers on rank {rank} is flat: restore the shape {shape}": want.reshape(-1),
                "the sum of {kind}matrices of integers on rank {rank} has its elements in the order of the memory, not of the matrix": want.t()
                .contiguous()
                .view(want.shape),
            }
            wrong_if(t, total, want, mistakes, **where)
            what = "the sum of {kind}matrices of integers on rank {rank}"
            total = t.tensor(total, what, shape=tuple(want.shape), dtype=want.dtype, rank=rank, kind=kind)
            t.that(torch.equal(total, want), what + " is wrong: sums of integers are exact", **where)
        messages_only(t, run)


@check("ring", points=1, seconds=30)
def check_all_reduce_argument(student, t):
    "The argument stays unchanged"
    for world in (1, 2):
        values = drawn(t, world, t.integer(4, 9))
        run = run_on(student, reduced, values)
        everywhere(t, run, values)
        messages_only(t, run)
        unchanged(t, run, values)
