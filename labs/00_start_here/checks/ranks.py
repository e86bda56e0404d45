"""The visible checks of the mean over the ranks."""

from __future__ import annotations

from dlo_lib.comm.calls import Kind
from dlo_lib.grading.checks.contract import Run, check
from dlo_lib.labkit.compare import every_rank, explained, near, wrong_if
from dlo_lib.labkit.traffic import passes_exactly, passes_only, uses_what_arrives

from .scenarios import averaged
from .twins import mean

OWN = "rank {rank} returns its own numbers: dist.all_reduce(x) replaces x by the sum over all ranks"
SUM = "rank {rank} returns the sum over the {world} ranks: divide it by their number, dist.get_world_size()"
OF_FOUR = "rank {rank} divides by 4, but there are {world} ranks: divide by dist.get_world_size()"
ONE_RANK = "rank 0 has the mean, rank {rank} has not: dist.all_reduce(x) gives the sum to all ranks"
NO_RESULT = (
    "dist.all_reduce(x) returns None, because it changes x itself: call it in one line, use x in the next"
)


def mean_of(student, t, world: int, size: int) -> Run:
    """The mean on all ranks is the twin's; the run."""
    values = [t.normal(size) for _ in range(world)]
    run = explained(student, averaged, [{"x": value} for value in values], {"'NoneType' and": NO_RESULT})
    want = mean(values)
    for rank, got in enumerate(run.results):
        mistakes = {OWN: values[rank], SUM: world * want, OF_FOUR: world * want / 4}
        wrong_if(t, got, want, mistakes, rtol=1e-4, atol=1e-6, rank=rank, world=world)
        first, own = (near(each, want, 1e-4, 1e-6) for each in (run.results[0], got))
        t.that(own or not first, ONE_RANK, rank=rank)
    every_rank(t, run, want, "the mean on rank {rank} of {world}")
    return run


@check("mean", points=1, seconds=20)
def check_mean(student, t):
    "Each of four ranks has the mean"
    mean_of(student, t, 4, t.integer(2, 5))


@check("mean", points=1, seconds=20)
def check_any_number_of_ranks(student, t):
    "It works for any number of ranks"
    mean_of(student, t, 3, t.integer(2, 5))


@check("mean", points=1, seconds=20)
def check_one_all_reduce(student, t):
    "One all-reduce, and nothing else"
    size = t.integer(2, 5)
    run = mean_of(student, t, 4, size)
    passes_only(t, run, [Kind.ALL_REDUCE], "rank {rank} calls {kinds}: an all-reduce is enough")
    message = "rank {rank} passes {got} bytes in {count} calls: one all-reduce of {want} bytes is enough"
    passes_exactly(t, run, 4 * size, message, calls=1)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 3))
