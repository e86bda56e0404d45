"""The closed formulas of memory against ``measure_memory``, on drawn plans of models with experts.

Other plans than those of ``tests/planner/measured_experts.jsonl``, which the formulas were compared with. The
model has 8 blocks of width 512. A part is within the limits if it is off by at most 5 % of itself or 2 % of
the peak.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from benchmarks.paired import Row
from dlo_lib.models import LlamaConfig
from dlo_lib.models.router import GateWeights, MoEConfig
from dlo_lib.parallel.plan import ParallelPlan, ZeroStage
from dlo_lib.planner.memory import plan_memory
from dlo_lib.planner.plans import Checkpointing, Plans
from dlo_lib.planner.sizes import ModelSizes
from dlo_lib.profiling import Part, measure_memory

SEED, ROWS = 40, 1


def drawn(draw: random.Random) -> tuple[LlamaConfig, ParallelPlan]:
    """Draw a model and a plan of ZeRO 0 or 3 with ep 1, 2 or 4."""
    top_k, ep = draw.choice([1, 2]), draw.choice([1, 2, 4])
    weights = GateWeights.SOFTMAX_BEFORE if top_k == 1 else GateWeights.SOFTMAX_AFTER
    shared, every = draw.choice([0, 512]), draw.choice([1, 2])
    moe = MoEConfig(draw.choice([8, 16]), top_k, draw.choice([256, 512, 1024]), shared, every, weights)
    config = LlamaConfig(
        vocab_size=draw.choice([4000, 8000]), hidden=512, intermediate=1536, num_layers=8, num_heads=8,
        num_kv_heads=draw.choice([4, 8]), head_dim=64, tied_embeddings=draw.random() < 0.5, moe=moe,
    )  # fmt: skip
    stage = draw.choice([ZeroStage.NONE, ZeroStage.PARAMETERS])
    tp = draw.choice([1, 1, 2])
    shards = max(2, ep) if stage is ZeroStage.PARAMETERS or ep > 1 else 1
    plan = ParallelPlan(
        dp_shard=shards, dp_replicate=draw.choice([1, 2]), ep=ep, tp=tp, zero_stage=stage,
        sequence_parallel=tp > 1 and draw.random() < 0.5,
    )  # fmt: skip
    return config, plan


def rows(pairs: int = 12) -> Iterator[Row]:
    """Yield a row that compares ``pairs`` drawn plans."""
    draw, off, parts, peaks = random.Random(SEED), 0, 0, []
    for _ in range(pairs):
        config, plan = drawn(draw)
        seq, full = draw.choice([1024, 2048]), draw.random() < 0.5
        ranks = plan.dp_replicate * plan.dp_shard * plan.tp
        report = measure_memory(config, 1, seq, checkpointing=full, parallel=plan, world_size=ranks)
        saves = Checkpointing.FULL if full else Checkpointing.NONE
        found = plan_memory(
            ModelSizes.of(config), Plans.of_plans([plan], checkpointing=saves, micro_batch=1), seq
        )
        peaks.append(abs(float(found.peak[0]) / report.peak_bytes - 1))
        for part in Part:
            measured, computed = report.peak_by_part[part], float(found.parts[part][0])
            parts += measured > 0
            off += abs(measured - computed) > max(0.05 * measured, 0.02 * report.peak_bytes)
    note = f"{parts - off} of {parts} parts within 5 % of themselves or 2 % of the peak; the peak is off by "
    note += f"{100 * np.mean(peaks):.1f} % on average, {100 * max(peaks):.1f} % at most"
    yield Row(f"memory of experts, {pairs} drawn plans", "measure_memory", 1, note=note)
