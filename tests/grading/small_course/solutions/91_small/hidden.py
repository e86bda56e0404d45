"""Hidden checks of the small lab."""

import torch

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks.questions import mean

ANSWERS = {
    "q1": Answer("b", "8 bits make 2**8 values"),
    "q2": Answer("a", "zero divided by the scale is zero"),
}


@check("scale", points=1)
def check_scale_dtype(student, t):
    """Scales are float32 whatever x is"""
    scale = student.absmax_scale(t.normal(3, 9, dtype=torch.bfloat16))
    t.tensor(scale, "absmax_scale(x)", shape=(3,))
    t.that(
        scale.dtype == torch.float32, "for bfloat16 the scale is {dtype}, expected float32", dtype=scale.dtype
    )


@check("quantise", points=1)
def check_row_of_zeros(student, t):
    """A row of zeros stays zeros"""
    x = t.normal(4, 10)
    x[2] = 0
    q, _ = t.items(student.quantise(x), 2, "quantise(x)")
    t.tensor(q, "q", shape=(4, 10), dtype=torch.int8)
    t.that(bool((q[2] == 0).all()), "a row of zeros must stay zeros")


@check("mean", points=1, seconds=6)
def check_three_ranks(student, t):
    """Three ranks as well"""
    xs = [t.normal(4) for _ in range(3)]
    run = student.ranks(mean, [{"x": x} for x in xs])
    for rank, got in enumerate(run.results):
        t.close(got, sum(xs) / 3, "the mean on rank {rank} of 3", rank=rank)
