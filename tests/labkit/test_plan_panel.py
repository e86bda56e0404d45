"""The panel rates the plan of its sliders, and names the reason for which a combination is no plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle

import dlo_lib.labkit.plan_panel as module
from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.labkit.figures import GIB
from dlo_lib.labkit.plan_panel import beside_planner, plan_bars, plan_panel
from dlo_lib.planner import PlanRequest, rated

NODES = GpuNodes(gpu("h100-80"), 4, link("ndr"), 4)
REQUEST = PlanRequest("llama-3.3-70b", NODES, 256, 1024, 4096)
PLAN = {"pp": 4, "tp": 4, "dp": 16, "micro_batch": 1, "chunks": 1, "sharded": True, "checkpointing": False}


@pytest.fixture
def sliders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the panel passes to ``explore``."""
    passed: dict[str, Any] = {}
    monkeypatch.setattr(module, "explore", lambda draw, **choices: passed.update(draw=draw, **choices))
    plan_panel(REQUEST, pp=16)
    return passed


def test_a_plan_that_does_not_fit_has_this_in_its_title(sliders: dict[str, Any]) -> None:
    titles = [axes.get_title("left") for axes in sliders["draw"]().axes]
    assert titles[0].startswith("p 16, t 1, d 16: ")
    assert titles[1].endswith("does not fit")


def test_the_bars_add_up_to_the_memory_and_the_time() -> None:
    found = rated(REQUEST, PLAN)
    memory, time = plan_bars(found, PLAN, REQUEST.limit).axes
    for axes, total in ((memory, found.memory / GIB), (time, found.seconds)):
        bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
        assert sum(bar.get_width() for bar in bars) == pytest.approx(total)
    assert time.get_title("left") == f"{found.seconds:.1f} s a step, MFU {100 * found.mfu:.1f} %"


def test_a_combination_that_is_no_plan_is_refused(sliders: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="several chunks need a pipeline"):
        sliders["draw"](pp=1, chunks=2)


def test_own_parts_are_drawn_beside_the_totals_of_the_planner() -> None:
    mine = {"first": {"state": 2 * GIB, "waiting": GIB}, "second": {"state": 9 * GIB, "waiting": GIB}}
    (axes,) = beside_planner(mine, {"first": 4 * GIB, "second": 8 * GIB}, GIB, 5, "GiB").axes
    (diamonds,) = axes.collections
    assert np.asarray(diamonds.get_offsets()).tolist() == [[4, 0], [8, 1]]
    assert [text.get_text() for text in axes.texts] == ["10, the planner 8"]
