"""Hidden checks of the best compromise: the visible ideas with other sizes; the answers of the quiz."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer
from dlo_lib.labkit.compare import near

from .checks.choices import drawn_layout, read_megatron, within
from .checks.formulas import sent_in_a_step
from .checks.plans import compute_of, part_of, parts_of
from .checks.twins import drawn_plan, drawn_rank, drawn_step, makespan, owned_by


@check("bubble", points=1)
def check_everything_at_once(student, t):
    "The bubble of a plan with all degrees above 1"
    pp, tp, dp, b, m = t.integer(5, 9), t.integer(2, 4), t.integer(2, 6), t.integer(2, 4), t.integer(9, 17)
    got = t.number(student.bubble(pp * tp * dp, tp, dp, m * dp * b, b), "bubble(...)")
    t.that(near(got, makespan(pp, m) / m - 1), "with all degrees above 1 the bubble is not (p - 1) / m")


@check("traffic", points=1)
def check_other_step(student, t):
    "The traffic of a step with eight ranks in a group"
    got, want = sent_in_a_step(student, t, tp=8, dp=t.integer(9, 12), pp=t.integer(3, 6))
    right = near(got["tensor"], want["tensor"])
    t.that(right, "tensor parallelism sends another number of elements")


@check("memory", points=1)
def check_other_state(student, t):
    "The state of other sharded plans"
    for pp in (2, 4):
        plan = drawn_plan(t, pp=pp, sharded=True, dp=t.choice([3, 5, 16]))
        case = config, *_ = drawn_rank(t, plan, num_layers=8)
        got, want = part_of(student, t, "state", case, last=True), 16 * owned_by(config, plan) / plan["dp"]
        right = near(got, want, 0.005)
        t.that(right, "the state of a sharded plan is not 16 bytes over d")


@check("time", points=1)
def check_other_compute(student, t):
    "The computation of other plans"
    case = drawn_step(t, 8, pp=1, tp=4, chunks=1, checkpointing=False)
    right = near(parts_of(student, t, case)["compute"], compute_of(case), 0.02)
    t.that(right, "the computation of one stage is wrong")


@check("choose", points=3, seconds=20)
def check_other_clusters(student, t):
    "At most 1.2 times the planner's best, on other models and clusters"
    within(student, t, 1.2)


@check("configs", points=1)
def check_other_arguments(student, t):
    "The arguments of Megatron-LM for four chunks"
    plan, config, batch = drawn_layout(t, chunks=4)
    read = read_megatron(t, student.megatron_arguments(plan, config, batch), plan, config.num_layers)
    t.that(read["chunks"] == 4, "four chunks of a rank have L / (4 p) blocks each")


# -- quiz

ANSWERS = {
    "q1": Answer("b", "with p = n / t the bubble is (n / t - 1) / m"),
    "q2": Answer("c", "8 (t - 1) / t = 7 for each block, 10 blocks"),
    "q3": Answer("a", "there t ranks hold the same activation, and each would send it over the slow link"),
    "q4": Answer("d", "a smaller micro-batch needs less activations; the state does not depend on it"),
    "q5": Answer("b", "a sharded model gathers its parameters for each micro-batch"),
}
