"""The memory of a rank for many plans at once, by the parts that ``measure_memory`` reports.

Notation, per token: h hidden, f intermediate, q and k all query and key features, t = tp, s = t with sequence
parallelism and 1 without; N ranks share the state. In bf16, a block keeps for its backward

    with autocast (ZeRO 0 - 2)   16 h / s + c h + (4q + 4k + 8f) / t     inputs and norms in fp32, and the
                                 casts: c = 10 without tp, which casts the input of each product, 4 with it
    sharded parameters (ZeRO 3)  4 h + 12 h / s + (4q + 4k + 8f) / t     everything is in bf16 already

Fused norms keep their input only, and a fused SwiGLU keeps 6 f. Ulysses keeps another 2 q / t, the heads that
it exchanged. With checkpointing, a block keeps its input, and one block at a time has all of the above.
State and the moments of a step: docstring of ``profiling.footprint``. ``tests/profiling/mesh_formula.py``
derives the terms of pipelines.

Precision is bf16 with fp32 state, attention is a flash kernel, and the models have no experts where the
formula was compared with ``measure_memory``, which measures none; there, experts are counted as their
parameters over the ranks that share them, and their activations as those of a wider MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlo_lib.optim.entry import OptimizerStep
from dlo_lib.planner.plans import Array, Plans
from dlo_lib.planner.sizes import ModelSizes
from dlo_lib.planner.stages import balanced_stages, in_flight
from dlo_lib.profiling import Part

_MIB = 2**20
_BUCKET = 24 * _MIB
"""The bytes of a full bucket of gradients, 25 MiB at most."""
_CHUNK = 3072
"""The most rows of a chunk of the fused loss, or half of ``hidden`` if that is more."""


@dataclass(frozen=True)
class PlanMemory:
    """The memory of one rank of each plan, in bytes; arrays of shape (plans,).

    Attributes:
        parts: the peak of each part. The parts peak at different times.
        peak: the largest sum.
    """

    parts: dict[Part, Array]
    peak: Array


def plan_memory(
    sizes: ModelSizes,
    plans: Plans,
    seq: int,
    step: OptimizerStep = OptimizerStep.FUSED,
    last: bool = False,
) -> PlanMemory:
    """Return the memory of the first rank of the pipeline, or of its last one, with AdamW.

    Args:
        seq: the tokens of a whole sequence, of which a rank has 1/cp.
        step: the implementation of AdamW; ``FOREACH`` has temporary tensors as large as its parameters.
    """
    return _Rank(sizes, plans, seq, step, last).memory()


def peak_memory(
    sizes: ModelSizes, plans: Plans, seq: int, step: OptimizerStep = OptimizerStep.FUSED
) -> Array:
    """Return the bytes of the rank that needs the most, (plans,). The first rank of a pipeline has the most
    micro-batches in flight, the last one the logits."""
    first = plan_memory(sizes, plans, seq, step).peak
    return np.maximum(first, plan_memory(sizes, plans, seq, step, last=True).peak)


class _Rank:
    """The terms of one rank; arrays of shape (plans,)."""

    def __init__(self, sizes: ModelSizes, plans: Plans, seq: int, step: OptimizerStep, last: bool) -> None:
        self.sizes, self.plans, self.step = sizes, plans, step
        p = plans
        self.tokens = p.micro_batch * seq / p.cp
        self.sharded = p.stage == 3
        self.pipelined = p.pp > 1
        self.wrapped = (p.copies * p.cp > 1) | (~self.pipelined & (p.tp == 1))
        stages = balanced_stages(p, sizes, seq)
        self.blocks = stages.last if last else stages.first
        self.flight = in_flight(p, p.pp - 1 if last else 0)
        self.has_head = ~self.pipelined | (~stages.head_on_first if last else stages.head_on_first)
        self.has_table = ~self.pipelined | (not last) | (self.has_head & sizes.tied)
        self.receives = self.pipelined & last
        self.table = sizes.table / p.tp
        self.block = sizes.block_parameters / p.tp + 2 * sizes.hidden * (1 - 1 / p.tp)
        tables = self.has_table * 1.0 + self.has_head * (1.0 - (self.has_table & sizes.tied))
        experts = self.blocks * sizes.expert_parameters / (p.ep * p.tp)
        self.owned = self.blocks * self.block + tables * self.table + experts
        self.ranks = p.dp_shard * p.cp
        self.fp32_share = np.where(p.stage >= 3, self.ranks, 1)

    def memory(self) -> PlanMemory:
        parts = {
            Part.WEIGHTS: 4 * self.owned / self.fp32_share,
            Part.GRADIENTS: self.gradients(),
            Part.OPTIMIZER_STATE: 8 * self.owned / np.where(self.plans.stage >= 1, self.ranks, 1),
            Part.STEP_TEMPORARIES: self.temporaries(),
            Part.CAST_WEIGHTS: self.cast_weights(),
            Part.UNITS: self.units(),
            Part.ACTIVATIONS: self.activations(),
            Part.LOGITS_AND_LOSS: self.logits(),
            Part.BUFFERS: 16 * self.plans.micro_batches * self.tokens,
        }
        return PlanMemory(parts, self.peak(parts))

    def peak(self, parts: dict[Part, Array]) -> Array:
        """The largest sum over the moments: the loss, the backward of the last and of the first block, the
        end of the backward, and the optimiser."""
        always = parts[Part.WEIGHTS] + parts[Part.OPTIMIZER_STATE] + parts[Part.BUFFERS]
        cast, held = parts[Part.CAST_WEIGHTS], 4 * self.owned / np.where(self.plans.stage >= 2, self.ranks, 1)
        # In a pipeline, gradients exist before the last forward; without, they grow as activations shrink.
        early = np.where(self.pipelined & ~self.sharded, held, 0)
        units = np.where(self.pipelined, self.early_units(), parts[Part.UNITS] * 2 / 3) * self.sharded
        working = always + early + cast + units
        loss = working + parts[Part.LOGITS_AND_LOSS] + self.waiting() + self.tokens * self.beside()
        last = working + parts[Part.ACTIVATIONS] + np.where(self.has_head, 4 * self.table, 0)
        all_but_one = np.maximum(held - 4 * self.table / np.where(self.plans.stage >= 2, self.ranks, 1), 0)
        first = always + all_but_one + parts[Part.UNITS] + self.tokens * (self.kept() + self.in_block())
        end = always + parts[Part.GRADIENTS] + parts[Part.UNITS]
        update = always + np.minimum(parts[Part.GRADIENTS], held) + parts[Part.STEP_TEMPORARIES]
        return np.maximum.reduce([loss, last, first * (self.blocks > 0), end, update])

    def gradients(self) -> Array:
        """Those of the parameters of this rank, and those that exist twice while they are cast or packed."""
        p, table, tied = self.plans, 4 * self.table, self.sizes.tied
        held = 4 * self.owned / np.where(p.stage >= 2, self.ranks, 1)
        in_bf16 = table / 2 * np.where(tied & (self.ranks > 1), 2, 1)
        ends = self.has_table | self.has_head
        whole = np.where(self.wrapped, (2 if tied else 1) * table, np.where(tied, 2 * table, 0))
        buckets = np.minimum(4 * self.owned / p.chunks, np.maximum(_BUCKET, 1.5 * table * ends))
        sharded = held + (2.5 if tied else 1) * table
        added = np.where(self.pipelined, np.where(self.wrapped, buckets, in_bf16 * ends), whole)
        matrices = 4 * self.sizes.hidden * self.sizes.intermediate / p.tp * (self.blocks > 0)
        waiting = np.maximum(held, np.maximum(in_bf16 * ends, matrices))
        by_unit = np.where(self.pipelined, waiting, held + in_bf16)
        return np.where(self.sharded, by_unit, np.where(p.stage == 2, sharded, held + added))

    def temporaries(self) -> Array:
        share = np.where(self.plans.stage >= 1, self.ranks, 1)
        return 4 * self.owned / share if self.step is OptimizerStep.FOREACH else np.zeros(len(self.plans))

    def cast_weights(self) -> Array:
        """The bf16 copies of autocast, until the end of a forward; of a sharded unit, its shard in bf16."""
        p = self.plans
        freed = (p.checkpointing == 2) & ((p.tp > 1) | self.pipelined)
        copies = np.where(freed, np.minimum(2, self.blocks), self.blocks * self.flight / p.chunks)
        head = np.where(self.has_head, self.table, 0)
        largest = np.maximum(
            self.block * (self.blocks > 0), np.where(self.has_table | self.has_head, self.table, 0)
        )
        return np.where(self.sharded, 2 * largest / self.ranks, 2 * (copies * self.block + head))

    def units(self) -> Array:
        """Of sharded training: whole parameters and messages. A pipeline keeps its parameters whole, in bf16,
        and sums their gradients in fp32. ZeRO 2 has the messages of two buckets."""
        three = np.maximum(3 * self.block, 2 * self.block + self.table)
        in_turn = 4 * three + np.where(self.sizes.tied, 4 * self.table, 0)
        buckets = np.minimum(4 * self.owned, np.maximum(2 * _BUCKET, 4 * self.table + _BUCKET))
        whole = np.where(self.pipelined, 6 * self.owned, in_turn)
        return np.where(self.sharded, whole, np.where(self.plans.stage == 2, buckets, 0))

    def early_units(self) -> Array:
        """The units of a pipeline while the most activations wait: without gradients, if no backward has run
        before the last forward."""
        none_before = self.flight >= self.plans.micro_batches * self.plans.chunks
        return np.where(none_before, 2, 6) * self.owned

    def kept(self) -> Array:
        """The bytes a token that a block keeps for its backward, without checkpointing."""
        z, p = self.sizes, self.plans
        h, s = z.hidden, p.split
        cast = np.where(p.tp > 1, 4, 10)
        inputs = np.where(self.sharded, 4 * h + 12 * h / s, 16 * h / s + cast * h)
        exchanged = (p.cp > 1) & (p.context != 0)
        features = (4 + 2 * exchanged) * z.queries + 4 * z.keys + np.where(p.fused, 6, 8) * z.intermediate
        return inputs - np.where(p.fused, 8 * h / s, 0) + features / p.tp

    def waiting(self) -> Array:
        """The activations between forward and backward, in all micro-batches in flight."""
        full = self.plans.checkpointing == 2
        return (
            self.tokens
            * self.flight
            * self.blocks
            / self.plans.chunks
            * np.where(full, self.input(), self.kept())
        )

    def input(self) -> Array:
        """The bytes a token of the input of a block."""
        return np.where(self.sharded, 2, 4) * self.sizes.hidden / self.plans.split

    def in_block(self) -> Array:
        """The bytes a token of the temporary tensors in the backward of a block: of its MLP, or of a norm."""
        z, p = self.sizes, self.plans
        part, wide = z.hidden / p.split, z.intermediate / p.tp
        gathered = np.where(self.sharded & p.sequence_parallel, 2 * z.hidden, 0)
        mlp = np.where(self.sharded, 2, 4) * part + 4 * wide + gathered
        norm = np.where(p.fused, 0, 18 * part - 8 * wide - gathered)
        return np.maximum(mlp, norm)

    def beside(self) -> Array:
        """The bytes a token beside the blocks: received messages, inputs of the stage, waiting last norms."""
        p, part = self.plans, self.sizes.hidden / self.plans.split
        norms = np.where(self.has_head & self.pipelined, 8 * part * (self.head_flight() - 1), 0)
        received = np.where(self.sharded, 4, np.where(self.has_head, 8, 6)) * part * self.pipelined
        saved = self.receives & self.sharded & (p.checkpointing != 2)
        return norms + received + np.where(saved, 2 * part * self.flight / p.chunks, 0)

    def activations(self) -> Array:
        """What waits, and the largest temporary tensors: of a block, or of the last norm."""
        p, part = self.plans, self.sizes.hidden / self.plans.split
        recomputed = self.kept() - np.where(self.sharded, 0, self.input())
        again = np.where(p.checkpointing == 2, recomputed, 0)
        in_block = np.where(self.blocks > 0, again + self.in_block(), 0)
        last_norm = np.where(self.has_head, np.where(p.fused, 12, 24) * part, 0)
        return self.waiting() + self.tokens * (np.maximum(in_block, last_norm) + self.beside())

    def head_flight(self) -> Array:
        """The micro-batches whose logits wait: all of AFAB, one of the others."""
        return np.where(
            self.flight >= self.plans.micro_batches * self.plans.chunks, self.flight / self.plans.chunks, 1
        )

    def logits(self) -> Array:
        """Logits and loss: in fp32 the log-probabilities, their gradient and that of the logits; two of the
        three where the vocabulary is cut; one chunk of bf16 logits with a fused loss."""
        z, p = self.sizes, self.plans
        cut = (p.tp > 1) | self.pipelined
        vocab = z.vocab / p.tp
        copied = np.where(self.sharded, np.where(p.sequence_parallel, 2, 0), 2) * z.hidden
        each = np.where(p.tp > 1, 8, 12) * vocab + copied
        waiting = (self.head_flight() - 1) * (4 * vocab + copied)
        chunks = np.ceil(self.tokens / max(_CHUNK, z.hidden // 2))
        beside = np.where(self.sharded, 4, np.where(chunks > 1, 6, 8)) * z.hidden
        chunk = self.tokens * (2 * vocab / chunks + beside)
        whole = self.tokens * (each + waiting)
        return np.where(self.has_head, np.where(p.fused & ~cut, chunk, whole), 0)
