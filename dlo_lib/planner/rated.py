"""One plan as seven numbers, as a person writes it: is it valid, and what does it cost?

The numbers are ``pp``, ``tp``, ``dp``, ``micro_batch``, ``chunks`` (stages of a rank: 1 is 1F1B, more are
interleaved 1F1B), ``sharded`` (the state over the ``dp`` copies, ZeRO 3) and ``checkpointing``. Sequence
parallelism comes with ``tp``. A search has more choices than these; ``in_knobs`` says which of its plans can
be written so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.planner.calibration import library_stack
from dlo_lib.planner.cost import step_cost
from dlo_lib.planner.memory import largest_memory
from dlo_lib.planner.plans import SCHEDULES, Array, Checkpointing, Plans, refused_models, refused_plans
from dlo_lib.planner.search import PlanRequest

COUNTS = ("pp", "tp", "dp", "micro_batch", "chunks")
SWITCHES = ("sharded", "checkpointing")
_ONE_F_ONE_B = SCHEDULES.index(ScheduleKind.ONE_F_ONE_B)
_INTERLEAVED = SCHEDULES.index(ScheduleKind.INTERLEAVED)


@dataclass(frozen=True)
class Rated:
    """What a plan costs.

    Attributes:
        refused: why the plan is not valid, or "". If it is refused, the other attributes are 0 or None.
        seconds: of a step.
        mfu: the model FLOPs of the step, as a part of the peak of all GPUs.
        memory: the peak of the rank that needs the most, bytes.
        time_parts: seconds by part of a step.
        memory_parts: bytes by part on that rank; each part at its own peak.
    """

    refused: str
    seconds: float = 0.0
    mfu: float = 0.0
    memory: float = 0.0
    time_parts: Mapping[str, float] | None = None
    memory_parts: Mapping[str, float] | None = None


def rated(request: PlanRequest, plan: Mapping[str, int]) -> Rated:
    """Return what ``plan`` costs on the GPUs of ``request``. Its limit of memory is not applied.

    Args:
        plan: a number for each of ``COUNTS`` and ``SWITCHES``.
    """
    sentence = _refused(request, plan)
    if sentence:
        return Rated(sentence)
    plans, sizes = plans_of(plan, request.batch), request.sizes
    for rule, broken in (refused_plans(plans) | refused_models(plans, sizes, request.seq)).items():
        if broken[0]:
            return Rated(rule)
    stack = library_stack(request.nodes)
    cost = step_cost(sizes, plans, request.seq, request.nodes, stack, request.dtype)
    largest = largest_memory(sizes, plans, request.seq)
    return Rated(
        "",
        float(cost.seconds[0]),
        float(cost.mfu[0]),
        float(largest.peak[0]),
        {name: float(seconds[0]) for name, seconds in cost.parts.items()},
        {part.value: float(held[0]) for part, held in largest.parts.items()},
    )


def plans_of(plan: Mapping[str, int], batch: int) -> Plans:
    """Return the plan as arrays of one row. ``batch``: the sequences of a step of all copies."""
    sharded = bool(plan["sharded"]) and plan["dp"] > 1
    return Plans.of(
        pp=plan["pp"],
        tp=plan["tp"],
        dp_shard=plan["dp"] if sharded else 1,
        dp_replicate=1 if sharded else plan["dp"],
        stage=3 if sharded else 0,
        schedule=_INTERLEAVED if plan["chunks"] > 1 else _ONE_F_ONE_B,
        chunks=plan["chunks"],
        sequence_parallel=plan["tp"] > 1,
        micro_batch=plan["micro_batch"],
        micro_batches=batch // (plan["dp"] * plan["micro_batch"]),
        checkpointing=Checkpointing.FULL if plan["checkpointing"] else Checkpointing.NONE,
    )


def in_knobs(plans: Plans) -> Array:
    """Return which plans the seven numbers can express: bool, shape (plans,)."""
    p = plans
    stages = (p.stage == 0) | ((p.stage == 3) & (p.dp_replicate == 1))
    schedules = (p.pp == 1) | np.isin(p.schedule, (_ONE_F_ONE_B, _INTERLEAVED))
    return (p.cp == 1) & (p.ep == 1) & stages & schedules & ((p.tp == 1) | p.sequence_parallel)


def _refused(request: PlanRequest, plan: Mapping[str, int]) -> str:
    """Return why the numbers are no plan of the request, or ""."""
    names = (*COUNTS, *SWITCHES)
    if missing := [name for name in names if name not in plan]:
        return f"it has no {missing[0]}"
    for name in COUNTS:
        if isinstance(plan[name], bool) or not isinstance(plan[name], int) or plan[name] < 1:
            return f"{name} is {plan[name]!r}, not a whole number from 1 on"
    for name in SWITCHES:
        if plan[name] not in (False, True):
            return f"{name} is {plan[name]!r}, not True or False"
    if (gpus := plan["pp"] * plan["tp"] * plan["dp"]) != request.gpus:
        return f"pp x tp x dp is {gpus}, there are {request.gpus} GPUs"
    if request.batch % (plan["dp"] * plan["micro_batch"]):
        return f"dp x micro_batch does not divide the batch of {request.batch}"
    if plan["chunks"] > 1 and plan["pp"] == 1:
        return "several chunks need a pipeline"
    return ""
