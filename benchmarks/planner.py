"""The planner against published runs and against its target of time.

The runs and sweeps are those of ``benchmarks/planner_published.toml``, which names their sources, and our
measured run on an H100. Errors are in points of the peak, predicted minus measured; they need no
pairs. The time of a search is that of the process, of all its steps: candidates, rules, memory, time, order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchmarks import planner_memory
from benchmarks.paired import Row
from benchmarks.planner_fit import fit, leave_one_out
from benchmarks.planner_published import errors, published, published_sweeps
from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.planner import (
    LIBRARY,
    MEGATRON,
    ModelSizes,
    PlanRequest,
    Plans,
    library_stack,
    search,
    step_cost,
)
from dlo_lib.planner.calibration import H100_TOKENS, anchored_by

ROWS = 9 + len(published_sweeps())


def rows(pairs: int = 5) -> Iterator[Row]:
    """Yield a row for each table; ``pairs``: how often the search is timed."""
    runs = published()
    fitted = fit(runs)
    yield _points("calibration on ten runs", errors(runs, MEGATRON), "arXiv:2104.04473, table 1")
    yield _points("leave-one-out", leave_one_out(runs, fitted), "the same runs")
    yield _points("unseen runs, same software", errors(published("unseen"), MEGATRON), "table 2")
    yield _points(
        "530B, Megatron-LM of 2022", errors(published("megatron-2022"), MEGATRON), "arXiv:2205.05198"
    )
    titan, source = published("torchtitan-a100"), "torchtitan, docs/performance.md"
    yield _points("torchtitan on 64 A100, cold", errors(titan, LIBRARY), source)
    first, *others = titan
    own = anchored_by(LIBRARY, first.sizes, first.plans, first.seq, first.nodes, first.seconds)
    yield _points("the others with the first as anchor", errors(tuple(others), own), source)
    hopper = published("torchtitan-h100")
    stack = library_stack(hopper[0].nodes)
    yield _points("torchtitan on H100, our anchor", errors(hopper, stack), "torchtitan, benchmarks/")
    for sweep in published_sweeps():
        reached = 100 * sweep.reached(MEGATRON)
        each = ", ".join(f"{percent:.0f}" for percent in reached)
        note = (
            f"the best measured plan has {reached[sweep.best]:.1f} % of the best predicted one; all: {each}"
        )
        yield Row(sweep.title, "arXiv:2104.04473, figures 13 - 16", 1, note=note)
    yield from planner_memory.rows()
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


def _points(name: str, found: np.ndarray, source: str) -> Row:
    each = ", ".join(f"{point:+.1f}" for point in found)
    mean, most = np.abs(found).mean(), np.abs(found).max()
    return Row(name, source, 1, note=f"mean {mean:.2f}, largest {most:.2f} points: {each}")
