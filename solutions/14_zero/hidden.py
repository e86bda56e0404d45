"""The hidden checks: other cases, and the answers of the quiz. Never released.

A student reads a message only if it holds no values.
"""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks.scenarios import norms
from .checks.stages import same_parameters
from .checks.state import pieces
from .checks.twins import ADAMW, norm_case


@check("pieces", points=1)
def check_scalar(student, t):
    "A tensor without dimensions"
    tensor = t.normal(1)[0]
    got = torch.stack(pieces(student, t, tensor, 3)).flatten()
    t.that(
        bool(got[0] == tensor) and not got[1:].any(),
        "A single number without dimensions is in the first piece; the other pieces are zeros.",
    )


@check("stage1", points=1, seconds=20)
def check_small_parameters(student, t):
    "Parameters with fewer numbers than ranks"
    same_parameters(student, t, 4, ADAMW, shapes=[(1, 2), (t.integer(4, 5), 3), (3, 1)])


@check("norm", points=1, seconds=20)
def check_empty_pieces(student, t):
    "A rank whose pieces are empty"
    case, want = norm_case(t, t.shuffled([[0, 0], [t.integer(2, 9), 0]]))
    for got, _ in student.ranks(norms, case).results:
        number = t.tensor(got, "the norm where one rank has empty pieces").flatten().to(want.dtype)
        t.close(number, want[None], "the norm where one rank has empty pieces", rtol=1e-5)


# -- quiz

ANSWERS = {
    "q1": Answer(
        "c",
        "stage 3 gathers the weights twice: 3 B f against DDP's 2 B f; stage 2 only runs the step between "
        "the two halves",
    ),
    "q2": Answer("a", "4 + 12 / 8 bytes"),
    "q3": Answer("d", "squares of pieces add up, and the sum over all ranks is one all-reduce of one number"),
    "q4": Answer("b", "ZeRO stays data parallelism: every rank computes every layer"),
    "q5": Answer("c", "the moments stay where the update is computed"),
}
