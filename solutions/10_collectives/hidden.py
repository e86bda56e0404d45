"""The hidden checks: sizes, roots and world sizes of other kinds, the traffic, the nudge, and the right answers of the quiz. Never released.

Their messages hold no values where a student should read them.
"""

from __future__ import annotations

import torch

from dlo_lib.grading.contract import Kind, Nudge, check
from dlo_lib.grading.quiz import Answer, quiz_right

from .checks import (
    broadcast_right,
    drawn,
    gather_inputs,
    link,
    pair,
    parts_right,
    points_of,
    reduce_right,
    run_on,
    same_chunks,
    same_cost,
    shifted,
    timings,
)
from .quiz import QUIZ
from .scenarios import estimated, from_root_transposed, gathered, reduced, reduced_transposed, scattered, scattered_and_held, to_zero
from .traffic import messages_only, sent
from .twins import chunks_of, estimate, summed

# -- 1 · pi


@check("pi", points=1, seconds=30)
def check_unequal_shares(student, t):
    "Ranks with unequal numbers of points"
    parts = points_of(t, [t.integer(3, 5), t.integer(16, 24), t.integer(30, 40)])
    run = student.ranks(estimated, [{"points": part} for part in parts])
    message = "every point should weigh the same: add up the hits and the points of all ranks, then divide"
    for got in run.results:
        t.that(type(got) is float and bool(abs(got - estimate(parts)) < 1e-6), message)


@check("pi", points=1, seconds=30)
def check_one_all_reduce(student, t):
    "One all-reduce of the counts"
    parts = points_of(t, [12, 12])
    run = student.ranks(estimated, [{"points": part} for part in parts])
    for rank, got in enumerate(run.results):
        t.close(got, estimate(parts), "the estimate of rank {rank}", rank=rank)
        kinds = [call.kind for call in run.calls(rank)]
        t.that(kinds == [Kind.ALL_REDUCE], "one all-reduce is enough: put the two counts into one tensor")
        t.that(run.bytes(rank) <= 16, "only the two counts need to travel, not the points")


# -- 2 · exchange


@check("exchange", points=2, seconds=40)
def check_any_pattern(student, t):
    "Longer ways round, odd numbers of ranks, itself not among them"
    for world, distance in ((4, 2), (3, 2), (4, 3)):
        shifted(student, t, drawn(t, world, t.integer(3, 9)), distance)


# -- 3 · scatter


@check("scatter", points=1, seconds=40)
def check_scatter_odd(student, t):
    "Sizes that two does not divide, and one rank alone"
    for size in (2 * t.integer(2, 5) + 1, 1):
        values = drawn(t, 2, size)
        same_chunks(t, run_on(student, scattered, values), values, "the chunk of rank {rank}, of a size that {world} does not divide")
    values = drawn(t, 1, t.integer(3, 7))
    same_chunks(t, run_on(student, scattered, values), values, "the only chunk of one rank")


@check("scatter", points=1, seconds=30)
def check_scatter_input(student, t):
    "The argument stays as it is"
    values = drawn(t, 2, 2 * t.integer(2, 5))
    run = run_on(student, scattered, [value.clone() for value in values])
    for rank, got in enumerate(run.results):
        t.close(pair(t, got, rank)[1], values[rank], "the argument of rank {rank} after the call", rank=rank)


