"""Predicted against measured time of a training step on the ranks of this machine.

First the constants are fitted (``dlo_lib/planner/measure.py``, some seconds on two ranks). Then each plan
makes steps in turns with the first calibration run. The ratios are measured / predicted: of the wall time,
and of the CPU time of the slowest rank, where each step is divided by the slowdown of the calibration run
beside it. Wall times count on an idle machine only; the note shows where other work used it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.paired import Row, Spread
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.parallel.plan import ParallelPlan, ZeroStage
from dlo_lib.planner.measure import CALIBRATION, SmallRun, measure, predicted, run_steps, small_llama
from dlo_lib.planner.plans import Array

MODEL = small_llama()
BUSY = 1.1
"""The wall time of a process alone, relative to its CPU time, above which other work has its core."""


def _run(plan: ParallelPlan, batch: int = 2, seq: int = 128, **others: int | bool) -> SmallRun:
    return SmallRun(MODEL, seq, batch, plan, **others)  # type: ignore[arg-type]


def _piped(stages: int, schedule: ScheduleKind, count: int) -> SmallRun:
    return _run(ParallelPlan(pp=stages, schedule=schedule, micro_batches=count), batch=1, micro_batches=count)


TWO, ALL = ParallelPlan(dp_replicate=2), ZeroStage.PARAMETERS
CASES = {
    "DDP": _run(TWO),
    "DDP, two micro-batches": _run(TWO, batch=1, micro_batches=2),
    "DDP, checkpointing": _run(TWO, checkpointing=True),
    "ZeRO-1": _run(ParallelPlan(dp_shard=2, zero_stage=ZeroStage.OPTIMIZER)),
    "ZeRO-2": _run(ParallelPlan(dp_shard=2, zero_stage=ZeroStage.GRADIENTS)),
    "FSDP": _run(ParallelPlan(dp_shard=2, zero_stage=ALL)),
    "tensor": _run(ParallelPlan(tp=2)),
    "tensor, sequence parallelism": _run(ParallelPlan(tp=2, sequence_parallel=True)),
    "pipeline, 1F1B": _piped(2, ScheduleKind.ONE_F_ONE_B, 4),
    "pipeline, AFAB": _piped(2, ScheduleKind.AFAB, 4),
    "context, ring": _run(ParallelPlan(cp=2), seq=256),
    "DDP on 4": _run(ParallelPlan(dp_replicate=4)),
    "pipeline, 1F1B on 4": _piped(4, ScheduleKind.ONE_F_ONE_B, 8),
    "FSDP x tensor on 4": _run(ParallelPlan(dp_shard=2, zero_stage=ALL, tp=2)),
}
ROWS = len(CASES)
SECONDS = (1.5, 0.3)


def rows(pairs: int = 8) -> Iterator[Row]:
    """Yield a row for each plan; ``pairs``: its steps."""
    machine = measure()
    alone = float(predicted(CALIBRATION[0], machine).cpu_seconds[0])
    for name, run in CASES.items():
        turns, cost = run_steps(run, pairs), predicted(run, machine)
        wall, cpu = float(cost.seconds[0]), float(cost.cpu_seconds[0])
        corrected = turns.cpu * alone / turns.reference_cpu
        busy = float(np.median(turns.reference_wall / turns.reference_cpu))
        ranks = int(run.plans.gpus[0])
        said = "cores shared; " if cost.shared[0] else ""
        said += f"{1e3 * wall:.0f} ms predicted, {1e3 * float(np.median(turns.wall)):.0f} measured"
        said += f"; CPU {1e3 * cpu:.0f}, {1e3 * float(np.median(corrected)):.0f}"
        if busy > BUSY and ranks <= machine.cores:
            said += f"; machine busy: a process alone took {busy:.1f} times its CPU time"
        yield Row(
            name, "predicted", ranks, time_ratio=_spread(turns.wall / wall),
            cpu_ratio=_spread(corrected / cpu), note=said,
        )  # fmt: skip


def _spread(ratios: Array) -> Spread:
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high), len(ratios))
