"""The visible checks of the parallel layers: results and gradients in float64, and what passes between the
ranks.

Traffic is counted outside the student's process; bytes are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Run, check
from dlo_lib.labkit.compare import wrong_if
from dlo_lib.labkit.memory import MIB, holds_at_most
from dlo_lib.labkit.traffic import passes_only, uses_what_arrives

from .scenarios import layers_of, part_of_large, parts_of
from .twins import Found, attention, cross_entropy, embedding, linear, mlp, part

DOUBLE = torch.float64
EXACT = {"rtol": 1e-9, "atol": 1e-10}
ALONE = (
    "the gradient of {what} on rank {rank} of {world} is the contribution of this rank alone: in backward "
    "the contributions of all ranks must be added (copy_to_ranks)"
)
TOO_OFTEN = (
    "the gradient of {what} on rank {rank} is {world} times too large: every rank already has the whole "
    "gradient of a sum, so its backward must not add again"
)

# -- helpers of all layers


def double(t, *shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return t.normal(*shape, dtype=DOUBLE)


@dataclass(frozen=True)
class Case:
    """A function of the student with the tensors and the gradient of each rank; ``verify`` checks the results
    of a run."""

    name: str
    parts: Sequence[Sequence[Tensor | None]]
    grads: Sequence[Tensor]
    verify: Callable[[Run], None] | None = None
    fixed: Sequence[int] = ()
    groups: Sequence[Sequence[int]] = ()

    def inputs(self) -> list[dict]:
        """What each rank gets."""
        groups = [list(ranks) for ranks in self.groups]
        return [
            {"tensors": list(own), "fixed": list(self.fixed), "grad": grad, "groups": groups}
            for own, grad in zip(self.parts, self.grads)
        ]


def layer_run(
    student,
    t,
    name: str,
    parts: Sequence[Sequence[Tensor | None]],
    grads: Sequence[Tensor],
    fixed: Sequence[int] = (),
    also: Sequence[Case] = (),
    verify: Callable[[Run], None] | None = None,
) -> Run:
    """The function on one rank for each of ``parts``; in the same run ``also``, which is right."""
    return run_together(student, t, Case(name, parts, grads, verify, fixed), *also)[0]


def run_together(student, t, *cases: Case) -> list[Run]:
    """One run of several functions, one after another: for each the run with its results, which are right."""
    inputs = [{"cases": list(of_rank)} for of_rank in zip(*(case.inputs() for case in cases))]
    run = student.ranks(layers_of(*(case.name for case in cases)), inputs)
    each = [of_case(t, run, i, len(cases)) for i in range(len(cases))]
    for case, own in zip(cases, each):
        if case.verify is not None:
            case.verify(own)
    return each


def of_case(t, run: Run, i: int, number: int) -> Run:
    """The run with the results of function ``i`` of ``number`` alone."""
    again = run.repeat
    return replace(
        run,
        results=[t.items(got, number, "what the functions return")[i] for got in run.results],
        repeat=None if again is None else lambda nudge: of_case(t, again(nudge), i, number),
    )


def in_groups_of_one(
    t,
    name: str,
    tensors: Sequence[Tensor],
    grad: Tensor,
    twin: Callable[..., Found],
    trained: Sequence[str],
    world: int = 2,
    fixed: Sequence[int] = (),
) -> Case:
    """The function in ``world`` groups of one rank, each with whole tensors and other ones than the others.

    ``trained``: the names of the arguments that have a gradient.
    """
    trains = [tensor.dtype is DOUBLE and i not in fixed for i, tensor in enumerate(tensors)]
    parts = [
        [(1 + rank) * tensor if differs else tensor for tensor, differs in zip(tensors, trains)]
        for rank in range(world)
    ]

    def verify(run: Run) -> None:
        found = [twin(*own, grad) for own in parts]
        alone = "with a group of one rank, the result of "
        right_results(t, run, [out for out, _ in found], alone + name)
        names = [f"{argument}, with a group of one rank," for argument in trained]
        right_gradients(t, run, names, [grads for _, grads in found])

    groups = [[rank] for rank in range(world)]
    return Case(name, parts, [grad] * world, verify, fixed, groups)


def right_results(
    t, run: Run, outs: Sequence[Tensor], what: str, mistakes: Sequence[Mapping[str, Tensor]] = ()
) -> None:
    """The result of every rank is ``outs[rank]``."""
    for rank, got in enumerate(run.results):
        out = t.items(got, 4, "what the layer returns")[0]
        if mistakes:
            wrong_if(t, out, outs[rank], mistakes[rank], rank=rank, world=run.world)
        t.close(out, outs[rank], what + " on rank {rank} of {world}", rank=rank, world=run.world, **EXACT)


def right_gradients(
    t,
    run: Run,
    names: Sequence[str],
    wants: Sequence[Sequence[Tensor]],
    alone: Sequence[Tensor] | None = None,
) -> None:
    """The gradients of every rank are ``wants[rank]``; ``alone[rank]`` is what this rank contributes to the
    first one."""
    for rank, got in enumerate(run.results):
        found = t.items(got, 4, "what the layer returns")[1]
        message = "the result on rank {rank} requires no gradient: the chain of autograd is cut before it"
        t.that(found is not None, message, rank=rank)
        found = t.items(found, len(names), "the gradients")
        for i, (name, mine, right) in enumerate(zip(names, found, wants[rank])):
            values = {"what": name, "rank": rank, "world": run.world}
            t.that(mine is not None, "the gradient of {what} on rank {rank} of {world} is missing", **values)
            mistakes = {TOO_OFTEN: run.world * right}
            if i == 0 and alone is not None:
                mistakes = {ALONE: alone[rank]} | mistakes
            wrong_if(t, mine, right, mistakes, **values)
            t.close(mine, right, "the gradient of {what} on rank {rank} of {world}", **values, **EXACT)


def all_reduces(t, run: Run, forward: int, backward: int, nbytes: int, why: str) -> None:
    """Every rank makes these numbers of all-reduces, of ``nbytes`` each, and no other call."""
    message = "rank {rank} uses {kinds}: nothing is gathered, all-reduces are enough"
    passes_only(t, run, [Kind.ALL_REDUCE, Kind.NEW_GROUP], message)
    for rank in range(run.world):
        calls = run.calls(rank, Kind.ALL_REDUCE)
        for moment, want in (("forward", forward), ("backward", backward)):
            own = [call for call in calls if call.in_backward == (moment == "backward")]
            message = "rank {rank} makes {count} all-reduces in {moment}, {want} would be right: {why}"
            t.that(len(own) == want, message, rank=rank, count=len(own), moment=moment, want=want, why=why)
            for call in own:
                message = "rank {rank} passes {got} bytes to an all-reduce in {moment}, {want} are enough"
                values = {"rank": rank, "got": call.payload_bytes, "moment": moment, "want": nbytes}
                t.that(call.payload_bytes == nbytes, message, **values)


# -- conjugate


def conjugate_case(t, world: int) -> tuple[list[Tensor], list[Tensor]]:
    """An input and a gradient for each rank."""
    shape = t.integer(2, 4), t.integer(2, 4)
    return [double(t, *shape) for _ in range(world)], [double(t, *shape) for _ in range(world)]


@check("conjugate", points=2, seconds=30)
def check_copy(student, t):
    "CopyToRanks: identity, and in backward the sum"
    world = 2
    xs, grads = conjugate_case(t, world)
    run = layer_run(student, t, "copy_to_ranks", [[x] for x in xs], grads)
    right_results(t, run, xs, "the result of CopyToRanks")
    right_gradients(t, run, ["the input"], [[sum(grads)]] * world, alone=grads)


@check("conjugate", points=2, seconds=30)
def check_sum(student, t):
    "SumOverRanks: the sum, and in backward identity"
    world = 2
    xs, grads = conjugate_case(t, world)
    grads = [grads[0]] * world  # all ranks compute the same loss
    run = layer_run(student, t, "sum_over_ranks", [[x] for x in xs], grads)
    right_results(t, run, [sum(xs)] * world, "the result of SumOverRanks")
    right_gradients(t, run, ["the input"], [[grad] for grad in grads])


@check("conjugate", points=1, seconds=30)
def check_one_communication(student, t):
    "One all-reduce each, and what arrives is used"
    for name, forward in (("copy_to_ranks", 0), ("sum_over_ranks", 1)):
        xs, grads = conjugate_case(t, 2)
        grads = [grads[0]] * 2 if forward else grads
        run = layer_run(student, t, name, [[x] for x in xs], grads)
        right_results(t, run, [sum(xs)] * 2 if forward else xs, "the result of " + name)
        why = "CopyToRanks communicates in backward, SumOverRanks in forward"
        all_reduces(t, run, forward, 1 - forward, xs[0].nbytes, why)
        uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 1))


@check("conjugate", points=1, seconds=30)
def check_unchanged(student, t):
    "Neither the input nor the received gradient changes"
    names = "copy_to_ranks", "sum_over_ranks"
    drawn = [conjugate_case(t, 2) for _ in names]
    runs = run_together(
        student, t, *(Case(name, [[x] for x in xs], grads) for name, (xs, grads) in zip(names, drawn))
    )
    # CopyToRanks sends in backward, SumOverRanks in forward
    moments = {call.in_backward for call in runs[0].calls(0)}
    t.that(len(moments) == 2, "not tested yet: the ranks send nothing, see the first checks")
    for name, (xs, grads), run in zip(names, drawn, runs):
        for rank, got in enumerate(run.results):
            _, _, (after,), grad = t.items(got, 4, "what the function returns")
            same = bool(torch.equal(after, xs[rank]))
            t.that(same, "{name} changes its input: all_reduce works in place, so give it a clone", name=name)
            same = bool(torch.equal(grad, grads[rank]))
            message = "the backward of {name} changes the gradient that it gets: give a clone to all_reduce"
            t.that(same, message, name=name)


@check("conjugate", points=1, seconds=30)
def check_group(student, t):
    "Only the ranks of the group"
    groups, world = [[0, 2], [1]], 3
    xs, grads = conjugate_case(t, world)
    members = [next(ranks for ranks in groups if rank in ranks) for rank in range(world)]
    sums = [[sum(held[other] for other in members[rank]) for rank in range(world)] for held in (xs, grads)]
    names = "copy_to_ranks", "sum_over_ranks"
    copied, summed = run_together(
        student, t, *(Case(name, [[x] for x in xs], grads, groups=groups) for name in names)
    )
    for rank, got in enumerate(copied.results):
        found = t.items(t.items(got, 4, "what the function returns")[1], 1, "the gradients")
        known = {"the backward of CopyToRanks adds over all ranks: pass group=ctx.group": sum(grads)}
        wrong_if(t, found[0], sums[1][rank], known)
        what = "the gradient of CopyToRanks in a group, on rank {rank}"
        t.close(found[0], sums[1][rank], what, rank=rank, **EXACT)
    mistakes = [{"SumOverRanks adds over all ranks: pass group=group": sum(xs)}] * world
    right_results(t, summed, sums[0], "the result of SumOverRanks in a group", mistakes)


# -- shard


@check("shard", points=1, seconds=20)
def check_part(student, t):
    "The part of each rank"
    for world, dims in ((2, (0, 1)), (3, (1,))):
        weights = [t.normal(6 * t.integer(1, 2), 6 * t.integer(1, 2)) for _ in dims]
        run = student.ranks(parts_of, [{"weights": weights, "dims": list(dims)}] * world)
        for rank, found in enumerate(run.results):
            found = t.items(found, len(dims) + 1, "the parts")
            what = "shard(weight, {dim}, group) on rank {rank}, in a group of one rank,"
            t.close(found[-1], weights[0], what, dim=dims[0], rank=rank)
            for weight, dim, got in zip(weights, dims, found):
                want = part(weight, dim, rank, world)
                known = {"shard returns the whole weight: it is replicated, not divided": weight}
                wrong_if(t, got, want, known)
                what = "shard(weight, {dim}) on rank {rank} of {world}"
                t.close(got, want, what, dim=dim, rank=rank, world=world)


@check("shard", points=1, seconds=30)
def check_part_memory(student, t):
    "The rest of the weight is freed"
    seed, width = t.integer(0, 999), 1600
    run = student.ranks(part_of_large, [{"seed": seed, "width": width}] * 2)
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
    for rank, got in enumerate(run.results):
        row, shape = t.items(got, 2, "a row and the shape")
        t.equal(shape, [width // 2, width], "the shape of the part on rank {rank}", rank=rank)
        t.close(row, part(weight, 0, rank, 2)[0, :4], "a row of the part on rank {rank}", rank=rank)
    whole = weight.nbytes
    message = (
        "rank {rank} holds {held:.0f} MiB, its part has {part:.0f}: a view keeps the whole weight in "
        "memory, return a copy"
    )
    holds_at_most(t, run, "after shard", whole / 2 + 3.5 * MIB, message, part=whole / 2 / MIB)


# -- linear


def column_case(t, world: int, bias: bool = True, shape: tuple[int, ...] = (5,)) -> Case:
    """A column linear on ranks, and the expected results."""
    inner, outer = t.integer(2, 5), world * t.integer(1, 3)
    whole = [double(t, *shape, inner), double(t, outer, inner), double(t, outer) if bias else None]
    grad = double(t, *shape, outer)
    parts = [
        [whole[0], part(whole[1], 0, rank, world), part(whole[2], 0, rank, world) if bias else None]
        for rank in range(world)
    ]
    grads = [part(grad, len(shape), rank, world) for rank in range(world)]

    def verify(run: Run) -> None:
        out, found = linear(whole[0], whole[1], whole[2], grad)
        outs = [part(out, len(shape), rank, world) for rank in range(world)]
        right_results(t, run, outs, "the result of column_linear")
        alone = [linear(own[0], own[1], None, of_rank)[1][0] for own, of_rank in zip(parts, grads)]
        wants = [[found[0], *(part(each, 0, rank, world) for each in found[1:])] for rank in range(world)]
        right_gradients(t, run, ["x", "the weight", "the bias"][: len(found)], wants, alone)

    return Case("column_linear", parts, grads, verify)


def row_case(t, world: int, bias: bool = True, shape: tuple[int, ...] = (5,)) -> Case:
    """A row linear on ranks, and the expected results."""
    inner, outer = world * t.integer(1, 3), t.integer(2, 5)
    whole = [double(t, *shape, inner), double(t, outer, inner), double(t, outer) if bias else None]
    grad = double(t, *shape, outer)
    parts = [
        [part(whole[0], len(shape), rank, world), part(whole[1], 1, rank, world), whole[2]]
        for rank in range(world)
    ]

    def verify(run: Run) -> None:
        out, found = linear(whole[0], whole[1], whole[2], grad)
        mistakes: list[dict[str, Tensor]] = []
        for own in parts:
            partial = linear(own[0], own[1], None, grad)[0]
            known = {"row_linear returns the partial sums of rank {rank}: add them over the ranks": partial}
            if whole[2] is not None:
                often = "the bias is added {world} times: add it once, after the sum"
                known |= {often: out + (world - 1) * whole[2], "the bias is missing": out - whole[2]}
            mistakes.append(known)
        right_results(t, run, [out] * world, "the result of row_linear", mistakes)
        wants = [
            [part(found[0], len(shape), rank, world), part(found[1], 1, rank, world), *found[2:]]
            for rank in range(world)
        ]
        right_gradients(t, run, ["x", "the weight", "the bias"][: len(found)], wants)

    return Case("row_linear", parts, [grad] * world, verify)


def linear_alone(t, name: str, world: int) -> Case:
    """A linear layer in groups of one rank, where both layers are an ordinary one."""
    inner, outer = t.integer(2, 4), t.integer(2, 4)
    tensors = [double(t, 3, inner), double(t, outer, inner), double(t, outer)]
    names = ("x", "the weight", "the bias")
    return in_groups_of_one(t, name, tensors, double(t, 3, outer), linear, names, world)


@check("linear", points=2, seconds=30)
def check_column(student, t):
    "The column layer: results and gradients"
    run_together(student, t, column_case(t, 3), linear_alone(t, "column_linear", 3))


@check("linear", points=2, seconds=30)
def check_row(student, t):
    "The row layer: results and gradients, the bias once"
    run_together(student, t, row_case(t, 3), linear_alone(t, "row_linear", 3))


@check("linear", points=1, seconds=30)
def check_without_bias(student, t):
    "Without a bias"
    run_together(student, t, column_case(t, 2, bias=False), row_case(t, 2, bias=False))


@check("linear", points=2, seconds=30)
def check_linear_traffic(student, t):
    "One all-reduce each: of x's gradient, and of the result"
    shape, inner, outer = t.integer(2, 4), 2 * t.integer(1, 3), 2 * t.integer(1, 3)
    x, weight, grad = double(t, shape, inner), double(t, outer, inner), double(t, shape, outer)
    out, _ = linear(x, weight, None, grad)
    columns = [[x, part(weight, 0, rank, 2), None] for rank in range(2)]
    run = layer_run(student, t, "column_linear", columns, [part(grad, 1, rank, 2) for rank in range(2)])
    right_results(t, run, [part(out, 1, rank, 2) for rank in range(2)], "the result of column_linear")
    why = "a column layer adds the gradients of x, and its result stays divided"
    all_reduces(t, run, 0, 1, x.nbytes, why)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, 1)
    rows = [[part(x, 1, rank, 2), part(weight, 1, rank, 2), None] for rank in range(2)]
    run = layer_run(student, t, "row_linear", rows, [grad] * 2)
    right_results(t, run, [out] * 2, "the result of row_linear")
    why = "a row layer adds the partial sums, and the gradient of its x stays divided"
    all_reduces(t, run, 1, 0, out.nbytes, why)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, 1)


# -- mlp


def mlp_case(
    student, t, world: int, shape: tuple[int, ...] = (2, 3), alone: bool = False
) -> tuple[Run, Found, list[list[Tensor]], Tensor]:
    """An MLP on ranks, with results that are right; with ``alone`` in groups of one rank too."""
    hidden, inner = t.integer(2, 4), world * t.integer(1, 3)
    x, down, grad = double(t, *shape, hidden), double(t, hidden, inner), double(t, *shape, hidden)
    gate, up = double(t, inner, hidden), double(t, inner, hidden)
    parts = [
        [x, part(gate, 0, rank, world), part(up, 0, rank, world), part(down, 1, rank, world)]
        for rank in range(world)
    ]
    names = ("x", "gate", "up", "down")
    other = in_groups_of_one(t, "parallel_mlp", [x, gate, up, down], grad, mlp, names, world)
    run = layer_run(student, t, "parallel_mlp", parts, [grad] * world, also=[other] if alone else [])
    found = mlp(x, gate, up, down, grad)
    message = "parallel_mlp returns the partial sums of rank {rank}: add them over the ranks"
    mistakes = [{message: mlp(*own, grad)[0]} for own in parts]
    right_results(t, run, [found[0]] * world, "the result of parallel_mlp", mistakes)
    return run, found, parts, grad


@check("mlp", points=3, seconds=30)
def check_mlp(student, t):
    "Results and gradients of one process"
    run, (_, found), parts, grad = mlp_case(student, t, 2, alone=True)
    wants = [[found[0], *(part(found[i], int(i == 3), rank, 2) for i in (1, 2, 3))] for rank in range(2)]
    right_gradients(t, run, ["x", "gate", "up", "down"], wants, [mlp(*own, grad)[1][0] for own in parts])


@check("mlp", points=2, seconds=30)
def check_mlp_traffic(student, t):
    "Exactly one all-reduce forward, one backward"
    run, (out, _), _, _ = mlp_case(student, t, 2)
    why = "gate and up have the same input: copy it to the ranks once, and their gradients are added first"
    all_reduces(t, run, 1, 1, out.nbytes, why)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 1), call=0)


# -- embedding


def embedding_case(student, t, world: int, alone: bool = False) -> tuple[Run, Tensor]:
    """An embedding on ranks, with results and gradients that are right; with ``alone`` in groups of one rank
    too."""
    words, hidden = world * t.integer(2, 3), t.integer(2, 4)
    # some words twice, others never
    tokens = torch.tensor(t.shuffled(list(range(words)) * 2)[: words + 1]).view(1, -1)
    weight, grad = double(t, words, hidden), double(t, *tokens.shape, hidden)
    own = [part(weight, 0, rank, world) for rank in range(world)]
    name = "parallel_embedding"
    other = in_groups_of_one(t, name, [tokens, weight], grad, embedding, ["the rows"], world)
    parts = [[tokens, rows] for rows in own]
    run = layer_run(student, t, name, parts, [grad] * world, also=[other] if alone else [])
    out, (of_weight,) = embedding(tokens, weight, grad)
    local = [(tokens - rank * len(rows)).clamp(0, len(rows) - 1) for rank, rows in enumerate(own)]
    clamped = sum(embedding(found, rows, grad)[0] for found, rows in zip(local, own))
    zeroed = sum(
        embedding(found.where(found == tokens - rank * len(own[0]), 0), own[rank], grad)[0]
        for rank, found in enumerate(local)
    )
    remainder = sum(embedding(tokens % len(rows), rows, grad)[0] for rows in own)
    unmasked = "for a token of another rank, a rank adds a row of its part: this contribution must be zero"
    wrong = {"the nearest row": clamped, "row 0": zeroed, "modulo": remainder}
    known = {f"{unmasked} ({text})": value for text, value in wrong.items()}
    right_results(t, run, [out] * world, "the embedding of the tokens", [known] * world)
    right_gradients(t, run, ["the rows"], [[part(of_weight, 0, rank, world)] for rank in range(world)])
    return run, out


@check("embedding", points=2, seconds=30)
def check_embedding(student, t):
    "Every token has its row, on every rank, and the rows their gradients"
    embedding_case(student, t, 3, alone=True)


@check("embedding", points=1, seconds=30)
def check_embedding_traffic(student, t):
    "One all-reduce of the result, and no table is gathered"
    run, out = embedding_case(student, t, 2)
    all_reduces(t, run, 1, 0, out.nbytes, "the contributions of all ranks are added once")
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 1))


# -- attention


def attention_whole(t, heads: int, kv_heads: int, size: int = 4) -> tuple[list[Tensor], Tensor]:
    """x, q, k, v, o, cos and sin of an attention with whole weights, and a gradient of its result."""
    batch, seq, hidden = 2, t.integer(3, 4), t.integer(3, 5)
    weights = [double(t, count * size, hidden) for count in (heads, kv_heads, kv_heads)]
    angles = double(t, seq, size // 2).repeat(1, 2)
    x, o = double(t, batch, seq, hidden), double(t, hidden, heads * size)
    return [x, *weights, o, angles.cos(), angles.sin()], double(t, batch, seq, hidden)


def attention_case(
    student, t, world: int, kv_each: int = 1, alone: bool = False
) -> tuple[Run, Found, list[list[Tensor]], Tensor]:
    """Attention on ranks, with results that are right; with ``alone`` in groups of one rank too."""
    whole, grad = attention_whole(t, 2 * kv_each * world, kv_each * world)
    cut = (None, 0, 0, 0, 1, None, None)
    parts = [[part(tensor, dim, rank, world) for tensor, dim in zip(whole, cut)] for rank in range(world)]
    name, names, fixed = "parallel_attention", ("x", "q", "k", "v", "o"), (5, 6)
    other = in_groups_of_one(t, name, whole, grad, attention, names, world, fixed)
    run = layer_run(student, t, name, parts, [grad] * world, fixed, also=[other] if alone else [])
    found = attention(*whole, grad)
    message = "parallel_attention returns the contribution of rank {rank}: add those of all heads"
    mistakes = [{message: attention(*own, grad)[0]} for own in parts]
    right_results(t, run, [found[0]] * world, "the result of parallel_attention", mistakes)
    return run, found, parts, grad


@check("attention", points=2, seconds=30)
def check_attention(student, t):
    "Results and gradients of one process"
    run, (_, found), parts, grad = attention_case(student, t, 2, alone=True)
    cut = (None, 0, 0, 0, 1)
    wants = [[part(tensor, dim, rank, 2) for tensor, dim in zip(found, cut)] for rank in range(2)]
    right_gradients(t, run, ["x", "q", "k", "v", "o"], wants, [attention(*own, grad)[1][0] for own in parts])


@check("attention", points=1, seconds=30)
def check_attention_traffic(student, t):
    "Exactly one all-reduce forward, one backward"
    run, (out, _), _, _ = attention_case(student, t, 2, kv_each=2)
    why = "q, k and v have the same input: copy it to the ranks once"
    all_reduces(t, run, 1, 1, out.nbytes, why)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 1), call=0)


# -- loss


OWN_WORDS = (
    "the loss on rank {rank} has only the exponentials of this rank's {words} words: add their sums over the "
    "ranks"
)


def loss_case(
    student, t, world: int, scale: float = 1.0, shape: tuple[int, int] = (2, 3), alone: bool = False
) -> tuple[Run, int]:
    """A cross-entropy on ranks whose results are right, with ``alone`` in groups of one rank too; the number
    of tokens."""
    words = world * t.integer(2, 4)
    logits, targets = scale * double(t, *shape, words), t.integers(0, words - 1, *shape)
    parts = [[part(logits, 2, rank, world), targets] for rank in range(world)]
    name, one = "parallel_cross_entropy", torch.ones((), dtype=DOUBLE)
    other = in_groups_of_one(
        t, name, [logits, targets], one, lambda *own: cross_entropy(*own[:2]), ["the logits"], world
    )
    run = layer_run(student, t, name, parts, [one] * world, also=[other] if alone else [])
    loss, (grad,) = cross_entropy(logits, targets)
    words_of_rank = words // world
    mistakes = []
    for own, _ in parts:
        local = (own.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).mean()
        total = shape[0] * shape[1] * loss
        mean = "the loss on rank {rank} is the sum over the tokens: return the mean"
        mistakes.append({OWN_WORDS: local, mean: total})
    for rank, got in enumerate(run.results):
        value = t.items(got, 4, "what the loss returns")[0]
        t.that(type(value) is Tensor, "parallel_cross_entropy should return a tensor, the loss")
        finite = bool(torch.isfinite(value).all())
        message = (
            "the loss on rank {rank} is not finite: an exponential overflows. Subtract the maximum over all "
            "ranks first"
        )
        t.that(scale == 1.0 or finite, message, rank=rank)
        wrong_if(t, value, loss, mistakes[rank], rank=rank, words=words_of_rank)
        t.close(value, loss, "the loss on rank {rank} of {world}", rank=rank, world=world, **EXACT)
    right_gradients(t, run, ["the logits"], [[part(grad, 2, rank, world)] for rank in range(world)])
    return run, targets.numel()


@check("loss", points=3, seconds=30)
def check_loss(student, t):
    "The loss of one process, and the gradient of the logits"
    loss_case(student, t, 2, alone=True)


@check("loss", points=1, seconds=30)
def check_large_logits(student, t):
    "Large logits"
    loss_case(student, t, 2, scale=1000.0 * t.uniform(1, 2))


@check("loss", points=2, seconds=30)
def check_never_gathered(student, t):
    "At most three numbers a token, and nothing in backward"
    run, tokens = loss_case(student, t, 2, shape=(3, 4))
    message = (
        "rank {rank} uses {kinds}: the logits are never gathered, all-reduces of some numbers for each "
        "token are enough"
    )
    passes_only(t, run, [Kind.ALL_REDUCE], message)
    for rank in range(2):
        backward = [call for call in run.calls(rank) if call.in_backward]
        message = "rank {rank} communicates in backward: each rank has all it needs for its logits"
        t.that(not backward, message, rank=rank)
        message = (
            "rank {rank} passes {got} numbers for each token, three are enough: maximum, sum of "
            "exponentials, logit of the target"
        )
        each = run.bytes(rank) / (8 * tokens)
        t.that(bool(each <= 3), message, rank=rank, got=each)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 1))
