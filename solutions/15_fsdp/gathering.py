"""The visible checks of what ranks do with a unit: it becomes whole, is freed, and its gradients are reduced.

Traffic is what passed the switch; bytes are exact, padding counted. Memory is read from outside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.contract import Kind, Nudge, check

from .scenarios import freed, gathered, large_freed, reduced
from .twins import from_ranks, mean_rows, near, packed_bytes, packed_row, rows_of

MIB = 2**20

# -- 5 · unshard


def copies_of(t, world: int, even: bool = False) -> list[list[Tensor]]:
    """Parameters of odd sizes, of which each rank has a copy with other numbers: what is whole comes from all of them."""
    shapes = [(world * t.integer(1, 2) + (0 if even else 1), t.integer(2, 4)), (t.integer(2, 5),), (3, t.integer(2, 3))]
    return [[t.normal(*shape) for shape in shapes] for _ in range(world)]


def gather_run(student, t, copies: list[list[Tensor]], compute: str | None = None, times: int = 1, nudge: Nudge | None = None):
    """``unshard`` on ranks with these copies, each compared with the rows of all."""
    world = len(copies)
    run = student.ranks(gathered, [{"tensors": own, "compute": compute, "times": times} for own in copies], nudge=nudge)
    want = [whole if compute is None else whole.to(getattr(torch, compute)) for whole in from_ranks(copies)]
    for rank, got in enumerate(run.results):
        got = t.items(got, len(want), "the parameters in their modules")
        own = [rows_of(tensor, rank, world) for tensor in copies[rank]]
        t.that(world == 1 or not near(got, own), "after unshard the modules still have the shards: put the whole parameters there")
        shift = torch.zeros(0)
        if nudge is not None and nudge.rank == rank:
            shift = shifted(copies, nudge)
        for i, (mine, right) in enumerate(zip(got, want)):
            moved = right + shift[i] if len(shift) else right
            t.close(mine, moved, "parameter {i} on rank {rank} of {world}", i=i, rank=rank, world=world, atol=1e-7, rtol=1e-6)
    return run


def shifted(copies: list[list[Tensor]], nudge: Nudge) -> list[Tensor]:
    """What the nudge adds to each parameter: the way back of an element of the packed rows."""
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


@check("unshard", points=3, seconds=40)
def check_whole_values(student, t):
    "The parameters are whole, on every rank"
    for world in (1, 2, 3, 4):
        gather_run(student, t, copies_of(t, world))


@check("unshard", points=2, seconds=20)
def check_one_gather(student, t):
    "One all-gather, and none for a unit that is whole"
    copies = copies_of(t, 2)
    run = gather_run(student, t, copies, times=2)
    want = packed_bytes([tensor.shape for tensor in copies[0]], 2, 4)
    for rank in range(run.world):
        count, sent = len(run.calls(rank, Kind.ALL_GATHER)), run.bytes(rank)
        t.that(
            sent != 2 * want, "gathered twice: unshard was called a second time for a unit that was whole already, and gathered it again"
        )
        message = "rank {rank} passed {sent} bytes in {count} all-gathers; the packed unit is one message of {want}, padding counted"
        others = ", ".join(sorted({call.kind.value for call in run.calls(rank)} - {Kind.ALL_GATHER.value}))
        t.that(
            not others, "rank {rank} used {others}: an all-gather brings the rows of all ranks, and nothing else", rank=rank, others=others
        )
        t.that(sent == want and count == 1, message, rank=rank, sent=sent, count=count, want=want)


@check("unshard", points=2, seconds=20)
def check_gathered_is_used(student, t):
    "What arrives is what the module gets"
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
    for rank in range(run.world):
        sent = run.bytes(rank)
        t.that(
            sent == want,
            "rank {rank} passed {sent} bytes: cast the row before it is sent, that makes {want}",
            rank=rank,
            sent=sent,
            want=want,
        )


# -- 6 · reshard


@check("reshard", points=2, seconds=30)
def check_freed(student, t):
    "The memory of whole parameters is given back"
    seed, width = t.integer(0, 999), 1448
    run = student.ranks(large_freed, [{"seed": seed, "width": width}] * 2)
    random = torch.Generator().manual_seed(seed)
    want = [torch.randn(width, width, generator=random)[0, :4] for _ in range(2)]
    for rank, got in enumerate(run.results):
        for mine, right in zip(t.items(got, 2, "the whole parameters"), want):
            t.close(mine, right, "a whole parameter on rank {rank}", rank=rank)
    row = 4 * width**2  # half of two matrices
    for rank in range(run.world):
        held = run.memory(rank, "after reshard")
        message = (
            "never freed: rank {rank} holds {held:.0f} MiB after reshard, its row is {row:.0f}. Free the storage of every whole parameter"
        )
        t.that(held < row + 5 * MIB, message, rank=rank, held=held / MIB, row=row / MIB)


@check("reshard", points=1, seconds=20)
def check_shards_back(student, t):
    "The modules have their shards again"
    tensors = copies_of(t, 1)[0]
    for rank, got in enumerate(student.ranks(freed, [{"tensors": tensors, "compute": None}] * 2).results):
        held, _, shapes = t.items(got, 3, "parameters, row and shapes")
        for shape, whole in zip(t.items(shapes, len(tensors), "the shapes"), tensors):
            message = (
                "a whole parameter of shape {want} has shape {shape} after reshard: the tensor stays what it is, only its storage is freed"
            )
            t.that(shape == list(whole.shape), message, want=list(whole.shape), shape=shape)
        for i, (mine, whole) in enumerate(zip(t.items(held, len(tensors), "the parameters"), tensors)):
            t.that(mine is not None, "the module of parameter {i} still has the whole one, which is freed: put the shards there", i=i)
            t.close(mine, rows_of(whole, rank, 2), "parameter {i} in its module on rank {rank}", i=i, rank=rank, atol=0, rtol=0)


# -- 7 · reduce


def reduce_run(
    student, t, world: int, passes: int = 1, frozen: tuple[int, ...] = (), missing: tuple[int, ...] = (), dtypes=(None, None), nudge=None
):
    """Gradients of the shards are the rows of the average; the run, and the shapes of the trained parameters."""
    shapes = [(t.integer(2, 6), t.integer(2, 4)), (t.integer(2, 6),), (2 * t.integer(1, 2), 3)]
    tensors = [t.normal(*shape) for shape in shapes]
    dtype = torch.float32 if dtypes[0] is None else getattr(torch, dtypes[0])
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
        got = t.items(got, len(shapes), "the gradients of the shards")
        mine = [got[i] for i in trained_ones]
        want = mean_rows(kept, [list(shapes[i]) for i in trained_ones], rank)
        t.that(all(got[i] is None for i in frozen), "the shard of a frozen parameter has a gradient on rank {rank}", rank=rank)
        t.that(
            world == 1 or not near(mine, [world * right for right in want]),
            "summed instead of averaged: the gradients on {world} ranks are {world} times too large",
            world=world,
        )
        t.that(
            passes == 1 or not near(mine, mean_rows(kept[-1:], [list(shapes[i]) for i in trained_ones], rank)),
            "only the last micro-batch is left: the result has to be added to what is in shard.grad already",
        )
        for i, own, right in zip(trained_ones, mine, want):
            if nudge is not None and nudge.rank == rank and i == trained_ones[0]:
                right = nudged(own, right, nudge, world)
            t.close(own, right, "the gradient of shard {i} on rank {rank} of {world}", i=i, rank=rank, world=world, atol=1e-6, rtol=1e-5)
    return run, [torch.Size(shapes[i]) for i in trained_ones]


def nudged(own: object, right: Tensor, nudge: Nudge, world: int) -> Tensor:
    """What the nudge makes of this gradient: divided by the ranks after the reduce-scatter, or, where gradients were divided before it, whole."""
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
    "One reduce-scatter: nobody receives a whole gradient"
    run, shapes = reduce_run(student, t, 3)
    want = packed_bytes(shapes, 3, 4)
    for rank in range(run.world):
        kinds = sorted({call.kind.value for call in run.calls(rank)} - {Kind.REDUCE_SCATTER.value})
        t.that(not kinds, "the gradient was communicated un-sharded: {kinds} gives every rank more than its rows", kinds=", ".join(kinds))
        sent, count = run.bytes(rank, Kind.REDUCE_SCATTER), len(run.calls(rank))
        message = "rank {rank} passed {sent} bytes in {count} reduce-scatters; the packed unit is one message of {want}, padding counted"
        t.that(sent == want and count == 1, message, rank=rank, sent=sent, count=count, want=want)


@check("reduce", points=1, seconds=20)
def check_accumulates(student, t):
    "Micro-batches add up"
    reduce_run(student, t, 2, passes=t.integer(2, 3))


@check("reduce", points=1, seconds=20)
def check_reduced_is_used(student, t):
    "What arrives is what the shards get"
    reduce_run(student, t, 2, nudge=Nudge(Kind.REDUCE_SCATTER, rank=0, element=t.integer(0, 1), by=3.0))
