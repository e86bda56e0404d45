"""The hidden checks: other dtypes, other numbers of ranks, and values altered in flight."""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import Kind, Nudge, check
from dlo_lib.grading.checks.quiz import Answer

from .checks.questions import fsdp_case, mean, train, trained_sharded

ANSWERS = {"q1": Answer("b", "8 bits make 2**8 values")}


@check("scale", points=1, seconds=0.5)
def check_scale_dtype(student, t):
    """Scales are float32 whatever x is"""
    x = t.normal(3, 9, dtype=torch.bfloat16)
    t.close(student.absmax_scale(x), x.float().abs().amax(dim=1) / 127, "absmax_scale(x)")


@check("mean", points=1, seconds=2)
def check_three_ranks(student, t):
    """Three ranks as well"""
    xs = [t.normal(4) for _ in range(3)]
    for rank, got in enumerate(student.ranks(mean, [{"x": x} for x in xs]).results):
        t.close(got, sum(xs) / 3, "the mean on rank {rank} of 3", rank=rank)


@check("mean", points=1, seconds=2)
def check_what_arrives_is_used(student, t):
    """What the ranks receive is what they use"""
    xs = [t.normal(6) for _ in range(2)]
    nudge = Nudge(Kind.ALL_REDUCE, rank=t.integer(0, 1), element=t.integer(0, 5), by=2.0)
    run = student.ranks(mean, [{"x": x} for x in xs], nudge=nudge)
    summed = run.calls(nudge.rank, Kind.ALL_REDUCE)[0].reduction == "SUM"
    for rank, got in enumerate(run.results):
        want = sum(xs) / 2
        want[nudge.element] += (nudge.by / 2 if summed else nudge.by) if rank == nudge.rank else 0.0
        t.close(got, want, "the mean on rank {rank}", rank=rank)


@check("fsdp", points=1, seconds=5)
def check_three_shards(student, t):
    """Three ranks as well"""
    inputs = fsdp_case(t, 3)
    trained_sharded(t, student.ranks(train, inputs), inputs)
