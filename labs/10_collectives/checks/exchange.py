"""The visible checks of pi, of messages and of all-to-all. The twin of a collective is one process with the
tensors of all ranks.

``wrong_if`` names the known mistakes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Run, check
from dlo_lib.labkit.compare import wrong_if
from dlo_lib.labkit.messages import sent, steps_of_messages, targets
from dlo_lib.labkit.traffic import uses_what_arrives

from . import cases

# -- 1 · pi


def points_of(t, sizes: Sequence[int]) -> list[Tensor]:
    return [
        torch.stack(
            [torch.tensor([t.uniform(0, 1), t.uniform(0, 1)], dtype=torch.float64) for _ in range(size)]
        )
        for size in sizes
    ]


def shares(t, sizes: Sequence[int]) -> list[Tensor]:
    """The points of each rank, such that its own estimate and the mean of the ranks' estimates are not the
    right one. (With equal numbers of points the mean is right.)"""

    def tells(parts: list[Tensor]) -> bool:
        right, own = round(cases.estimate(parts), 3), [cases.estimate([part]) for part in parts]
        mean = [sum(own) / len(own)] if len(set(sizes)) > 1 else []
        return len(parts) == 1 or right not in [round(wrong, 3) for wrong in (*own, *mean)]

    return t.draw_until(lambda: points_of(t, sizes), tells)


def same_estimate(t, run: Run, parts: Sequence[Tensor]) -> None:
    """Check the estimate of every rank."""
    want, alone, total = (
        cases.estimate(parts),
        [cases.estimate([part]) for part in parts],
        sum(map(len, parts)),
    )
    for rank, got in enumerate(run.results):
        where = {"rank": rank, "world": run.world}
        t.number(got, "the estimate of rank {rank} of {world}", **where)
        mistakes = {
            "rank {rank} of {world} returns the estimate from its own points only: sum the counts over the "
            "ranks": alone[rank],
            "rank {rank} of {world} returns the mean of the ranks' estimates. Every point should have the "
            "same weight: sum the points inside and all points over the ranks, then divide": sum(alone)
            / run.world,
            "rank {rank} of {world} divides the points inside of all ranks by the points of one rank, or "
            "adds the ranks' estimates: divide by the points of all ranks": want * total / len(parts[rank]),
            "rank {rank} of {world} returns the sum of the ranks' estimates: sum the points inside and all "
            "points, then divide": sum(alone),
            "rank {rank} of {world} returns the fraction of points inside: the factor 4 is missing": want / 4,
        }
        wrong_if(t, got, want, mistakes, **where)
        t.close(got, want, "the estimate of rank {rank} of {world}", **where)


def estimates(student, t, sizes: Sequence[int]) -> Run:
    """A run with this number of points on each rank, whose estimates are right."""
    parts = shares(t, sizes)
    run = student.ranks(cases.estimated, [{"points": part} for part in parts])
    same_estimate(t, run, parts)
    return run


@check("pi", points=2, seconds=30)
def check_pi(student, t):
    "All ranks have the estimate from all points"
    for world in (1, 2, t.integer(4, 6)):
        estimates(student, t, [t.integer(8, 14)] * world)


@check("pi", points=1, seconds=30)
def check_unequal_shares(student, t):
    "Ranks with unequal numbers of points"
    estimates(student, t, [t.integer(3, 5), t.integer(16, 24), t.integer(30, 40)])


@check("pi", points=1, seconds=30)
def check_one_all_reduce(student, t):
    "One all-reduce of the counts"
    for world in (t.integer(3, 6), 2):
        run = estimates(student, t, [t.integer(8, 14)] * world)
        for rank in range(world):
            kinds = [call.kind for call in run.calls(rank)]
            t.that(
                kinds == [Kind.ALL_REDUCE],
                "rank {rank} of {world} makes {count} calls ({kinds}): put the two counts into one tensor "
                "and call all_reduce once",
                rank=rank,
                world=world,
                count=len(kinds),
                kinds=", ".join(kind.value for kind in kinds) or ("none"),
            )
            most = 2 * torch.float64.itemsize
            message = (
                "rank {rank} passes {got} bytes to the all-reduce: two counts have {most}, the points "
                "stay where they are"
            )
            t.that(run.bytes(rank) <= most, message, rank=rank, got=run.bytes(rank), most=most)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 1))


# -- 2 · exchange


def routes(values: Sequence[Tensor], to: Sequence[int]) -> list[dict]:
    """The inputs of each rank: rank ``r`` sends its tensor to rank ``to[r]``."""
    sources = [to.index(rank) for rank in range(len(values))]
    return [
        {"outgoing": own, "to": target, "incoming": torch.zeros_like(values[source]), "source": source}
        for own, target, source in zip(values, to, sources)
    ]


def routed(student, values: Sequence[Tensor], to: Sequence[int]) -> Run:
    """Each rank ``r`` sends its tensor to rank ``to[r]``."""
    return student.ranks(cases.exchanged, routes(values, to))


UNCHANGED = (
    "`incoming` is unchanged on rank {rank} of {world}: receive the tensor of rank {source} into it, and "
    "return only after the `wait()` of the receive"
)
FROM_TARGET = (
    "rank {rank} of {world} has the tensor of rank {to}, to which it sends: it receives from rank {source}"
)


def same_received(t, run: Run, values: Sequence[Tensor], to: Sequence[int]) -> None:
    for rank, got in enumerate(run.results):
        source = to.index(rank)
        want, where = values[source], {"rank": rank, "world": run.world, "to": to[rank], "source": source}
        mistakes = {UNCHANGED: torch.zeros_like(want), FROM_TARGET: values[to[rank]]}
        wrong_if(t, got, want, mistakes, **where)
        t.close(got, want, "the tensor that rank {rank} of {world} received", **where)
    cases.messages_only(t, run)


def shift(world: int, distance: int) -> list[int]:
    """Each rank sends to the rank at ``distance`` to its right."""
    return [(rank + distance) % world for rank in range(world)]


@check("exchange", points=1, seconds=30)
def check_exchange(student, t):
    "All ranks of a ring send at the same time"
    for world in (2, t.integer(3, 6)):
        values, to = cases.drawn(t, world, t.integer(3, 9)), shift(world, 1)
        same_received(t, routed(student, values, to), values, to)


@check("exchange", points=1, seconds=30)
def check_exchange_waits(student, t):
    "It returns when its send and its receive are done"
    world, late = 3, t.integer(0, 2)
    values, to = cases.drawn(t, world, t.integer(3, 9)), shift(world, 1)
    run = student.ranks(
        cases.exchanged_with_one_late, [{**case, "late": late} for case in routes(values, to)]
    )
    for rank, got in enumerate(run.results):
        message = (
            "not tested yet: rank {rank} of {world} did not receive the tensor of its neighbour, see the "
            "first check"
        )
        good = isinstance(got, Tensor) and torch.equal(got, values[to.index(rank)])
        t.that(good, message, rank=rank, world=world)
    for rank in range(world):
        before = run.calls(rank)[: run.calls_before(rank, "returned")]
        sends = [call for call in before if call.kind is Kind.SEND]
        started = len(sends) >= (1 if rank == late else 2)  # the others also say that they begin
        unfinished = [call.kind for call in run.open_calls(rank, "returned")]
        message = (
            "on rank {rank} `exchange` returns before its send to rank {to} is done: rank {to} begins later "
            "than the others. Wait for the send, and for the thread if a thread sends"
        )
        t.that(started and Kind.SEND not in unfinished, message, rank=rank, to=to[rank])
        message = "on rank {rank} `exchange` returns before its receive is done: wait for it"
        t.that(not unfinished, message, rank=rank)
    t.that(run.forgotten_wait() == "", "`exchange` returns before its messages are done.")


@check("exchange", points=1, seconds=40)
def check_any_pattern(student, t):
    "Any pattern: 0 and 2 send to each other, 1 and 3 too (even ranks cannot all send first)"
    values, to = cases.drawn(t, 4, t.integer(3, 9)), shift(4, 2)
    run = routed(student, values, to)
    same_received(t, run, values, to)
    uses_what_arrives(t, run, Kind.RECV, t.integer(0, 3))


# -- 12 · all-to-all


OWN_PARTS = (
    "rank {rank} returns its own parts for the others: it should return the parts that the others have for it"
)
AS_THEY_ARRIVE = (
    "rank {rank} returns the parts in the order in which they arrive: part s should be that of rank s"
)


def parts_right(student, t, sizes: Sequence[Sequence[int]], what: str) -> Run:
    """A run with right results. ``sizes[source][target]``: the elements of each part."""
    world = len(sizes)
    parts = [[t.normal(size) for size in row] for row in sizes]
    inputs = [{"parts": own, "sizes": [row[rank] for row in sizes]} for rank, own in enumerate(parts)]
    run = student.ranks(cases.to_everyone, inputs)
    for rank, result in enumerate(run.results):
        got = t.items(result, world, "the parts of rank {rank}", rank=rank)
        want = [row[rank] for row in parts]
        arrived = [want[(rank - step) % world] for step in range(world)]
        wrong_if(t, got, want, {OWN_PARTS: parts[rank], AS_THEY_ARRIVE: arrived}, rank=rank)
        for source, part in enumerate(got):
            t.close(part, want[source], what, rank=rank, source=source, world=world)
    cases.messages_only(t, run)
    return run


def some_sizes(t, world: int, least: int) -> list[list[int]]:
    """Sizes of the parts, ``least`` or more."""
    return [[t.integer(least, least + 3) for _ in range(world)] for _ in range(world)]


@check("everyone", points=2, seconds=40)
def check_everyone(student, t):
    "Each of one, two and four ranks has a part from every rank"
    for world in (1, 2, 4):
        what = "the part from rank {source} on rank {rank}"
        run = parts_right(student, t, [[t.integer(2, 4)] * world] * world, what)
        for rank in range(world):
            message = "rank {rank} sends to itself: its own part needs no message"
            t.that(all(call.peer != rank for call in run.calls(rank)), message, rank=rank)


@check("everyone", points=1, seconds=40)
def check_everyone_three(student, t):
    "Numbers of ranks that are not powers of two"
    for world in (3, t.integer(6, 7)):
        what = "the part from rank {source} on rank {rank} of {world}, which is not a power of two"
        parts_right(student, t, [[t.integer(2, 4)] * world] * world, what)


@check("everyone", points=1, seconds=30)
def check_unequal_parts(student, t):
    "Parts of unequal sizes, and empty ones"
    sizes = [[(3 * source + target + t.integer(0, 1)) % 4 for target in range(4)] for source in range(4)]
    parts_right(student, t, sizes, "the part from rank {source} on rank {rank}, with parts of unequal sizes")


@check("everyone", points=1, seconds=40)
def check_everyone_steps(student, t):
    "In each step every rank sends one part and receives one"
    for world in (4, t.integer(5, 7)):
        run = parts_right(student, t, some_sizes(t, world, 1), "the part from rank {source} on rank {rank}")
        got = steps_of_messages(run)
        first = Counter(peers[0] for rank in range(world) if (peers := targets(run, rank)))
        rank, count = first.most_common(1)[0]
        message = (
            "the messages of {world} ranks take {got} steps if a rank sends one and receives one in each, "
            "{least} are enough"
        )
        if count > 1:
            message += ": {count} ranks send to rank {rank} first, which is overloaded while others wait"
        t.that(got <= world, message, world=world, got=got, least=world - 1, rank=rank, count=count)


@check("everyone", points=2, seconds=30)
def check_straight(student, t):
    "Each part goes directly to its rank"
    for world in (2, t.choice([3, 5, 6])):
        sizes = some_sizes(t, world, 1)
        run = parts_right(student, t, sizes, "the part from rank {source} on rank {rank}")
        for rank in range(world):
            peers = sorted(targets(run, rank))
            t.that(
                peers == [peer for peer in range(world) if peer != rank],
                "rank {rank} sends to ranks {peers}: it should send one message to each other rank",
                rank=rank,
                peers=", ".join(map(str, peers)) or "none",
            )
            want = (sum(sizes[rank]) - sizes[rank][rank]) * torch.float32.itemsize
            message = (
                "rank {rank} sends {got} bytes, its parts for the others have {want}: a part goes only "
                "to its destination"
            )
            t.that(sent(run, rank) == want, message, rank=rank, got=sent(run, rank), want=want)
    uses_what_arrives(t, run, Kind.RECV, t.integer(0, world - 1))
