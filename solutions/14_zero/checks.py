"""The visible checks of this lab: what one process can show, and the pieces. Those of the stages are in ``on_ranks.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.contract import Kind, check
from dlo_lib.grading.quiz import quiz_complete
from dlo_lib.models import LlamaConfig
from dlo_lib.models.counts import parameters_by_part

from .hints import HINTS as HINTS
from .on_ranks import (
    check_accumulates,
    check_averaged_pieces,
    check_gathers,
    check_linear,
    check_norm,
    check_one_number,
    check_reduce_scatter,
    check_same_update,
    check_state_is_divided,
    check_updates_travel,
)
from .quiz import QUIZ
from .scenarios import made_whole, one_piece
from .twins import STAGES, measured_state, whole_case

# -- 1 · state


def same_state(student, t, stage: int, parts: tuple[str, ...], message: str, optimizer: str = "adamw", moments: int = 2) -> None:
    """The student's bytes of ``parts`` are the measured ones, for some numbers of ranks."""
    config = LlamaConfig(1024 * t.integer(1, 3), 64 * t.integer(2, 4), 256, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=32)
    parameters = sum(parameters_by_part(config).values())
    for world in (1, 2, 4 * t.integer(2, 16)):
        got, want = student.state_bytes(parameters, world, stage, moments), measured_state(config, world, stage, optimizer)
        t.that(type(got) is dict and set(got) == set(want), "state_bytes should give a dict with weights, gradients and optimizer")
        for part in parts:
            number = t.number(got[part], 'state_bytes(...)["{part}"]', part=part)
            good = abs(number - want[part]) <= 0.02 * want[part] + 4096  # padding, and the optimiser's step counters
            t.that(
                bool(good),
                'stage {stage}, {world} ranks, {parameters} parameters: "{part}" is {got:.0f} bytes, measured {want:.0f}. ' + message,
                stage=stage,
                world=world,
                parameters=parameters,
                part=part,
                got=number,
                want=want[part],
            )


@check("state", points=1, seconds=30)
def check_stage0(student, t):
    "Data parallelism: everything everywhere"
    same_state(student, t, 0, ("weights", "gradients", "optimizer"), "4 bytes a number, AdamW keeps two; nothing is divided.")


@check("state", points=1, seconds=30)
def check_stage1(student, t):
    "Stage 1 divides the optimiser's state"
    same_state(student, t, 1, ("optimizer",), "Each rank keeps the moments of 1/N of the parameters.")


@check("state", points=1, seconds=30)
def check_stage2(student, t):
    "Stage 2 divides the gradients as well"
    same_state(student, t, 2, ("gradients",), "Each rank keeps the gradients of the parameters that it updates.")


@check("state", points=1, seconds=30)
def check_stage3(student, t):
    "Stage 3 divides the weights as well"
    same_state(student, t, 3, ("weights",), "At rest nobody has more than 1/N of the weights.")


# -- 2 · pieces


def pieces(student, t, tensor: Tensor, world: int) -> list[Tensor]:
    """The student's piece for every rank."""
    size = -(-tensor.numel() // world)
    found = []
    for rank in range(world):
        got = student.piece_of(tensor, rank, world)
        found.append(got)
        good = type(got) is Tensor and tuple(got.shape) == (size,) and got.dtype == tensor.dtype
        shape = tuple(got.shape) if type(got) is Tensor else type(got).__name__
        t.that(
            good,
            "the piece of rank {rank} of a tensor of shape {whole} on {world} ranks is {shape}, expected ({size},)",
            rank=rank,
            whole=tuple(tensor.shape),
            world=world,
            shape=shape,
            size=size,
        )
    return found


@check("pieces", points=1)
def check_pieces(student, t):
    "The pieces, one after the other, are the flat tensor and zeros"
    for world in (1, 2, 3, 4):
        tensor = t.normal(t.integer(3, 6), t.integer(3, 6))
        got = torch.cat(pieces(student, t, tensor, world))
        t.close(got[: tensor.numel()], tensor.flatten(), "all pieces on {world} ranks together", world=world, atol=0, rtol=0)
        t.that(not got[tensor.numel() :].any(), "what is appended to make the pieces equal should be zeros")


@check("pieces", points=1, seconds=20)
def check_copy(student, t):
    "A piece is a copy: it keeps nothing else in memory"
    value, numel, world = t.uniform(1.0, 2.0), 4 * 2**20, 4
    run = student.ranks(one_piece, [{"value": value, "numel": numel}] * world)
    for rank, got in enumerate(run.results):
        t.close(got, torch.full((64 // world,), value), "the piece of rank {rank} of {world}", rank=rank, world=world)
        held = run.memory(rank, "the tensor is gone") / (4 * numel)
        t.that(
            held < 0.6,
            "rank {rank} keeps {held:.2f} times the bytes of the tensor for a piece of 1/{world}: a slice is a *view*, and keeps alive all that it was "
            "cut from. Make it a copy with .clone()",
            rank=rank,
            held=held,
            world=world,
        )


@check("pieces", points=1, seconds=20)
def check_whole(student, t):
    "whole gives every rank the tensor back, with one all-gather"
    for world in (1, 2, 3):
        tensor, case = whole_case(t, (t.integer(3, 6), t.integer(3, 6)), world)
        run = student.ranks(made_whole, case)
        for rank, got in enumerate(run.results):
            t.close(got, tensor, "whole on rank {rank} of {world}", rank=rank, world=world, atol=0, rtol=0)
            sent, padded = run.bytes(rank), world * case[rank]["piece"].nbytes
            good = sent == padded and len(run.calls(rank, Kind.ALL_GATHER)) == 1
            t.that(good, "rank {rank} passed {sent} bytes, one all-gather of {padded} is enough", rank=rank, sent=sent, padded=padded)


# -- 8 · settings


@check("settings", points=1)
def check_stage(student, t):
    "The stage"
    for stage in t.shuffled([0, 1, 2, 3]):
        config = {"train_micro_batch_size_per_gpu": t.integer(1, 8), "zero_optimization": {"stage": stage}}
        got = student.settings(config, t.integer(1, 8))
        t.that(type(got) is dict, "settings should give a dict")
        t.equal(got.get("parallel"), STAGES[stage], '"parallel" of stage {stage}', stage=stage)


@check("settings", points=2)
def check_batches(student, t):
    "The three numbers that hang together"
    total, one, often = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    for given in ((total, one), (one, often), (total, often), (total, one, often), (total,), (one,)):
        world, batch = t.integer(2, 8), t.integer(1, 8)
        steps = t.integer(2, 5) if len(given) > 1 else 1
        numbers = {total: world * batch * steps, one: batch, often: steps}
        got = student.settings({name: numbers[name] for name in given}, world)
        t.that(type(got) is dict, "settings should give a dict")
        shown = {name: numbers[name] for name in given}
        for name, want in (("batch", batch), ("accumulation", steps)):
            t.equal(got.get(name), want, '"{name}" on {world} ranks for {shown}', name=name, world=world, shown=shown)


# -- quiz

complete = quiz_complete(QUIZ, points=1)
