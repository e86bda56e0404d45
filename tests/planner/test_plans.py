"""Arrays of plans agree with ``ParallelPlan``, with ``partition`` and with the simulator of pipelines."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.models import model_config
from dlo_lib.parallel.context import ContextKind
from dlo_lib.parallel.pipeline import schedules
from dlo_lib.parallel.pipeline.partition import counted_costs, partition
from dlo_lib.parallel.pipeline.schedules import interleaved, make_schedule
from dlo_lib.parallel.pipeline.simulate import Costs, simulate
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.parallel.plan import ParallelPlan, ZeroStage
from dlo_lib.planner.plans import CHUNKS, CONTEXTS, SCHEDULES, Plans, allowed, refused_models, refused_plans
from dlo_lib.planner.sizes import ModelSizes
from dlo_lib.planner.stages import balanced_stages, bubble, in_flight


def drawn_fields(draw: random.Random) -> dict:
    degrees = {name: draw.choice([1, 1, 2, 3, 4]) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    return degrees | {
        "ep": draw.choice([1, 1, 1, 2, 3]),
        "sequence_parallel": draw.random() < 0.3,
        "zero_stage": ZeroStage(draw.choice([0, 0, 1, 2, 3, 3])),
        "context_kind": draw.choice(CONTEXTS),
        "schedule": draw.choice([None, *SCHEDULES]),
    }


def accepted_by_the_library(fields: dict) -> bool:
    if fields["pp"] == 1:
        fields = fields | {"schedule": None}
    try:
        plan = ParallelPlan(**fields)
        plan.over(
            int(np.prod([getattr(plan, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]))
        )
    except UserError:
        return False
    return True


def test_the_rules_on_arrays_are_those_of_parallel_plan_on_1000_drawn_plans():
    draw = random.Random(5)
    rows = [drawn_fields(draw) for _ in range(1000)]
    plans = Plans.of(
        **{
            name: [row[name] for row in rows]
            for name in rows[0]
            if name not in ("zero_stage", "context_kind", "schedule")
        },
        stage=[int(row["zero_stage"]) for row in rows],
        context=[CONTEXTS.index(row["context_kind"]) for row in rows],
        schedule=[SCHEDULES.index(row["schedule"] or ScheduleKind.ONE_F_ONE_B) for row in rows],
    )
    expected = [accepted_by_the_library(row) for row in rows]
    rules = refused_plans(plans)
    assert allowed(rules).tolist() == expected
    assert 100 < sum(expected) < 900
    assert all(broken.any() for broken in rules.values())


def test_a_row_becomes_the_plan_that_it_was_made_of():
    plan = ParallelPlan(
        pp=4, dp_shard=2, tp=2, sequence_parallel=True, cp=2, context_kind=ContextKind.ULYSSES,
        zero_stage=ZeroStage.PARAMETERS, schedule=ScheduleKind.INTERLEAVED, micro_batches=8,
    )  # fmt: skip
    plans = Plans.of_plans([plan, ParallelPlan(dp_replicate=8)], micro_batch=2)
    assert plans.plan(0) == plan
    assert plans.plan(1) == ParallelPlan(dp_replicate=8, zero_stage=ZeroStage.NONE)
    assert (plans.gpus.tolist(), plans.chunks.tolist()) == ([32, 8], [2, 1])


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.3-70b"])
@pytest.mark.parametrize("seq", [512, 8192])
def test_stages_have_the_blocks_of_partition(model, seq):
    sizes, config = ModelSizes.of(model), model_config(model)
    cases = [(pp, chunks) for pp in (2, 3, 4, 5, 8, 16) for chunks in (1, 2, 3) if pp * chunks <= 16]
    plans = Plans.of(
        pp=[pp for pp, _ in cases],
        chunks=[chunks for _, chunks in cases],
        schedule=SCHEDULES.index(ScheduleKind.INTERLEAVED),
    )
    stages = balanced_stages(plans, sizes, seq)
    for row, (pp, chunks) in enumerate(cases):
        cut = partition(counted_costs(config, seq), pp * chunks)
        blocks = [sum(1 <= piece <= config.num_layers for piece in pieces) for pieces in cut]
        assert stages.first[row] == sum(blocks[::pp]), (pp, chunks)
        assert stages.last[row] == sum(blocks[pp - 1 :: pp]), (pp, chunks)
        assert stages.largest[row] == max(blocks)


SIMULATED = [
    (kind, ranks, many)
    for kind in ScheduleKind
    for ranks, many in ((2, 8), (4, 8), (4, 16), (3, 7))
    if many >= 2 * ranks
]


@pytest.mark.parametrize(("kind", "ranks", "many"), SIMULATED)
def test_bubble_and_flight_are_those_of_the_simulator(kind, ranks, many):
    """Of equal stages, with F = I = W, for which the table of schedules states all bubbles."""
    chunks, schedule = CHUNKS[kind], make_schedule(kind, ranks, many)
    found = simulate(schedule, Costs(1 / chunks, 1 / chunks, 1 / chunks))
    plans = Plans.of(pp=ranks, micro_batches=many, schedule=SCHEDULES.index(kind), chunks=chunks)
    one = np.ones(1)
    waits = bubble(plans, one, one, one)[0]
    if schedules.SCHEDULES[kind].inside:
        inside = max(row[-1][1] - row[0][0] - busy for row, busy in zip(found.spans, found.busy))
        assert inside == pytest.approx(waits, abs=1e-9)
    else:
        assert max(found.bubble) == pytest.approx(waits, abs=1e-9)
    for rank in (0, ranks - 1):
        held = max(_held(schedule.rows[rank]))
        assert in_flight(plans, rank)[0] in (held, held + 1), "DualPipe-V: at most 2p + 1"


def _held(row):
    """The activations of a rank after each action, from forward to input gradient."""
    held = 0
    for action in row:
        held += {"F": 1, "B": -1, "I": -1}.get(action.kind.value, 0)
        yield held


def test_interleaved_stages_divide_the_bubble_for_any_number_of_micro_batches():
    for ranks, many, chunks in ((4, 6, 2), (4, 8, 3), (2, 5, 4)):
        costs = Costs(1 / chunks, 1 / chunks, 1 / chunks)
        found = max(simulate(interleaved(ranks, many, chunks), costs).bubble)
        plans = Plans.of(
            pp=ranks, micro_batches=many, chunks=chunks, schedule=SCHEDULES.index(ScheduleKind.INTERLEAVED)
        )
        assert found == pytest.approx(bubble(plans, *(np.ones(1),) * 3)[0])


def test_a_plan_that_does_not_fit_the_model_is_refused_by_the_rule():
    sizes = ModelSizes.of("llama-3.2-1b")  # 32 heads, 8 key heads, 16 layers, tied
    zb_v = SCHEDULES.index(ScheduleKind.ZB_V)
    plans = Plans.of(
        tp=[8, 16, 1, 1, 1, 1, 2],
        pp=[1, 1, 32, 2, 1, 4, 1],
        cp=[1, 1, 1, 1, 4, 1, 1],
        stage=[0, 0, 0, 3, 0, 0, 0],
        schedule=[2, 2, 2, zb_v, 2, 3, 2],
        chunks=[1, 1, 1, 2, 1, 2, 1],
        ep=[1, 1, 1, 1, 1, 1, 2],
        micro_batches=2,
    )
    rules = refused_models(plans, sizes, seq=2044)
    broken = [[name for name in rules if rules[name][row]] for row in range(len(plans))]
    assert broken[0] == []
    assert "tp divides" in broken[1][0]
    assert "at most the pieces" in broken[2][0]
    assert [name.split()[0] for name in broken[3]] == ["a", "tied"]
    assert "divide the sequence" in broken[4][0]
    assert "as many micro-batches" in broken[5][0]
    assert "ep divides the experts" in broken[6][0]
