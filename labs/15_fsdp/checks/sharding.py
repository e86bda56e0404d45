"""The visible checks of cutting and units.

Those of gathering and reducing are in ``gathering.py``, those of hooks in ``training.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, check
from dlo_lib.labkit.compare import every_rank
from dlo_lib.labkit.traffic import passes_exactly, passes_only, uses_what_arrives
from dlo_lib.models import llama

from . import scenarios
from .gathering import EXACT
from .training import TINY
from .twins import expected_units, padded_size, rows_of

# -- one flat buffer


def tensors_of(t, world: int) -> list[Tensor]:
    """Two matrices and a vector, which need padding on several ranks; in float64 on two ranks."""
    dtype = torch.float64 if world == 2 else torch.float32

    def draw() -> list[Tensor]:
        matrices = [t.normal(t.integer(2, 6), t.integer(2, 5), dtype=dtype) for _ in range(2)]
        return [*matrices, t.normal(t.integer(3, 7), dtype=dtype)]

    return t.draw_until(draw, lambda tensors: world == 1 or len(flat_of(tensors)) % world > 0)


def flat_of(tensors: list[Tensor], world: int = 1) -> Tensor:
    """All numbers, and zeros up to a multiple of the number of ranks."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return torch.cat([flat, flat.new_zeros(-len(flat) % world)])


