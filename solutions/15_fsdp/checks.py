"""The visible checks of this lab: cutting, packing and units. Those of gathering and reducing are in ``gathering.py``, of hooks in ``training.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.grading.contract import Kind, check
from dlo_lib.grading.quiz import quiz_complete
from dlo_lib.models import llama

from .gathering import (
    check_accumulates,
    check_averaged,
    check_compute_dtype,
    check_freed,
    check_gathered_is_used,
    check_one_gather,
    check_reduce_scatter,
    check_reduced_is_used,
    check_shards_back,
    check_whole_values,
)
from .hints import HINTS as HINTS
from .quiz import QUIZ
from .scenarios import cut, from_flat, written_through
from .training import (
    TINY,
    check_at_rest,
    check_order,
    check_same_gradients,
    check_state,
    check_state_is_exact,
    check_training_traffic,
    check_trains,
)
from .twins import expected_units, packed_row, padded_size, rows_of

# -- 1 · one flat buffer


def tensors_of(t, count: int = 3) -> list[Tensor]:
    """Matrices of odd sizes and a vector."""
    return [*(t.normal(t.integer(2, 6), t.integer(2, 5)) for _ in range(count - 1)), t.normal(t.integer(3, 7))]


def flat_pieces(student, t, tensors: list[Tensor], world: int) -> list[Tensor]:
    """The student's piece for each rank, of the right size."""
    size, found = -(-sum(tensor.numel() for tensor in tensors) // world), []
    for rank in range(world):
        got = student.flat_shard(tensors, rank, world)
        found.append(t.tensor(got, "the piece of rank {rank} of {world}", rank=rank, world=world, shape=(size,)))
    return found


@check("flat", points=2)
def check_flat_shards(student, t):
    "The pieces, one behind the other, are all tensors and zeros"
    for world in (1, 2, 3, 4):
        tensors = tensors_of(t)
        got, want = torch.cat(flat_pieces(student, t, tensors, world)), torch.cat([tensor.flatten() for tensor in tensors])
        t.close(got[: want.numel()], want, "all pieces on {world} ranks together", world=world, atol=0, rtol=0)
        t.that(not got[want.numel() :].any(), "what is appended to make the pieces equal should be zeros")


def flat_case(tensors: list[Tensor], world: int) -> list[dict]:
    """What each rank has of one flat buffer."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    size = -(-flat.numel() // world)
    padded = torch.cat([flat, flat.new_zeros(size * world - flat.numel())])
    return [{"shard": piece.clone(), "shapes": [list(tensor.shape) for tensor in tensors]} for piece in padded.split(size)]


@check("flat", points=2, seconds=30)
def check_flat_whole(student, t):
    "flat_whole gives every rank all tensors, with one all-gather"
    for world in (1, 2, 3):
        tensors = tensors_of(t)
        case = flat_case(tensors, world)
        run = student.ranks(from_flat, case)
        for rank, got in enumerate(run.results):
            for i, (mine, want) in enumerate(zip(t.items(got, len(tensors), "flat_whole(...)"), tensors)):
                t.close(mine, want, "tensor {i} on rank {rank} of {world}", i=i, rank=rank, world=world, atol=0, rtol=0)
            sent, padded = run.bytes(rank), world * case[rank]["shard"].nbytes
            good = sent == padded and len(run.calls(rank, Kind.ALL_GATHER)) == 1
            t.that(good, "rank {rank} passed {sent} bytes, one all-gather of {padded} is enough", rank=rank, sent=sent, padded=padded)


# -- 2 · padding


def same_padding(student, t, shapes: list[torch.Size], world: int, message: str) -> None:
    """Both numbers are what is left when the real numbers are taken from what ranks hold."""
    real = sum(shape.numel() for shape in shapes)
    want = [math.ceil(real / world) * world - real, world * sum(padded_size(shape, world) for shape in shapes) - real]
    got = t.items(student.padding(shapes, world), 2, "padding(shapes, world)")
    for name, mine, right in zip(("one flat buffer", "padded rows"), got, want):
        t.that(type(mine) is int, "padding should give whole numbers")
        text = "{name}: the padding of {shapes} on {world} ranks is {right}, not {mine}. " + message
        t.that(mine == right, text, name=name, shapes=[tuple(shape) for shape in shapes], world=world, right=right, mine=mine)


@check("padding", points=2)
def check_padding(student, t):
    "What all ranks hold of zeros"
    for world in (1, 2, 3, 5, 8):
        shapes = [torch.Size((t.integer(2, 12), t.integer(2, 5))) for _ in range(3)]
        same_padding(student, t, shapes, world, "Each parameter's rows are padded for themselves, and a row has many numbers.")


# -- 3 · rows


@check("rows", points=2)
def check_own_rows(student, t):
    "Every rank has ceil(length / N) rows, as far as they exist"
    for world in (1, 2, 3, 4):
        length = t.integer(4, 13)
        for rank in range(world):
            want = rows_of(torch.arange(length), rank, world)
            start, stop = t.items(student.own_rows(length, rank, world), 2, "own_rows(length, rank, world)")
            t.that(type(start) is int and type(stop) is int, "own_rows should give whole numbers")
            got = list(range(length))[start:stop]
            t.equal(got, want.tolist(), "the rows of rank {rank} of {world}, of {length}", rank=rank, world=world, length=length)


@check("rows", points=2, seconds=20)
def check_views(student, t):
    "The parts of a row, as views"
    tensors = [t.normal(2 * t.integer(1, 3) + 1, t.integer(2, 4)), t.normal(2 * t.integer(1, 3) + 1), t.normal(4, 2, 3)]
    rows = [packed_row(tensors, rank, 2) for rank in (0, 1)]
    shapes = [tensor.shape for tensor in tensors]
    for rank, row in enumerate(rows):
        got = t.items(student.shard_views(row, shapes, rank, 2), len(shapes), "shard_views(row, ...)")
        for i, tensor in enumerate(tensors):
            t.close(got[i], rows_of(tensor, rank, 2), "part {i} of the row of rank {rank}", i=i, rank=rank, atol=0, rtol=0)
    plus = t.uniform(1, 2)
    ((views, after),) = student.ranks(
        written_through, [{"shapes": [list(shape) for shape in shapes], "row": rows[0], "plus": plus}]
    ).results
    for i, tensor in enumerate(tensors):
        t.close(t.items(views, 3, "the views")[i], rows_of(tensor, 0, 2), "part {i}", i=i, atol=0, rtol=0)
    want = packed_row([tensor + plus for tensor in tensors], 0, 2)
    t.close(after, want, "the row after its parts were changed in place (they should be views of it, not copies)", rtol=1e-5)


# -- 4 · packing


def same_pack(student, t, tensors: list[Tensor], world: int) -> None:
    """``pack`` gives each rank's row."""
    want = torch.stack([packed_row(tensors, rank, world) for rank in range(world)])
    got = t.tensor(student.pack(tensors, world), "pack(tensors, {world})", world=world, shape=want.shape, dtype=want.dtype)
    by_parameter = torch.cat([packed_row([tensor], rank, world) for tensor in tensors for rank in range(world)]).view(want.shape)
    t.that(
        not torch.equal(got, by_parameter) or torch.equal(want, by_parameter),
        "pack is sorted by parameter first. Row r must be what rank r keeps: its part of the first parameter, then of the second",
    )
    t.close(got, want, "pack(tensors, {world})", world=world, atol=0, rtol=0)


def same_unpack(student, t, tensors: list[Tensor], world: int) -> None:
    """``unpack`` gives the tensors back."""
    packed = torch.stack([packed_row(tensors, rank, world) for rank in range(world)])
    got = t.items(student.unpack(packed, [tensor.shape for tensor in tensors]), len(tensors), "unpack(packed, shapes)")
    for i, tensor in enumerate(tensors):
        t.close(got[i], tensor, "tensor {i}, unpacked from {world} rows", i=i, world=world, atol=0, rtol=0)


@check("pack", points=2)
def check_pack(student, t):
    "Row r is what rank r keeps"
    for world in (1, 2, 3, 4):
        same_pack(student, t, tensors_of(t), world)


@check("pack", points=2)
def check_unpack(student, t):
    "And back"
    for world in (1, 2, 3, 4):
        same_unpack(student, t, tensors_of(t), world)


# -- 8 · units


def same_units(student, t, ties: list[list[str]], kind: str, tied: bool, message: str) -> None:
    """Modules and names are those expected."""
    sizes = {**TINY, "num_layers": t.integer(2, 4), "tied_embeddings": tied}
    want = expected_units(sizes, ties, getattr(llama, kind))
    (found,) = student.ranks(cut, [{"sizes": sizes, "ties": ties, "kind": kind}]).results
    t.that(type(found) is list and len(found) == len(want), "there should be {want} units. " + message, want=len(want))
    for got, (module, names) in zip(found, want):
        unit = f"the unit of {module}" if module else "the root"
        owner, held = t.items(got, 2, "a unit")
        t.equal(owner, module, "the module of a unit (the root is '')")
        good = type(held) is list and all(type(same) is list and all(type(name) is str for name in same) for same in held)
        t.that(bool(good), "{unit} should have a list of names for each parameter", unit=unit)
        mine = sorted(sorted(same) for same in held)
        extra = [same for same in mine if same not in names] or [same for same in names if same not in mine]
        t.that(mine == names, "{unit} differs in {extra}. " + message, unit=unit, extra=extra[0] if extra else "order")


@check("units", points=2, seconds=20)
def check_units(student, t):
    "The root and the blocks, for two kinds of block"
    for kind in ("Block", "MLP"):
        same_units(student, t, [], kind, False, "Each block is a unit, and the root has what belongs to no block")


@check("units", points=2, seconds=20)
def check_tied_units(student, t):
    "A tied parameter is in one unit, under all its names"
    message = "A tied parameter is one parameter with several names: in two units it would be gathered twice"
    same_units(student, t, [], "Block", True, message)
    layer = t.integer(0, 1)
    first, second = f"layers.{layer}.self_attn.k_proj.weight", f"layers.{layer}.self_attn.v_proj.weight"
    same_units(student, t, [[first, second]], "Block", True, message)


# -- quiz

complete = quiz_complete(QUIZ, points=1)
