"""The visible checks of the exchange, of the layer on several ranks, and of its gradients.

Traffic is counted outside the student's process; bytes are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, NotWritten, Run, Scenario, Wrong, check
from dlo_lib.labkit.compare import near, wrong_if
from dlo_lib.labkit.traffic import kinds_of, uses_what_arrives
from dlo_lib.text import tr

from .routing import EXACT, TWO_GROUPS, double, members_of
from .scenarios import counted, exchanged, layer, padded, reduced, whole_step
from .twins import Found, moe, other_orders

ONLY = "rank {rank} uses {kinds}: an all-to-all is enough"

# -- exchange


def counts_case(student, t, world: int, groups: Sequence[Sequence[int]] = ()) -> None:
    """The counts that each rank receives; the number of experts fits the group and all ranks."""
    size = 6
    counts = [t.integers(0, 9, size) for _ in range(world)]
    run = student.ranks(counted, [{"counts": own, "groups": [list(each) for each in groups]} for own in counts])
    for rank, got in enumerate(run.results):
        members = members_of(groups, rank, world)
        want = torch.stack([counts[other].chunk(len(members))[members.index(rank)] for other in members])
        of_everyone = torch.stack([each.chunk(world)[rank] for each in counts])
        everyone = "exchange_counts on rank {rank} has the counts of all ranks, not of its group: give group=group to the all-to-all"
        mistakes = {
            "exchange_counts returns the counts of rank {rank} on rank {rank}: they must be sent": counts[rank].view(len(members), -1),
            everyone: of_everyone.reshape(len(members), -1),
        }
        wrong_if(t, got, want, mistakes, rank=rank)
        wrong_if(t, got, want, {everyone: of_everyone}, rank=rank)
        same = type(got) is Tensor and got.dtype == want.dtype and got.shape == want.shape and bool(torch.equal(got, want))
        shown = got.tolist() if type(got) is Tensor else got
        message = "exchange_counts on rank {rank} of {world} is {got}, expected {want}: a row for each rank of the group"
        t.that(same, message, rank=rank, world=world, got=shown, want=want.tolist())


@check("exchange", points=1, seconds=20)
def check_counts(student, t):
    "The rows that come from each rank of the group"
    counts_case(student, t, 3, TWO_GROUPS)


def rows_case(student, t, world: int, groups: Sequence[Sequence[int]] = ()) -> Run:
    """Rows that travel between ranks, and their gradients, which are right."""
    width, members = t.integer(2, 3), [members_of(groups, rank, world) for rank in range(world)]
    sizes = t.shuffled([1, 3, 0, 2])
    send = [sizes[-len(own) :] if rank else sizes[: len(own)] for rank, own in enumerate(members)]  # unequal, also there and back
    receive = [[send[other][own.index(rank)] for other in own] for rank, own in enumerate(members)]
    rows = [double(t, sum(sizes), width) for sizes in send]
    grads = [double(t, sum(sizes), width) for sizes in receive]
    inputs = [
        {"rows": rows[rank], "send": send[rank], "receive": receive[rank], "grad": grads[rank], "groups": [list(own) for own in groups]}
        for rank in range(world)
    ]
    run = student.ranks(exchanged, inputs)
    parts, back = [own.split(sizes) for own, sizes in zip(rows, send)], [own.split(sizes) for own, sizes in zip(grads, receive)]
    for rank, got in enumerate(run.results):
        own = members[rank]
        out, grad = t.items(got, 2, "what AllToAll returns")
        want = torch.cat([parts[other][own.index(rank)] for other in own])
        t.close(out, want, "the rows that arrive on rank {rank} of {world}", rank=rank, world=world, **EXACT)
        t.that(grad is not None, "the received rows have no gradient on rank {rank}", rank=rank)
        want = torch.cat([back[other][own.index(rank)] for other in own])
        t.close(grad, want, "the gradient of the rows of rank {rank} of {world}", rank=rank, world=world, **EXACT)
    return run


@check("exchange", points=2, seconds=20)
def check_all_to_all(student, t):
    "Rows travel to the ranks of the group, and their gradients back"
    rows_case(student, t, 3, TWO_GROUPS)


@check("exchange", points=1, seconds=20)
def check_exchange_traffic(student, t):
    "One all-to-all each way"
    run = rows_case(student, t, 2)
    for rank in range(run.world):
        others = kinds_of(run, rank, [Kind.ALL_TO_ALL])
        t.that(not others, ONLY, rank=rank, kinds=others)
        count = len(run.calls(rank, Kind.ALL_TO_ALL))
        t.that(count == 2, "rank {rank} makes {count} all-to-alls: one in forward and one in backward", rank=rank, count=count)
    uses_what_arrives(t, run, Kind.ALL_TO_ALL, t.integer(0, 1), call=0)


# -- layer


def layer_inputs(t, world: int, size: int, dtype: torch.dtype = torch.float32):
    """Tokens of each rank, the router, all experts, a bias, and a gradient for each rank; sizes are multiples of 4."""
    tokens, hidden, inner = t.integer(5, 7), 4, 8
    xs = [t.normal(tokens, hidden, dtype=dtype) for _ in range(world)]
    router = t.normal(size, hidden, dtype=dtype)
    first, second = t.normal(size, hidden, inner, dtype=dtype), t.normal(size, inner, hidden, dtype=dtype)
    grads = [t.normal(tokens, hidden, dtype=dtype) for _ in range(world)]
    return xs, router, first, second, 0.2 * t.normal(size, dtype=dtype), grads


NEAR = {"rtol": 1e-4, "atol": 1e-5}


def own_experts(members: Sequence[int], rank: int, size: int) -> slice:
    """The experts that this rank of a group stores."""
    each, place = size // len(members), members.index(rank)
    return slice(place * each, (place + 1) * each)


def right_layer(t, run: Run, found: Sequence[Found], owned: Sequence[slice], name: str) -> None:
    """Results and gradients of every rank."""
    for rank, got in enumerate(run.results):
        out, grads = t.items(got, 2, "what the layer returns")
        want, right = found[rank]
        t.close(out, want, "the result of " + name + " on rank {rank} of {world}", rank=rank, world=run.world, **NEAR)
        t.that(grads is not None, "the result on rank {rank} requires no gradient: the chain of autograd is cut before it", rank=rank)
        grads = t.items(grads, 4, "the gradients")
        wants = [right[0], right[1], right[2][owned[rank]], right[3][owned[rank]]]
        for i, what in enumerate(("x", "the router", "first", "second")):
            values = {"what": what, "rank": rank, "world": run.world}
            t.that(grads[i] is not None, "the gradient of {what} on rank {rank} of {world} is missing", **values)
            t.close(grads[i], wants[i], "the gradient of {what} on rank {rank} of {world}", **values, **NEAR)


def run_in_groups(student, scenario: Scenario, inputs: Sequence[Mapping[str, Any]]) -> Run:
    """A run of ``scenario`` on ranks in groups; what raises or hangs there is probably a forgotten group."""
    try:
        return student.ranks(scenario, inputs)
    except NotWritten:
        raise
    except Wrong as error:
        if not inputs[0]["groups"]:
            raise
        said = tr(
            "the layer fails if its group is only a part of the ranks: a call in it is probably without the group, which belongs in "
            "exchange_counts(counts, group), AllToAll.apply(..., group) and dist.get_world_size(group)"
        )
        raise Wrong(f"{said}. {error}", said) from None


def by_group(groups: Sequence[Sequence[int]], world: int) -> list[list[int]]:
    """The members of each group; one group of all ranks without groups."""
    return [list(ranks) for ranks in groups] or [list(range(world))]


def layer_case(student, t, world: int, groups: Sequence[Sequence[int]] = (), size: int = 4, k: int = 2) -> tuple[Run, int]:
    """The layer on ranks, with results and gradients that are right; the numbers of the rows that a rank sends."""
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
                arrival, not_back, twice = (outs[place] for outs in orders)
                wrong[rank] = {
                    "the bias is not used on rank {rank}: give it to route": plain[place][0],
                    "the result on rank {rank} has rows of other experts: received rows are sorted by source, sort them by expert first": (
                        arrival
                    ),
                    "the result on rank {rank} has results of other rows: put the results back into the order in which the rows came": (
                        not_back
                    ),
                    "the result on rank {rank} has results of other rows: results[order] applies the order of step 4 a second time, and its "
                    "inverse is needed: order.argsort(), or index_copy": twice,
                }
        alone = {rank for members in by_group(groups, world) if len(members) == 1 for rank in members}
        if size // world == 1 or not any(
            near(found[rank][0], value, **NEAR) for rank in wrong if rank not in alone for value in wrong[rank].values()
        ):
            break
    owned = [own_experts(members_of(groups, rank, world), rank, size) for rank in range(world)]
    inputs = [
        {
            "x": xs[rank],
            "router": router,
            "first": first[owned[rank]].clone(),
            "second": second[owned[rank]].clone(),
            "k": k,
            "bias": bias,
            "grad": grads[rank],
            "groups": [list(each) for each in groups],
        }
        for rank in range(world)
    ]
    run = run_in_groups(student, layer, inputs)
    for rank, got in enumerate(run.results):
        wrong_if(t, t.items(got, 2, "what the layer returns")[0], found[rank][0], wrong[rank], **NEAR, rank=rank)
    right_layer(t, run, [found[rank] for rank in range(world)], owned, "expert_parallel")
    return run, k * xs[0].numel()


@check("layer", points=3, seconds=40)
def check_layer(student, t):
    "The results and gradients of one process"
    layer_case(student, t, 2)


@check("layer", points=2, seconds=40)
def check_layer_traffic(student, t):
    "Tokens travel in the group, experts do not: three all-to-alls in forward, two in backward"
    run, numbers = layer_case(student, t, 3, TWO_GROUPS, size=6)
    for rank in range(run.world):
        others = kinds_of(run, rank, [Kind.ALL_TO_ALL])
        t.that(
            not others, "rank {rank} uses {kinds}: tokens travel to their experts by all-to-all, and nothing else", rank=rank, kinds=others
        )
        calls = run.calls(rank, Kind.ALL_TO_ALL)
        for moment, want in (("forward", 3), ("backward", 2)):
            count = sum(call.in_backward == (moment == "backward") for call in calls)
            message = (
                "rank {rank} makes {count} all-to-alls in {moment}, expected {want}: counts, rows and results, and the gradients of both"
            )
            t.that(count == want, message, rank=rank, count=count, moment=moment, want=want)
        rows = [call for call in calls if "int" not in call.dtype and not call.in_backward]
        sent = sum(rows[0].send_splits) if rows and rows[0].send_splits else 0
        message = "rank {rank} sends {sent} numbers to the experts, expected {want}: a row for each of its choices"
        t.that(sent == numbers, message, rank=rank, sent=sent, want=numbers)
    uses_what_arrives(t, run, Kind.ALL_TO_ALL, t.choice(TWO_GROUPS[0]), call=2)


# -- gradients


def reduced_case(student, t) -> tuple[Run, list[list[Tensor]]]:
    """Gradients on two ranks with different experts after ``reduce_gradients``: shared ones, and those of experts."""
    shape = t.integer(1, 4), 2
    held = [[double(t, *shape) for _ in range(2)] for _ in range(2)]
    inputs = [{"shared": [held[0][rank], None], "experts": [held[1][rank], None], "groups": [[0], [1]]} for rank in range(2)]
    return student.ranks(reduced, inputs), held


@check("gradients", points=1, seconds=30)
def check_shared(student, t):
    "Shared parameters: the mean over all ranks"
    run, (shared, _) = reduced_case(student, t)
    right = sum(shared) / 2
    for rank, got in enumerate(run.results):
        mine, none = t.items(t.items(got, 2, "the gradients")[0], 2, "the gradients")
        mistakes = {
            "shared gradients on rank {rank} are summed: they should be the mean over all ranks": sum(shared),
            "shared gradients on rank {rank} are averaged over its replicas only": shared[rank],
            "shared gradients on rank {rank} are not added over all ranks": shared[rank] / 2,
        }
        wrong_if(t, mine, right, mistakes, rank=rank)
        t.close(mine, right, "the shared gradient on rank {rank} of 2", rank=rank, **EXACT)
        t.that(none is None, "a parameter without gradient has one on rank {rank}: skip None", rank=rank)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 1), call=0)


@check("gradients", points=2, seconds=30)
def check_expert_gradients(student, t):
    "Experts: the sum over their replicas, divided by all ranks"
    run, (_, experts) = reduced_case(student, t)
    for rank, got in enumerate(run.results):
        mine, none = t.items(t.items(got, 2, "the gradients")[1], 2, "the gradients")
        right = experts[rank] / 2
        divided = "gradients of experts on rank {rank} are divided by the number of replicas: divide by the number of all ranks, because "
        mistakes = {
            "gradients of experts on rank {rank} are averaged over all ranks: its neighbours store other experts": sum(experts) / 2,
            divided + "the tokens of all ranks of an expert group are in them": experts[rank],
        }
        wrong_if(t, mine, right, mistakes, rank=rank)
        t.close(mine, right, "the gradient of experts on rank {rank} of 2, which store different ones", rank=rank, **EXACT)
        t.that(none is None, "a parameter without gradient has one on rank {rank}: skip None", rank=rank)


@check("gradients", points=2, seconds=60)
def check_grid(student, t):
    "Two expert groups have the gradients of one process with the whole batch"
    ep, k = 2, 2  # with k = 1, the router has no gradient
    xs, router, first, second, _, grads = layer_inputs(t, 4, 4, torch.float64)
    inputs = [
        {
            "ep": ep,
            "x": xs[rank],
            "router": router,
            "first": first.chunk(ep)[rank % ep].clone(),
            "second": second.chunk(ep)[rank % ep].clone(),
            "k": k,
            "grad": grads[rank],
        }
        for rank in range(4)
    ]
    run = student.ranks(whole_step, inputs)
    rows = [moe(xs[row : row + 2], router, first, second, k, grads[row : row + 2]) for row in (0, 2)]
    of_router = sum(right[1] for found in rows for _, right in found) / 4
    for rank, got in enumerate(run.results):
        mine = t.items(got, 3, "the gradients")
        alone = "the gradient of {what} on rank {rank} has the tokens of its expert group only: add those of its replicas"
        of_rows = [[each.chunk(ep)[rank % ep] / 4 for each in found[0][1][2:]] for found in rows]
        wants = of_router, *(sum(both) for both in zip(*of_rows))
        for what, grad, right, group in zip(("the router", "first", "second"), mine, wants, (of_router, *of_rows[rank // ep])):
            wrong_if(t, grad, right, {alone: group}, what=what, rank=rank)
            t.close(grad, right, "the gradient of {what} on rank {rank} of 2 × 2", what=what, rank=rank, rtol=1e-9, atol=1e-10)


# -- padded


def padded_case(student, t, world: int, groups: Sequence[Sequence[int]], size: int, capacity: int) -> tuple[Run, int]:
    """The layer with fixed shapes, with results and gradients that are right; the numbers of a buffer."""
    xs, router, first, second, _, grads = layer_inputs(t, world, size)
    owned = [own_experts(members_of(groups, rank, world), rank, size) for rank in range(world)]
    inputs = [
        {
            "x": xs[rank],
            "router": router,
            "first": first[owned[rank]].clone(),
            "second": second[owned[rank]].clone(),
            "k": 2,
            "capacity": capacity,
            "grad": grads[rank],
            "groups": [list(each) for each in groups],
        }
        for rank in range(world)
    ]
    run = run_in_groups(student, padded, inputs)
    found: dict[int, Found] = {}
    dropless: dict[int, Found] = {}
    for members in by_group(groups, world):
        own = [xs[rank] for rank in members], router, first, second, 2, [grads[rank] for rank in members]
        found |= zip(members, moe(*own, None, capacity))
        dropless |= zip(members, moe(*own))
    for rank, got in enumerate(run.results):
        out = t.items(got, 2, "what the layer returns")[0]
        message = "no row is dropped on rank {rank}: each expert gets at most {capacity} rows of a rank"
        known = near(found[rank][0], dropless[rank][0], **NEAR) or not near(out, dropless[rank][0], **NEAR)
        t.that(known, message, rank=rank, capacity=capacity)
    right_layer(t, run, [found[rank] for rank in range(world)], owned, "padded_expert_parallel")
    return run, size * capacity * xs[0].shape[1]


@check("padded", points=2, seconds=40)
def check_padded(student, t):
    "The results and gradients of one process with a capacity"
    padded_case(student, t, 2, (), 4, t.integer(1, 2))


@check("padded", points=1, seconds=40)
def check_fixed_shapes(student, t):
    "Two all-to-alls each way in the group, of the same size for any choice"
    run, numbers = padded_case(student, t, 3, TWO_GROUPS, 6, t.integer(2, 3))
    for rank in range(run.world):
        others = kinds_of(run, rank, [Kind.ALL_TO_ALL])
        t.that(not others, ONLY, rank=rank, kinds=others)
        calls = run.calls(rank, Kind.ALL_TO_ALL)
        for moment in ("forward", "backward"):
            own = [call.numel for call in calls if call.in_backward == (moment == "backward")]
            message = "rank {rank} makes {count} all-to-alls in {moment}, two are enough: no counts are exchanged"
            t.that(len(own) == 2, message, rank=rank, count=len(own), moment=moment)
            message = "rank {rank} sends {got} numbers in an all-to-all, expected {want}: E · capacity rows"
            t.that(own == [numbers] * 2, message, rank=rank, got=max(own), want=numbers)
    uses_what_arrives(t, run, Kind.ALL_TO_ALL, t.choice(TWO_GROUPS[0]), call=1)
