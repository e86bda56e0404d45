"""Published training runs (``planner_published.toml``), and how far a prediction is from each.

Errors are in points of the peak: 100 * FLOPs of a step / (seconds * peak of all GPUs), predicted minus
measured, where both count the same FLOPs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.planner.cost import StepParts
from dlo_lib.planner.plans import SCHEDULES, Array, Checkpointing, Plans
from dlo_lib.planner.sizes import ModelSizes
from dlo_lib.planner.stack import Stack

SEQ = 2048
_OF_STACKS = ("hides_tensor", "fused_norms")
"""The names of columns that are fields of ``Stack``."""
_OF_PLANS = ("pp", "tp", "stage", "chunks", "micro_batch", "checkpointing", "compiled", "sequence_parallel")
"""The names of columns that are fields of ``Plans``."""
A100 = GpuNodes(gpu("a100-80"), 8, link("hdr"), 8)
"""The nodes of arXiv:2104.04473: 8 GPUs, eight links of 200 Gb/s."""


@dataclass(frozen=True)
class PublishedRun:
    """One run of a table.

    Attributes:
        sizes, plans, nodes, seq, dtype: what ran; ``plans`` is one plan.
        flops: of a step of all GPUs, as the table counts them.
        seconds: of a step, as measured; NaN in a figure without numbers.
        recomputed: the part of the forward of blocks that is computed again.
        products: with selective recomputation of operations, the part of the matrix products that is computed
            again, with all kernels between them and without attention; None otherwise.
        software: fields of the ``Stack`` in which this run differs, which are known.
    """

    sizes: ModelSizes
    plans: Plans
    flops: float
    seconds: float
    nodes: GpuNodes = A100
    seq: int = SEQ
    dtype: str = "fp16"
    recomputed: float = 1.0
    products: float | None = None
    software: Mapping[str, bool] = field(default_factory=dict)

    def predicted(self, stack: Stack) -> float:
        """Return the predicted seconds of a step."""
        stack = replace(stack, **self.software)

        def parts(plans: Plans) -> StepParts:
            return StepParts(self.sizes, plans, self.seq, self.nodes, stack, self.dtype)

        whole = parts(self.plans)
        if self.recomputed == 1 and self.products is None:
            return float(whole.cost().seconds[0])
        saved = parts(replace(self.plans, checkpointing=np.array([Checkpointing.NONE]))).cost().seconds[0]
        if self.products is None:
            return float(saved + self.recomputed * (whole.cost().seconds[0] - saved))
        block = whole.block()
        # What sequence parallelism scattered is kept, and what it gathers is gathered again.
        again = self.products * block.linears[0] + block.small[0] + block.tensor[0] / 2
        return float(saved + self.sizes.layers * self.plans.micro_batches[0] * again[0])

    def percent(self, stack: Stack) -> float:
        """Return the predicted percentage of the peak."""
        return self._percent(self.predicted(stack))

    @property
    def measured_percent(self) -> float:
        """The measured percentage of the peak."""
        return self._percent(self.seconds)

    def error(self, stack: Stack) -> float:
        """Return the predicted minus the measured percentage of the peak, in points."""
        return self.percent(stack) - self.measured_percent

    def _percent(self, seconds: float) -> float:
        return 100 * self.flops / (seconds * int(self.plans.gpus[0]) * self.nodes.gpu.peak(self.dtype))


@dataclass(frozen=True)
class PublishedSweep:
    """Plans of one model and batch, of which a paper says which is the fastest."""

    title: str
    runs: tuple[PublishedRun, ...]
    best: int
    """The index of the plan that was measured as the fastest."""

    def reached(self, stack: Stack) -> Array:
        """Return the predicted throughput of each plan as a fraction of the best predicted one."""
        percent = np.array([run.percent(stack) for run in self.runs])
        return percent / percent.max()


@cache
def published(table: str = "calibration") -> tuple[PublishedRun, ...]:
    """Return the runs of a table: "calibration", "unseen", "megatron-2022", "torchtitan-a100" or
    "torchtitan-h100"."""
    entry = _tables()[table]
    return tuple(_run(entry, dict(zip(entry["columns"], row))) for row in entry["rows"])


@cache
def published_sweeps() -> tuple[PublishedSweep, ...]:
    """Return the sweeps, one for each batch. The figures have no numbers to compare."""
    return tuple(
        PublishedSweep(
            f"{entry['title']}, batch {batch}",
            tuple(_run(entry, dict(zip(entry["columns"], row), batch=batch)) for row in entry["rows"]),
            entry["rows"].index(entry["best"]),
        )
        for entry in _tables()["sweep"]
        for batch in entry["batches"]
    )


def errors(runs: tuple[PublishedRun, ...], stack: Stack) -> Array:
    """Return the error of each run, in points of the peak."""
    return np.array([run.error(stack) for run in runs])


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _nodes(gpus: str, ports: str, bandwidth: float = 0, watts: float = 0, **counts: Any) -> GpuNodes:
    card = gpu(gpus)
    card = replace(card.limited(watts or card.watts), bandwidth=bandwidth or card.bandwidth)
    return GpuNodes(gpu=card, link=link(ports), **counts)


def _run(entry: dict[str, Any], row: dict[str, Any]) -> PublishedRun:
    """Return the run of a row of a table."""
    given = entry.get("all", {}) | row
    gpt = "gpt" in given
    sizes = ModelSizes.gpt(*given["gpt"]) if gpt else ModelSizes(*_tables()["models"][given["model"]])
    nodes = _nodes(**entry["nodes"]) if "nodes" in entry else A100
    gpus, seq, dtype = given["gpus"], given.get("seq", SEQ), given.get("dtype", "fp16")
    copies = gpus // (given["tp"] * given.get("pp", 1))
    sequences = given.get("batch", copies * given["micro_batch"])
    interleaved = given.get("chunks", 1) > 1
    plan, software = (
        {name: given[name] for name in names if name in given} for names in (_OF_PLANS, _OF_STACKS)
    )
    plans = Plans.of(
        dp_shard=copies if given.get("stage") == 3 else 1,
        dp_replicate=1 if given.get("stage") == 3 else copies,
        schedule=SCHEDULES.index(ScheduleKind.INTERLEAVED if interleaved else ScheduleKind.ONE_F_ONE_B),
        micro_batches=sequences // (copies * given["micro_batch"]),
        **{"checkpointing": Checkpointing.FULL} | plan,
    )
    part, products, flops = given.get("recomputed", 1), None, sizes.flops(float(sequences) * seq, seq)
    if part == "products":
        part, products = 1, sizes.hidden * (sizes.keys + sizes.queries + sizes.intermediate) / sizes.matrices
    if "tokens" in given:
        seconds = sequences * seq / (gpus * given["tokens"])
    elif "mfu" in given:
        seconds = 100 * flops / (given["mfu"] * gpus * nodes.gpu.peak(dtype))
    else:
        flops = 96.0 * sequences * seq * sizes.layers * sizes.hidden**2
        flops *= 1 + seq / (6 * sizes.hidden) + sizes.vocab / (16 * sizes.layers * sizes.hidden)
        seconds = flops / (gpus * given.get("tflops", np.nan) * 1e12)
    return PublishedRun(sizes, plans, flops, seconds, nodes, seq, dtype, float(part), products, software)
