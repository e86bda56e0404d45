"""The planner against published runs and against its target of time.

The runs and sweeps are those of ``dlo_lib/planner/published.toml``, our measured run on an H100, and two
published runs of other software. Errors are in points of the peak, predicted minus measured; they need no
pairs. The time of a search is that of the process, of all its steps: candidates, rules, memory, time, order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.paired import Row
from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.planner import LIBRARY, MEGATRON, ModelSizes, PlanRequest, Plans, search, step_cost
from dlo_lib.planner.calibration import (
    H100_TOKENS,
    errors,
    fit,
    leave_one_out,
    published,
    published_sweeps,
)
from dlo_lib.planner.plans import SCHEDULES, Checkpointing

ROWS = 6 + len(published_sweeps())
SEQ_2022, A100 = 2048, GpuNodes(gpu("a100-80"), 8, link("hdr"), 8)
FULL_2022, SELECTIVE_2022 = 42.1, 54.2
"""MFU of 530B on 2,240 A100 with full and with selective recomputation: abstract of arXiv:2205.05198."""
TORCHTITAN_70B = 51.7
"""MFU of Llama 3 70B on 64 A100, FSDP2, full checkpointing, 8,192 tokens, 1 sequence: docs/performance.md of
torchtitan in 2024. The network is not stated; eight links of 200 Gb/s a node are assumed."""


def rows(pairs: int = 5) -> Iterator[Row]:
    """Yield a row for each table; ``pairs``: how often the search is timed."""
    runs = published()
    fitted = fit(runs)
    yield _points("calibration on ten runs", errors(runs, MEGATRON), "arXiv:2104.04473, table 1")
    yield _points("leave-one-out", leave_one_out(runs, fitted), "the same runs")
    yield _points("unseen runs, same software", errors(published("unseen"), MEGATRON), "table 2")
    yield _points("unseen runs, other software", np.array(other_stacks()), "arXiv:2205.05198, torchtitan")
    for sweep in published_sweeps():
        reached = 100 * sweep.reached(MEGATRON)
        each = ", ".join(f"{percent:.0f}" for percent in reached)
        note = (
            f"the best measured plan has {reached[sweep.best]:.1f} % of the best predicted one; all: {each}"
        )
        yield Row(sweep.title, "arXiv:2104.04473, figures 13 - 16", 1, note=note)
    cost = step_cost(
        ModelSizes.of("llama-3.2-1b"), Plans.of(micro_batch=2), 2048,
        GpuNodes(gpu("h100-80"), 1, link("ndr"), 1), LIBRARY,
    )  # fmt: skip
    tokens = 2 * 2048 / float(cost.seconds[0])
    yield Row(
        "Llama 3.2 1B on an H100, cold",
        "measured",
        1,
        note=f"{tokens:,.0f} tokens/s predicted, {H100_TOKENS:,} measured (the anchor of Hopper)",
    )
    nodes = GpuNodes(gpu("h100-80"), 4, link("ndr"), 4)
    request, seconds = PlanRequest("llama-3.3-70b", nodes, 512, 2048, 4096), []
    for _ in range(pairs):
        began = time.process_time()
        found = search(request)
        seconds.append(time.process_time() - began)
    yield Row(
        "search, Llama 3.3 70B on 512 H100",
        "0.3 s",
        512,
        note=f"{found.tried:,} candidates in {statistics.median(seconds):.3f} s of CPU",
    )


def other_stacks() -> list[float]:
    """Return the errors, in points, on runs of other software with the constants of Megatron-LM of 2021."""
    sizes = ModelSizes.gpt(20_480, 105, 128)
    plans = Plans.of(
        pp=35, tp=8, dp_replicate=8, chunks=3, micro_batches=280, micro_batch=1,
        schedule=SCHEDULES.index(ScheduleKind.INTERLEAVED),
        checkpointing=[Checkpointing.FULL, Checkpointing.SELECTIVE], sequence_parallel=[False, True],
    )  # fmt: skip
    full, selective = 100 * step_cost(sizes, plans, SEQ_2022, A100, MEGATRON, "fp16").mfu
    sharded = Plans.of(dp_shard=64, stage=3, checkpointing=Checkpointing.FULL)
    titan = 100 * step_cost(ModelSizes.of("llama-3.1-70b"), sharded, 8192, A100, LIBRARY).mfu[0]
    return [full - FULL_2022, selective - SELECTIVE_2022, titan - TORCHTITAN_70B]


def _points(name: str, found: np.ndarray, source: str) -> Row:
    each = ", ".join(f"{point:+.1f}" for point in found)
    mean, most = np.abs(found).mean(), np.abs(found).max()
    return Row(name, source, 1, note=f"mean {mean:.2f}, largest {most:.2f} points: {each}")
