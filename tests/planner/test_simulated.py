"""The schedule of a plan, executed action by action, against the formulas that the search uses."""

from __future__ import annotations

import numpy as np
import pytest

from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.planner import LIBRARY, PlanRequest, Plans, explain, simulated, simulated_step, step_cost
from dlo_lib.planner.plans import CHUNKS, SCHEDULES
from dlo_lib.planner.search import Found

NODES = GpuNodes(gpu("h100-80"), 4, link("ndr"), 4)
REQUEST = PlanRequest("llama-3.3-70b", NODES, 64, 64, 4096)


def found_of(schedule: ScheduleKind, **degrees: object) -> Found:
    plans = Plans.of(schedule=SCHEDULES.index(schedule), **degrees)
    cost = step_cost(REQUEST.sizes, plans, REQUEST.seq, NODES, LIBRARY)
    return Found(REQUEST, LIBRARY, plans, np.zeros(len(plans)), cost, len(plans))


def test_the_formula_of_1f1b_is_within_five_percent_of_the_simulated_step():
    found = found_of(ScheduleKind.ONE_F_ONE_B, pp=[2, 4, 8, 16], tp=4, micro_batches=64)
    for row in range(4):
        step = simulated_step(found, row)
        assert step is not None
        assert step.seconds == pytest.approx(found.cost.seconds[row], rel=0.05)
        assert 0 < step.bubble < 1.1 * found.cost.parts["pipeline bubble"][row]


def test_a_v_of_many_unequal_stages_is_slower_than_its_formula_says():
    found = found_of(ScheduleKind.ZB_V, pp=[4, 32], chunks=2, tp=8, micro_batches=128)
    few, many = (simulated_step(found, row) for row in (0, 1))
    assert few is not None
    assert many is not None
    assert few.seconds == pytest.approx(found.cost.seconds[0], rel=0.05)
    assert many.seconds > 1.08 * found.cost.seconds[1], "80 blocks on 64 stages: some have two blocks"


@pytest.mark.parametrize("kind", ScheduleKind, ids=lambda kind: kind.value)
def test_the_middle_of_a_long_step_repeats(kind, monkeypatch):
    found = found_of(kind, pp=4, chunks=CHUNKS[kind], micro_batches=70)
    short = simulated_step(found, 0)
    monkeypatch.setattr(simulated, "MOST", 1000)
    whole = simulated_step(found, 0)
    assert short is not None
    assert whole is not None
    assert short.seconds == pytest.approx(whole.seconds, rel=0.01)


def test_a_plan_without_a_pipeline_has_no_schedule_to_simulate():
    found = found_of(ScheduleKind.ONE_F_ONE_B, pp=1, dp_shard=64, stage=3, micro_batches=1)
    assert simulated_step(found, 0) is None
    assert not [line for line in explain(found) if "simulated" in line]


def test_the_explanation_of_a_pipeline_has_the_simulated_step():
    found = found_of(ScheduleKind.INTERLEAVED, pp=8, chunks=2, tp=8, micro_batches=64)
    step = simulated_step(found, 0)
    assert step is not None
    (line,) = [line for line in explain(found) if "simulated" in line]
    assert f"step {1e3 * step.seconds:.0f} ms" in line
