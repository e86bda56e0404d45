"""The visible checks of the exchange, and of the layer on several ranks.

Traffic is counted outside the student's process; bytes are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, NotWritten, Run, Scenario, Wrong, check
from dlo_lib.labkit import tr
from dlo_lib.labkit.compare import explained, near, wrong_if
from dlo_lib.labkit.traffic import passes_only, uses_what_arrives

from .routing import EXACT, TWO_GROUPS, double, members_of
from .scenarios import counted, exchanged, layer, padded
from .twins import Found, moe, other_orders, untransposed

ONLY = "rank {rank} uses {kinds}: an all-to-all is enough"

# -- exchange


def counts_case(student, t, world: int, groups: Sequence[Sequence[int]] = ()) -> None:
    """The counts that each rank receives; the number of experts fits the group and all ranks."""
    size = 6 * t.integer(1, 2)
    counts = [t.integers(0, 9, size) for _ in range(world)]
    own_groups = [list(each) for each in groups]
    run = student.ranks(counted, [{"counts": own, "groups": own_groups} for own in counts])
    for rank, got in enumerate(run.results):
        members = members_of(groups, rank, world)
        want = torch.stack([counts[other].chunk(len(members))[members.index(rank)] for other in members])
        of_everyone = torch.stack([each.chunk(world)[rank] for each in counts])
        not_sent = "exchange_counts returns the counts of rank {rank} on rank {rank}: they must be sent"
        everyone = (
            "exchange_counts on rank {rank} has the counts of all ranks, not of its group: give group=group "
            "to the all-to-all"
        )
        mistakes = {not_sent: counts[rank].view_as(want), everyone: of_everyone.reshape(len(members), -1)}
        wrong_if(t, got, want, mistakes, rank=rank)
        wrong_if(t, got, want, {everyone: of_everyone}, rank=rank)
        same = type(got) is Tensor and got.dtype == want.dtype and bool(torch.equal(got, want))
        shown = got.tolist() if type(got) is Tensor else got
        message = "exchange_counts on rank {rank} of {world} is {got}, expected {want}: a row for each rank"
        t.that(same, message, rank=rank, world=world, got=shown, want=want.tolist())
    passes_only(t, run, [Kind.ALL_TO_ALL], ONLY)


@check("exchange", points=1, seconds=20)
def check_counts(student, t):
    "The rows that come from each rank of the group"
    counts_case(student, t, 3, TWO_GROUPS)


def rows_case(student, t, world: int, groups: Sequence[Sequence[int]] = ()) -> Run:
    """Rows that travel between ranks, and their gradients, which are right."""
    width, members = t.integer(2, 3), [members_of(groups, rank, world) for rank in range(world)]
    sizes = t.shuffled([1, 3, 0, 2])
    # unequal, also there and back
    send = [sizes[-len(own) :] if rank else sizes[: len(own)] for rank, own in enumerate(members)]
    receive = [[send[other][own.index(rank)] for other in own] for rank, own in enumerate(members)]
    rows = [double(t, sum(sizes), width) for sizes in send]
    grads = [double(t, sum(sizes), width) for sizes in receive]
    fixed = {"groups": [list(own) for own in groups]}
    inputs = [
        {"rows": rows[rank], "send": send[rank], "receive": receive[rank], "grad": grads[rank], **fixed}
        for rank in range(world)
    ]
    run = student.ranks(exchanged, inputs)
    parts = [own.split(sizes) for own, sizes in zip(rows, send)]
    back = [own.split(sizes) for own, sizes in zip(grads, receive)]
    for rank, got in enumerate(run.results):
        own = members[rank]
        out, grad = t.items(got, 2, "what AllToAll returns")
        where = {"rank": rank, "world": world, **EXACT}
        want = torch.cat([parts[other][own.index(rank)] for other in own])
        t.close(out, want, "the rows that arrive on rank {rank} of {world}", **where)
        t.that(grad is not None, "the received rows have no gradient on rank {rank}", rank=rank)
        want = torch.cat([back[other][own.index(rank)] for other in own])
        t.close(grad, want, "the gradient of the rows of rank {rank} of {world}", **where)
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
    for rank in range(run.world):
        count = len(run.calls(rank, Kind.ALL_TO_ALL))
        message = "rank {rank} makes {count} all-to-alls: one in forward and one in backward"
        t.that(count == 2, message, rank=rank, count=count)
    uses_what_arrives(t, run, Kind.ALL_TO_ALL, t.integer(0, 1), call=0)


# -- layer


def layer_inputs(t, world: int, size: int, dtype: torch.dtype = torch.float32):
    """Tokens of each rank, the router, all experts, a bias, and a gradient for each rank; sizes are multiples
    of 4."""
    tokens, hidden, inner = t.integer(5, 7), 4, 8
    xs = [t.normal(tokens, hidden, dtype=dtype) for _ in range(world)]
    router = t.normal(size, hidden, dtype=dtype)
    first, second = t.normal(size, hidden, inner, dtype=dtype), t.normal(size, inner, hidden, dtype=dtype)
    grads = [t.normal(tokens, hidden, dtype=dtype) for _ in range(world)]
    return xs, router, first, second, 0.2 * t.normal(size, dtype=dtype), grads


NEAR = {"rtol": 1e-4, "atol": 1e-5}


def inputs_of_ranks(xs, router, first, second, grads, groups, **others) -> tuple[list[slice], list[dict]]:
    """The experts that each rank stores, and the inputs of the layer on it."""
    fixed, owned, inputs = {"router": router, "groups": [list(each) for each in groups], **others}, [], []
    for rank, (x, grad) in enumerate(zip(xs, grads)):
        members = members_of(groups, rank, len(xs))
        each, place = len(first) // len(members), members.index(rank)
        own = slice(place * each, (place + 1) * each)
        experts = {"first": first[own].clone(), "second": second[own].clone()}
        owned.append(own)
        inputs.append({"x": x, "grad": grad, **experts, **fixed})
    return owned, inputs


def right_layer(t, run: Run, found: Sequence[Found], owned: Sequence[slice], name: str) -> None:
    """Results and gradients of every rank."""
    for rank, got in enumerate(run.results):
        out, grads = t.items(got, 2, "what the layer returns")
        want, right = found[rank]
        what = "the result of " + name + " on rank {rank} of {world}"
        t.close(out, want, what, rank=rank, world=run.world, **NEAR)
        message = "the result on rank {rank} requires no gradient: the chain of autograd is cut before it"
        t.that(grads is not None, message, rank=rank)
        grads = t.items(grads, 4, "the gradients")
        wants = [right[0], right[1], right[2][owned[rank]], right[3][owned[rank]]]
        calls = [call for call in run.calls(rank, Kind.ALL_TO_ALL) if "int" not in call.dtype]
        back = sum(call.in_backward for call in calls)
        there = len(calls) - back
        message = (
            "rank {rank} makes {there} all-to-alls of rows in forward and {back} in backward: send rows by "
            "AllToAll.apply, because autograd does not see a plain collective"
        )
        t.that(back >= there or near(grads[0], wants[0], **NEAR), message, rank=rank, there=there, back=back)
        for i, what in enumerate(("x", "the router", "first", "second")):
            values = {"what": what, "rank": rank, "world": run.world}
            message = "the gradient of {what} on rank {rank} of {world} is missing"
            t.that(grads[i] is not None, message, **values)
            message = "the gradient of {what} on rank {rank} of {world}"
            t.close(grads[i], wants[i], message, **values, **NEAR)


TOO_LARGE = (
    "An index is too large: order has the numbers of choices, and the rows of x are tokens; the token of "
    "choice c is c // k"
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


def by_group(groups: Sequence[Sequence[int]], world: int) -> list[list[int]]:
    """The members of each group; one group of all ranks without groups."""
    return [list(ranks) for ranks in groups] or [list(range(world))]


OTHER_EXPERTS = "the result on rank {rank} has rows of other experts: "
OTHER_ROWS = "the result on rank {rank} has results of other rows: "
BY_SOURCE = OTHER_EXPERTS + "received rows are sorted by source, sort them by expert first"
NOT_PUT_BACK = OTHER_ROWS + "put the results back into the order in which the rows came"
ORDER_TWICE = OTHER_ROWS + (
    "results[order] applies the order of step 4 a second time, and its inverse is needed: order.argsort(), "
    "or index_copy"
)
BY_COLUMN = OTHER_EXPERTS + (
    "rows arrive source by source, and received has a row for each source, so flatten it as it is"
)


def layer_case(
    student, t, world: int, groups: Sequence[Sequence[int]] = (), size: int = 4, k: int = 2
) -> tuple[Run, int]:
    """The layer on ranks, with results and gradients that are right; the numbers of the rows that a rank
    sends."""
    for _ in range(20):  # until each known mistake changes the result of each rank that is not alone
        xs, router, first, second, bias, grads = layer_inputs(t, world, size)
        found: dict[int, Found] = {}
        wrong: dict[int, dict[str, Tensor]] = {}
        for members in by_group(groups, world):
            own, each = [xs[rank] for rank in members], size // len(members)
            layers = moe(own, router, first, second, k, [grads[rank] for rank in members], bias)
            plain = moe(own, router, first, second, k, [grads[rank] for rank in members])
            orders = other_orders(own, router, first, second, k, bias, each)
            for place, rank in enumerate(members):
                found[rank] = layers[place]
                arrival, not_back, twice, by_column = (outs[place] for outs in orders)
                wrong[rank] = {
                    "the bias is not used on rank {rank}: give it to route": plain[place][0],
                    BY_SOURCE: arrival,
                    NOT_PUT_BACK: not_back,
                    ORDER_TWICE: twice,
                    BY_COLUMN: by_column,
                }
        together = [rank for members in by_group(groups, world) if len(members) > 1 for rank in members]
        others = [(found[rank][0], value) for rank in together for value in wrong[rank].values()]
        if size // world == 1 or not any(near(right, value, **NEAR) for right, value in others):
            break
    owned, inputs = inputs_of_ranks(xs, router, first, second, grads, groups, k=k, bias=bias)
    run = run_in_groups(student, layer, inputs)
    for rank, got in enumerate(run.results):
        out = t.items(got, 2, "what the layer returns")[0]
        wrong_if(t, out, found[rank][0], wrong[rank], **NEAR, rank=rank)
    right_layer(t, run, [found[rank] for rank in range(world)], owned, "expert_parallel")
    return run, k * xs[0].numel()


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
    for rank in range(run.world):
        calls = run.calls(rank, Kind.ALL_TO_ALL)
        for moment, want in (("forward", 3), ("backward", 2)):
            count = sum(call.in_backward == (moment == "backward") for call in calls)
            message = (
                "rank {rank} makes {count} all-to-alls in {moment}, expected {want}: counts, rows and "
                "results, and the gradients of both"
            )
            t.that(count == want, message, rank=rank, count=count, moment=moment, want=want)
        rows = [call for call in calls if "int" not in call.dtype and not call.in_backward]
        sent = sum(rows[0].send_splits) if rows and rows[0].send_splits else 0
        message = "rank {rank} sends {sent} numbers to the experts, expected {want}: a row for each choice"
        t.that(sent == numbers, message, rank=rank, sent=sent, want=numbers)
    uses_what_arrives(t, run, Kind.ALL_TO_ALL, t.choice(TWO_GROUPS[0]), call=2)


# -- padded


NOT_TRANSPOSED = OTHER_EXPERTS + (
    "the received buffer is (source, expert, row), and the experts need (expert, source · row). A view does "
    "not exchange dimensions, transpose does"
)
NOT_TURNED_BACK = OTHER_ROWS + "before the way back the buffer is (source, expert, row) again"


def padded_case(
    student, t, world: int, groups: Sequence[Sequence[int]], size: int, capacity: int, k: int = 2
) -> tuple[Run, int]:
    """The layer with fixed shapes, with results and gradients that are right; the numbers of a buffer."""
    xs, router, first, second, _, grads = layer_inputs(t, world, size)
    owned, inputs = inputs_of_ranks(xs, router, first, second, grads, groups, k=k, capacity=capacity)
    full = (
        "An index is too large: without keep_within, an expert has more rows than the capacity, and its "
        "rows leave its part of the buffer"
    )
    run = run_in_groups(student, padded, inputs, full)
    found: dict[int, Found] = {}
    dropless: dict[int, Found] = {}
    wrong: dict[int, dict[str, Tensor]] = {}
    for members in by_group(groups, world):
        own = [xs[rank] for rank in members], router, first, second, k, [grads[rank] for rank in members]
        found |= zip(members, moe(*own, None, capacity))
        dropless |= zip(members, moe(*own))
        for rank, neither, not_back in zip(members, *untransposed(*own[:5], capacity)):
            wrong[rank] = {NOT_TRANSPOSED: neither, NOT_TURNED_BACK: not_back}
    for rank, got in enumerate(run.results):
        out = t.items(got, 2, "what the layer returns")[0]
        message = "no row is dropped on rank {rank}: each expert gets at most {capacity} rows of a rank"
        known = near(found[rank][0], dropless[rank][0], **NEAR) or not near(out, dropless[rank][0], **NEAR)
        t.that(known, message, rank=rank, capacity=capacity)
        wrong_if(t, out, found[rank][0], wrong[rank], **NEAR, rank=rank)
    right_layer(t, run, [found[rank] for rank in range(world)], owned, "padded_expert_parallel")
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
    for rank in range(run.world):
        calls = run.calls(rank, Kind.ALL_TO_ALL)
        for moment in ("forward", "backward"):
            own = [call.numel for call in calls if call.in_backward == (moment == "backward")]
            message = "rank {rank} makes {count} all-to-alls in {moment}, two are enough: exchange no counts"
            t.that(len(own) == 2, message, rank=rank, count=len(own), moment=moment)
            message = "rank {rank} sends {got} numbers in an all-to-all, expected {want}: E · capacity rows"
            t.that(own == [numbers] * 2, message, rank=rank, got=max(own), want=numbers)
    uses_what_arrives(t, run, Kind.ALL_TO_ALL, t.choice(TWO_GROUPS[0]), call=1)
