"""The visible checks of the state and the pieces. Those of the stages are in ``stages.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, check
from dlo_lib.labkit.compare import every_rank
from dlo_lib.labkit.memory import holds_at_most
from dlo_lib.labkit.traffic import passes_exactly, passes_only, uses_what_arrives
from dlo_lib.models import LlamaConfig
from dlo_lib.models.counts import parameters_by_part

from .scenarios import made_whole, one_piece
from .twins import measured_state, whole_case

# -- 1 · state


def same_state(student, t, stage: int, messages: dict[str, str], optimizer: str = "adamw", moments: int = 2) -> None:
    """The student's bytes are the measured ones, for some numbers of ranks. ``messages``: the parts to compare, in this order."""
    config = LlamaConfig(1024 * t.integer(1, 3), 64 * t.integer(2, 4), 256, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=32)
    parameters = sum(parameters_by_part(config).values())
    for world in (1, 2, 4 * t.integer(2, 16)):
        got, want = student.state_bytes(parameters, world, stage, moments), measured_state(config, world, stage, optimizer)
        t.that(type(got) is dict and set(got) == set(want), "state_bytes should return a dict with weights, gradients and optimizer")
        for part, message in messages.items():
            number = t.number(got[part], 'state_bytes(...)["{part}"]', part=part)
            good = abs(number - want[part]) <= 0.02 * want[part] + 4096  # padding, and the optimiser's step counters
            t.that(
                bool(good),
                'stage {stage}, world {world}, {parameters} parameters: "{part}" is {got:.0f} bytes, measured {want:.0f}. ' + message,
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
        student, t, 0, dict.fromkeys(("weights", "gradients", "optimizer"), "Each number has 4 bytes, AdamW keeps two; nothing is divided.")
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


# -- 2 · pieces

NOTHING = "{name} returns None: is a return missing?"


def pieces(student, t, tensor: Tensor, world: int) -> list[Tensor]:
    """The student's piece for every rank."""
    size = -(-tensor.numel() // world)
    found = []
    for rank in range(world):
        got = student.piece_of(tensor, rank, world)
        found.append(got)
        if type(got) is Tensor:
            message = "the piece of rank {rank} of {world} is {got}, the tensor is {want}: a piece has the dtype of its tensor"
            t.that(got.dtype == tensor.dtype, message, rank=rank, world=world, got=got.dtype, want=tensor.dtype)
        good = type(got) is Tensor and tuple(got.shape) == (size,)
        shape = tuple(got.shape) if type(got) is Tensor else type(got).__name__
        t.that(
            good,
            "the piece of rank {rank} of {world}, of a tensor of shape {whole}, is {shape}, expected ({size},)",
            rank=rank,
            whole=tuple(tensor.shape),
            world=world,
            shape=shape,
            size=size,
        )
    return found


def undivided(t, world: int) -> tuple[int, int]:
    """A shape with a number of elements that ``world`` does not divide."""
    return t.draw_until(lambda: (t.integer(3, 6), t.integer(3, 6)), lambda shape: world == 1 or shape[0] * shape[1] % world > 0)


@check("pieces", points=1)
def check_pieces(student, t):
    "The concatenated pieces are the flat tensor, followed by zeros"
    for world in (1, 2, 3, 4):
        tensor = t.normal(*undivided(t, world), dtype=torch.float64 if world == 2 else torch.float32)
        got = torch.cat(pieces(student, t, tensor, world))
        t.close(got[: tensor.numel()], tensor.flatten(), "the pieces of all ranks together (world {world})", world=world, atol=0, rtol=0)
        t.that(not got[tensor.numel() :].any(), "the padding at the end should be zeros")


@check("pieces", points=1, seconds=20)
def check_copy(student, t):
    "A piece is a copy and keeps no other memory"
    value, numel, world = t.uniform(1.0, 2.0), 4 * 2**20, 4
    run = student.ranks(one_piece, [{"value": value, "numel": numel}] * world)
    every_rank(t, run, torch.full((64 // world,), value), "the piece of rank {rank} of {world}")
    message = (
        "rank {rank} keeps {held:.2f} times the bytes of the tensor for a piece of 1/{world}: a slice is a *view* and "
        "keeps the memory of the whole tensor. Copy it with .clone()"
    )
    holds_at_most(t, run, "the tensor is gone", 0.6 * 4 * numel, message, unit=4 * numel, world=world)


@check("pieces", points=1, seconds=20)
def check_whole(student, t):
    "whole restores the tensor on every rank, with one all-gather"
    for world in (1, 2, 3):
        tensor, case = whole_case(t, undivided(t, world), world, torch.float64 if world == 2 else torch.float32)
        run = student.ranks(made_whole, case)
        t.that(run.results[0] is not None, NOTHING, name="whole")
        every_rank(t, run, tensor, "whole on rank {rank} of {world}", atol=0, rtol=0)
        padded = [world * own["piece"].nbytes for own in case]
        passes_only(t, run, [Kind.ALL_GATHER], "rank {rank} calls {kinds}: one all-gather is enough")
        passes_exactly(t, run, padded, "rank {rank} passed {got} bytes, but one all-gather of {want} is enough", calls=1)
    uses_what_arrives(t, run, Kind.ALL_GATHER, t.integer(0, 1))


@check("pieces", points=1, seconds=20)
def check_few_numbers(student, t):
    "A tensor with fewer numbers than ranks"
    few = t.integer(2, 3)
    tensor, case = whole_case(t, (few,), 5)
    got = torch.cat(pieces(student, t, tensor, 5))
    wrong = "the first {few} ranks of 5 should have one number of a tensor of {few}, and the others a zero"
    t.that(bool(torch.equal(got[:few], tensor) and not got[few:].any()), wrong, few=few)
    for mine in student.ranks(made_whole, case).results:
        shape = tuple(t.tensor(mine, "whole on a rank").shape)
        t.that(
            shape == (few,),
            "whole returns the shape {shape} for a tensor of {few} numbers on 5 ranks: cut off all padding",
            shape=shape,
            few=few,
        )
        t.close(mine, tensor, "whole of a tensor of {few} numbers on 5 ranks", few=few, atol=0, rtol=0)
