"""The hidden checks: other sizes and shapes; the answers of the quiz. Never released."""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks.sending import one_bit_run, sparse_run
from .checks.training import low_rank_inputs, low_rank_run


@check("topk", points=1, seconds=30)
def check_large_sizes(student, t):
    "A tensor of many elements"
    sparse_run(student, t, 2, [(t.integer(40_000, 50_000), 400, torch.float32)])


@check("onebit", points=1, seconds=30)
def check_many_ranks(student, t):
    "Six ranks, several tensors"
    one_bit_run(student, t, t.integer(5, 6), 3, t.integer(1, 2))


@check("powersgd", points=1, seconds=30)
def check_wide(student, t):
    "A gradient with more columns than rows"
    shape = t.integer(5, 7), t.integer(12, 16), t.integer(1, 3)
    low_rank_run(student, t, *low_rank_inputs(t, 2, 3, shape=shape))


ANSWERS = {
    "q1": Answer("c", "12 k (N - 1) bytes against 8 Ψ (N - 1) / N: nearly the same for k = Ψ / 100, N = 64"),
    "q2": Answer("b", "what is not sent adds up, so the element arrives late and is not lost"),
    "q3": Answer("a", "the uncorrected v grows at first, and the rule is true at such a step"),
    "q4": Answer("d", "overlap costs nothing and keeps the sum exact: compression comes after it"),
}
