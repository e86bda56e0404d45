"""A plan of seven numbers costs what the search says of the same plan, and a wrong one is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.planner import PlanRequest, rated, search
from dlo_lib.planner.rated import in_knobs, plans_of

REQUEST = PlanRequest("llama-3.1-8b", GpuNodes(gpu("h100-80"), 4, link("ndr"), 4), 32, 64)
PLAN = {"pp": 4, "tp": 2, "dp": 4, "micro_batch": 2, "chunks": 2, "sharded": True, "checkpointing": False}


def test_a_plan_of_the_search_costs_the_same():
    found = search(REQUEST)
    rows = np.flatnonzero(in_knobs(found.plans))[:40]
    for row in rows:
        p = found.plans
        plan = {"pp": p.pp, "tp": p.tp, "dp": p.copies, "micro_batch": p.micro_batch, "chunks": p.chunks}
        numbers = {name: int(values[row]) for name, values in plan.items()}
        numbers["chunks"] = numbers["chunks"] if numbers["pp"] > 1 else 1
        switches = {"sharded": bool(p.stage[row] == 3), "checkpointing": bool(p.checkpointing[row])}
        got = rated(REQUEST, numbers | switches)
        assert (got.refused, got.memory) == ("", pytest.approx(found.memory[row]))
        assert got.seconds == pytest.approx(found.cost.seconds[row])
        assert sum(got.time_parts.values()) == pytest.approx(got.seconds)
        assert in_knobs(plans_of(numbers | switches, REQUEST.batch))[0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tp": 4}, "pp x tp x dp is 64, there are 32 GPUs"),
        ({"micro_batch": 3}, "does not divide the batch of 64"),
        ({"pp": 2, "tp": 16, "dp": 1}, "tp divides the heads"),
        ({"pp": 1, "dp": 16}, "several chunks need a pipeline"),
        ({"dp": 4.0}, "dp is 4.0, not a whole number"),
        ({"sharded": 3}, "sharded is 3, not True or False"),
        ({"chunks": 16}, "at most the pieces of the model"),
        ({"micro_batch": 8}, "at least as many micro-batches as stages"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(wrong, says):
    assert says in rated(REQUEST, PLAN | wrong).refused


def test_a_missing_number_is_named():
    assert rated(REQUEST, {"pp": 1}).refused == "it has no tp"
