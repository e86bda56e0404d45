"""The visible checks of the mean over the ranks."""

from __future__ import annotations

from dlo_lib.comm.calls import Kind
from dlo_lib.grading.checks.contract import Run, check
from dlo_lib.labkit.compare import every_rank, wrong_if
from dlo_lib.labkit.traffic import passes_exactly, passes_only, uses_what_arrives

from .scenarios import averaged
from .twins import mean

OWN = "rank {rank} returns its own numbers: it has not communicated. dist.all_reduce(x) replaces x by the sum over all ranks"
SUM = "rank {rank} returns the sum over the {world} ranks: divide it by their number, dist.get_world_size()"


def mean_of(student, t, world: int, size: int) -> Run:
    """The mean on all ranks is the twin's; the run."""
    values = [t.normal(size) for _ in range(world)]
    run = student.ranks(averaged, [{"x": value} for value in values])
    want = mean(values)
    for rank, got in enumerate(run.results):
        wrong_if(t, got, want, {OWN: values[rank], SUM: world * want}, rtol=1e-4, atol=1e-6, rank=rank, world=world)
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
