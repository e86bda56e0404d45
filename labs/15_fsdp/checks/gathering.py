"""The visible checks of a unit on ranks: it is gathered and freed, and its gradients are reduced.

Traffic is counted outside the student's process; bytes are exact, padding included. Memory is read from
outside.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Nudge, check
from dlo_lib.labkit.compare import near, same
from dlo_lib.labkit.memory import MIB, holds_at_most
from dlo_lib.labkit.traffic import passes_exactly, passes_only, sends_one_of

from . import scenarios
from .twins import as_dtype, from_ranks, mean_rows, packed_bytes, packed_row, rows_of

ROOM = MIB  # a process needs 0.1 to 0.4 MiB besides its tensors
EXACT = {"rtol": 0.0, "atol": 0.0}

# -- what messages carry

# Ranks that know the inputs of all others, such as weights from a seed, could otherwise compute the results
# without the unit, and send messages of the right sizes with other numbers.
ROWS = "rank {rank} gathers other numbers than the rows of a unit: unshard sends unit.row, in compute_dtype"
GRADIENTS = "rank {rank} passes other numbers to a reduce-scatter than its packed gradients of a unit"


def gathers_rows(t, run, units: Sequence[Sequence[Tensor]], kind=Kind.ALL_GATHER, first=None) -> None:
    """Every all-gather of a rank, or the first ones, carries its packed row of one of ``units``, each given
    by its whole parameters."""
    known = [[packed_row(unit, rank, run.world) for unit in units] for rank in range(run.world)]
    sends_one_of(t, run, kind, known, ROWS, first=first)


def reduces_gradients(t, run, units: Sequence[Sequence[Sequence[Tensor]]], first: int | None = None) -> None:
    """Every reduce-scatter of a rank, or the first ones, carries its gradients of one of its units;
    ``units[rank]`` are given by the whole gradients of their trained parameters.

    A rank may divide them before by the number of ranks, or by a part of it: where numbers could become too
    large, ``fully_shard`` divides by about the square root before and by the rest after the sum.
    """
    kind, ranks = Kind.REDUCE_SCATTER, range(run.world)
    known = [
        [torch.cat([packed_row(unit, rank, run.world) for rank in ranks]) for unit in own] for own in units
    ]
    rounded = any(sent.dtype == torch.bfloat16 for rank in ranks for sent in run.numbers(rank, kind))
    rtol = 1e-2 if rounded else 1e-6
    sends_one_of(t, run, kind, known, GRADIENTS, rtol=rtol, first=first, divided=run.world)


# -- unshard


def copies_of(t, world: int, even: bool = False) -> list[list[Tensor]]:
    """Parameters of odd sizes; each rank has a copy with other numbers, so a whole one needs all ranks."""
    rows = world * t.integer(1, 2) + (0 if even else 1)
    shapes = [(rows, t.integer(2, 4)), (t.integer(2, 5),), (3, t.integer(2, 3))]
    return [[t.normal(*shape) for shape in shapes] for _ in range(world)]


def gather_run(student, t, copies: list[list[Tensor]], compute=None, nudge=None, wholes=None):
    """``unshard`` on ranks with these copies gives ``wholes``, by default the rows of all; the run."""
    world, rows = len(copies), [packed_row(own, rank, len(copies)) for rank, own in enumerate(copies)]
    inputs = [{"tensors": own, "compute": compute} for own in copies]
    run = student.ranks(scenarios.gathered, inputs, nudge=nudge)
    for rank, got in enumerate(run.results):
        got, row = t.items(got, 2, "parameters and row")
        want = as_dtype(from_ranks(copies), compute) if wholes is None else wholes[rank]
        own = [rows_of(tensor, rank, world) for tensor in copies[rank]]
        mistakes = {"after unshard the modules still have the shards: call put(unit, True)": own}
        what = "parameter {i} on rank {rank} of {world}"
        same(t, got, want, what, mistakes, rtol=1e-6, atol=1e-7, rank=rank, world=world)
        message = "unshard has changed unit.row on rank {rank}: send a copy of it, in compute_dtype"
        t.that(compute is None or (type(row) is Tensor and torch.equal(row, rows[rank])), message, rank=rank)
    sends_one_of(t, run, Kind.ALL_GATHER, [[row] for row in rows], ROWS)
    return run


@check("unshard", points=2, seconds=40)
def check_whole_values(student, t):
    "The parameters are whole, on every rank"
    for world in (1, 2, 3, 4):
        gather_run(student, t, copies_of(t, world))


@check("unshard", points=2, seconds=20)
def check_one_gather(student, t):
    "One all-gather, and none for a unit that is whole"
    copies, factor = copies_of(t, 2), 2.0
    run = student.ranks(scenarios.gathered_again, [{"tensors": own, "factor": factor} for own in copies])
    wholes = from_ranks(copies)
    old = (
        "old weights: the unit was freed, its row has changed since, and unshard filled it with the values "
        "of the first gather. Gather the row of a unit that is not whole each time, and keep no copy"
    )
    for rank, got in enumerate(run.results):
        got, _ = t.items(got, 2, "parameters and row")
        want = [factor * whole for whole in wholes]
        same(t, got, want, "parameter {i} on rank {rank}", {old: wholes}, rtol=1e-6, atol=1e-7, rank=rank)
    rows = [packed_row(own, rank, 2) for rank, own in enumerate(copies)]
    sends_one_of(t, run, Kind.ALL_GATHER, [[row, factor * row] for row in rows], ROWS)
    want = packed_bytes(copies[0], 2, 4)
    message = "gathered twice: unshard was called for a unit that was already whole, and gathered it again"
    t.that(all(run.bytes(rank) != 3 * want for rank in range(2)), message)
    passes_only(t, run, [Kind.ALL_GATHER], "rank {rank} used {kinds}: one all-gather of the rows is enough")
    message = (
        "rank {rank} passed {got} bytes (all-gathers: {count}) for a unit that became whole, was freed and "
        "became whole again; twice one message of the packed unit, padding included, makes {want}"
    )
    passes_exactly(t, run, 2 * want, message, calls=2)


@check("unshard", points=2, seconds=20)
def check_gathered_is_used(student, t):
    "The module gets the gathered values"
    copies, rank, source = copies_of(t, 2, even=True), t.integer(0, 1), t.integer(0, 1)
    element = source * packed_row(copies[0], 0, 2).numel()  # the first number that comes from the source
    wholes = [from_ranks(copies), from_ranks(copies)]
    wholes[rank][0][source * len(copies[0][0]) // 2, 0] += 2.0
    nudge = Nudge(Kind.ALL_GATHER, rank, element=element, by=2.0)
    gather_run(student, t, copies, nudge=nudge, wholes=wholes)


@check("unshard", points=1, seconds=20)
def check_compute_dtype(student, t):
    "With bf16 as compute_dtype, half the bytes"
    copies = copies_of(t, 2)
    run = gather_run(student, t, copies, compute="bfloat16")
    message = "rank {rank} passed {got} bytes: cast the row before it is sent, which makes {want} bytes"
    passes_exactly(t, run, packed_bytes(copies[0], 2, 2), message)


MOVED = (
    "after unshard a whole parameter has another storage than before: resize its own storage, and fill it "
    "with whole.data.copy_(value)"
)


@check("unshard", points=1, seconds=20)
def check_storage(student, t):
    "The whole parameters have the memory of their dtype"
    message = (
        "the storage of whole parameter {i}, in {dtype}, has {size} bytes, but its numbers have {right}: "
        "resize_ takes bytes, whole.numel() * whole.element_size()"
    )
    for dtype, compute in ((torch.float32, "bfloat16"), (torch.float64, None)):
        shapes = [(2 * t.integer(1, 3), t.integer(2, 4)), (t.integer(2, 5),)]
        copies = [[t.normal(*shape, dtype=dtype) for shape in shapes] for _ in range(2)]
        want = as_dtype(from_ranks(copies), compute)
        inputs = [{"tensors": own, "compute": compute} for own in copies]
        for got in student.ranks(scenarios.stored, inputs).results:
            t.that(got != "moved", MOVED)
            wholes, sizes = t.items(got, 2, "parameters and sizes")
            for i, (size, right) in enumerate(zip(t.items(sizes, len(want), "the sizes"), want)):
                values = {"i": i, "dtype": str(right.dtype), "size": size, "right": right.nbytes}
                t.that(size == right.nbytes, message, **values)
            same(t, wholes, want, "parameter {i}", **EXACT)


@check("unshard", points=2, seconds=20)
def check_same_tensors(student, t):
    "Backward uses the weight tensors of forward"
    shape = 2 * t.integer(1, 3), t.integer(2, 4)
    copies = [[t.normal(*shape)] for _ in range(2)]
    weight, xs = from_ranks(copies)[0], [t.normal(3, shape[0]) for _ in range(2)]
    inputs = [{"weight": own, "x": x} for (own,), x in zip(copies, xs)]
    for x, got in zip(xs, student.ranks(scenarios.kept_for_backward, inputs).results):
        t.that(got != "moved", MOVED)
        message = "backward refuses a whole weight that was changed after forward: fill it through .data"
        t.that(got != "inplace", message)
        message = (
            "backward needs the tensors of forward, and they have no memory: fill the tensors of "
            "unit.wholes, and make no new ones"
        )
        t.that(got != "storage", message)
        inner = 1 - torch.tanh(x @ weight).square()
        what = "gradient {i} (of input and whole weight) of a unit that was freed and gathered again"
        same(t, got, [inner @ weight.T, x.T @ inner], what, rtol=1e-3, atol=1e-5)


# -- reshard


@check("reshard", points=2, seconds=30)
def check_freed(student, t):
    "The memory of whole parameters is freed"
    seed, width, first = t.integer(0, 999), 1254, t.integer(0, 3)
    # of the first matrix, on its way from rank 0
    nudge = Nudge(Kind.ALL_GATHER, rank=1, element=first, by=3.0)
    run = student.ranks(scenarios.large_freed, [{"seed": seed, "width": width}] * 2, nudge=nudge)
    random = torch.Generator().manual_seed(seed)
    wholes = [torch.randn(width, width, generator=random) for _ in range(2)]
    sizes = []
    for rank, got in enumerate(run.results):
        values, of_storages = t.items(got, 2, "parameters and sizes")
        sizes.append(max(t.items(of_storages, 2, "the sizes")))
        want = [whole[0, :4].clone() for whole in wholes]
        want[0][first] += nudge.by if rank == nudge.rank else 0.0
        same(t, values, want, "whole parameter {i} on rank {rank}", rank=rank)
    gathers_rows(t, run, [wholes])
    row = 4 * width**2  # half of two matrices
    message = (
        "never freed: rank {rank} holds {held:.0f} MiB after reshard, but its row has {row:.0f}. Free the "
        "storage of every whole parameter"
    )
    holds_at_most(t, run, "after reshard", row + ROOM, message, row=row / MIB)
    for rank, size in enumerate(sizes):
        message = (
            "after reshard the storage of a whole parameter of rank {rank} has {size} bytes: resize it to 0"
        )
        t.that(not size, message, rank=rank, size=size)


@check("reshard", points=1, seconds=20)
def check_shards_back(student, t):
    "The modules have their shards again"
    tensors = copies_of(t, 1)[0]
    inputs = {"tensors": tensors, "compute": None}
    for rank, got in enumerate(student.ranks(scenarios.freed, [inputs] * 2).results):
        held, _, shapes, word, sizes = t.items(got, 5, "parameters, row, shapes and storages")
        message = (
            "unit.wholes has other tensors after reshard: it keeps the same ones, which autograd may have "
            "saved, and frees their storages"
        )
        t.that(word != "tensor", message)
        message = (
            "a whole parameter has another storage after reshard: resize its own to 0, a view may be saved"
        )
        t.that(word != "storage", message)
        for i, size in enumerate(t.items(sizes, len(tensors), "the sizes")):
            message = "never freed: the storage of whole parameter {i} has {size} bytes; resize it to 0"
            t.that(not size, message, i=i, size=size)
        for shape, whole in zip(t.items(shapes, len(tensors), "the shapes"), tensors):
            message = "a whole parameter of shape {want} has shape {shape}: only its storage is freed"
            t.that(shape == list(whole.shape), message, want=list(whole.shape), shape=shape)
        for i, mine in enumerate(t.items(held, len(tensors), "the parameters")):
            message = "the module of parameter {i} still has the whole one, which is freed: put(unit, False)"
            t.that(mine is not None, message, i=i)
        rows = [rows_of(whole, rank, 2) for whole in tensors]
        same(t, held, rows, "parameter {i} in its module on rank {rank}", rank=rank, **EXACT)


@check("reshard", points=1, seconds=20)
def check_row_untouched(student, t):
    "The row is unchanged, in its precision"
    tensors = copies_of(t, 1)[0]
    inputs = {"tensors": tensors, "compute": "bfloat16"}
    for rank, got in enumerate(student.ranks(scenarios.freed, [inputs] * 2).results):
        held, row, *_ = t.items(got, 5, "parameters, row, shapes and storages")
        after = zip(t.items(held, len(tensors), "the parameters"), tensors)
        changed = any(mine is None or mine.shape != whole.shape for mine, whole in after)
        message = "not tested yet: reshard does nothing, the modules still have the whole parameters"
        t.that(changed, message)
        good = type(row) is Tensor and bool(torch.equal(row, packed_row(tensors, rank, 2)))
        message = "After reshard the row of rank {rank} has changed: with bf16 it is rounded in every step."
        t.that(good, message, rank=rank)


# -- reduce


def reduce_run(student, t, world: int, passes=1, frozen=(), unused=(), compute=None, reduce=None, nudge=None):
    """Gradients of the shards are the rows of the average; the run, and the trained parameters.

    The first rank does not use the parameters ``unused`` in the first pass.
    """
    shapes = [(t.integer(2, 6), t.integer(2, 4)), (t.integer(2, 6),), (2 * t.integer(1, 2), 3)]
    tensors = [t.normal(*shape) for shape in shapes]
    dtype = getattr(torch, compute or "float32")
    grads = [
        [[t.normal(*shape, dtype=dtype) for shape in shapes] for _ in range(world)] for _ in range(passes)
    ]
    for own in (own for ranks in grads for own in ranks):
        for i in (*frozen, *(unused if own is grads[0][0] else ())):
            own[i] = None
    fixed = {"tensors": tensors, "frozen": list(frozen), "compute": compute, "reduce": reduce}
    inputs = [{"passes": [ranks[rank] for ranks in grads], **fixed} for rank in range(world)]
    run = student.ranks(scenarios.reduced, inputs, nudge=nudge)
    trained = [i for i in range(len(shapes)) if i not in frozen]
    of_trained = [[[own[i] for i in trained] for own in ranks] for ranks in grads]
    for rank, got in enumerate(run.results):
        got, row, left = t.items(got, 3, "gradients, row and what is left")
        got = t.items(got, len(shapes), "the gradients of the shards")
        if passes > 1:
            untouched = type(row) is Tensor and torch.equal(row, packed_row(tensors, rank, world))
            message = (
                "reduce_gradients has changed unit.row on rank {rank}, the weights: receive in a new one"
            )
            t.that(bool(untouched), message, rank=rank)
            message = (
                "whole parameter {i} still has its gradient on rank {rank}: set whole.grad to None; the next "
                "micro-batch would add to it"
            )
            t.that(not left, message, i=left[0] if left else 0, rank=rank)
        message = "the shard of a frozen parameter has a gradient on rank {rank}"
        t.that(all(got[i] is None for i in frozen), message, rank=rank)
        want, last = (
            mean_rows(some, [shapes[i] for i in trained], rank) for some in (of_trained, of_trained[-1:])
        )
        summed = "summed instead of averaged: the gradients on {world} ranks are {world} times too large"
        lost = "only the last micro-batch is left: add the result to the gradient that is in shard.grad"
        mistakes = {summed: [world * right for right in want], lost: last}
        if nudge is not None and nudge.rank == rank:
            want[0] = nudged(got[trained[0]], want[0], nudge, world)
        what = "the gradient of shard {i} on rank {rank} of {world}"
        tolerance = {"rtol": 3e-2, "atol": 3e-2} if reduce == "bfloat16" else {"rtol": 1e-5, "atol": 1e-6}
        same(t, [got[i] for i in trained], want, what, mistakes, **tolerance, rank=rank, world=world)
    if not frozen:
        reduces_gradients(t, run, [[ranks[rank] for ranks in of_trained] for rank in range(world)])
    return run, [tensors[i] for i in trained]


def nudged(own: object, right: Tensor, nudge: Nudge, world: int) -> Tensor:
    """This gradient with the nudge, which is divided by the ranks unless the division came before the
    reduce-scatter."""
    after, before = right.clone(), right.clone()
    after.view(-1)[nudge.element] += nudge.by / world
    before.view(-1)[nudge.element] += nudge.by
    return before if near(own, before) else after


@check("reduce", points=3, seconds=40)
def check_averaged(student, t):
    "Every rank gets its rows of the averaged gradients"
    for world in (1, 2, 3, 4):
        reduce_run(student, t, world)


@check("reduce", points=2, seconds=20)
def check_reduce_scatter(student, t):
    "One reduce-scatter: no rank receives a whole gradient"
    run, trained = reduce_run(student, t, 3)
    message = "the gradient was communicated un-sharded: {kinds} gives every rank more than its rows"
    passes_only(t, run, [Kind.REDUCE_SCATTER], message)
    message = (
        "rank {rank} passed {got} bytes (reduce-scatters: {count}); the packed unit is one message of "
        "{want}, padding included"
    )
    passes_exactly(t, run, packed_bytes(trained, 3, 4), message, calls=1)


@check("reduce", points=1, seconds=20)
def check_accumulates(student, t):
    "Micro-batches add up"
    reduce_run(student, t, 2, passes=t.integer(2, 3))


@check("reduce", points=1, seconds=20)
def check_reduced_is_used(student, t):
    "The shards get the reduced values"
    nudge = Nudge(Kind.REDUCE_SCATTER, rank=0, element=t.integer(0, 1), by=3.0)
    reduce_run(student, t, 2, nudge=nudge)


@check("reduce", points=1, seconds=20)
def check_frozen_and_unused(student, t):
    "Frozen parameters send nothing, unused ones zeros"
    run, trained = reduce_run(student, t, 2, frozen=(t.integer(0, 1),), unused=(2,))
    message = (
        "rank {rank} passed {got} bytes, but the trained parameters have {want}: send these, and no others"
    )
    passes_exactly(t, run, packed_bytes(trained, 2, 4), message)


@check("reduce", points=1, seconds=20)
def check_reduce_dtype(student, t):
    "Gradients are summed in reduce_dtype, whatever dtype they have"
    of_fp32 = t.choice([(2, None, "float64", 8), (2, None, "bfloat16", 2)])
    for world, compute, reduce, size in ((3, "bfloat16", "float32", 4), of_fp32):
        run, trained = reduce_run(student, t, world, compute=compute, reduce=reduce)
        message = "rank {rank} passed {got} bytes; in {reduce}, the reduce_dtype of this unit, it has {want}"
        passes_exactly(t, run, packed_bytes(trained, world, size), message, reduce=reduce)


@check("reduce", points=2, seconds=30)
def check_gradients_freed(student, t):
    "No whole gradient is in memory"
    seed, width = t.integer(0, 999), 1620
    nudge = Nudge(Kind.REDUCE_SCATTER, rank=t.integer(0, 1), element=t.integer(0, 999), by=4096.0)
    run = student.ranks(scenarios.large_reduced, [{"seed": seed, "width": width}] * 2, nudge=nudge)
    grad = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
    got = sum(t.number(own, "the sum of a gradient") for own in run.results)
    total = float(grad.double().sum())
    right = min((total + nudge.by / 2, total + nudge.by), key=lambda right: abs(got - right))
    what = "the sum of the gradients of all shards, where a received number is changed"
    t.close(got, right, what, rtol=1e-3, atol=1e-2)
    reduces_gradients(t, run, [[[grad]]] * 2)
    own = 2 * 4 * width**2 / 2  # the row and its gradient
    message = (
        "rank {rank} holds {held:.0f} MiB after reduce_gradients, but its row and their gradients have "
        "{own:.0f}: a whole gradient is still in memory. Set whole.grad to None, and keep no reference to it"
    )
    holds_at_most(t, run, "after reduce", own + ROOM, message, own=own / MIB)