@check("scatter", points=2, seconds=30)
def check_scatter_traffic(student, t):
    "N - 1 chunks are sent, and what arrives is used"
    size = 3 * t.integer(3, 6)
    values = drawn(t, 3, size)
    run = run_on(student, scattered, values)
    same_chunks(t, run, values, "the chunk of rank {rank}")
    for rank in range(3):
        t.that(sent(run, rank) == values[0].nbytes * 2 // 3, "on three ranks each sends two of three chunks and no more")
    nudge = Nudge(Kind.RECV, rank=1, call=1, element=t.integer(0, size // 3 - 1), by=2.0)  # the last to arrive is its own chunk
    want = [chunk.clone() for chunk in chunks_of(values)]
    want[1][nudge.element] += nudge.by
    for rank, got in enumerate(run_on(student, scattered, values, nudge).results):
        t.close(pair(t, got, rank)[0], want[rank], "the chunk of rank {rank} when another value arrives", rank=rank)


@check("scatter", points=1, seconds=40)
def check_scatter_memory(student, t):
    "The chunk does not keep the whole tensor alive"
    values = drawn(t, 4, 2 << 20)  # 8 MiB each; the rank's own copy of its input is there too
    run = student.ranks(scattered_and_held, [{"value": value} for value in values])
    for rank, (got, want) in enumerate(zip(run.results, chunks_of(values))):
        t.close(got, want, "the chunk of rank {rank} of a large tensor", rank=rank, atol=1e-5)
    messages_only(t, run)
    for rank in range(run.world):
        held = run.memory(rank, "after the reduce-scatter")
        most = 7 * values[rank].nbytes // 4
        t.that(held < most, "the chunk is a view of a whole tensor: as long as it lives, all of it stays in memory")


# -- 4 · gather


@check("gather", points=1, seconds=40)
def check_gather_odd(student, t):
    "Chunks of unequal sizes"
    for world, size in ((2, 2 * t.integer(2, 4) + 1), (3, 3 * t.integer(2, 4) + 2), (4, 6), (3, 2)):
        whole = t.normal(size)
        run = student.ranks(gathered, gather_inputs(whole, world))
        for rank, got in enumerate(run.results):
            t.close(got, whole, "the whole on rank {rank} of {world}, of a size that {world} does not divide", rank=rank, world=world)
        messages_only(t, run)


@check("gather", points=2, seconds=40)
def check_gather_traffic(student, t):
    "N - 1 chunks to the right neighbour"
    world = 4
    whole = t.normal(world * t.integer(2, 4))
    run = student.ranks(gathered, gather_inputs(whole, world))
    messages_only(t, run)
    for rank, got in enumerate(run.results):
        t.close(got, whole, "the whole on rank {rank}", rank=rank)
        t.that(
            sent(run, rank) == whole.nbytes * 3 // 4, "N - 1 chunks are sent by each rank, no more and no fewer: no rank serves all others"
        )
        t.that(all(call.peer == (rank + 1) % world for call in run.calls(rank, Kind.SEND)), "each rank sends to its right neighbour only")


# -- 5 · ring


@check("ring", points=1, seconds=30)
def check_all_reduce_shape(student, t):
    "Any shape, dtype and strides"
    values = [t.integers(-50, 50, 3, 5) for _ in range(2)]
    for scenario, want in ((reduced, summed(values)), (reduced_transposed, summed(values).t())):
        run = run_on(student, scenario, values)
        for rank, got in enumerate(run.results):
            what = "the sum on rank {rank} of matrices of whole numbers, also transposed ones"
            total = t.tensor(pair(t, got, rank)[0], what, shape=tuple(want.shape), dtype=want.dtype, rank=rank)
            t.that(torch.equal(total, want), "matrices of whole numbers, also transposed ones, have exactly their sum on every rank")


@check("ring", points=1, seconds=30)
def check_all_reduce_argument(student, t):
    "The argument stays as it is"
    for world in (1, 2):
        values = drawn(t, world, t.integer(4, 9))
        run = run_on(student, reduced, [value.clone() for value in values])
        for rank, got in enumerate(run.results):
            t.close(pair(t, got, rank)[1], values[rank], "the argument of rank {rank} of {world} after the call", rank=rank, world=world)


# -- 6 · trees


@check("broadcast", points=2, seconds=60)
def check_any_root(student, t):
    "Any root"
    for root in (1, 3):
        broadcast_right(student, t, 4, root)


@check("broadcast", points=1, seconds=30)
def check_three_ranks(student, t):
    "Numbers of ranks that are no powers of two"
    for world in (3, 5):
        broadcast_right(student, t, world, root=0)


@check("broadcast", points=2, seconds=30)
def check_broadcast_rounds(student, t):
    "Ranks that have it pass it on"
    run = broadcast_right(student, t, 4, root=0)
    number = [len(run.calls(rank, Kind.SEND)) for rank in range(4)]
    t.that(number[0] == 2, "the root of four sends twice: ranks that have the tensor help")
    t.that(sum(number) == 3, "three ranks need the tensor, so three messages pass")


@check("broadcast", points=1, seconds=30)
def check_broadcast_strides(student, t):
    "A transposed matrix is filled too"
    values = [t.normal(3, 4) for _ in range(2)]
    run = run_on(student, from_root_transposed, values, root=0)
    for rank, got in enumerate(run.results):
        t.close(got, values[0].t(), "what rank {rank} has in a transposed matrix: was only a copy of it filled?", rank=rank)


@check("reduce", points=1, seconds=30)
def check_reduce_three(student, t):
    "Numbers of ranks that are no powers of two"
    for world in (3, 5):
        reduce_right(student, t, world)


@check("reduce", points=2, seconds=30)
def check_reduce_rounds(student, t):
    "Rank 0 receives one partial sum a round"
    run = reduce_right(student, t, 4)
    t.that(len(run.calls(0, Kind.RECV)) == 2, "rank 0 of four receives twice: pairs are summed at the same time")
    t.that(sum(len(run.calls(rank, Kind.SEND)) for rank in range(4)) == 3, "each rank but rank 0 sends its partial sum once")


@check("reduce", points=1, seconds=30)
def check_reduce_argument(student, t):
    "The argument stays as it is"
    values = drawn(t, 2, t.integer(3, 7))
    run = run_on(student, to_zero, [value.clone() for value in values])
    for rank, got in enumerate(run.results):
        t.close(pair(t, got, rank)[1], values[rank], "the argument of rank {rank} after the call", rank=rank)


# -- 7 · everyone to everyone


@check("everyone", points=1, seconds=30)
def check_everyone_three(student, t):
    "A number of ranks that is no power of two"
    for world in (3, 5):
        parts_right(student, t, [[t.integer(2, 4)] * world] * world, "what rank {rank} has from rank {source}, of an odd number of ranks")


@check("everyone", points=1, seconds=30)
def check_unequal_parts(student, t):
    "Parts of unequal sizes, and empty ones"
    sizes = [[(3 * source + target + t.integer(0, 1)) % 4 for target in range(4)] for source in range(4)]
    parts_right(student, t, sizes, "what rank {rank} has from rank {source}, of parts of unequal sizes")


@check("everyone", points=2, seconds=30)
def check_straight(student, t):
    "Each part goes straight to its rank"
    world, size = 4, t.integer(2, 4)
    run = parts_right(student, t, [[size] * world] * world, "what rank {rank} has from rank {source}")
    for rank in range(world):
        peers = sorted(call.peer for call in run.calls(rank, Kind.SEND))
        t.that(peers == [peer for peer in range(world) if peer != rank], "one message to each other rank")
        t.that(sent(run, rank) == 3 * size * 4, "a rank sends each part to its owner, not all parts to everyone")


# -- 8 · the model


@check("cost", points=1)
def check_tree_rounds(student, t):
    "The tree on numbers of ranks that are no powers of two"
    for ranks in (3, 5, 2 ** t.integer(3, 6) + 1):
        same_cost(student, t, "tree", ranks, "a round that is only half full is still a round: round log2 N up")


@check("fit", points=2)
def check_noise(student, t):
    "Noise on large tensors does not hide the latency"
    alpha, beta = 2e-5, link(t)[1]
    got = t.items(student.fit_link(timings(t, alpha, beta, 0.1)), 2, "fit_link(timings)")
    message = "the latency is lost: divide each equation by its time, else 10 % of the largest tensor outweigh all of the small ones"
    t.that(type(got[0]) is float and bool(abs(got[0] - alpha) < 0.15 * alpha), message)
    t.that(type(got[1]) is float and bool(abs(got[1] - beta) < 0.15 * beta), "the seconds a byte takes are not found under noise of 10 %")


@check("crossover", points=1)
def check_no_crossover(student, t):
    "Two and three ranks: the ring is never dearer"
    for ranks in (2, 3):
        alpha, beta = link(t)
        t.equal(student.crossover_bytes(ranks, alpha, beta), None, "the crossover where the tree saves no message")


# -- quiz

ANSWERS = {
    "q1": Answer("b", "2 (N-1)/N is 1.75 for 8 ranks and 1.97 for 64: a large tensor hardly notices the number of ranks"),
    "q2": Answer("c", "12 rounds against 126: a small tensor pays for messages, not for bytes"),
    "q3": Answer("a", "dist.send promises only that the tensor may be used again; whether it waits for the receiver depends on the size"),
    "q4": Answer("d", "chunk c is summed from rank c + 1 round to rank c; the all-gather copies bits"),
    "q5": Answer("a", "B f instead of 2 B f"),
}
right = quiz_right(QUIZ, ANSWERS, points=1)
