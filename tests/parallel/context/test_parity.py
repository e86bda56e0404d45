"""A context-parallel Llama learns what one process learns from the whole sequences: losses and gradients
within 1e-10 in float64, over 4 steps, on 1 to 4 ranks, in every form and placement."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from dlo_lib.launch import run_ranks
from dlo_lib.parallel.context import ContextKind, SequencePlacement
from tests.parallel.context.twins import STEPS, Case, History, alone, train_all

RING, ULYSSES, COMBINED = ContextKind
CONTIGUOUS, ZIGZAG, STRIPED = SequencePlacement
CASES = {
    1: [Case(), Case(documents=True, kind=ULYSSES), Case(documents=True)],
    2: [
        Case(seq=20, heads=(3, 1)),
        Case(placement=CONTIGUOUS, documents=True),
        Case(placement=STRIPED, seq=18, checkpointing=True),
        Case(placement=STRIPED, documents=True),
        Case(kind=ULYSSES, seq=14),
        Case(count=2, fsdp=True),
        Case(documents=True, dtype=torch.float32),
    ],
    3: [
        Case(seq=18, documents=True),
        Case(placement=CONTIGUOUS, seq=15),
        Case(placement=STRIPED, seq=21, heads=(5, 5), count=2),
        Case(kind=ULYSSES, seq=15, heads=(6, 1), documents=True, checkpointing=True),
    ],
    4: [
        Case(documents=True, checkpointing=True),
        Case(placement=STRIPED, seq=20, documents=True),
        Case(placement=CONTIGUOUS, seq=12, checkpointing=True, heads=(6, 6)),
        Case(kind=ULYSSES, seq=20, heads=(4, 2)),
        Case(kind=COMBINED, inner=2, heads=(4, 1)),
        Case(kind=COMBINED, inner=2, placement=STRIPED, documents=True, checkpointing=True),
        Case(cp=2, count=2, seq=12),
        Case(cp=2, count=2, seq=20, fsdp=True, checkpointing=True, placement=STRIPED),
        Case(dtype=torch.float32, seq=32),
    ],
}


@functools.cache
def trained(world: int) -> list[list[tuple[History, int]]]:
    """For each case, the histories of the ranks: one job, because a job costs more than a case."""
    return list(zip(*run_ranks(train_all, world, CASES[world], timeout=240), strict=True))


@functools.cache
def trained_alone(case: Case, data_ranks: int) -> History:
    return alone(case, data_ranks)


@pytest.mark.parametrize(
    ("world", "index"), [(world, index) for world, cases in CASES.items() for index in range(len(cases))]
)
def test_the_ranks_learn_what_one_process_learns(world, index):
    case = CASES[world][index]
    rtol, atol = (0, 1e-10) if case.dtype is torch.float64 else (1e-5, 1e-5)
    # The twin does not depend on these choices.
    same = replace(case, kind=RING, placement=ZIGZAG, inner=None, cp=0, checkpointing=False, fsdp=False)
    for history, data_ranks in trained(world)[index]:
        twin = trained_alone(same, data_ranks)
        assert len(history.losses) == len(twin.losses) == STEPS
        torch.testing.assert_close(history.losses, twin.losses, rtol=rtol, atol=atol)
        for mine, its in zip(history.gradients, twin.gradients, strict=True):
            torch.testing.assert_close(mine, its, rtol=rtol, atol=atol)
