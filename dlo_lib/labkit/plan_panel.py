"""Parallel plans as bars of their parts: a panel with a slider for each knob, and one's own model of plans
beside the planner's.

The panel shows which knob makes which part longer, for any request of the planner::

    plan_panel(PlanRequest("llama-3.3-70b", nodes, gpus=256, batch=1024, seq=4096), pp=16)
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from dlo_lib.labkit.explore import explore
from dlo_lib.labkit.figures import BLACK, GIB, LIMIT, SMALL, finish, legend, panels, stacked, styled
from dlo_lib.planner import PlanRequest, Rated, rated
from dlo_lib.planner.explain import COLOURS as TIME_COLOURS
from dlo_lib.profiling import Part
from dlo_lib.profiling.plot import COLOURS

MEMORY_COLOURS = {part.value: COLOURS[part] for part in Part if part in COLOURS}
NO, YES = "no", "yes"


def plan_panel(request: PlanRequest, pp: int = 1, tp: int = 1, checkpointing: str = YES) -> None:
    """Show the panel for the GPUs of ``request``, which begins with a plan that is not sharded.

    ``dp`` is what the other degrees leave of the GPUs. A combination that is no plan keeps the last figure,
    with the reason.

    Args:
        pp, tp, checkpointing: where these sliders start; a degree is a power of 2.
    """

    def panel(pp=pp, tp=tp, micro_batch=1, chunks=1, sharded=NO, checkpointing=checkpointing):
        plan = {"pp": pp, "tp": tp, "dp": request.gpus // (pp * tp), "micro_batch": micro_batch}
        plan |= {"chunks": chunks, "sharded": sharded == YES, "checkpointing": checkpointing == YES}
        found = rated(request, plan)
        if found.refused:
            raise ValueError(found.refused)
        return plan_bars(found, plan, request.limit)

    powers = [1, 2, 4, 8, 16, 32]
    switches = {"sharded": [NO, YES], "checkpointing": [NO, YES]}
    explore(panel, pp=powers, tp=powers[:4], micro_batch=powers[:4], chunks=powers[:3], **switches)


@styled
def plan_bars(found: Rated, plan: dict[str, int], limit: float) -> Figure:
    """The memory of the largest rank and the time of a step of one plan, each as a bar of its parts."""
    memory, time = panels(1, 2, width=10, height=4.6)
    held, took = found.memory_parts or {}, found.time_parts or {}
    share = found.memory / max(sum(held.values()), 1)
    stacked(memory, {"": {name: share * value for name, value in held.items() if value}}, MEMORY_COLOURS, GIB)
    memory.axvline(limit / GIB, color=LIMIT, linestyle="--", label="usable")
    stacked(time, {"": {name: value for name, value in took.items() if value}}, dict(zip(took, TIME_COLOURS)))
    memory.set_title(f"p {plan['pp']}, t {plan['tp']}, d {plan['dp']}: {found.memory / GIB:.0f} GiB")
    verdict = "does not fit" if found.memory > limit else f"MFU {100 * found.mfu:.1f} %"
    time.set_title(f"{found.seconds:.1f} s a step, {verdict}")
    for axes in (memory, time):
        legend(axes, "right", fontsize=SMALL)
    most = max(1.5 * limit, 1.05 * found.memory) / GIB
    finish(memory, "x", xlabel="GiB, each part in its share of the peak", xlim=(0, most))
    return finish(time, "x", xlabel="seconds", xlim=(0, max(40, 1.05 * found.seconds)))


@styled
def beside_planner(
    parts: Mapping[str, Mapping[str, float]],
    planner: Mapping[str, float],
    unit: float,
    most: float,
    xlabel: str,
) -> Figure:
    """Your parts of each plan as bars, and the planner's total as a diamond.

    Args:
        parts: your bytes or seconds of each plan, by part.
        planner: the planner's total of each plan, in the same order.
        unit: what is 1 on the axis, such as ``GIB``.
        most: the end of the axis, in units; a longer bar has its total as text.
    """
    (axes,) = panels(width=10, height=3.8)
    spots = [total / unit for total in planner.values()]
    for row, (end, spot) in enumerate(zip(stacked(axes, parts, unit=unit), spots, strict=True)):
        if end > most:
            told = f"{end:.0f}, the planner {spot:.0f}"
            axes.text(0.99 * most, row, told, ha="right", va="center", color="white")
    rows = range(len(spots))
    axes.scatter(spots, rows, s=50, c="white", marker="D", edgecolors=BLACK, zorder=5, label="the planner")
    legend(axes, "above", ncols=6)
    return finish(axes, "x", xlabel=xlabel, xlim=(0, most))
