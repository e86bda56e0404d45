"""The hidden checks: other sizes, and the answers of the quiz. Never released.

A student reads a message only if it holds no values.
"""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks.blocks import attention_run, heads_of, linear_loss_run
from .checks.rows import growing, loss_run, norm_backward_run


@check("norm_backward", points=1)
def check_one_row(student, t):
    "Fewer rows than ROWS"
    norm_backward_run(student, t, 1, t.integer(33, 47), 4)


@check("loss", points=1)
def check_other_blocks(student, t):
    "Other block sizes"
    loss_run(student, t, growing(t, 2, t.integer(65, 90), 32) - 8, t.choice((32, 64)))


@check("linear_loss", points=1, seconds=20)
def check_few_rows(student, t):
    "Fewer rows and words than a block"
    rows, hidden = t.integer(17, 28), t.integer(33, 47)
    x = 0.1 * t.normal(rows, hidden)
    linear_loss_run(student, t, rows, hidden, t.integer(9, 30), x=x, blocks=(32, 32, 16))


@check("attention", points=1, seconds=20)
def check_causal_groups(student, t):
    "Causal attention with grouped queries"
    size = t.integer(17, 30)
    attention_run(student, t, *heads_of(t, 4, 2, size, size, extra=8), causal=True, blocks=(32, 16))


# -- quiz

ANSWERS = {
    "q1": Answer("b", "the arithmetic is the same, and its intensity is far below the ridge"),
    "q2": Answer("c", "other=float('-inf') is neutral: exp(-inf) is 0"),
    "q3": Answer("a", "a race: write partial sums, or use tl.atomic_add"),
    "q4": Answer("d", "the old terms were exp(x - 3) and become exp(x - 5)"),
    "q5": Answer("b", "P = exp(S - lse), one number for each query"),
}
