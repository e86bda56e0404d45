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

SEQ, VOCAB = 2048, 51_200
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
    if table == "megatron-2022":
        return _of_2022(entry)
    if table.startswith("torchtitan"):
        given = dict(entry["nodes"])
        name, port, bandwidth = given.pop("gpu"), given.pop("link"), given.pop("bandwidth", None)
        card = gpu(name) if bandwidth is None else replace(gpu(name), bandwidth=bandwidth)
        nodes = GpuNodes(gpu=card, link=link(port), **given)
        return tuple(_sharded(nodes, *row) for row in entry["rows"])
    return tuple(
        _megatron(ModelSizes.gpt(hidden, layers, heads), (tp, pp, chunks), gpus, batch, micro_batch, tflops)
        for hidden, layers, heads, tp, pp, gpus, batch, micro_batch, chunks, tflops in entry["rows"]
    )


@cache
def published_sweeps() -> tuple[PublishedSweep, ...]:
    """Return the sweeps, one for each batch. The figures have no numbers to compare."""
    sweeps = []
    for entry in _tables()["sweep"]:
        for batch in entry["batches"]:
            sizes = ModelSizes.gpt(*entry["gpt"])
            runs = tuple(
                _megatron(sizes, (tp, pp, 1), entry["gpus"], batch, micro_batch, np.nan)
                for tp, pp, micro_batch in entry["rows"]
            )
            title = f"{entry['title']}, batch {batch}"
            sweeps.append(PublishedSweep(title, runs, entry["rows"].index(entry["best"])))
    return tuple(sweeps)


def errors(runs: tuple[PublishedRun, ...], stack: Stack) -> Array:
    """Return the error of each run, in points of the peak."""
    return np.array([run.error(stack) for run in runs])


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def _megatron(
    sizes: ModelSizes, split: tuple[int, int, int], gpus: int, batch: int, micro_batch: int, tflops: float
) -> PublishedRun:
    """Return a run with full recomputation, which the FLOPs of its table count; ``split``: tp, pp, stages of
    a rank."""
    tp, pp, chunks = split
    copies, hidden, layers = gpus // (tp * pp), sizes.hidden, sizes.layers
    kind = ScheduleKind.INTERLEAVED if chunks > 1 else ScheduleKind.ONE_F_ONE_B
    plans = Plans.of(
        pp=pp,
        tp=tp,
        dp_replicate=copies,
        chunks=chunks,
        schedule=SCHEDULES.index(kind),
        micro_batch=micro_batch,
        micro_batches=batch // copies // micro_batch,
        checkpointing=Checkpointing.FULL,
    )
    flops = 96.0 * batch * SEQ * layers * hidden**2
    flops *= 1 + SEQ / (6 * hidden) + VOCAB / (16 * layers * hidden)
    return PublishedRun(sizes, plans, flops, flops / (gpus * tflops * 1e12))


def _of_2022(entry: dict[str, Any]) -> tuple[PublishedRun, ...]:
    """Return the runs of one model of which the MFU is published."""
    sizes, plans = ModelSizes.gpt(*entry["gpt"]), Plans.of(**entry["plan"])
    flops = sizes.flops(float(plans.copies[0] * plans.micro_batches[0]) * SEQ, SEQ)
    peak = int(plans.gpus[0]) * A100.gpu.peak("fp16")
    return tuple(
        PublishedRun(sizes, plans[[index]], flops, 100 * flops / (percent * peak))
        for index, percent in enumerate(entry["mfu"])
    )


def _sharded(
    nodes: GpuNodes,
    model: str,
    gpus: int,
    tp: int,
    micro_batch: int,
    seq: int,
    compiled: bool,
    recomputed: float | str,
    tokens: float,
) -> PublishedRun:
    """Return a run with sharded parameters, of which the tokens/s of a GPU are published."""
    sizes = ModelSizes(*_tables()["models"][model])
    plans = Plans.of(
        tp=tp,
        dp_shard=gpus // tp,
        stage=3,
        sequence_parallel=tp > 1,
        micro_batch=micro_batch,
        checkpointing=Checkpointing.FULL,
        compiled=compiled,
    )
    if recomputed == "products":
        recomputed = sizes.hidden * (sizes.keys + sizes.queries + sizes.intermediate) / sizes.matrices
    every = float(micro_batch * seq * gpus // tp)
    flops, seconds = sizes.flops(every, seq), every / (gpus * tokens)
    return PublishedRun(sizes, plans, flops, seconds, nodes, seq, "bf16", float(recomputed))