@check("flat", points=2)
def check_flat_shards(student, t):
    "The concatenated pieces are all tensors, followed by zeros"
    for world in (1, 2, 3, 4):
        tensors = tensors_of(t, world)
        want, pieces = flat_of(tensors, world), []
        for rank in range(world):
            got, shape = student.flat_shard(tensors, rank, world), (len(want) // world,)
            what = "the piece of rank {rank} of {world}"
            pieces.append(t.tensor(got, what, rank=rank, world=world, shape=shape))
        got, real = torch.cat(pieces), len(flat_of(tensors))
        t.close(
            got[:real], want[:real], "the pieces of all ranks together (world {world})", world=world, **EXACT
        )
        t.that(not got[real:].any(), "the padding at the end should be zeros")


@check("flat", points=1, seconds=20)
def check_flat_copy(student, t):
    "A piece is a copy, and keeps no other memory"
    message = (
        "the piece of rank {rank} has {want} bytes, but keeps {kept} in memory: it is a view of a longer "
        "tensor. Return a copy"
    )
    even = [2 * t.integer(2, 5) for _ in range(3)]  # without padding, which another check is for
    for tensors in ([t.normal(even[0], 3), t.normal(even[1])], [t.normal(even[2])]):
        run = student.ranks(scenarios.kept_by_a_piece, [{"tensors": tensors}] * 2)
        for rank, got in enumerate(run.results):
            piece, kept, shared = t.items(got, 3, "the piece and its memory")
            t.close(
                piece, flat_of(tensors).chunk(2)[rank], "the piece of rank {rank} of 2", rank=rank, **EXACT
            )
            t.that(kept == piece.nbytes and not shared, message, rank=rank, want=piece.nbytes, kept=kept)


def flat_inputs(tensors: list[Tensor], world: int) -> list[dict]:
    """Each rank's part of one flat buffer."""
    shapes = [list(tensor.shape) for tensor in tensors]
    return [{"shard": piece.clone(), "shapes": shapes} for piece in flat_of(tensors, world).chunk(world)]


@check("flat", points=2, seconds=30)
def check_flat_whole(student, t):
    "flat_whole gives every rank all tensors, with one all-gather"
    for world in (1, 2, 3):
        tensors = tensors_of(t, world)
        run = student.ranks(scenarios.from_flat, flat_inputs(tensors, world))
        every_rank(t, run, [tensors] * world, "tensor {i} on rank {rank} of {world}", **EXACT)
        passes_only(t, run, {Kind.ALL_GATHER}, "rank {rank} calls {kinds}: one all-gather is enough")
        message = "rank {rank} passed {got} bytes, but one all-gather of {want} is enough"
        passes_exactly(t, run, flat_of(tensors, world).nbytes, message, calls=1)
    # The last piece, which comes next to rank 1, may be zeros only.
    uses_what_arrives(t, run, Kind.ALL_GATHER, t.choice((0, 2)))


# -- padding


def same_padding(student, t, shapes: list[torch.Size], world: int, why: str) -> None:
    """Both paddings are the numbers that ranks hold minus the real numbers."""
    real = sum(shape.numel() for shape in shapes)
    want = -real % world, world * sum(padded_size(shape, world) for shape in shapes) - real
    got = t.items(student.padding(shapes, world), 2, "padding(shapes, world)")
    for name, mine, right in zip(("one flat buffer", "padded rows"), got, want):
        t.that(type(mine) is int, "padding should return integers")
        text = "{name}: the padding of {shapes} with world={world} is {right}, not {mine}. " + why
        values = {"name": name, "shapes": [tuple(shape) for shape in shapes], "world": world}
        t.that(mine == right, text, **values, right=right, mine=mine)


@check("padding", points=2)
def check_padding(student, t):
    "The padding of all ranks"
    for world in (1, 2, 3, 5, 8):
        shapes = [
            torch.Size((t.integer(2, 12), t.integer(2, 5), *more)) for more in ((), (), (t.integer(2, 3),))
        ]
        same_padding(
            student,
            t,
            shapes,
            world,
            "The rows of each parameter are padded separately, and a row has many numbers.",
        )


@check("padding", points=1)
def check_padding_of_scalars(student, t):
    "Tensors without dimensions, and fewer rows than ranks"
    shapes = [torch.Size(()), torch.Size((t.integer(1, 2), t.integer(2, 5))), torch.Size((t.integer(3, 9),))]
    same_padding(student, t, shapes, 4, "A tensor without dimensions is one row of one number.")


# -- rows


@check("rows", points=2)
def check_own_rows(student, t):
    "Every rank has ceil(length / N) rows, as far as they exist"
    drawn = [(world, t.integer(4, 13)) for world in (1, 2, 3, 4)]
    for world, length in [(4, 10), *drawn, (5, t.integer(1001, 9999))]:
        for rank in range(world):
            want = rows_of(torch.arange(length), rank, world).tolist()
            start, stop = t.items(student.own_rows(length, rank, world), 2, "own_rows(length, rank, world)")
            t.that(type(start) is int and type(stop) is int, "own_rows should return integers")
            got = list(range(length))[start:stop]
            even = torch.tensor_split(torch.arange(length), world)[rank].tolist()
            where = {"rank": rank, "world": world, "length": length}
            message = (
                "rank {rank} of {world} has {mine} of {length} rows, {right} would be right: these are "
                "parts as even as possible, as numpy.array_split makes them. Here every rank has "
                "ceil(length / N) rows, and the last ones have what is left"
            )
            t.that(got == want or got != even, message, **where, mine=len(got), right=len(want))
            message = "own_rows({length}, {rank}, {world}) is {got}, not {want}: try thousands of rows"
            ends = (want[0], want[-1] + 1) if length > 1000 else (start, stop)
            t.that((start, stop) == ends, message, **where, got=(start, stop), want=ends)
            t.equal(got, want, "the rows of rank {rank} of {world}, of {length}", **where)


@check("rows", points=1)
def check_ranks_without_rows(student, t):
    "Ranks without rows"
    length = t.integer(2, 3)
    for rank in range(7):
        start, stop = t.items(student.own_rows(length, rank, 7), 2, "own_rows(length, rank, world)")
        t.that(type(start) is int and type(stop) is int, "own_rows should return integers")
        want = (rank, rank + 1) if rank < length else (length, length)
        message = "own_rows({length}, {rank}, 7) is {got}, not {want}: twice `length` for a rank without rows"
        t.that((start, stop) == want, message, length=length, rank=rank, got=(start, stop), want=want)


# -- units


def same_units(student, t, kind: str, tied: bool) -> None:
    """Modules and names are those expected."""
    sizes = {**TINY, "num_layers": t.integer(2, 4), "tied_embeddings": tied}
    want = expected_units(sizes, getattr(llama, kind))
    (found,) = student.ranks(scenarios.cut, [{"sizes": sizes, "kind": kind}]).results
    rule = (
        "If all names of a parameter are in one block, it belongs to this block's unit; all others belong to "
        "the root"
    )
    good = type(found) is list and len(found) == len(want)
    t.that(good, "there should be {want} units. " + rule, want=len(want))
    for got, (module, names) in zip(found, want):
        unit = f"the unit of {module}" if module else "the root"
        owner, held = t.items(got, 2, "a unit")
        t.equal(owner, module, "the module of a unit (the root is '')")
        good = type(held) is list and all(
            type(same) is list and all(type(name) is str for name in same) for same in held
        )
        t.that(bool(good), "{unit} should have a list of names for each parameter", unit=unit)
        mine = sorted(sorted(same) for same in held)
        extra = [same for same in mine if same not in names] or [same for same in names if same not in mine]
        t.that(mine == names, "{unit} differs in {extra}. " + rule, unit=unit, extra=(extra or ["order"])[0])


def same_unit(student, t, names: list[str], blocks: list[str], want: str | None, why: str) -> None:
    """``unit_of`` returns this block, or None."""
    got = student.unit_of(list(names), list(blocks))
    good = got is None if want is None else type(got) is str and got == want
    message = "unit_of({names}, {blocks}) is {got}, not {want}: " + why
    t.that(good, message, names=names, blocks=blocks, got=got, want=want)


@check("units", points=1, seconds=20)
def check_unit_of(student, t):
    "A parameter of one block belongs to this block, one outside the blocks to the root"
    blocks = [f"layers.{number}" for number in range(11 + t.integer(1, 3))]
    weight = t.choice(["self_attn.q_proj.weight", "mlp.up_proj.weight", "norm"])
    for number in (0, 1, 10, len(blocks) - 1):
        block = blocks[number]
        some = blocks[:3] if number < 2 else [*blocks[:2], block]
        why = "layers.10.norm also begins with layers.1: a prefix needs its dot, layers.1."
        same_unit(student, t, [f"{block}.{weight}"], some, block, why)
    for name in ("norm.weight", f"layers.{t.integer(20, 99)}.{weight}", f"encoder.layers.1.{weight}"):
        why = "this parameter is in no block. A name is in the block layers.1 if it begins with layers.1."
        same_unit(student, t, [name], blocks[:3], None, why)


@check("units", points=1, seconds=20)
def check_tied_unit_of(student, t):
    "A tied parameter belongs to a block only if all its names are in this block"
    blocks = ["layers.0", "layers.1", "layers.2"]
    first, second = f"layers.{t.integer(0, 1)}", "layers.2"
    names = [f"{first}.self_attn.k_proj.weight", f"{first}.self_attn.v_proj.weight"]
    same_unit(student, t, names, blocks, first, "all its names are in this block")
    why = "a parameter that is needed in several places belongs to the root"
    for other in (f"{second}.mlp.up_proj.weight", "lm_head.weight"):
        same_unit(student, t, [names[0], other], blocks, None, why)
        same_unit(student, t, [names[0], other, names[1]], blocks, None, why)
    same_unit(student, t, ["embed_tokens.weight", names[0]], blocks, None, why)


@check("units", points=1, seconds=20)
def check_units(student, t):
    "The units of a Llama, with tied embeddings and without, for two kinds of block"
    same_units(student, t, "Block", True)
    same_units(student, t, "MLP", False)
