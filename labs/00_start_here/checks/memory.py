"""The visible checks of the state in memory, against a step of a small layer."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import same

from .twins import trained

WEIGHTS = "only the weights are counted: add their gradients, and the state of the optimiser"
NO_GRADIENTS = "the gradients are missing: they are one tensor as large as the weights"
NO_STATE = "the state of the optimiser is missing: with moments={moments} it is {moments} times the weights"
TWO = (
    "this counts 2 tensors as large as the weights; there are {tensors}: weights, gradients, and "
    "moments={moments} of the optimiser"
)
FOUR = "this counts 2 tensors of optimiser state, but moments={moments} says how many there are"
TWICE = "the state of the optimiser is counted twice: moments={moments} is the number of its tensors"
GB = "this is in GB (10⁹ bytes): 1 GiB is 2³⁰ bytes"
BYTES = "this is in bytes: divide by 2**30"


def state_of(student, t, moments: int) -> None:
    """The state of a small layer after a step of an optimiser with ``moments`` tensors is as measured."""
    count, want = trained(t.integer(20, 40), t.integer(20, 40), moments)
    tensor = want / (2 + moments)
    if moments == 2:
        missing = {NO_GRADIENTS: want - tensor, NO_STATE: 2 * tensor, TWICE: 6 * tensor}
    else:
        missing = {TWO: 2 * tensor, FOUR: 4 * tensor}
    mistakes = {WEIGHTS: tensor, **missing, GB: want * 2**30 / 1e9, BYTES: want * 2**30}
    got, what = student.state_gib(count, moments), "state_gib({count}, moments={moments})"
    values = {"count": count, "moments": moments, "tensors": 2 + moments}
    same(t, got, want, what, mistakes, rtol=1e-6, atol=0, **values)


@check("state", points=1)
def check_adamw(student, t):
    "AdamW, which keeps two tensors"
    state_of(student, t, 2)


@check("state", points=1)
def check_sgd(student, t):
    "SGD, with momentum and without"
    for moments in (1, 0):
        state_of(student, t, moments)
