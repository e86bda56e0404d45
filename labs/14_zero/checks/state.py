"""The visible checks of the state and the pieces. Those of the stages are in ``stages.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, check
from dlo_lib.labkit.compare import every_rank
from dlo_lib.labkit.memory import MIB, holds_at_most
from dlo_lib.labkit.traffic import passes_exactly, passes_only, uses_what_arrives
from dlo_lib.models import LlamaConfig
from dlo_lib.models.counts import parameters_by_part

from .scenarios import made_whole, one_piece, separate
from .twins import measured_state, whole_case

# -- 1 · state


def same_state(
    student, t, stage: int, messages: dict[str, str], optimizer: str = "adamw", moments: int = 2
) -> None:
    """The student's bytes are the measured ones, on two ranks or more. ``messages``: the parts to compare, in
    this order."""
    config = LlamaConfig(
        1024 * t.integer(1, 3),
        64 * t.integer(2, 4),
        256,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
    )
    parameters = sum(parameters_by_part(config).values())
    world = t.choice([2, 8, 16, 32])  # it divides every first dimension: the function keeps the fractions
    got, want = (
        student.state_bytes(parameters, world, stage, moments),
        measured_state(config, world, stage, optimizer),
    )
    t.that(
        type(got) is dict and set(got) == set(want),
        "state_bytes should return a dict with weights, gradients and optimizer",
    )
    for part, message in messages.items():
        number = t.number(got[part], 'state_bytes(...)["{part}"]', part=part)
        # padding, and the optimiser's step counters
        good = abs(number - want[part]) <= 0.02 * want[part] + 4096
        t.that(
            bool(good),
            'stage {stage}, world {world}, {parameters} parameters: "{part}" is {got:.0f} bytes, measured '
            "{want:.0f}. " + message,
            stage=stage,
            world=world,
            parameters=parameters,
            part=part,
            got=number,
            want=want[part],
        )


NOT_YET = "Stage {stage} does not divide the {part}."
STILL = "What an earlier stage divides, the later stages divide as well."


@check("state", points=1, seconds=30)
def check_stage0(student, t):
    "Data parallelism: every rank holds everything"
    same_state(
        student,
        t,
        0,
        dict.fromkeys(
            ("weights", "gradients", "optimizer"),
            "Each number has 4 bytes, AdamW keeps two; nothing is divided.",
        ),
    )


@check("state", points=1, seconds=30)
def check_stage1(student, t):
    "Stage 1 divides the optimiser's state"
    message = "Each rank keeps the moments of 1/N of the parameters."
    same_state(student, t, 1, {"optimizer": message, "gradients": NOT_YET, "weights": NOT_YET})


@check("state", points=1, seconds=30)
def check_stage2(student, t):
    "Stage 2 divides the gradients as well"
    message = "Each rank keeps the gradients of the parameters that it updates."
    same_state(student, t, 2, {"gradients": message, "optimizer": STILL, "weights": NOT_YET})


@check("state", points=1, seconds=30)
def check_stage3(student, t):
    "Stage 3 divides the weights as well"
    message = "At rest no rank has more than 1/N of the weights."
    same_state(student, t, 3, {"weights": message, "optimizer": STILL, "gradients": STILL})


@check("state", points=1, seconds=30)
def check_momentum(student, t):
    "Another optimiser: momentum keeps one number"
    message = "SGD with momentum keeps one number for each parameter: the last argument says how many."
    same_state(student, t, 1, {"optimizer": message}, "sgd-momentum", 1)


def bytes_of(student, t, *arguments: int) -> dict[str, float]:
    """The three parts that the student computes, as numbers."""
    got = student.state_bytes(*arguments)
    parts = ("weights", "gradients", "optimizer")
    message = "state_bytes should return a dict with weights, gradients and optimizer"
    t.that(type(got) is dict and set(got) == set(parts), message)
    return {part: float(t.number(got[part], 'state_bytes(...)["{part}"]', part=part)) for part in parts}


@check("state", points=1)
def check_any_numbers(student, t):
    "Any optimiser and any number of ranks, with the fractions"
    for stage in range(4):
        world, moments = t.choice([3, 5, 7, 9]), t.integer(3, 6)
        parameters = world * t.integer(100, 999) + 1
        where = {"stage": stage, "world": world, "parameters": parameters, "moments": moments}
        alone, got = (
            bytes_of(student, t, parameters, 1, stage, 1),
            bytes_of(student, t, parameters, world, stage, moments),
        )
        for part, number in got.items():
            all_of_it = alone[part] * (moments if part == "optimizer" else 1)
            message = (
                "stage {stage}, world {world}, {parameters} parameters, moments {moments}: the part {part} "
                "has {got} bytes. On one rank with one moment it has {alone}: each moment has as many "
                "bytes, the others do not depend on moments, and a rank has all of a part or 1/{world} of "
                "it, not rounded"
            )
            fits = any(abs(number - right) <= 1e-9 * right for right in (all_of_it, all_of_it / world))
            t.that(fits, message, part=part, got=number, alone=alone[part], **where)
        nothing = bytes_of(student, t, parameters, world, stage, 0)["optimizer"]
        message = (
            'stage {stage}, world {world}: "optimizer" is {got} bytes without moments (plain SGD keeps '
            "nothing)"
        )
        t.that(nothing == 0, message, got=nothing, **where)
        usual, two = (
            bytes_of(student, t, parameters, world, stage),
            bytes_of(student, t, parameters, world, stage, 2),
        )
        t.that(
            usual == two,
            "stage {stage}: without its last argument state_bytes is not that of AdamW, moments=2",
            **where,
        )


# -- 2 · pieces

ROOM = MIB  # a process needs 0.1 to 0.4 MiB besides its tensors
NOTHING = "{name} returns None: is a return missing?"


def pieces(student, t, tensor: Tensor, world: int) -> list[Tensor]:
    """The student's piece for every rank."""
    size = -(-tensor.numel() // world)
    found = []
    for rank in range(world):
        got = student.piece_of(tensor, rank, world)
        found.append(got)
        if type(got) is Tensor:
            message = (
                "the piece of rank {rank} of {world} is {got}: a piece has the dtype of its tensor, {want}"
            )
            t.that(
                got.dtype == tensor.dtype, message, rank=rank, world=world, got=got.dtype, want=tensor.dtype
            )
        good = type(got) is Tensor and tuple(got.shape) == (size,)
        shape = tuple(got.shape) if type(got) is Tensor else type(got).__name__
        message = "the piece of rank {rank} of {world}, of a tensor {whole}, is {shape}, expected ({size},)"
        t.that(good, message, rank=rank, whole=tuple(tensor.shape), world=world, shape=shape, size=size)
    return found


DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64


def undivided(t, world: int, dtype: torch.dtype, dimensions: int) -> Tensor:
    """A tensor with a number of elements that ``world`` does not divide, of which every rank has some."""

    def tells(shape: tuple[int, ...]) -> bool:
        numel = math.prod(shape)
        return world == 1 or (numel % world > 0 and numel > (world - 1) ** 2)

    shape = t.draw_until(
        lambda: tuple(t.integer(2, 6 if dimensions > 1 else 40) for _ in range(dimensions)), tells
    )
    return (10 * t.normal(*shape)).to(dtype)


@check("pieces", points=1)
def check_pieces(student, t):
    "The concatenated pieces are the flat tensor, followed by zeros, for every shape and dtype"
    for world, dtype, dimensions in zip((1, 2, 3, 4, t.integer(5, 8)), t.shuffled(DTYPES), (1, 2, 3, 2, 4)):
        tensor = undivided(t, world, dtype, dimensions)
        got = torch.cat(pieces(student, t, tensor, world))
        what = "the pieces of all ranks together (world {world})"
        t.close(got[: tensor.numel()], tensor.flatten(), what, world=world, atol=0, rtol=0)
        t.that(not got[tensor.numel() :].any(), "the padding at the end should be zeros")


@check("pieces", points=1, seconds=20)
def check_copy(student, t):
    "A piece is a copy and keeps no other memory"
    for world in (1, 2, 3):
        tensor = t.normal(world * t.integer(1, 3), t.integer(2, 4))
        after = student.run(separate, tensor=tensor, world=world)
        message = (
            "a change of a piece changes the tensor, {world} rank(s): piece_of returns a *view*, not a "
            "copy. Copy it with .clone()"
        )
        t.that(type(after) is Tensor and bool(torch.equal(after, tensor)), message, world=world)
    value, numel, world = t.uniform(1.0, 2.0), 2 * MIB, t.integer(3, 5)
    run = student.ranks(one_piece, [{"value": value, "numel": numel}] * world)
    size = -(-numel // world)
    shown = torch.full((-(-size // (numel // 64)),), value)
    shown = [shown.clone() for _ in range(world)]
    shown[-1][(numel - (world - 1) * size + numel // 64 - 1) // (numel // 64) :] = 0.0  # padding
    every_rank(t, run, shown, "the piece of rank {rank} of {world}")
    message = (
        "rank {rank} keeps {held:.2f} times the bytes of the tensor for a piece of 1/{world}: a slice is a "
        "*view* and keeps the memory of the whole tensor. Copy it with .clone()"
    )
    holds_at_most(t, run, "the tensor is gone", 4 * size + ROOM, message, unit=4 * numel, world=world)


@check("pieces", points=1, seconds=20)
def check_whole(student, t):
    "whole restores the tensor on every rank, with one all-gather, for every shape and dtype"
    first, *dtypes = t.shuffled(DTYPES[1:])
    for world, dtype, dimensions in zip(
        (1, 2, t.integer(3, 4), t.integer(5, 6)), (first, torch.float32, *dtypes), (1, 2, 3, 4)
    ):
        tensor, case = whole_case(undivided(t, world, dtype, dimensions), world)
        run = student.ranks(made_whole, case)
        t.that(run.results[0] is not None, NOTHING, name="whole")
        every_rank(t, run, tensor, "whole on rank {rank} of {world}", atol=0, rtol=0)
        padded = [world * own["piece"].nbytes for own in case]
        passes_only(t, run, [Kind.ALL_GATHER], "rank {rank} calls {kinds}: one all-gather is enough")
        passes_exactly(
            t, run, padded, "rank {rank} passed {got} bytes, but one all-gather of {want} is enough", calls=1
        )
    uses_what_arrives(t, run, Kind.ALL_GATHER, t.integer(0, world - 1))


@check("pieces", points=1, seconds=20)
def check_few_numbers(student, t):
    "A tensor with fewer numbers than ranks"
    few = t.integer(2, 3)
    tensor, case = whole_case(t.normal(few), 5)
    got = torch.cat(pieces(student, t, tensor, 5))
    wrong = "the first {few} ranks of 5 should have one number of a tensor of {few}, and the others a zero"
    t.that(bool(torch.equal(got[:few], tensor) and not got[few:].any()), wrong, few=few)
    for mine in student.ranks(made_whole, case).results:
        shape = tuple(t.tensor(mine, "whole on a rank").shape)
        message = (
            "whole returns the shape {shape} for a tensor of {few} numbers on 5 ranks: cut off the padding"
        )
        t.that(shape == (few,), message, shape=shape, few=few)
        t.close(mine, tensor, "whole of a tensor of {few} numbers on 5 ranks", few=few, atol=0, rtol=0)
