"""The hidden checks: other sizes and shapes; the answers of the quiz. Never released."""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks import scenarios
from .checks.sending import one_bit_run, sparse_run
from .checks.training import same_low_rank


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
    rows, columns, rank = t.integer(5, 7), t.integer(12, 16), t.integer(1, 3)
    inputs = [[t.normal(rows, columns, dtype=torch.float64) for _ in range(3)] for _ in range(2)]
    q = t.normal(columns, rank, dtype=torch.float64)
    run = student.ranks(scenarios.low_rank_means, [{"q": q, "gradients": own} for own in inputs])
    same_low_rank(t, run.results, q, inputs)


ANSWERS = {
    "q1": Answer(
        "c", "12 k (N - 1) bytes against 8 Ψ (N - 1) / N: with k = Ψ / 100 and 64 ranks nearly the same"
    ),
    "q2": Answer("b", "what is not sent adds up, so the element arrives late and is not lost"),
    "q3": Answer(
        "a", "the uncorrected v grows in all early steps, whatever the gradients are: the rule fires at once"
    ),
    "q4": Answer("d", "overlap costs nothing and keeps the sum exact: compression comes after it"),
    "q5": Answer(
        "b", "the mean of N signs has N + 1 values for each element, and every rank must receive it"
    ),
}
