"""Visible checks of the small lab."""

from dlo_lib.grading.checks.contract import check, scenario
from dlo_lib.labkit.traffic import uses_what_arrives


@check("scale", points=1)
def check_scale_shape(student, t):
    """One scale a row"""
    x = t.normal(t.integer(2, 6), t.integer(8, 20))
    t.tensor(student.absmax_scale(x), "absmax_scale(x)", shape=x.shape[:1])


@check("scale", points=1)
def check_largest(student, t):
    """The largest element becomes 127"""
    x = t.normal(4, 30)
    scale = t.tensor(student.absmax_scale(x), "absmax_scale(x)", shape=(4,))
    t.close(
        (x.abs() / scale[:, None]).amax(dim=1),
        x.new_full((4,), 127.0),
        "the largest element of each row, divided by its scale",
    )


@check("quantise", points=3)
def check_round_trip(student, t):
    """Nothing is further away than half a step"""
    x = t.normal(t.integer(2, 6), t.integer(8, 20))
    q, scale = t.items(student.quantise(x), 2, "quantise(x)")
    t.tensor(q, "q", shape=x.shape)
    t.tensor(scale, "scale", shape=x.shape[:1])
    gap = (q.float() * scale[:, None] - x).abs()
    t.that(
        bool((gap <= 0.51 * scale[:, None]).all()),
        "q * scale is up to {gap:.3g} away from x: more than half a step",
        gap=float(gap.max()),
    )


@scenario
def mean(student, rank, world, x):
    return student.all_reduce_mean(x)


@check("mean", points=1, seconds=6)
def check_mean_everywhere(student, t):
    """Every rank gets the mean"""
    xs = [t.normal(5) for _ in range(2)]
    run = student.ranks(mean, [{"x": x} for x in xs])
    for rank, got in enumerate(run.results):
        t.close(got, sum(xs) / 2, "the mean on rank {rank}", rank=rank)
    uses_what_arrives(t, run)
