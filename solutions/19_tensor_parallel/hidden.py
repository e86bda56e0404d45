"""The hidden checks: other sizes and numbers of ranks, and the answers of the quiz. Never released.

A student reads a message only if it holds no values.
"""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks.layers import attention_case, column_case, loss_case, mlp_case, row_case, run_together
from .checks.training import model_run, right_groups


@check("linear", points=1, seconds=30)
def check_linear_dimensions(student, t):
    "Inputs of one and of three dimensions"
    shapes = (), (2, t.integer(1, 2), 2)
    run_together(
        student, t, *(case(t, 2, shape=shape) for shape in shapes for case in (column_case, row_case))
    )


@check("mlp", points=1, seconds=30)
def check_mlp_three_ranks(student, t):
    "Three ranks"
    mlp_case(student, t, 3)


@check("attention", points=1, seconds=30)
def check_attention_three_ranks(student, t):
    "Three ranks"
    attention_case(student, t, 3)


@check("loss", points=1, seconds=30)
def check_loss_three_ranks(student, t):
    "Three ranks"
    loss_case(student, t, 3)


@check("model", points=1, seconds=60)
def check_model_three_ranks(student, t):
    "Three ranks"
    model_run(student, t, 3, layers=1)


@check("grid", points=1, seconds=40)
def check_larger_grid(student, t):
    "Other grids"
    right_groups(student, t, 6, t.shuffled([3, 2]))


# -- quiz

ANSWERS = {
    "q1": Answer("c", "GELU(a + b) is not GELU(a) + GELU(b), and a column of H is not a sum over ranks"),
    "q2": Answer("a", "the gradient of x is the sum over all columns of A, and each rank has some of them"),
    "q3": Answer(
        "d",
        "other masks on the residual stream would make its copies differ; equal masks inside would repeat "
        "one pattern t times",
    ),
    "q4": Answer("b", "the other ranks of the tensor-parallel group have other columns"),
    "q5": Answer(
        "c",
        "4 all-reduces for each block, which the next layer needs; asynchronous forms hide them only behind "
        "products that take longer",
    ),
    "q6": Answer("b", "a reduce-scatter and an all-gather send the bytes of an all-reduce"),
}
