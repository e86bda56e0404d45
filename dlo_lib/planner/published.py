"""Published training runs (``published.toml``), and how far a prediction is from each.

Errors are in points of the peak: 100 * FLOPs of a step / (seconds * peak of all GPUs), predicted minus
measured, where both count the same FLOPs.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.planner.cost import step_cost
from dlo_lib.planner.plans import SCHEDULES, Array, Checkpointing, Plans
from dlo_lib.planner.sizes import ModelSizes
from dlo_lib.planner.stack import Stack

SEQ = 2048
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
        recomputed: the part of the recomputation of the plan that ran: below 1 if some blocks or products
            kept their results.
    """

    sizes: ModelSizes
    plans: Plans
    flops: float
    seconds: float
    nodes: GpuNodes = A100
    seq: int = SEQ
    dtype: str = "fp16"
    recomputed: float = 1.0

    def predicted(self, stack: Stack) -> float:
        """Return the predicted seconds of a step."""

        def seconds(plans: Plans) -> float:
            return float(step_cost(self.sizes, plans, self.seq, self.nodes, stack, self.dtype).seconds[0])

        whole = seconds(self.plans)
        if self.recomputed == 1:
            return whole
        saved = seconds(replace(self.plans, checkpointing=np.array([Checkpointing.NONE])))
        return saved + self.recomputed * (whole - saved)

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
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def _nodes(gpus: str, ports: str, bandwidth: float | None = None, **counts: Any) -> GpuNodes:
    card = gpu(gpus) if bandwidth is None else replace(gpu(gpus), bandwidth=bandwidth)
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
    plan = {name: given[name] for name in _OF_PLANS if name in given}
    plans = Plans.of(
        dp_shard=copies if given.get("stage") == 3 else 1,
        dp_replicate=1 if given.get("stage") == 3 else copies,
        schedule=SCHEDULES.index(ScheduleKind.INTERLEAVED if interleaved else ScheduleKind.ONE_F_ONE_B),
        micro_batches=sequences // (copies * given["micro_batch"]),
        **{"checkpointing": Checkpointing.FULL} | plan,
    )
    part, flops = given.get("recomputed", 1), sizes.flops(float(sequences) * seq, seq)
    if part == "products":
        part = sizes.hidden * (sizes.keys + sizes.queries + sizes.intermediate) / sizes.matrices
    if "tokens" in given:
        seconds = sequences * seq / (gpus * given["tokens"])
    elif "mfu" in given:
        seconds = 100 * flops / (given["mfu"] * gpus * nodes.gpu.peak(dtype))
    else:
        flops = 96.0 * sequences * seq * sizes.layers * sizes.hidden**2
        flops *= 1 + seq / (6 * sizes.hidden) + sizes.vocab / (16 * sizes.layers * sizes.hidden)
        seconds = flops / (gpus * given.get("tflops", np.nan) * 1e12)
    return PublishedRun(sizes, plans, flops, seconds, nodes, seq, dtype, float(part))
