"""The visible checks of a unit on ranks: it is gathered and freed, and its gradients are reduced.

Traffic is counted outside the student's process; bytes are exact, padding included. Memory is read from outside.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Nudge, check
from dlo_lib.labkit.compare import near, wrong_if
from dlo_lib.labkit.memory import MIB, holds_at_most
from dlo_lib.labkit.traffic import passes_exactly, passes_only, sends_one_of

from .scenarios import freed, gathered, kept_for_backward, large_freed, large_reduced, reduced, stored
from .twins import from_ranks, mean_rows, packed_bytes, packed_row, rows_of

ROOM, ROOM_OF_LIBRARY = MIB, 1.5 * MIB  # a process needs 0.1 to 0.4 MiB besides its tensors, 0.8 MiB with ``fully_shard``

# -- what messages carry

# Ranks that know the inputs of all others, such as weights from a seed, could otherwise compute the results without the unit, and send
# messages of the right sizes with other numbers.
ROWS = "rank {rank} gathers other numbers than the rows of a unit: the message of unshard is unit.row, in compute_dtype"
GRADIENTS = "rank {rank} passes other numbers to a reduce-scatter than its packed gradients of a unit"


def gathers_rows(t, run, units: Sequence[Sequence[Tensor]], kind: Kind = Kind.ALL_GATHER, first: int | None = None) -> None:
    """Every all-gather of a rank, or the first ones, carries its packed row of one of ``units``, each given by its whole parameters."""
    known = [[packed_row(list(unit), rank, run.world) for unit in units] for rank in range(run.world)]
    sends_one_of(t, run, kind, known, ROWS, first=first)


def reduces_gradients(t, run, units: Sequence[Sequence[Sequence[Tensor]]], first: int | None = None) -> None:
    """Every reduce-scatter of a rank, or the first ones, carries its gradients of one of its units; ``units[rank]`` are given by the whole
    gradients of their trained parameters.

    A rank may divide them before by the number of ranks, or by a part of it: where numbers could become too large, ``fully_shard`` divides by
    about the square root before and by the rest after the sum.
    """
    known = [[packed_whole(unit, run.world) for unit in own] for own in units]
    rounded = any(sent.dtype == torch.bfloat16 for rank in range(run.world) for sent in run.numbers(rank, Kind.REDUCE_SCATTER))
    sends_one_of(t, run, Kind.REDUCE_SCATTER, known, GRADIENTS, rtol=1e-2 if rounded else 1e-6, first=first, divided=run.world)


def packed_whole(tensors: Sequence[Tensor], world: int) -> Tensor:
    """The rows of all ranks, packed and padded."""
    return torch.cat([packed_row(list(tensors), rank, world) for rank in range(world)])


# -- unshard


def copies_of(t, world: int, even: bool = False) -> list[list[Tensor]]:
    """Parameters of odd sizes; each rank has a copy with other numbers, so a whole one needs all ranks."""
    shapes = [(world * t.integer(1, 2) + (0 if even else 1), t.integer(2, 4)), (t.integer(2, 5),), (3, t.integer(2, 3))]
    return [[t.normal(*shape) for shape in shapes] for _ in range(world)]


OLD = (
    "old weights: the unit was freed, its row has changed since, and unshard filled it with the values of the first gather. Gather the "
    "row of a unit that is not whole each time, and keep no copy"
)


def gather_run(
    student,
    t,
    copies: list[list[Tensor]],
    compute: str | None = None,
    times: int = 1,
    nudge: Nudge | None = None,
    factor: float | None = None,
):
    """``unshard`` on ranks with these copies, each compared with the rows of all; with ``factor`` once more, with changed rows."""
    world = len(copies)
    case = [{"tensors": own, "compute": compute, "times": times, "factor": factor} for own in copies]
    run = student.ranks(gathered, case, nudge=nudge)
    first = [whole if compute is None else whole.to(getattr(torch, compute)) for whole in from_ranks(copies)]
    want = [whole * (factor or 1) for whole in first]
    for rank, got in enumerate(run.results):
        got, row = t.items(got, 2, "parameters and row")
        got = t.items(got, len(want), "the parameters in their modules")
        own = [rows_of(tensor, rank, world) for tensor in copies[rank]]
        t.that(world == 1 or not near(got, own), "after unshard the modules still have the shards: call put(unit, True)")
        shift = torch.zeros(0)
        if nudge is not None and nudge.rank == rank:
            shift = shifted(copies, nudge)
        for i, (mine, right) in enumerate(zip(got, want)):
            moved = right + shift[i] if len(shift) else right
            if factor is not None:
                wrong_if(t, mine, moved, {OLD: first[i]})
            t.close(mine, moved, "parameter {i} on rank {rank} of {world}", i=i, rank=rank, world=world, atol=1e-7, rtol=1e-6)
        same = type(row) is torch.Tensor and torch.equal(row, packed_row(copies[rank], rank, world) * (factor or 1))
        t.that(compute is None or bool(same), "unshard has changed unit.row on rank {rank}: send a copy of it, in compute_dtype", rank=rank)
    rows = [packed_row(own, rank, world) for rank, own in enumerate(copies)]
    sends_one_of(t, run, Kind.ALL_GATHER, [[row, row * (factor or 1)] for row in rows], ROWS)
    return run


def shifted(copies: list[list[Tensor]], nudge: Nudge) -> list[Tensor]:
    """The change of each parameter by the nudge, which changes one element of the packed rows."""
    world, flat = len(copies), nudge.element
    marks = [[torch.zeros_like(tensor) for tensor in own] for own in copies]
    size = packed_row(copies[0], 0, world).numel()
    source, at = divmod(flat, size)
    for i, tensor in enumerate(marks[source]):
        part = rows_of(tensor, source, world)
        padded = rows_of(tensor, 0, world).numel()
        if 0 <= at < part.numel():
            part.view(-1)[at] = nudge.by
        at -= padded
        marks[source][i] = tensor
    return from_ranks(marks)


@check("unshard", points=2, seconds=40)
def check_whole_values(student, t):
    "The parameters are whole, on every rank"
    for world in (1, 2, 3, 4):
        gather_run(student, t, copies_of(t, world))


@check("unshard", points=2, seconds=20)
def check_one_gather(student, t):
    "One all-gather, and none for a unit that is whole"
    copies = copies_of(t, 2)
    run = gather_run(student, t, copies, times=2, factor=2.0)  # twice while it is whole, and again after it was freed
    want = packed_bytes([tensor.shape for tensor in copies[0]], 2, 4)
    for rank in range(run.world):
        message = "gathered twice: unshard was called for a unit that was already whole, and gathered it again"
        t.that(run.bytes(rank) != 3 * want, message)
    message = "rank {rank} used {kinds}: one all-gather of the rows is enough"
    passes_only(t, run, [Kind.ALL_GATHER], message)
    message = (
        "rank {rank} passed {got} bytes (all-gathers: {count}) for a unit that became whole, was freed and became whole again; twice one "
        "message of the packed unit, padding included, makes {want}"
    )
    passes_exactly(t, run, 2 * want, message, calls=2)


@check("unshard", points=2, seconds=20)
def check_gathered_is_used(student, t):
    "The module gets the gathered values"
    copies = copies_of(t, 2, even=True)
    size = packed_row(copies[0], 0, 2).numel()
    nudge = Nudge(Kind.ALL_GATHER, rank=t.integer(0, 1), element=size * t.integer(0, 1), by=2.0)
    gather_run(student, t, copies, nudge=nudge)


@check("unshard", points=1, seconds=20)
def check_compute_dtype(student, t):
    "With bf16 as compute_dtype, half the bytes"
    copies = copies_of(t, 2)
    run = gather_run(student, t, copies, compute="bfloat16")
    want = packed_bytes([tensor.shape for tensor in copies[0]], 2, 2)
    message = "rank {rank} passed {got} bytes: cast the row before it is sent, which makes {want} bytes"
    passes_exactly(t, run, want, message)


MOVED = "after unshard a whole parameter has another storage than before: resize its own storage, and fill it with whole.data.copy_(value)"


@check("unshard", points=1, seconds=20)
def check_storage(student, t):
    "The whole parameters have the memory of their dtype"
    for dtype, compute in ((torch.float32, "bfloat16"), (torch.float64, None)):
        shapes = [(2 * t.integer(1, 3), t.integer(2, 4)), (t.integer(2, 5),)]
        copies = [[t.normal(*shape, dtype=dtype) for shape in shapes] for _ in range(2)]
        want = [whole if compute is None else whole.to(getattr(torch, compute)) for whole in from_ranks(copies)]
        for got in student.ranks(stored, [{"tensors": own, "compute": compute} for own in copies]).results:
            t.that(got != "moved", MOVED)
            wholes, sizes = t.items(got, 2, "parameters and sizes")
            for i, (size, right) in enumerate(zip(t.items(sizes, len(want), "the sizes"), want)):
                t.that(
                    size == right.nbytes,
                    "the storage of whole parameter {i}, in {dtype}, has {size} bytes, but its numbers have {right}: resize_ takes bytes, "
                    "whole.numel() * whole.element_size()",
                    i=i,
                    dtype=str(right.dtype),
                    size=size,
                    right=right.nbytes,
                )
            for i, (mine, right) in enumerate(zip(t.items(wholes, len(want), "the parameters"), want)):
                t.close(mine, right, "parameter {i}", i=i, atol=0, rtol=0)


@check("unshard", points=2, seconds=20)
def check_same_tensors(student, t):
    "Backward uses the weight tensors of forward"
    shape = 2 * t.integer(1, 3), t.integer(2, 4)
    copies = [[t.normal(*shape)] for _ in range(2)]
    weight, xs = from_ranks(copies)[0], [t.normal(3, shape[0]) for _ in range(2)]
    run = student.ranks(kept_for_backward, [{"weight": own, "x": x} for (own,), x in zip(copies, xs)])
    for x, got in zip(xs, run.results):
        t.that(got != "moved", MOVED)
        t.that(got != "inplace", "backward refuses a whole weight that was changed after forward: fill it through .data")
        message = "backward needs the tensors of forward, and they have no memory: fill the tensors of unit.wholes, and make no new ones"
        t.that(got != "storage", message)
        of_x, of_weight = t.items(got, 2, "the gradients")
        inner = 1 - torch.tanh(x @ weight).square()
        t.close(of_x, inner @ weight.T, "the gradient of the input, of a unit that was freed and gathered again", rtol=1e-3, atol=1e-5)
        t.close(of_weight, x.T @ inner, "the gradient of the whole weight", rtol=1e-3, atol=1e-5)


# -- reshard


@check("reshard", points=2, seconds=30)
def check_freed(student, t):
    "The memory of whole parameters is freed"
    seed, width = t.integer(0, 999), 1254
    nudge = Nudge(Kind.ALL_GATHER, rank=1, element=t.integer(0, 3), by=3.0)  # a number of the first matrix, on its way from rank 0
    run = student.ranks(large_freed, [{"seed": seed, "width": width}] * 2, nudge=nudge)
    random = torch.Generator().manual_seed(seed)
    wholes = [torch.randn(width, width, generator=random) for _ in range(2)]
    sizes = []
    for rank, got in enumerate(run.results):
        values, of_storages = t.items(got, 2, "parameters and sizes")
        sizes.append(max(t.items(of_storages, 2, "the sizes")))
        want = [whole[0, :4].clone() for whole in wholes]
        want[0][nudge.element] += nudge.by if rank == nudge.rank else 0.0
        for mine, right in zip(t.items(values, 2, "the whole parameters"), want):
            t.close(mine, right, "a whole parameter on rank {rank}", rank=rank)
    gathers_rows(t, run, [wholes])
    row = 4 * width**2  # half of two matrices
    message = (
        "never freed: rank {rank} holds {held:.0f} MiB after reshard, but its row has {row:.0f}. Free the storage of every whole parameter"
    )
    holds_at_most(t, run, "after reshard", row + ROOM, message, row=row / MIB)
    for rank, size in enumerate(sizes):
        message = "after reshard the storage of a whole parameter on rank {rank} has {size} bytes: resize it to 0"
        t.that(not size, message, rank=rank, size=size)


@check("reshard", points=1, seconds=20)
def check_shards_back(student, t):
    "The modules have their shards again"
    tensors = copies_of(t, 1)[0]
    for rank, got in enumerate(student.ranks(freed, [{"tensors": tensors, "compute": None}] * 2).results):
        held, _, shapes, word, sizes = t.items(got, 5, "parameters, row, shapes and storages")
        message = (
            "unit.wholes has other tensors after reshard: it keeps the same ones, which autograd may have saved, and frees their storages"
        )
        t.that(word != "tensor", message)
        t.that(word != "storage", "a whole parameter has another storage after reshard: resize its own to 0; a view of it may be saved")
        for i, size in enumerate(t.items(sizes, len(tensors), "the sizes")):
            message = "never freed: after reshard the storage of whole parameter {i} on rank {rank} has {size} bytes; resize it to 0"
            t.that(not size, message, i=i, rank=rank, size=size)
        for shape, whole in zip(t.items(shapes, len(tensors), "the shapes"), tensors):
            message = "a whole parameter of shape {want} has shape {shape} after reshard: it keeps its shape, only its storage is freed"
            t.that(shape == list(whole.shape), message, want=list(whole.shape), shape=shape)
        for i, (mine, whole) in enumerate(zip(t.items(held, len(tensors), "the parameters"), tensors)):
            t.that(mine is not None, "the module of parameter {i} still has the whole one, which is freed: call put(unit, False)", i=i)
            t.close(mine, rows_of(whole, rank, 2), "parameter {i} in its module on rank {rank}", i=i, rank=rank, atol=0, rtol=0)


@check("reshard", points=1, seconds=20)
def check_row_untouched(student, t):
    "The row is unchanged, in its precision"
    tensors = copies_of(t, 1)[0]
    for rank, got in enumerate(student.ranks(freed, [{"tensors": tensors, "compute": "bfloat16"}] * 2).results):
        held, row, *_ = t.items(got, 5, "parameters, row, shapes and storages")
        after = zip(t.items(held, len(tensors), "the parameters"), tensors)
        changed = any(mine is None or mine.shape != whole.shape for mine, whole in after)
        t.that(changed, "not tested yet: reshard does nothing, the modules still have the whole parameters and their memory")
        good = type(row) is torch.Tensor and bool(torch.equal(row, packed_row(tensors, rank, 2)))
        t.that(good, "After unshard and reshard the row of rank {rank} has changed: with bf16 it is rounded in every step.", rank=rank)


# -- reduce


def reduce_run(
    student, t, world: int, passes: int = 1, frozen: tuple[int, ...] = (), missing: tuple[int, ...] = (), dtypes=(None, None), nudge=None
):
    """Gradients of the shards are the rows of the average; the run, and the shapes of the trained parameters."""
    shapes = [(t.integer(2, 6), t.integer(2, 4)), (t.integer(2, 6),), (2 * t.integer(1, 2), 3)]
    tensors = [t.normal(*shape) for shape in shapes]
    dtype = torch.float32 if dtypes[0] is None else getattr(torch, dtypes[0])
    rtol, atol = (3e-2, 3e-2) if dtypes[1] == "bfloat16" else (1e-5, 1e-6)
    grads = [[[t.normal(*shape, dtype=dtype) for shape in shapes] for _ in range(world)] for _ in range(passes)]
    for own in (own for ranks in grads for own in ranks):
        for i in (*frozen, *(missing if own is grads[0][0] else ())):
            own[i] = None
    case = [
        {"tensors": tensors, "passes": [ranks[rank] for ranks in grads], "frozen": list(frozen), "compute": dtypes[0], "reduce": dtypes[1]}
        for rank in range(world)
    ]
    run = student.ranks(reduced, case, nudge=nudge)
    trained_ones = [i for i in range(len(shapes)) if i not in frozen]
    kept = [[[own[i] for i in trained_ones] for own in ranks] for ranks in grads]
    for rank, got in enumerate(run.results):
        got, row, left = t.items(got, 3, "gradients, row and what is left")
        got = t.items(got, len(shapes), "the gradients of the shards")
        same = passes == 1 or (type(row) is torch.Tensor and torch.equal(row, packed_row(tensors, rank, world)))
        t.that(bool(same), "reduce_gradients has changed unit.row on rank {rank}, which holds the weights: receive in a new row", rank=rank)
        mine = [got[i] for i in trained_ones]
        want = mean_rows(kept, [list(shapes[i]) for i in trained_ones], rank)
        t.that(all(got[i] is None for i in frozen), "the shard of a frozen parameter has a gradient on rank {rank}", rank=rank)
        t.that(
            world == 1 or not near(mine, [world * right for right in want], 1e-4, 1e-6),
            "summed instead of averaged: the gradients on {world} ranks are {world} times too large",
            world=world,
        )
        t.that(
            passes == 1 or not near(mine, mean_rows(kept[-1:], [list(shapes[i]) for i in trained_ones], rank), 1e-4, 1e-6),
            "only the last micro-batch is left: add the result to the gradient that is already in shard.grad",
        )
        for i, own, right in zip(trained_ones, mine, want):
            if nudge is not None and nudge.rank == rank and i == trained_ones[0]:
                right = nudged(own, right, nudge, world)
            t.close(own, right, "the gradient of shard {i} on rank {rank} of {world}", i=i, rank=rank, world=world, atol=atol, rtol=rtol)
        message = "whole parameter {i} still has its gradient on rank {rank}: set whole.grad to None; the next micro-batch would add to it"
        t.that(passes == 1 or not left, message, i=left[0] if left else 0, rank=rank)
    if not frozen:
        zero = [torch.zeros(shape) for shape in shapes]
        sent = [[[zero[i] if ranks[rank][i] is None else ranks[rank][i] for i in trained_ones] for ranks in grads] for rank in range(world)]
        reduces_gradients(t, run, sent)
    return run, [torch.Size(shapes[i]) for i in trained_ones]


def nudged(own: object, right: Tensor, nudge: Nudge, world: int) -> Tensor:
    """This gradient with the nudge, which is divided by the ranks unless the division came before the reduce-scatter."""
    moved = [right.clone(), right.clone()]
    for tensor, by in zip(moved, (nudge.by / world, nudge.by)):
        tensor.view(-1)[nudge.element] += by
    return moved[1] if near([own], moved[1:]) else moved[0]


@check("reduce", points=3, seconds=40)
def check_averaged(student, t):
    "Every rank gets its rows of the averaged gradients"
    for world in (1, 2, 3, 4):
        reduce_run(student, t, world)


@check("reduce", points=2, seconds=20)
def check_reduce_scatter(student, t):
    "One reduce-scatter: no rank receives a whole gradient"
    run, shapes = reduce_run(student, t, 3)
    want = packed_bytes(shapes, 3, 4)
    message = "the gradient was communicated un-sharded: {kinds} gives every rank more than its rows"
    passes_only(t, run, [Kind.REDUCE_SCATTER], message)
    message = "rank {rank} passed {got} bytes (reduce-scatters: {count}); the packed unit is one message of {want}, padding included"
    passes_exactly(t, run, want, message, calls=1)


@check("reduce", points=1, seconds=20)
def check_accumulates(student, t):
    "Micro-batches add up"
    reduce_run(student, t, 2, passes=t.integer(2, 3))


@check("reduce", points=1, seconds=20)
def check_reduced_is_used(student, t):
    "The shards get the reduced values"
    reduce_run(student, t, 2, nudge=Nudge(Kind.REDUCE_SCATTER, rank=0, element=t.integer(0, 1), by=3.0))


@check("reduce", points=1, seconds=20)
def check_frozen_and_unused(student, t):
    "Frozen parameters send nothing, unused ones zeros"
    run, shapes = reduce_run(student, t, 2, frozen=(t.integer(0, 1),), missing=(2,))
    want = packed_bytes(shapes, 2, 4)
    message = "rank {rank} passed {got} bytes, but the gradients of the trained parameters have {want}: send these, and no others"
    passes_exactly(t, run, want, message)


@check("reduce", points=1, seconds=20)
def check_reduce_dtype(student, t):
    "Gradients are summed in reduce_dtype, whatever dtype they have"
    other = t.choice([("float64", 8), ("bfloat16", 2)])  # of fp32 gradients
    for world, dtypes, size in ((3, ("bfloat16", "float32"), 4), (2, (None, other[0]), other[1])):
        run, shapes = reduce_run(student, t, world, dtypes=dtypes)
        message = "rank {rank} passed {got} bytes; in " + dtypes[1] + ", the reduce_dtype of this unit, the message has {want}"
        passes_exactly(t, run, packed_bytes(shapes, world, size), message)


@check("reduce", points=2, seconds=30)
def check_gradients_freed(student, t):
    "No whole gradient is in memory"
    seed, width = t.integer(0, 999), 1620
    nudge = Nudge(Kind.REDUCE_SCATTER, rank=t.integer(0, 1), element=t.integer(0, 999), by=4096.0)  # of the sum, or of the average
    run = student.ranks(large_reduced, [{"seed": seed, "width": width}] * 2, nudge=nudge)
    random = torch.Generator().manual_seed(seed)
    grad = torch.randn(width, width, generator=random)
    got, total = sum(t.number(own, "the sum of a gradient") for own in run.results), float(grad.double().sum())
    right = min((total + nudge.by / 2, total + nudge.by), key=lambda right: abs(got - right))
    t.close(got, right, "the sum of the gradients of all shards, where a received number is changed", rtol=1e-3, atol=1e-2)
    reduces_gradients(t, run, [[[grad]]] * 2)
    own = 2 * 4 * width**2 / 2  # the row and its gradient
    message = (
        "rank {rank} holds {held:.0f} MiB after reduce_gradients, but its row and their gradients have {own:.0f}: a whole gradient is "
        "still in memory. Set whole.grad to None, and keep no reference to it"
    )
    holds_at_most(t, run, "after reduce", own + ROOM, message, own=own / MIB)
