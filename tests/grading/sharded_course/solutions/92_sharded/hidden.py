"""The hidden check: one value is altered in flight, and must show where the twin says."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import Kind, Nudge, check

from .checks.questions import case, same_everywhere, train, twin


@check("sharded", points=1)
def check_what_arrives_is_used(student, t):
    "What the ranks receive is what they use"
    world, shard = 2, t.integer(5, 20)
    inputs = case(t, world, world * shard)
    rank, element = t.integer(0, world - 1), t.integer(0, shard - 1)

    nudge = Nudge(Kind.REDUCE_SCATTER, rank, call=0, element=element, by=3.0)
    run = student.ranks(train, inputs, nudge=nudge)
    summed = run.calls(rank, Kind.REDUCE_SCATTER)[0].reduction == "SUM"
    same_everywhere(
        t, run, twin(inputs, {(0, rank * shard + element): nudge.by / world if summed else nudge.by})
    )

    last = Nudge(Kind.ALL_GATHER, rank, call=1, element=t.integer(0, world * shard - 1), by=5.0)
    want = twin(inputs)
    for place, got in enumerate(student.ranks(train, inputs, nudge=last).results):
        altered = want.clone()
        altered[last.element] += last.by if place == rank else 0.0
        t.close(got, altered, "the parameter that rank {rank} received", rank=place)
