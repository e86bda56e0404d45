"""The visible checks of trees, of all-to-all, and of the all-reduce in two levels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Run, Wrong, check
from dlo_lib.labkit.compare import wrong_if
from dlo_lib.labkit.traffic import sends_one_of, uses_what_arrives

from .rings import drawn, everywhere, messages_only, pair, run_on, sent, targets, unchanged
from .scenarios import from_root, from_root_transposed, in_levels, to_everyone, to_zero
from .twins import summed, tree_rounds


def rounds(children: Mapping[int, Sequence[int]], rank: int, in_order: bool) -> int:
    """The rounds of a tree of messages, with one message of each rank in a round, in this order or in the best one."""
    below = [rounds(children, child, in_order) for child in children[rank]]
    if not in_order:
        below.sort(reverse=True)
    return max((place + 1 + more for place, more in enumerate(below)), default=0)


def in_few_rounds(t, children: Mapping[int, Sequence[int]], root: int, message: str, in_order: bool = False) -> None:
    """Check the number of rounds. Each rank except ``root`` must be the child of one rank."""
    world, least = len(children), tree_rounds(len(children))
    got = rounds(children, root, in_order)
    tree = "; ".join(f"{rank}: {', '.join(map(str, others))}" for rank, others in children.items() if others)
    t.that(got == least, message, world=world, got=got, least=least, tree=tree)


# -- 6 · trees


def broadcast_right(student, t, world: int, root: int, check_use: bool = False) -> Run:
    values = drawn(t, world, t.integer(3, 7))
    run = run_on(student, from_root, values, root=root)
    where = {"world": world, "root": root}
    message = "all {world} ranks have the tensor of rank 0, not that of root {root}: count the ranks from the root"
    wrong_if(t, run.results, [values[root]] * world, {message: [values[0]] * world}, **where)
    for rank, got in enumerate(run.results):
        message = "rank {rank} of {world} still has its own tensor: no tensor has reached it from root {root}"
        wrong_if(t, got, values[root], {message: values[rank]}, rank=rank, **where)
        t.close(got, values[root], "the tensor of rank {rank} of {world}, from root {root}", rank=rank, **where)
    messages_only(t, run)
    if check_use:
        uses_what_arrives(t, run, Kind.RECV, (root + 1 + t.integer(0, world - 2)) % world)
    return run


@check("broadcast", points=2, seconds=40)
def check_broadcast(student, t):
    "Each of one, two and four ranks has the tensor of rank 0"
    for world in (1, 2, 4):
        broadcast_right(student, t, world, root=0)


@check("broadcast", points=3, seconds=60)
def check_any_root(student, t):
    "Any root, and any number of ranks"
    for world, root in ((4, 1), (4, 3), (3, 0), (5, 2)):
        broadcast_right(student, t, world, root, check_use=world == 5)


@check("broadcast", points=2, seconds=60)
def check_broadcast_rounds(student, t):
    "Two rounds with four ranks, three with five to eight: ranks that have the tensor send it on"
    for world in (4, 8):
        broadcast_rounds(t, broadcast_right(student, t, world, root=0), root=0)
    world = t.integer(5, 7)
    root = t.integer(1, world - 1)
    try:
        run = broadcast_right(student, t, world, root)
    except Wrong:  # another check is for this number of ranks and this root
        return
    broadcast_rounds(t, run, root)


def broadcast_rounds(t, run: Run, root: int) -> None:
    """Check the number of messages and of rounds."""
    world = run.world
    children = {rank: targets(run, rank) for rank in range(world)}
    every = sorted(itertools.chain(*children.values()))
    again = next((rank for rank in every if rank == root or every.count(rank) > 1), None)
    t.that(
        again is None, "{count} messages for {world} ranks: rank {rank} receives a tensor that it already has; {least} messages are enough",
        count=len(every), world=world, rank=again, least=world - 1,
    )  # fmt: skip
    count = len(children[root])
    star = (
        "the root of {world} ranks sends all {count} messages itself, one after the other: a rank that has received the tensor sends it on"
    )
    t.that(count < world - 1, star, world=world, count=count)
    in_few_rounds(
        t, children, root,
        "the broadcast to {world} ranks takes {got} rounds, {least} are enough: in each round every rank that has the tensor sends it on. "
        "Your messages (rank: to, in your order) are {tree}",
        in_order=True,
    )  # fmt: skip


@check("broadcast", points=1, seconds=30)
def check_broadcast_strides(student, t):
    "A transposed matrix is filled too"
    values = [t.normal(3, 4) for _ in range(2)]
    run = run_on(student, from_root_transposed, values, root=0)
    for rank, got in enumerate(run.results):
        want = values[0].t()
        message = "the transposed matrix of rank {rank} is unchanged: was only a copy of it filled?"
        wrong_if(t, got, want, {message: values[rank].t()}, rank=rank)
        t.close(got, want, "the transposed matrix of rank {rank}", rank=rank)
    messages_only(t, run)


def reduce_right(student, t, values: Sequence[Tensor]) -> Run:
    run, world, want = run_on(student, to_zero, values), len(values), summed(values)
    got = pair(t, run.results[0], 0)[0]
    wrong_if(t, got, want, {"the result on rank 0 of {world} is the mean, it should be the sum": want / world}, world=world)
    for number in range(1, world):
        for missing in itertools.combinations(range(world), number):
            rest = [value for rank, value in enumerate(values) if rank not in missing]
            message = "the sum on rank 0 of {world} lacks the tensors of these ranks: {missing}"
            wrong_if(t, got, want, {message: summed(rest)}, rtol=1e-4, atol=1e-6, world=world, missing=", ".join(map(str, missing)))
    t.close(got, want, "the sum on rank 0 of {world}", world=world)
    messages_only(t, run)
    return run


@check("reduce", points=2, seconds=40)
def check_reduce(student, t):
    "Rank 0 of one, two and four ranks has the sum"
    for world in (1, 2, 4):
        reduce_right(student, t, drawn(t, world, t.integer(3, 7)))


@check("reduce", points=1, seconds=30)
def check_reduce_three(student, t):
    "Numbers of ranks that are not powers of two"
    for world in (3, 5):
        run = reduce_right(student, t, drawn(t, world, t.integer(3, 7)))
    uses_what_arrives(t, run, Kind.RECV)


@check("reduce", points=2, seconds=60)
def check_reduce_rounds(student, t):
    "Two rounds with four ranks, three with five to eight: rank 0 receives one partial sum per round"
    for world in (4, 8):
        reduce_rounds(t, reduce_right(student, t, drawn(t, world, t.integer(3, 7))))
    try:
        run = reduce_right(student, t, drawn(t, t.integer(5, 7), t.integer(3, 7)))
    except Wrong:  # another check is for numbers of ranks that are not powers of two
        return
    reduce_rounds(t, run)


def reduce_rounds(t, run: Run) -> None:
    """Check the number of messages and of rounds."""
    world = run.world
    children: dict[int, list[int]] = {rank: [] for rank in range(world)}
    for rank in range(world):
        peers, want = targets(run, rank), min(rank, 1)
        t.that(
            len(peers) == want, "rank {rank} of {world} sends {count} messages: each rank except rank 0 sends its partial sum once",
            rank=rank, world=world, count=len(peers),
        )  # fmt: skip
        for to in peers:
            children[to].append(rank)
    count = len(children[0])
    star = "rank 0 of {world} ranks receives {count} messages, one after the other: pairs of ranks can add their tensors at the same time"
    t.that(count < world - 1, star, world=world, count=count)
    in_few_rounds(
        t, children, 0,
        "the reduce from {world} ranks takes {got} rounds, {least} are enough: in each round half of the ranks that still have a partial sum "
        "send it. Your messages (rank: from) are {tree}",
    )  # fmt: skip


@check("reduce", points=1, seconds=30)
def check_reduce_argument(student, t):
    "The argument stays unchanged"
    values = drawn(t, 2, t.integer(3, 7))
    unchanged(t, reduce_right(student, t, values), values)


# -- 7 · all-to-all


def parts_right(student, t, sizes: Sequence[Sequence[int]], what: str) -> Run:
    """``sizes[source][target]``: the elements of each part."""
    world = len(sizes)
    parts = [[t.normal(size) for size in row] for row in sizes]
    run = student.ranks(to_everyone, [{"parts": parts[rank], "sizes": [row[rank] for row in sizes]} for rank in range(world)])
    for rank, result in enumerate(run.results):
        got, want = t.items(result, world, "the parts of rank {rank}", rank=rank), [row[rank] for row in parts]
        mistakes = {
            "rank {rank} returns its own parts for the others: it should return the parts that the others have for it": parts[rank],
            "rank {rank} returns the parts in the order in which they arrive: part s should be that of rank s": [
                want[(rank - step) % world] for step in range(world)
            ],
        }
        wrong_if(t, got, want, mistakes, rank=rank)
        for source, part in enumerate(got):
            t.close(part, want[source], what, rank=rank, source=source, world=world)
    messages_only(t, run)
    return run


@check("everyone", points=2, seconds=40)
def check_everyone(student, t):
    "Each of one, two and four ranks has a part from every rank"
    for world in (1, 2, 4):
        run = parts_right(student, t, [[t.integer(2, 4)] * world] * world, "the part from rank {source} on rank {rank}")
        for rank in range(world):
            t.that(
                all(call.peer != rank for call in run.calls(rank)), "rank {rank} sends to itself: its own part needs no message", rank=rank
            )


@check("everyone", points=1, seconds=30)
def check_everyone_three(student, t):
    "A number of ranks that is not a power of two"
    for world in (3, 5):
        parts_right(
            student, t, [[t.integer(2, 4)] * world] * world, "the part from rank {source} on rank {rank} of {world}, an odd number of ranks"
        )


@check("everyone", points=1, seconds=30)
def check_unequal_parts(student, t):
    "Parts of unequal sizes, and empty ones"
    sizes = [[(3 * source + target + t.integer(0, 1)) % 4 for target in range(4)] for source in range(4)]
    parts_right(student, t, sizes, "the part from rank {source} on rank {rank}, with parts of unequal sizes")


@check("everyone", points=1, seconds=30)
def check_everyone_steps(student, t):
    "In each step every rank sends one part and receives one"

    def run(world: int) -> Run:
        return parts_right(student, t, [[t.integer(2, 4)] * world] * world, "the part from rank {source} on rank {rank}")

    no_rank_overloaded(t, run(4))
    try:
        six = run(6)
    except Wrong:  # another check is for numbers of ranks that are not powers of two
        return
    no_rank_overloaded(t, six)


def no_rank_overloaded(t, run: Run) -> None:
    """Check that in each step each rank receives from one rank at most."""
    for step, peers in enumerate(zip(*(targets(run, rank) for rank in range(run.world)))):
        crowded = next((peer for peer in peers if peers.count(peer) > 1), None)
        t.that(
            crowded is None,
            "in step {step} several ranks of {world} send to rank {rank}, which is overloaded while others wait",
            step=step,
            world=run.world,
            rank=crowded,
        )


@check("everyone", points=2, seconds=30)
def check_straight(student, t):
    "Each part goes directly to its rank"
    world, size = 4, t.integer(2, 4)
    run = parts_right(student, t, [[size] * world] * world, "the part from rank {source} on rank {rank}")
    for rank in range(world):
        peers = sorted(targets(run, rank))
        t.that(
            peers == [peer for peer in range(world) if peer != rank], "rank {rank} sends to ranks {peers}: it should send one message to each other rank",
            rank=rank, peers=", ".join(map(str, peers)) or "none",
        )  # fmt: skip
        want = (world - 1) * size * torch.float32.itemsize
        t.that(
            sent(run, rank) == want, "rank {rank} sends {got} bytes, its parts for the others have {want}: a part goes only to its destination",
            rank=rank, got=sent(run, rank), want=want,
        )  # fmt: skip
    uses_what_arrives(t, run, Kind.RECV, t.integer(0, world - 1))


# -- 8 · two levels


@check("levels", points=3, seconds=40)
def check_levels(student, t):
    "The sum on every rank, with one chunk between the nodes"
    for world, inside in ((4, 2), (2, 2), (2, 1)):
        values = drawn(t, world, 4 * t.integer(2, 5))
        run = run_on(student, in_levels, values, inside=inside)
        total = summed(values)
        for rank, result in enumerate(run.results):
            got = pair(t, result, rank)[0]
            first = rank - rank % inside
            node, peers = summed(values[first : first + inside]), summed(values[rank % inside :: inside])
            where = {"rank": rank, "world": world, "inside": inside}
            mistakes = {
                "rank {rank} of {world} has the sum over its node only: add the chunks of all nodes, with group=between": node,
                "rank {rank} of {world} has only the sum over the ranks with its place on every node: the sum inside the node is missing": peers,
                "rank {rank} of {world} has one chunk of the sum: gather the chunks of the node, with group=inside": total.tensor_split(
                    inside
                )[rank % inside],
            }
            wrong_if(t, got, total, mistakes, rtol=1e-4, atol=1e-6, **where)
            t.close(got, total, "the sum on rank {rank} of {world}, {inside} ranks a node", **where)
        for rank in range(world):
            chunk = values[0].nbytes // inside
            other = [call for call in run.calls(rank) if call.kind in (Kind.SEND, Kind.RECV)]
            message = "rank {rank} sends messages: use reduce_scatter_tensor, all_reduce and all_gather_into_tensor, with their groups"
            t.that(not other, message, rank=rank)
            got = run.bytes(rank, Kind.ALL_REDUCE)
            t.that(
                got == chunk,
                "rank {rank} of {world} passes {got} bytes to all-reduces: only a chunk of B / {inside}, {chunk} bytes, is added between the "
                "nodes. Cut the tensor by a reduce-scatter inside the node first",
                rank=rank, world=world, inside=inside, got=got, chunk=chunk,
            )  # fmt: skip
            node = list(range(rank - rank % inside, rank - rank % inside + inside))
            for call in run.calls(rank):
                if call.kind not in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.ALL_REDUCE):
                    continue
                want, name = (list(range(rank % inside, world, inside)), "between") if call.kind is Kind.ALL_REDUCE else (node, "inside")
                t.that(
                    sorted(call.members) == want,
                    "rank {rank} of {world} calls {kind} on the group of ranks {got}, it should be the group of ranks {want}: pass group={name}",
                    rank=rank, world=world, kind=call.kind.value, got=sorted(call.members), want=want, name=name,
                )  # fmt: skip
        total_chunks = [total.tensor_split(inside)[rank % inside] for rank in range(world)]
        node_chunks = [summed(values[rank - rank % inside :][:inside]).tensor_split(inside)[rank % inside] for rank in range(world)]
        message = "rank {rank} passes other numbers to its all-reduce than its chunk of the sum over its node: they should come from the reduce-scatter"
        sends_one_of(t, run, Kind.ALL_REDUCE, [[chunk] for chunk in node_chunks], message)
        message = "rank {rank} passes other numbers to its all-gather than its chunk of the sum over all ranks: they should come from the all-reduce"
        sends_one_of(t, run, Kind.ALL_GATHER, [[chunk] for chunk in total_chunks], message)
        if world == 4:
            uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 3))


@check("levels", points=1, seconds=30)
def check_levels_argument(student, t):
    "The argument stays unchanged"
    values = drawn(t, 2, 4 * t.integer(2, 5))
    run = run_on(student, in_levels, values, inside=2)
    everywhere(t, run, values)
    unchanged(t, run, values)
