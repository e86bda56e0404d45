"""The visible checks of the whole model, of TP × DP, and of the optional exercises 10 and 11."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Run, check
from dlo_lib.labkit.compare import near, wrong_if
from dlo_lib.labkit.traffic import passes_only, uses_what_arrives
from dlo_lib.models.llama import Llama, LlamaConfig

from .layers import (
    ALONE,
    EXACT,
    Case,
    attention_whole,
    double,
    in_groups_of_one,
    layer_run,
    right_gradients,
    right_results,
    run_together,
)
from .scenarios import averaged, grid_step, grouped, sharing_step, whole_step
from .twins import attention, llama_step, norm_mlp, part

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROWS = ("o_proj", "down_proj")

# -- model

WHOLE_WEIGHTS = (
    "the loss on rank {rank} is NaN: here a rank has only its part of each weight, and NaN in the place of "
    "the others, so no rank can compute with whole weights"
)


def cut(name: str) -> int | None:
    """Where a parameter of a Llama is cut, from the two groups of layers."""
    held = [dim for dim, layers in ((0, COLUMNS), (1, ROWS)) if name.rsplit(".", 2)[-2] in layers]
    return held[0] if held else None


def parts_alone(state: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """The state of a rank: its part of each weight in its place, and NaN where another rank has its part."""
    alone = {}
    for name, whole in state.items():
        alone[name], dim = whole, cut(name)
        if dim is not None:
            alone[name], size = torch.full_like(whole, math.nan), whole.shape[dim] // world
            alone[name].narrow(dim, rank * size, size).copy_(part(whole, dim, rank, world))
    return alone


def llama_case(t, world: int, layers: int = 2) -> tuple[dict[str, Any], dict[str, Tensor], Tensor, Tensor]:
    """Sizes that ``world`` divides, a state, tokens and targets."""
    sizes = {
        "vocab_size": world * t.integer(5, 7),
        "hidden": 8,
        "intermediate": world * t.integer(16, 20),  # a block has more weights than its all-reduces numbers
        "num_layers": layers,
        "num_heads": 2 * world,
        "num_kv_heads": world,
        "head_dim": 4,
    }
    shapes = Llama(LlamaConfig(**sizes), device="meta").state_dict()
    state = {
        name: 0.4 * double(t, *like.shape) + (1.0 if like.dim() == 1 else 0.0)
        for name, like in shapes.items()
    }
    seq = t.integer(3, 5)
    tokens, targets = (t.integers(0, sizes["vocab_size"] - 1, 2, seq) for _ in range(2))
    return sizes, state, tokens, targets


def model_run(student, t, world: int, layers: int = 2, alone: bool = False) -> tuple[Run, Tensor, int]:
    """A step of a Llama on ranks whose losses are right, with ``alone`` also one in groups of one rank; the
    tokens and the width."""
    sizes, state, tokens, targets = llama_case(t, world, layers)
    inputs = {"sizes": sizes, "tokens": tokens, "targets": targets, "groups": []}
    steps = [[inputs | {"state": parts_alone(state, rank, world)}] for rank in range(world)]
    groups = [[rank] for rank in range(world)]
    for rank, own in enumerate(steps if alone else []):
        others = {"tokens": tokens.roll(rank, 1), "targets": targets.roll(rank, 0)}
        own.append(inputs | others | {"state": state, "groups": groups})
    run = student.ranks(whole_step, [{"steps": own} for own in steps])
    loss, grads = llama_step(sizes, state, tokens, targets)
    for rank, of_rank in enumerate(run.results):
        got, *others = t.items(of_rank, len(steps[rank]), "what the steps return")
        value, shapes, found = t.items(got, 3, "what the step returns")
        for name, want in ((name, list(part(state[name], cut(name), rank, world).shape)) for name in grads):
            whole, values = (
                list(state[name].shape),
                {"name": name, "rank": rank, "shape": shapes.get(name), "want": want},
            )
            message = "{name} is whole on rank {rank}: it is replicated, not divided"
            t.that(want == whole or shapes.get(name) != whole, message, **values)
            message = (
                "{name} on rank {rank} has shape {shape}, expected {want}: it is cut along the other "
                "dimension, or should be whole"
            )
            t.that(shapes.get(name) == want, message, **values)
        nan = type(value) is Tensor and bool(value.isnan().any())
        t.that(not nan, WHOLE_WEIGHTS, rank=rank)
        what = "the loss on rank {rank} of {world}"
        t.close(value, torch.tensor(loss, dtype=torch.float64), what, rank=rank, world=world, **EXACT)
        for name, grad in grads.items():
            mine, values = found.get(name), {"name": name, "rank": rank, "world": world}
            t.that(mine is not None, "the gradient of {name} on rank {rank} is missing", **values)
            right = part(grad, cut(name), rank, world)
            t.close(mine, right, "the gradient of {name} on rank {rank} of {world}", **values, **EXACT)
        for other, given in zip(others, steps[rank][1:]):
            right_alone(t, other, rank, given)
    no_weights_travel(t, run, tokens.numel() * sizes["hidden"], layers)
    return run, tokens, sizes["hidden"]


def right_alone(t, got: Any, rank: int, given: dict[str, Any]) -> None:
    """The step of a group of one rank is that of one process."""
    value, _, found = t.items(got, 3, "what the step returns")
    loss, grads = llama_step(*(given[name] for name in ("sizes", "state", "tokens", "targets")))
    what = "with a group of one rank, the loss on rank {rank}"
    t.close(value, torch.tensor(loss, dtype=torch.float64), what, rank=rank, **EXACT)
    for name, grad in grads.items():
        what = "with a group of one rank, the gradient of {name} on rank {rank}"
        t.close(found.get(name), grad, what, name=name, rank=rank, **EXACT)


def no_weights_travel(t, run: Run, size: int, layers: int) -> None:
    """Activations of ``size`` numbers are added up, and no weights or gradients of them."""
    message = "rank {rank} uses {kinds}: all-reduces are enough"
    passes_only(t, run, [Kind.ALL_REDUCE], message)
    for rank in range(run.world):
        calls = [call for call in run.calls(rank) if len(call.members) > 1]
        message = (
            "rank {rank} passes {got} numbers to an all-reduce, the activations have {size}: neither weights "
            "nor their gradients are sent, each rank computes with its parts"
        )
        got = max((call.numel for call in calls), default=0)
        t.that(got <= size, message, rank=rank, got=got, size=size)
        most = 2 * (4 * layers + 2) * size
        got = sum(call.numel for call in calls)
        message = (
            "rank {rank} passes {got} numbers to all-reduces, {most} are more than enough for {layers} "
            "blocks: neither weights nor their gradients are sent"
        )
        t.that(got <= most, message, rank=rank, got=got, most=most, layers=layers)


@check("model", points=1, seconds=20)
def check_plan(student, t):
    "The plan: what is cut, and along which dimension"
    names = list(Llama(LlamaConfig(8, 4, 4, t.integer(2, 3), 1, 1, 4), device="meta").state_dict())
    for name in t.shuffled(names):
        got, want = student.shard_dim(name), cut(name)
        message = "shard_dim({name}) is {got}: a sum follows this layer, so its weight is cut along dim 1"
        t.that(want != 1 or got == want, message, name=name, got=got)
        message = "shard_dim({name}) is {got}: norms are whole on every rank, None"
        t.that(want is not None or got is None, message, name=name, got=got)
        message = "shard_dim({name}) is {got}, expected {want}"
        t.that(got == want and type(got) is type(want), message, name=name, got=got, want=want)


@check("model", points=3, seconds=60)
def check_model(student, t):
    "Loss and gradients of one process"
    model_run(student, t, 2, alone=True)


@check("model", points=2, seconds=60)
def check_model_traffic(student, t):
    "Two all-reduces a block in forward, two in backward"
    counts = {}
    for layers in (1, 3):
        run, tokens, hidden = model_run(student, t, 2, layers)
        for rank in range(2):
            size = tokens.numel() * hidden
            calls = [call for call in run.calls(rank, Kind.ALL_REDUCE) if call.numel == size]
            counts[layers, rank] = [
                sum(call.in_backward == backward for call in calls) for backward in (False, True)
            ]
    for rank in range(2):
        for moment, few, many in zip(("forward", "backward"), counts[1, rank], counts[3, rank]):
            each = (many - few) / 2
            message = (
                "rank {rank} makes {each:g} all-reduces of activations for each block in {moment}, two are "
                "right: attention and MLP"
            )
            t.that(each == 2, message, rank=rank, each=each, moment=moment)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 1), call=1)


# -- grid


def grid_groups(world: int, tp: int, rank: int) -> list[list[int]]:
    """The ranks of the tensor-parallel and of the data-parallel group, from a matrix of all ranks."""
    ranks = torch.arange(world).view(-1, tp)
    row, column = (ranks == rank).nonzero()[0].tolist()
    return [ranks[row].tolist(), ranks[:, column].tolist()]


def right_groups(student, t, world: int, widths: Sequence[int]) -> None:
    """The groups of every rank have the right members, for each width of the tensor-parallel group."""
    run = student.ranks(grouped, [{"widths": list(widths)}] * world)
    for rank, of_rank in enumerate(run.results):
        for tp, got in zip(widths, t.items(of_rank, len(widths), "the groups")):
            members = [
                [other for other in range(world) if int(found) >> other & 1]
                for found in t.items(got, 2, "the two groups")
            ]
            want = grid_groups(world, tp, rank)
            values = {"rank": rank, "world": world, "tp": tp, "got": members, "want": want}
            swapped = members == want[::-1] and want[0] != want[1]
            message = "the two groups of rank {rank} are exchanged: the tensor-parallel one comes first"
            t.that(not swapped, message, **values)
            message = "with tp = {tp} on {world} ranks, rank {rank} is in the groups {got}, expected {want}"
            t.that(members == want, message, **values)


@check("grid", points=2, seconds=40)
def check_groups(student, t):
    "The groups of a grid"
    right_groups(student, t, 4, t.shuffled([2, 1, 4]))


@check("grid", points=1, seconds=30)
def check_average(student, t):
    "The mean over the data-parallel group, and not of None"
    shapes = [(t.integer(1, 4), 3), (t.integer(1, 4),)]
    groups, world = [[0, 2], [1]], 3
    grads = [[double(t, *shape) for shape in shapes] for _ in range(world)]
    run = student.ranks(averaged, [{"grads": [own[0], None, own[1]], "groups": groups} for own in grads])
    for rank, got in enumerate(run.results):
        first, none, second = t.items(got, 3, "the gradients")
        for i, mine in enumerate((first, second)):
            same = [grads[other][i] for other in groups[rank % 2]]
            right = sum(same) / len(same)
            mistakes = {
                "gradients on rank {rank} are averaged over all ranks: tensor-parallel neighbours have "
                "other parts": sum(own[i] for own in grads) / world,
                "gradients on rank {rank} are divided by the number of all ranks: divide by the size of "
                "dp_group": sum(same) / world,
            }
            if len(same) > 1:
                mistakes[
                    "gradients on rank {rank} are summed over the group: data parallelism needs their mean"
                ] = sum(same)
            wrong_if(t, mine, right, mistakes, rank=rank)
            t.close(mine, right, "gradient {i} on rank {rank} of 3", i=i, rank=rank, **EXACT)
        t.that(none is None, "a parameter without gradient has one on rank {rank}: skip None", rank=rank)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, 2 * t.integer(0, 1))


@check("grid", points=2, seconds=60)
def check_grid(student, t):
    "TP 2 × DP 2 has the gradients of one process with the whole batch"
    sizes, state, tokens, targets = llama_case(t, 2, layers=1)
    inputs = [
        {
            "tp": 2,
            "sizes": sizes,
            "tokens": tokens[row : row + 1],
            "targets": targets[row : row + 1],
        }
        for row in (0, 1)
    ]
    states = [parts_alone(state, rank, 2) for rank in range(2)]
    run = student.ranks(grid_step, [inputs[rank // 2] | {"state": states[rank % 2]} for rank in range(4)])
    _, grads = llama_step(sizes, state, tokens, targets)
    for rank, found in enumerate(run.results):
        t.that(type(found) is dict, "the gradients on rank {rank} are missing", rank=rank)
        for name, grad in grads.items():
            mine, right = found.get(name), part(grad, cut(name), rank % 2, 2)
            both = part(grad, cut(name), 0, 2) + part(grad, cut(name), 1, 2)
            mixed = (
                "the gradient of {name} on rank {rank} is averaged over the tensor-parallel group too: its "
                "ranks have other parts"
            )
            wrong_if(t, mine, right, {mixed: both / 2}, name=name, rank=rank)
            t.close(
                mine, right, "the gradient of {name} on rank {rank} of 2 × 2", name=name, rank=rank, **EXACT
            )


# -- sequence


@check("sequence", points=2, seconds=30)
def check_gather_scatter(student, t):
    "GatherSequence and ScatterSequence are conjugate"
    world = 3
    rows, width = t.integer(1, 3), t.integer(2, 4)
    short = [double(t, rows, 2, width) for _ in range(world)]
    long = [double(t, world * rows, 2, width) for _ in range(world)]
    cases = ("GatherSequence", short, long), ("ScatterSequence", long, short)
    runs = run_together(student, t, *(Case(name, [[x] for x in xs], grads) for name, xs, grads in cases))
    for (name, _, grads), run in zip(cases, runs):
        joined, summed = torch.cat(short), sum(long)
        outs = [joined if name == "GatherSequence" else part(summed, 0, rank, world) for rank in range(world)]
        wants = [
            part(summed, 0, rank, world) if name == "GatherSequence" else joined for rank in range(world)
        ]
        right_results(t, run, outs, "the result of " + name)
        for rank, got in enumerate(run.results):
            (mine,) = t.items(t.items(got, 4, "what the function returns")[1], 1, "the gradients")
            own = part(grads[rank], 0, rank, world) if name == "GatherSequence" else wants[rank]
            message = "the backward of GatherSequence takes the rows of one gradient: add those of all ranks"
            t.that(near(own, wants[rank]) or not near(mine, own), message)
            what = "the gradient of {name} on rank {rank} of {world}"
            t.close(mine, wants[rank], what, name=name, rank=rank, world=world, **EXACT)


def sequence_case(
    student, t, world: int, alone: bool = False
) -> tuple[Run, Sequence[Sequence[Tensor]], list[Tensor], int, Sequence[Sequence[Tensor]]]:
    """An MLP behind a norm on ranks, with results that are right: the run, the gradients of each rank and of
    one process, the bytes of x, and the tensors of each rank. With ``alone`` in groups of one rank too."""
    rows, hidden, inner = t.integer(1, 3), t.integer(3, 4), world * t.integer(1, 3)
    x, grad = (double(t, world * rows, 2, hidden) for _ in range(2))
    weights = [
        double(t, hidden),
        double(t, inner, hidden),
        double(t, inner, hidden),
        double(t, hidden, inner),
    ]
    dims = (0, None, 0, 0, 1)
    parts = [
        [part(tensor, dim, rank, world) for tensor, dim in zip([x, *weights], dims)] for rank in range(world)
    ]
    grads = [part(grad, 0, rank, world) for rank in range(world)]
    out, found = norm_mlp(x, *weights, grad)

    def not_gathered(run: Run) -> None:
        for rank, got in enumerate(run.results):
            mine = t.items(got, 4, "what the layer returns")[0]
            message = (
                "the result on rank {rank} has the whole sequence: it is gathered, but only this rank's "
                "tokens are needed"
            )
            t.that(not (type(mine) is Tensor and mine.shape == out.shape), message, rank=rank)

    name, names = "sequence_mlp", ("x", "the norm's weight", "gate", "up", "down")
    other = [in_groups_of_one(t, name, [x, *weights], grad, norm_mlp, names, world)] if alone else []
    run = layer_run(student, t, name, parts, grads, also=other, verify=not_gathered)
    right_results(t, run, [part(out, 0, rank, world) for rank in range(world)], "the result of sequence_mlp")
    wants = [[part(tensor, dim, rank, world) for tensor, dim in zip(found, dims)] for rank in range(world)]
    return run, wants, found, x.nbytes, parts


@check("sequence", points=2, seconds=30)
def check_sequence_mlp(student, t):
    "Norm and MLP: results and gradients of one process"
    run, wants, _, _, _ = sequence_case(student, t, 2, alone=True)
    for got in run.results:
        found = t.items(got, 4, "what the layer returns")[1]
        t.that(found is not None, "the result requires no gradient")
    others = [[own[0], *own[2:]] for own in wants]
    kept = [[got[0], [got[1][0], *got[1][2:]], got[2], got[3]] for got in run.results]
    without_norm = Run(kept, run.traffic)
    right_gradients(t, without_norm, ["x", "gate", "up", "down"], others)


@check("sequence", points=1, seconds=30)
def check_norm_gradient(student, t):
    "The gradient of the norm is summed over the ranks"
    run, wants, found, _, _ = sequence_case(student, t, 2)
    grads = [
        t.items(t.items(got, 4, "what the layer returns")[1], 5, "the gradients")[1] for got in run.results
    ]
    for rank, mine in enumerate(grads):
        t.that(mine is not None, "the gradient of the norm's weight on rank {rank} is missing", rank=rank)
        same = near(mine, grads[1 - rank]) if isinstance(grads[1 - rank], Tensor) else False
        values = {"what": "the norm's weight", "rank": rank, "world": 2}
        t.that(same or not near(sum(grads), found[1]), ALONE, **values)
        t.close(mine, wants[rank][1], "the gradient of {what} on rank {rank} of {world}", **values, **EXACT)


@check("sequence", points=1, seconds=30)
def check_sequence_traffic(student, t):
    "An all-gather and a reduce-scatter each way"
    run, _, _, nbytes, parts = sequence_case(student, t, 2)
    for rank in range(2):
        sent = run.numbers(rank, Kind.ALL_GATHER)
        early = any(near(numbers.double(), parts[rank][0].flatten()) for numbers in sent)
        message = (
            "rank {rank} gathers x before the norm: every rank then computes the norm of the whole sequence "
            "and keeps all of it for backward. Gather the result of the norm"
        )
        t.that(not early, message, rank=rank)
        for moment in ("forward", "backward"):
            calls = [
                call
                for call in run.calls(rank)
                if call.in_backward == (moment == "backward") and call.kind is not Kind.NEW_GROUP
            ]
            for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
                own = [call.payload_bytes for call in calls if call.kind is kind]
                message = (
                    "rank {rank} makes {count} calls of {kind} with {got} bytes in {moment}: one of {want} "
                    "is right"
                )
                shown = {
                    "count": len(own),
                    "kind": kind.value,
                    "got": sum(own),
                    "moment": moment,
                    "want": nbytes,
                }
                t.that(own == [nbytes], message, rank=rank, **shown)
            large = [call for call in calls if call.kind is Kind.ALL_REDUCE and call.payload_bytes >= nbytes]
            t.that(
                not large,
                "rank {rank} uses an all-reduce of activations in {moment}: reduce-scatter takes its place",
                rank=rank,
                moment=moment,
            )
    uses_what_arrives(t, run, Kind.ALL_GATHER, t.integer(0, 1), call=0)


# -- kv


@check("kv", points=1, seconds=20)
def check_own_kv_heads(student, t):
    "The heads of a rank, with fewer heads than ranks"
    for kv_heads, world in t.shuffled([(8, 2), (4, 4), (2, 8), (1, 3), (6, 3), (3, 6)]):
        for rank in range(world):
            got = t.items(student.own_kv_heads(kv_heads, rank, world), 2, "own_kv_heads")
            # of each query head, its head of keys
            queries = torch.arange(2 * kv_heads * world).chunk(world)[rank] // (2 * world)
            want = [int(queries.min()), int(queries.max()) + 1]
            values = {"kv": kv_heads, "rank": rank, "world": world, "got": got, "want": want}
            wrapped = [rank % kv_heads, rank % kv_heads + 1]
            message = (
                "own_kv_heads({kv}, {rank}, {world}) is {got}: neighbours share a head, because they have "
                "the query heads of one group"
            )
            t.that(got == want or got != wrapped, message, **values)
            t.that(got == want, "own_kv_heads({kv}, {rank}, {world}) is {got}, expected {want}", **values)


def sharing_inputs(
    whole: list[Tensor], grad: Tensor, world: int, sharing: list[list[int]]
) -> list[list[dict[str, Any]]]:
    """What each rank gets: its part of an attention whose heads of keys two ranks share, and an attention in
    groups of one rank, with other tensors on each."""
    inputs = []
    for rank in range(world):
        own = [
            part(tensor, dim, rank, world) for tensor, dim in zip(whole, (None, 0, None, None, 1, None, None))
        ]
        own[2], own[3] = (part(tensor, 0, rank // 2, 2) for tensor in whole[2:4])
        alone = [(1 + rank) * tensor for tensor in whole[:5]] + whole[5:]
        groups = [[other] for other in range(world)]
        shared = {"tensors": own, "grad": grad, "groups": [], "sharing": sharing}
        inputs.append([shared, {"tensors": alone, "grad": grad, "groups": groups, "sharing": groups}])
    return inputs


@check("kv", points=2, seconds=40)
def check_shared_gradients(student, t):
    "Copies of a head have the gradient of all its query heads"
    world, sharing = 4, [[0, 1], [2, 3]]
    whole, grad = attention_whole(t, world, 2)
    inputs = sharing_inputs(whole, grad, world, sharing)
    run = student.ranks(sharing_step, [{"cases": own} for own in inputs])
    each = [t.items(got, 2, "what the scenario returns") for got in run.results]
    out, found = attention(*whole, grad)
    size = len(whole[2]) // 2  # rows of one head
    of_ranks = []
    for rank, (got, other) in enumerate(each):
        mine, grads = t.items(got, 2, "what the layer returns")
        t.close(mine, out, "the result on rank {rank} of {world}", rank=rank, world=world, **EXACT)
        right = attention(*inputs[rank][1]["tensors"], grad)[0]
        mine, what = t.items(other, 2, "what the layer returns")[0], "with groups of one rank, the result"
        t.close(mine, right, what + " on rank {rank} of {world}", rank=rank, world=world, **EXACT)
        t.that(grads is not None, "the result on rank {rank} requires no gradient", rank=rank)
        of_ranks.append(t.items(grads, 5, "the gradients"))
    for rank, grads in enumerate(of_ranks):
        wants = [
            found[0],
            part(found[1], 0, rank, world),
            part(found[2], 0, rank // 2, 2),
            part(found[3], 0, rank // 2, 2),
        ]
        for i, (name, right) in enumerate(zip(("x", "q", "k", "v"), wants)):
            values = {"name": name, "rank": rank}
            t.that(grads[i] is not None, "the gradient of {name} on rank {rank} is missing", **values)
            neighbour = of_ranks[rank ^ 1][i]
            split = (
                i in (2, 3)
                and isinstance(neighbour, Tensor)
                and grads[i].shape == neighbour.shape
                and near(grads[i] + neighbour, right)
            )
            message = (
                "the gradient of {name} on rank {rank} is that of this rank's query heads alone: copies of "
                "a head drift apart"
            )
            t.that(not split, message, **values)
            message = (
                "the gradient of {name} on rank {rank} is added over all ranks: only those of `sharing` "
                "have a copy of this head"
            )
            wrong_if(
                t,
                grads[i],
                right,
                {message: found[i][:size] + found[i][size:]} if i in (2, 3) else {},
                **values,
            )
            t.close(grads[i], right, "the gradient of {name} on rank {rank} of 4", **values, **EXACT)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 3))
