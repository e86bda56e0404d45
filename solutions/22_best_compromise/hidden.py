"""Hidden checks of the best compromise: the visible ideas with other sizes; the answers of the quiz."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer
from dlo_lib.labkit.compare import entry, near

from .checks.choices import drawn_layout, read_megatron, within
from .checks.formulas import step_case
from .checks.plans import compute_of, drawn_step, part_of, parts_of, state_of
from .checks.twins import batch_of, drawn_config, drawn_plan, makespan, ring


@check("bubble", points=1)
def check_everything_at_once(student, t):
    "The bubble of a plan with all degrees above 1"
    pp, tp, dp, b, m = t.integer(5, 9), t.integer(2, 4), t.integer(2, 6), t.integer(2, 4), t.integer(9, 17)
    got = t.number(student.bubble(pp * tp * dp, tp, dp, m * dp * b, b), "bubble(...)")
    t.that(near(got, makespan(pp, m) / m - 1), "with all degrees above 1 the bubble is not (p - 1) / m")


@check("traffic", points=1)
def check_other_step(student, t):
    "The traffic of a step with eight ranks in a group"
    plan, h, layers, parameters, m, seq = step_case(t, tp=8, dp=t.integer(9, 12), pp=t.integer(3, 6))
    layers = plan["pp"] * t.integer(2, 5)
    b, dp = plan["micro_batch"], plan["dp"]
    got = student.step_elements(plan, h, layers, parameters, m * dp * b, seq)
    want = m * layers // plan["pp"] * 4 * ring(b * seq * h, 8, 2)
    t.that(
        near(entry(t, got, "tensor", "step_elements(...)"), want),
        "tensor parallelism sends another number of elements",
    )


@check("memory", points=1)
def check_other_state(student, t):
    "The state of other sharded plans"
    for pp in (2, 4):
        config, plan = (
            drawn_config(t, num_layers=8),
            drawn_plan(t, pp=pp, sharded=True, dp=t.choice([3, 5, 16])),
        )
        got = part_of(student, t, "state", config, plan, batch_of(t, plan), 64 * t.integer(1, 4), last=True)
        t.that(
            near(got, state_of(config, plan) / plan["dp"], 0.005),
            "the state of a sharded plan is not 16 bytes over d",
        )


@check("time", points=1)
def check_other_compute(student, t):
    "The computation of other plans"
    case = drawn_step(t, 8, pp=1, tp=4, chunks=1, checkpointing=False)
    t.that(
        near(parts_of(student, t, *case)["compute"], compute_of(case), 0.02),
        "the computation of one stage is wrong",
    )


@check("choose", points=3, seconds=20)
def check_other_clusters(student, t):
    "At most 1.2 times the planner's best, on other models and clusters"
    within(student, t, 1.2)


@check("configs", points=1)
def check_other_arguments(student, t):
    "The arguments of Megatron-LM for four chunks"
    plan, config, batch = drawn_layout(t, chunks=4)
    got = student.megatron_arguments(plan, config, batch)
    read = read_megatron(t, got, plan["pp"] * plan["tp"] * plan["dp"], config.num_layers)
    t.that(read["chunks"] == 4, "four chunks of a rank have L / (4 p) blocks each")


# -- quiz

ANSWERS = {
    "q1": Answer("b", "with p = n / t the bubble is (n / t - 1) / m"),
    "q2": Answer("c", "8 (t - 1) / t = 7 for each block, 10 blocks"),
    "q3": Answer(
        "a", "there the t ranks hold the same activation, and each would send it over the slow link"
    ),
    "q4": Answer("d", "a smaller micro-batch needs less activations; the state does not depend on it"),
    "q5": Answer("b", "a sharded model gathers its parameters for each micro-batch"),
}
