"""The hidden checks: other cases, and the answers of the quiz. Never released.

A student reads a message only if it holds no values.
"""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import Kind, check
from dlo_lib.grading.checks.quiz import Answer
from dlo_lib.labkit.traffic import passes_only

from .checks.scenarios import from_flat
from .checks.sharding import flat_inputs
from .checks.training import same_llama


@check("flat", points=1, seconds=20)
def check_flat_few(student, t):
    "Fewer numbers than ranks"
    tensors = [t.normal(1)[0], t.normal(t.integer(1, 2))]
    run = student.ranks(from_flat, flat_inputs(tensors, 4))
    for got in run.results:
        for mine, want in zip(t.items(got, 2, "the tensors"), tensors):
            good = type(mine) is torch.Tensor and mine.shape == want.shape and bool(torch.equal(mine, want))
            t.that(good, "Tensors with fewer numbers than ranks, or without dimensions, are not restored.")
    passes_only(t, run, {Kind.ALL_GATHER}, "rank {rank} calls {kinds}: one all-gather is enough")


@check("end", points=1, seconds=60)
def check_four_ranks(student, t):
    "Four ranks"
    same_llama(student, t, 4, [])


# -- quiz

ANSWERS = {
    "q1": Answer("b", "16 bytes x 2 billion / 8; after backward no block is whole"),
    "q2": Answer("d", "rows of a matrix stay whole, and parameters stay separate"),
    "q3": Answer("a", "this rank does not use the other rows of the average"),
    "q4": Answer("c", "this saves gathers of all blocks, and the memory is that of the whole model"),
    "q5": Answer("b", "1 + 0.001 is 1 in bf16"),
    "q6": Answer("a", "all ranks must gather the same units in the same order"),
}
