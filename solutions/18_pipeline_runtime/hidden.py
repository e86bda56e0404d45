"""The hidden checks: a micro-batch of padding, and the answers of the quiz. Never released.

Their messages do not contain the expected values.
"""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks.stages import batch_of, parts
from .checks.twins import IGNORED

# -- 1 · the loss of a micro-batch


@check("loss", points=1)
def check_nothing_to_learn(student, t):
    "A micro-batch without any valid target adds nothing"
    outputs, targets = batch_of(t, [3, 3])
    targets[1] = torch.full_like(targets[1], IGNORED)
    got = parts(student, t, outputs, targets)
    t.that(
        bool(got[1] == 0.0),
        "The part of a micro-batch that is only padding is 0; a mean over nothing is NaN.",
    )


# -- quiz

ANSWERS = {
    "q1": Answer("c", "the slowest stage sets the pace of the pipeline."),
    "q2": Answer(
        "c",
        "gradients add up over micro-batches, so each part must be divided by the number of targets of the "
        "batch.",
    ),
    "q3": Answer("a", "a buffer hides the deadlock while messages are small."),
    "q4": Answer("b", "only the input part is on the path from rank to rank."),
    "q5": Answer(
        "b",
        "each rank has the gradient of its share of the batch, already divided by all targets; their sum is "
        "the gradient.",
    ),
    "q6": Answer(
        "c", "the order of the cells is the same; blocking messages make ranks wait for each other."
    ),
}
