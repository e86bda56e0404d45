"""The visible checks of the exchange, and of the layer on several ranks.

Traffic is counted outside the student's process; bytes are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, NotWritten, Run, Scenario, Wrong, check
from dlo_lib.labkit import tr
from dlo_lib.labkit.compare import EXACT, double, each_rank, explained, near, same, wrong_if
from dlo_lib.labkit.traffic import makes_calls, passes_only, uses_what_arrives

from .routing import TWO_GROUPS, members_of, part_of
from .scenarios import counted, exchanged, expert_parallel, padded_expert_parallel
from .twins import moe, other_orders, untransposed

ONLY = "rank {rank} uses {kinds}: an all-to-all is enough"

# -- exchange

NOT_SENT = "exchange_counts returns the counts of rank {rank} on rank {rank}: they must be sent"
COUNTS_OF_ALL = (
    "exchange_counts on rank {rank} has the counts of all ranks, not of its group: give group=group to the "
    "all-to-all"
)


@check("exchange", points=1, seconds=20)
def check_counts(student, t):
    "The rows that come from each rank of the group"
    world, size = 3, 6 * t.integer(1, 2)  # the number of experts fits the group and all ranks
    counts = [t.integers(0, 9, size) for _ in range(world)]
    run = student.ranks(counted, [{"counts": own, "groups": TWO_GROUPS} for own in counts])
    for rank, got in enumerate(run.results):
        members = members_of(TWO_GROUPS, rank, world)
        want = torch.stack([part_of(counts[other], members, rank) for other in members])
        of_all = torch.stack([each.chunk(world)[rank] for each in counts])
        wrong_if(t, got, want, {COUNTS_OF_ALL: of_all}, rank=rank)
        mistakes = {NOT_SENT: counts[rank].view_as(want), COUNTS_OF_ALL: of_all.reshape(len(members), -1)}
        wrong_if(t, got, want, mistakes, rank=rank)
        shown = got.tolist() if type(got) is Tensor else got
        message = "exchange_counts on rank {rank} of {world} is {got}, expected {want}: a row for each rank"
        t.that(near(got, want), message, rank=rank, world=world, got=shown, want=want.tolist())
    passes_only(t, run, [Kind.ALL_TO_ALL], ONLY)


def rows_case(student, t, world: int, groups: Sequence[Sequence[int]] = ()) -> Run:
    """Rows that travel between ranks, and their gradients, which are right."""
    width, members = t.integer(2, 3), [members_of(groups, rank, world) for rank in range(world)]
    sizes = t.shuffled([1, 3, 0, 2])
    # unequal, also there and back
    send = [sizes[-len(own) :] if rank else sizes[: len(own)] for rank, own in enumerate(members)]
    receive = [[send[other][own.index(rank)] for other in own] for rank, own in enumerate(members)]
    rows = [double(t, sum(sizes), width) for sizes in send]
    grads = [double(t, sum(sizes), width) for sizes in receive]
    inputs = [
        {"rows": own, "send": there, "receive": back, "grad": grad, "groups": list(groups)}
        for own, there, back, grad in zip(rows, send, receive, grads)
    ]
    run = student.ranks(exchanged, inputs)
    parts = [own.split(sizes) for own, sizes in zip(rows, send)]
    back = [own.split(sizes) for own, sizes in zip(grads, receive)]
    for rank, (out, found) in each_rank(t, run, 2, "what the scenario returns"):
        arrived, returned = (
            torch.cat([each[other][members[rank].index(rank)] for other in members[rank]])
            for each in (parts, back)
        )
        where = {"rank": rank, "world": world, **EXACT}
        t.close(out, arrived, "the rows that arrive on rank {rank} of {world}", **where)
        t.that(found is not None, "the received rows have no gradient on rank {rank}", rank=rank)
        same(t, found, [returned], "the gradient of the rows of rank {rank} of {world}", **where)
    return run


@check("exchange", points=2, seconds=20)
def check_all_to_all(student, t):
    "Rows travel to the ranks of the group, and their gradients back"
    rows_case(student, t, 3, TWO_GROUPS)


@check("exchange", points=1, seconds=20)
def check_exchange_traffic(student, t):
    "One all-to-all each way"
    run = rows_case(student, t, 2)
    passes_only(t, run, [Kind.ALL_TO_ALL], ONLY)
    message = "rank {rank} makes {count} all-to-alls: one in forward and one in backward"
    makes_calls(t, run, Kind.ALL_TO_ALL, 2, message)
    uses_what_arrives(t, run, Kind.ALL_TO_ALL, t.integer(0, 1), call=0)


# -- layer

NEAR = {"rtol": 1e-4, "atol": 1e-5}


def layer_inputs(t, world: int, size: int, dtype: torch.dtype = torch.float32):
    """Tokens of each rank, the router, all experts, and a gradient for each rank; sizes are multiples of
    4."""
    tokens, hidden, inner = t.integer(5, 7), 4, 8
    xs = [t.normal(tokens, hidden, dtype=dtype) for _ in range(world)]
    weights = [t.normal(size, *shape, dtype=dtype) for shape in ((hidden,), (hidden, inner), (inner, hidden))]
    return xs, *weights, [t.normal(tokens, hidden, dtype=dtype) for _ in range(world)]


TOO_LARGE = (
    "An index is too large: order has the numbers of choices, and the rows of x are tokens; the token of "
    "choice c is c // k"
)
CUT_CHAIN = "the result on rank {rank} requires no gradient: the chain of autograd is cut before it"
PLAIN = (
    "rank {rank} makes {there} all-to-alls of rows in forward and {back} in backward: send rows by "
    "AllToAll.apply, because autograd does not see a plain collective"
)


def run_in_groups(
    student, scenario: Scenario, inputs: Sequence[Mapping[str, Any]], too_large: str = TOO_LARGE
) -> Run:
    """A run of ``scenario`` on ranks in groups. If it raises or hangs there, and the ranks of the first group
    succeed with the same inputs when they are all ranks, a group is probably forgotten; otherwise the message
    says that the error comes first. ``too_large`` is the cause of an index that is out of bounds."""
    causes = {"out of bounds": too_large}
    try:
        return explained(student, scenario, inputs, causes)
    except NotWritten:
        raise
    except Wrong as error:
        groups = inputs[0]["groups"]
        if not groups:
            raise
        try:
            explained(student, scenario, [{**inputs[rank], "groups": []} for rank in groups[0]], causes)
        except Wrong as same:
            also = tr("a group of all ranks fails as well, so a forgotten group is not the first cause")
            raise Wrong(f"{also}. {same}", also) from None
        said = tr(
            "the layer fails if its group is only a part of the ranks: a call in it is probably without the "
            "group, which belongs in exchange_counts(counts, group), AllToAll.apply(..., group) and "
            "dist.get_world_size(group)"
        )
        raise Wrong(f"{said}. {error}", said) from None


def by_rank(
    groups: Sequence[Sequence[int]], world: int, found: Callable[[Sequence[int]], Iterable[Any]]
) -> list[Any]:
    """What ``found`` returns for the members of each group, by rank."""
    pairs = [pair for members in groups or [range(world)] for pair in zip(members, found(members))]
    return [of_rank for _, of_rank in sorted(pairs, key=lambda pair: pair[0])]


def right_layer(
    student,
    t,
    scenario: Scenario,
    case,
    groups: Sequence[Sequence[int]],
    found: Sequence[Sequence[Any]],
    known: Sequence[str],
    too_large: str = TOO_LARGE,
    **fixed: Any,
) -> Run:
    """The layer on ranks, with results and gradients that are right.

    Args:
        case: what ``layer_inputs`` returns.
        found: of each rank, the result of the layer and its gradients, and the result by each mistake of
            ``known``.
        fixed: other inputs of ``scenario``, which messages may use.
    """
    xs, router, *experts, grads = case
    inputs, members = [], [members_of(groups, rank, len(xs)) for rank in range(len(xs))]
    for rank, (x, grad) in enumerate(zip(xs, grads)):
        first, second = (part_of(each, members[rank], rank).clone() for each in experts)
        inputs.append({"x": x, "router": router, "first": first, "second": second, "grad": grad, **fixed})
    run = run_in_groups(student, scenario, [{**own, "groups": list(groups)} for own in inputs], too_large)
    for rank, (out, got) in each_rank(t, run, 2, "what the layer returns"):
        (want, right), *wrong = found[rank]
        where = {"rank": rank, "world": run.world, **NEAR, **fixed}
        what = "the result of " + scenario.name + " on rank {rank} of {world}"
        same(t, out, want, what, dict(zip(known, wrong)), **where)
        t.that(got is not None, CUT_CHAIN, rank=rank)
        got = t.items(got, 4, "the gradients")
        right = [*right[:2], *(part_of(each, members[rank], rank) for each in right[2:])]
        calls = [call for call in run.calls(rank, Kind.ALL_TO_ALL) if "int" not in call.dtype]
        back = sum(call.in_backward for call in calls)
        there = len(calls) - back
        t.that(back >= there or near(got[0], right[0], **NEAR), PLAIN, rank=rank, there=there, back=back)
        for what, mine, want in zip(("x", "the router", "first", "second"), got, right):
            message = "the gradient of {what} on rank {rank} of {world}"
            t.that(mine is not None, message + " is missing", what=what, **where)
            t.close(mine, want, message, what=what, **where)
    return run


OTHER_EXPERTS = "the result on rank {rank} has rows of other experts: "
OTHER_ROWS = "the result on rank {rank} has results of other rows: "
LAYER_MISTAKES = (
    "the bias is not used on rank {rank}: give it to route",
    OTHER_EXPERTS + "received rows are sorted by source, sort them by expert first",
    OTHER_ROWS + "put the results back into the order in which the rows came",
    OTHER_ROWS + "results[order] applies the order of step 4 a second time, and its inverse is needed: "
    "order.argsort(), or index_copy",
    OTHER_EXPERTS + "rows arrive source by source, and received has a row for each source, so flatten it as "
    "it is",
)


def layer_case(
    student, t, world: int, groups: Sequence[Sequence[int]] = (), size: int = 4, k: int = 2
) -> tuple[Run, int]:
    """The layer on ranks, with results and gradients that are right; the numbers of the rows that a rank
    sends."""

    def draw() -> tuple[Any, Tensor, list[Any]]:
        case, bias = layer_inputs(t, world, size), 0.2 * t.normal(size)
        xs, *weights, grads = case

        def found(members: Sequence[int]) -> Iterable[Any]:
            own = [xs[rank] for rank in members], *weights, k
            layers, plain = (moe(*own, [grads[rank] for rank in members], each) for each in (bias, None))
            others = other_orders(*own, bias, size // len(members))
            return zip(layers, [out for out, _ in plain], *others)

        return case, bias, by_rank(groups, world, found)

    def tells(drawn: tuple[Any, Tensor, list[Any]]) -> bool:
        """Whether each known mistake changes the result of each rank that is not alone."""
        for rank, ((right, _), *known) in enumerate(drawn[2]):
            alone = len(members_of(groups, rank, world)) == 1
            if not alone and any(near(right, wrong, **NEAR) for wrong in known):
                return size // world == 1  # with one expert on a rank, some orders are the same
        return True

    case, bias, found = t.draw_until(draw, tells)
    run = right_layer(student, t, expert_parallel, case, groups, found, LAYER_MISTAKES, k=k, bias=bias)
    return run, k * case[0][0].numel()


@check("layer", points=3, seconds=40)
def check_layer(student, t):
    "The results and gradients of one process"
    layer_case(student, t, 2)


@check("layer", points=2, seconds=40)
def check_layer_traffic(student, t):
    "Tokens travel in the group, experts do not: three all-to-alls in forward, two in backward"
    run, numbers = layer_case(student, t, 3, TWO_GROUPS, size=6, k=3)
    message = "rank {rank} uses {kinds}: tokens travel to their experts by all-to-all, and nothing else"
    passes_only(t, run, [Kind.ALL_TO_ALL], message)
    message = (
        "rank {rank} makes {count} all-to-alls in {moment}, expected {want}: counts, rows and results, and "
        "the gradients of both"
    )
    makes_calls(t, run, Kind.ALL_TO_ALL, 3, message, in_backward=False, moment="forward")
    makes_calls(t, run, Kind.ALL_TO_ALL, 2, message, in_backward=True, moment="backward")
    message = "rank {rank} sends {sent} numbers to the experts, expected {want}: a row for each choice"
    for rank in range(run.world):
        calls = run.calls(rank, Kind.ALL_TO_ALL)
        rows = [call for call in calls if "int" not in call.dtype and not call.in_backward]
        sent = sum(rows[0].send_splits) if rows and rows[0].send_splits else 0
        t.that(sent == numbers, message, rank=rank, sent=sent, want=numbers)
    uses_what_arrives(t, run, Kind.ALL_TO_ALL, t.choice(TWO_GROUPS[0]), call=2)


# -- padded

TOO_MANY = (
    "An index is too large: without keep_within, an expert has more rows than the capacity, and its rows "
    "leave its part of the buffer"
)
PADDED_MISTAKES = (
    "no row is dropped on rank {rank}: each expert gets at most {capacity} rows of a rank",
    OTHER_EXPERTS + "the received buffer is (source, expert, row), and the experts need (expert, source · "
    "row). A view does not exchange dimensions, transpose does",
    OTHER_ROWS + "before the way back the buffer is (source, expert, row) again",
)


def padded_case(
    student, t, world: int, groups: Sequence[Sequence[int]], size: int, capacity: int, k: int = 2
) -> tuple[Run, int]:
    """The layer with fixed shapes, with results and gradients that are right; the numbers of a buffer."""
    case = layer_inputs(t, world, size)
    xs, *weights, grads = case

    def found(members: Sequence[int]) -> Iterable[Any]:
        own = [xs[rank] for rank in members], *weights, k
        layers, dropless = (moe(*own, [grads[rank] for rank in members], None, c) for c in (capacity, None))
        return zip(layers, [out for out, _ in dropless], *untransposed(*own, capacity))

    fixed = {"k": k, "capacity": capacity, "too_large": TOO_MANY}
    wants = by_rank(groups, world, found)
    run = right_layer(student, t, padded_expert_parallel, case, groups, wants, PADDED_MISTAKES, **fixed)
    return run, size * capacity * xs[0].shape[1]


@check("padded", points=2, seconds=40)
def check_padded(student, t):
    "The results and gradients of one process with a capacity"
    padded_case(student, t, 2, (), 4, t.integer(1, 2))


@check("padded", points=1, seconds=40)
def check_fixed_shapes(student, t):
    "Two all-to-alls each way in the group, of the same size for any choice"
    run, numbers = padded_case(student, t, 3, TWO_GROUPS, 6, t.integer(2, 3), k=3)
    passes_only(t, run, [Kind.ALL_TO_ALL], ONLY)
    message = "rank {rank} makes {count} all-to-alls in {moment}, two are enough: exchange no counts"
    for moment in ("forward", "backward"):
        makes_calls(t, run, Kind.ALL_TO_ALL, 2, message, in_backward=moment == "backward", moment=moment)
    message = "rank {rank} sends {got} numbers in an all-to-all, expected {want}: E · capacity rows"
    for rank in range(run.world):
        sizes = [call.numel for call in run.calls(rank, Kind.ALL_TO_ALL)]
        t.that(sizes == [numbers] * 4, message, rank=rank, got=max(sizes), want=numbers)
    uses_what_arrives(t, run, Kind.ALL_TO_ALL, t.choice(TWO_GROUPS[0]), call=1)
