"""Fits the constants of a software stack to published runs, and tests them on runs that it has not seen.

The table of Megatron-LM (2021) has ten runs, on 32 to 3,072 GPUs. Three of the five constants are fitted by
least squares of the squared error, which weighs the largest error most; ``depth`` and ``links`` are fixed
within their bounds, because ten runs do not separate them from the others. Leave-one-out fits the constants
to nine runs and predicts the tenth.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dlo_lib.base.errors import UserError
from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.planner.cost import COMPUTED, StepCost, step_cost
from dlo_lib.planner.plans import SCHEDULES, Array, Checkpointing, Plans
from dlo_lib.planner.sizes import ModelSizes
from dlo_lib.planner.stack import BOUNDS, Stack

FITTED = ("matmul", "memory", "sends")
SEQ, VOCAB = 2048, 51_200
MEGATRON = Stack(
    matmul=0.776,
    depth=200.0,
    memory=0.845,
    links=0.70,
    sends=0.172,
    spread=0.06,
    flash=None,
    grad_bytes=2,
    overlap=0.0,
    balanced=False,
)
"""Megatron-LM of 2021 (PyTorch 1.8): ``fit(published("calibration"))``. Attention writes its scores, and the
reduction of gradients hides behind nothing. ``spread``: leave-one-out."""
LIBRARY = replace(
    MEGATRON, flash=0.6, grad_bytes=4, overlap=0.8, balanced=True, scatter_gather=False, spread=0.3
)
"""This library on PyTorch 2: flash attention, balanced stages, reductions behind the backward, whole
activations between stages. Its constants are those of ``MEGATRON`` on A100, so that its error on another card
is large: 32 % of the time of Llama 3.2 1B on an H100. One measured run fixes it (``Stack.anchored``)."""
H100_TOKENS = 34_497
"""Measured tokens/s of Llama 3.2 1B on one H100: eager bf16, 2 sequences of 2,048 tokens. With fused kernels,
it was 29,689, which the formulas do not predict: they count the bytes that fused kernels save."""


def library_stack(nodes: GpuNodes) -> Stack:
    """Return the stack of this library on these GPUs: anchored by our run on an H100 where they are Hopper's,
    otherwise that of A100, with a wide interval."""
    if not nodes.gpu.name.startswith(("h100", "h200")):
        return LIBRARY
    plans = Plans.of(micro_batch=2)
    one = GpuNodes(gpu("h100-80"), 1, link("ndr"), 1)
    return anchored_by(LIBRARY, ModelSizes.of("llama-3.2-1b"), plans, 2048, one, 2 * 2048 / H100_TOKENS)


def anchored_by(
    stack: Stack,
    sizes: ModelSizes,
    plans: Plans,
    seq: int,
    nodes: GpuNodes,
    seconds: float,
    dtype: str = "bf16",
) -> Stack:
    """Return ``stack`` with the slowdown for which the first of ``plans`` takes ``seconds`` a step.

    Raises:
        UserError: its communication and its optimiser alone are predicted to take longer.
    """
    for _ in range(4):  # the bubble, which consists of computation and messages, changes too
        cost = step_cost(sizes, plans, seq, nodes, stack, dtype)
        busy = float(sum(cost.parts[name][0] for name in COMPUTED))
        rest = float(cost.seconds[0]) - busy
        if seconds <= rest:
            raise UserError(
                f"the run took {seconds:.3g} s a step, its communication alone {rest:.3g} s as predicted: "
                "check --site and the plan of the run"
            )
        stack = stack.anchored(busy, seconds - rest)
    return stack


@dataclass(frozen=True)
class PublishedRun:
    """One run of a table: a model, a plan, and TFLOP/s of a GPU with recomputation."""

    sizes: ModelSizes
    plans: Plans
    gpus: int
    batch: int
    tflops: float

    def cost(self, stack: Stack) -> StepCost:
        """Return the predicted time of a step on nodes of 8 A100 with eight 200 Gb/s links."""
        nodes = GpuNodes(gpu("a100-80"), 8, link("hdr"), 8)
        return step_cost(self.sizes, self.plans, SEQ, nodes, stack, "fp16")

    def percent(self, stack: Stack) -> float:
        """Return the predicted percentage of the peak, by the formula of the paper (equation 3), which counts
        recomputation."""
        hidden, layers = self.sizes.hidden, self.sizes.layers
        flops = 96.0 * self.batch * SEQ * layers * hidden**2
        flops *= 1 + SEQ / (6 * hidden) + VOCAB / (16 * layers * hidden)
        return float(100 * flops / (self.cost(stack).seconds[0] * self.gpus * gpu("a100-80").peak("fp16")))

    def error(self, stack: Stack) -> float:
        """Return the predicted minus the measured percentage of the peak, in points."""
        return self.percent(stack) - 100e12 * self.tflops / gpu("a100-80").peak("fp16")


@cache
def published(table: str = "calibration") -> tuple[PublishedRun, ...]:
    """Return the runs of a table of ``published.toml``: "calibration" or "unseen"."""
    return tuple(
        _run(ModelSizes.gpt(hidden, layers, heads), (tp, pp, chunks), gpus, batch, micro_batch, tflops)
        for hidden, layers, heads, tp, pp, gpus, batch, micro_batch, chunks, tflops in _tables()[table][
            "rows"
        ]
    )


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))


def _run(
    sizes: ModelSizes, split: tuple[int, int, int], gpus: int, batch: int, micro_batch: int, tflops: float
) -> PublishedRun:
    """Return a run with full recomputation; ``split``: tp, pp, stages of a rank."""
    tp, pp, chunks = split
    copies = gpus // (tp * pp)
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
    return PublishedRun(sizes, plans, gpus, batch, tflops)


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


def published_sweeps() -> tuple[PublishedSweep, ...]:
    """Return the sweeps of ``published.toml``, one for each batch. The figures have no numbers to compare."""
    sweeps = []
    for entry in _tables()["sweep"]:
        for batch in entry["batches"]:
            runs = tuple(
                _run(ModelSizes.gpt(*entry["gpt"]), (tp, pp, 1), entry["gpus"], batch, micro_batch, np.nan)
                for tp, pp, micro_batch in entry["rows"]
            )
            title = f"{entry['title']}, batch {batch}"
            sweeps.append(PublishedSweep(title, runs, entry["rows"].index(entry["best"])))
    return tuple(sweeps)


def errors(runs: tuple[PublishedRun, ...], stack: Stack) -> Array:
    """Return the error of each run, in points of the peak."""
    return np.array([run.error(stack) for run in runs])


def fit(runs: tuple[PublishedRun, ...], start: Stack = MEGATRON, rounds: int = 8) -> Stack:
    """Return the stack with the constants ``FITTED`` to ``runs``: Gauss-Newton on the squared errors, within
    ``BOUNDS``."""
    low, high = np.array([BOUNDS[name] for name in FITTED]).T
    values = np.array([getattr(start, name) for name in FITTED])

    def stack_of(found: Array) -> Stack:
        matmul, memory, sends = map(float, found)
        return replace(start, matmul=matmul, memory=memory, sends=sends)

    def residuals(found: Array) -> Array:
        points = errors(runs, stack_of(found))
        return points * np.abs(points)

    best = residuals(values)
    for _ in range(rounds):
        steps = 1e-3 * (high - low)
        slopes = np.stack(
            [
                (residuals(values + step * unit) - best) / step
                for step, unit in zip(steps, np.eye(len(FITTED)))
            ]
        )
        scaled = slopes * (high - low)[:, None]
        damped = scaled @ scaled.T + 1e-3 * np.eye(len(FITTED)) * np.trace(scaled @ scaled.T)
        move = -np.linalg.solve(damped, scaled @ best) * (high - low)
        for shorter in (1.0, 0.3, 0.1):
            tried = np.clip(values + shorter * move, low, high)
            if (found := residuals(tried)) @ found < best @ best:
                values, best = tried, found
                break
        else:
            break
    return stack_of(values)


def leave_one_out(runs: tuple[PublishedRun, ...], start: Stack = MEGATRON) -> Array:
    """Return the error of each run, in points, of constants that are fitted to the others."""
    found = []
    for index, run in enumerate(runs):
        others = runs[:index] + runs[index + 1 :]
        found.append(run.error(fit(others, start, rounds=4)))
    return np.array(found)
