"""The visible checks of trees, and of the all-reduce in two levels.

Results and traffic are compared in the same runs, on drawn numbers of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from dlo_lib.comm.calls import Call
from dlo_lib.grading.checks.contract import Kind, Run, check
from dlo_lib.labkit.compare import wrong_if
from dlo_lib.labkit.messages import in_few_rounds, targets, whole_tensors
from dlo_lib.labkit.traffic import sends_one_of, uses_what_arrives

from . import cases

# -- 6 · trees


def broadcasts(student, t, world: int, roots: Sequence[int]) -> tuple[Run, list[int]]:
    """A run with a broadcast from each root, one after another, with right results; and the size of each
    tensor, no two of which are equal."""
    first = t.integer(3, 7)
    sizes = [first + number for number in range(len(roots))]
    values = [[t.normal(size) for size in sizes] for _ in range(world)]
    run = student.ranks(cases.from_roots, [{"values": own, "roots": list(roots)} for own in values])
    what = "the tensors of rank {rank}"
    results = [t.items(got, len(roots), what, rank=rank) for rank, got in enumerate(run.results)]
    for number, root in enumerate(roots):
        got, given = ([own[number] for own in tensors] for tensors in (results, values))
        where = {"world": world, "root": root}
        message = (
            "all {world} ranks have the tensor of rank 0, not that of root {root}: count the ranks from the "
            "root"
        )
        wrong_if(t, got, [given[root]] * world, {message: [given[0]] * world}, **where)
        for rank, mine in enumerate(got):
            message = (
                "rank {rank} of {world} still has its own tensor: no tensor has reached it from root {root}"
            )
            wrong_if(t, mine, given[root], {message: given[rank]}, rank=rank, **where)
            what = "the tensor of rank {rank} of {world}, from root {root}"
            t.close(mine, given[root], what, rank=rank, **where)
    cases.messages_only(t, run)
    return run, sizes


@check("broadcast", points=2, seconds=40)
def check_broadcast(student, t):
    "Each of one, two and four ranks has the tensor of rank 0"
    for world in (1, 2, 4):
        broadcasts(student, t, world, [0])


@check("broadcast", points=3, seconds=60)
def check_any_root(student, t):
    "Any root, and any number of ranks"
    for world in (3, t.integer(6, 7)):
        roots = t.shuffled(list(range(world)))[:3]
        run, _ = broadcasts(student, t, world, roots)
    uses_what_arrives(t, run, Kind.RECV, (roots[-1] + 1 + t.integer(0, world - 2)) % world)


@check("broadcast", points=2, seconds=60)
def check_broadcast_rounds(student, t):
    "Two rounds with four ranks, three with five to eight: ranks that have the tensor send it on"
    for world in (4, t.integer(5, 8), t.integer(9, 12)):
        roots = [0, t.integer(1, world - 1)] if world == 4 else [t.integer(0, world - 1)]
        run, sizes = broadcasts(student, t, world, roots)
        whole_tensors(t, run, sizes)
        for root, size in zip(roots, sizes):
            broadcast_rounds(t, run, root, size)


def broadcast_rounds(t, run: Run, root: int, size: int) -> None:
    """Check the number of messages and of rounds of the broadcast of a tensor of ``size`` elements."""
    world = run.world
    children = {
        rank: [call.peer for call in run.calls(rank, Kind.SEND) if call.numel == size]
        for rank in range(world)
    }
    every = sorted(itertools.chain(*children.values()))
    again = next((rank for rank in every if rank == root or every.count(rank) > 1), None)
    message = (
        "{count} messages for {world} ranks: rank {rank} receives a tensor that it already has; {least} "
        "messages are enough"
    )
    t.that(again is None, message, count=len(every), world=world, rank=again, least=world - 1)
    count = len(children[root])
    star = (
        "the root of {world} ranks sends all {count} messages itself, one after the other: a rank that has "
        "received the tensor sends it on"
    )
    t.that(count < world - 1, star, world=world, count=count)
    message = (
        "the broadcast to {world} ranks takes {got} rounds, {least} are enough: in each round every rank "
        "that has the tensor sends it on. Your messages (rank: to, in your order) are {tree}"
    )
    in_few_rounds(t, children, root, cases.tree_rounds(world), message, in_order=True)


@check("broadcast", points=1, seconds=30)
def check_broadcast_strides(student, t):
    "A transposed matrix is filled too"
    values = [t.normal(3, 4) for _ in range(2)]
    run = cases.run_on(student, cases.from_root_transposed, values, root=0)
    for rank, got in enumerate(run.results):
        want = values[0].t()
        message = "the transposed matrix of rank {rank} is unchanged: was only a copy of it filled?"
        wrong_if(t, got, want, {message: values[rank].t()}, rank=rank)
        t.close(got, want, "the transposed matrix of rank {rank}", rank=rank)
    cases.messages_only(t, run)


# -- 11 · reduce


def reduce_right(student, t, values: Sequence[Tensor]) -> Run:
    """A run of a reduce with the right sum."""
    run, world, want = cases.run_on(student, cases.to_zero, values), len(values), cases.summed(values)
    got = cases.pair(t, run.results[0], 0)[0]
    message = "the result on rank 0 of {world} is the mean, it should be the sum"
    wrong_if(t, got, want, {message: want / world}, world=world)
    lacking = [] if cases.same(got, want) else subsets(world)
    missing = next((ranks for ranks in lacking if cases.same(got, sum_without(values, ranks))), ())
    message = "the sum on rank 0 of {world} lacks the tensors of these ranks: {missing}"
    t.that(not missing, message, world=world, missing=", ".join(map(str, missing)))
    t.close(got, want, "the sum on rank 0 of {world}", world=world)
    cases.messages_only(t, run)
    return run


def subsets(world: int) -> itertools.chain:
    """The sets of ranks that can be missing in a sum, small ones first."""
    return itertools.chain.from_iterable(
        itertools.combinations(range(world), number) for number in range(1, world)
    )


def sum_without(values: Sequence[Tensor], missing: Sequence[int]) -> Tensor:
    return cases.summed([value for rank, value in enumerate(values) if rank not in missing])


@check("reduce", points=2, seconds=40)
def check_reduce(student, t):
    "Rank 0 of one, two and four ranks has the sum"
    for world in (1, 2, 4):
        reduce_right(student, t, cases.drawn(t, world, t.integer(3, 7)))


@check("reduce", points=1, seconds=40)
def check_reduce_three(student, t):
    "Numbers of ranks that are not powers of two"
    for world in (3, t.integer(6, 7)):
        run = reduce_right(student, t, cases.drawn(t, world, t.integer(3, 7)))
    uses_what_arrives(t, run, Kind.RECV)


@check("reduce", points=2, seconds=60)
def check_reduce_rounds(student, t):
    "Two rounds with four ranks, three with five to eight: rank 0 receives one partial sum per round"
    for world in (4, t.integer(5, 8), t.integer(9, 12)):
        size = t.integer(3, 7)
        run = reduce_right(student, t, cases.drawn(t, world, size))
        whole_tensors(t, run, [size])
        reduce_rounds(t, run)


def reduce_rounds(t, run: Run) -> None:
    """Check the number of messages and of rounds."""
    world = run.world
    children: dict[int, list[int]] = {rank: [] for rank in range(world)}
    for rank in range(world):
        peers, want = targets(run, rank), min(rank, 1)
        message = (
            "rank {rank} of {world} sends {count} messages: each rank except rank 0 sends its partial "
            "sum once"
        )
        t.that(len(peers) == want, message, rank=rank, world=world, count=len(peers))
        for to in peers:
            children[to].append(rank)
    count = len(children[0])
    star = (
        "rank 0 of {world} ranks receives {count} messages, one after the other: pairs of ranks can add "
        "their tensors at the same time"
    )
    t.that(count < world - 1, star, world=world, count=count)
    message = (
        "the reduce from {world} ranks takes {got} rounds, {least} are enough: in each round half of the "
        "ranks that still have a partial sum send it. Your messages (rank: from) are {tree}"
    )
    in_few_rounds(t, children, 0, cases.tree_rounds(world), message)


@check("reduce", points=1, seconds=30)
def check_reduce_argument(student, t):
    "The argument stays unchanged"
    values = cases.drawn(t, t.choice([2, 4]), t.integer(3, 7))
    cases.unchanged(t, reduce_right(student, t, values), values)


# -- 8 · two levels


def chunks_of_nodes(values: Sequence[Tensor], inside: int) -> list[Tensor]:
    """The chunk of each rank in the sum over its node."""
    nodes = [
        cases.summed(values[first : first + inside]).tensor_split(inside)
        for first in range(0, len(values), inside)
    ]
    return [chunk for node in nodes for chunk in node]


NODE_ONLY = (
    "rank {rank} of {world} has the sum over its node only: add the chunks of all nodes, with group=between"
)
PEERS_ONLY = (
    "rank {rank} of {world} has only the sum over the ranks with its place on every node: the sum inside the "
    "node is missing"
)
MIXED = (
    "rank {rank} of {world} adds the chunks of all ranks, which are different parts of the tensor: pass "
    "group=between to the all-reduce"
)
ONE_CHUNK = (
    "rank {rank} of {world} has one chunk of the sum: gather the chunks of the node, with group=inside"
)


def two_levels(student, t, world: int, inside: int) -> tuple[Run, list[Tensor]]:
    """A run with right sums, and the tensors of the ranks."""
    values = cases.drawn(t, world, inside * t.integer(2, 5))
    run = cases.run_on(student, cases.in_levels, values, inside=inside)
    total = cases.summed(values)
    mixed = cases.summed(chunks_of_nodes(values, inside)).repeat(inside)
    for rank, result in enumerate(run.results):
        got = cases.pair(t, result, rank)[0]
        first = rank - rank % inside
        node, peers = (
            cases.summed(values[first : first + inside]),
            cases.summed(values[rank % inside :: inside]),
        )
        where = {"rank": rank, "world": world, "inside": inside}
        chunk = total.tensor_split(inside)[rank % inside]
        mistakes = {NODE_ONLY: node, PEERS_ONLY: peers, MIXED: mixed, ONE_CHUNK: chunk}
        wrong_if(t, got, total, mistakes, rtol=1e-4, atol=1e-6, **where)
        t.close(got, total, "the sum on rank {rank} of {world}, {inside} ranks a node", **where)
    return run, values


def between_nodes(run: Run, rank: int, inside: int) -> list[Call]:
    """The calls of ``rank`` whose data cross between nodes, of any kind."""
    return [
        call
        for call in run.calls(rank)
        if call.ring_bytes and len({member // inside for member in call.members}) > 1
    ]


def few_bytes(t, run: Run, size: int, inside: int) -> None:
    """Check the bytes of all calls, whatever their kind: between the nodes an all-reduce of a chunk, inside a
    node a reduce-scatter and an all-gather. ``size``: bytes of the tensor."""
    world, chunk = run.world, size // inside
    for rank in range(world):
        where = {"rank": rank, "world": world, "inside": inside}
        messages = [call for call in run.calls(rank) if call.kind.point_to_point]
        message = (
            "rank {rank} sends messages: use reduce_scatter_tensor, all_reduce and all_gather_into_tensor, "
            "with their groups"
        )
        t.that(not messages, message, rank=rank)
        outer, place = between_nodes(run, rank, inside), list(range(rank % inside, world, inside))
        stray = next((call for call in outer if sorted(call.members) != place), None)
        t.that(
            stray is None,
            "rank {rank} of {world} calls {kind} on the group of ranks {got}, which has several ranks of "
            "one node: pass group=inside for what stays in the node, ranks {node}, and group=between for "
            "what is added between the nodes",
            kind=stray.kind.value if stray else "",
            got=sorted(stray.members) if stray else [],
            node=list(range(rank - rank % inside, rank - rank % inside + inside)),
            **where,
        )
        got, most = sum(call.ring_bytes for call in outer), 2 * chunk * (world - inside) / world
        t.that(
            bool(got <= most),
            "rank {rank} of {world} sends {got:.0f} bytes between the nodes ({names}), {most:.0f} are "
            "enough: only a chunk of B / {inside}, {chunk} bytes, is added between the nodes. Cut the "
            "tensor by a reduce-scatter inside the node first",
            got=got,
            most=most,
            chunk=chunk,
            names=", ".join(call.kind.value for call in outer),
            **where,
        )
        inner = [call for call in run.calls(rank) if call.ring_bytes and call not in outer]
        got, most = sum(call.ring_bytes for call in inner), 2 * size * (inside - 1) / inside
        t.that(
            bool(got <= most),
            "rank {rank} of {world} sends {got:.0f} bytes inside its node ({names}), {most:.0f} are enough: "
            "a reduce-scatter gives each rank one chunk of the sum of the node, and an all-gather brings "
            "the chunks back",
            got=got,
            most=most,
            names=", ".join(call.kind.value for call in inner),
            **where,
        )


@check("levels", points=3, seconds=60)
def check_levels(student, t):
    "The sum on every rank, with one chunk between the nodes"
    for world, inside in ((4, 2), (6, t.integer(2, 3)), (2, 2), (t.integer(2, 3), 1)):
        run, values = two_levels(student, t, world, inside)
        few_bytes(t, run, values[0].nbytes, inside)
        total = cases.summed(values)
        total_chunks = [total.tensor_split(inside)[rank % inside] for rank in range(world)]
        message = (
            "rank {rank} passes other numbers to its all-reduce than its chunk of the sum over its node: "
            "they should come from the reduce-scatter"
        )
        if world > inside:
            known = [[chunk] for chunk in chunks_of_nodes(values, inside)]
            sends_one_of(t, run, Kind.ALL_REDUCE, known, message)
        message = (
            "rank {rank} passes other numbers to its all-gather than its chunk of the sum over all ranks: "
            "they should come from the all-reduce"
        )
        sends_one_of(t, run, Kind.ALL_GATHER, [[chunk] for chunk in total_chunks], message)
        if world == 4:
            rank = t.integer(0, world - 1)
            crossing = between_nodes(run, rank, inside)
            t.that(bool(crossing), "nothing passes between the nodes of {world} ranks", world=world)
            uses_what_arrives(t, run, crossing[-1].kind, rank)


@check("levels", points=1, seconds=30)
def check_levels_argument(student, t):
    "The argument stays unchanged"
    run, values = two_levels(student, t, 2, 2)
    cases.unchanged(t, run, values)
