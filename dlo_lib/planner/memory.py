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

A block with experts has the input of its router in fp32, 4 h / s, and for each expert that a token uses
(4 h + 8 f) / s, because every rank of tp computes its own part of the tokens, or all of them, with whole
experts. Its casts are those of a shared expert, if there is one. A rank holds 1 / ep of the experts, which
ZeRO 3 divides over N / ep ranks.

Precision is bf16 with fp32 state, attention is a flash kernel, and all experts have equal loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def largest_memory(
    sizes: ModelSizes, plans: Plans, seq: int, step: OptimizerStep = OptimizerStep.FUSED
) -> PlanMemory:
    """Return the memory of the rank that needs the most: the first rank of a pipeline has the most
    micro-batches in flight, the last one the logits. The arguments are those of ``plan_memory``."""
    first, last = (plan_memory(sizes, plans, seq, step, last=end) for end in (False, True))
    parts = {part: np.where(last.peak > first.peak, last.parts[part], first.parts[part]) for part in Part}
    return PlanMemory(parts, np.maximum(first.peak, last.peak))


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
        self.kinds = sizes.kinds
        first = np.floor(stages.first * sizes.mixed + 1e-9)
        rest = np.floor((sizes.layers - stages.last) * sizes.mixed + 1e-9)
        mixed = np.round(sizes.layers * sizes.mixed) - rest if last else first
        one = p.chunks == 1  # several stages of a rank have the mean
        self.share = np.where(one, mixed / np.maximum(self.blocks, 1), sizes.mixed)
        self.block = self.mean(self.block_of)
        self.expert = self.mean(lambda kind: kind.expert_parameters / p.ep)  # whole on every rank of tp
        tables = self.has_table * 1.0 + self.has_head * (1.0 - (self.has_table & sizes.tied))
        self.experts = self.blocks * self.expert
        self.owned = self.blocks * self.block + tables * self.table + self.experts
        self.ranks = p.dp_shard * p.cp

    def block_of(self, kind: ModelSizes) -> Array:
        """The parameters of a block outside its experts. Norms and the router are whole on every rank."""
        whole = 2 * kind.hidden + kind.router
        return (kind.block_parameters - whole) / self.plans.tp + whole

    def mean(self, value: Callable[[ModelSizes], Any]) -> Any:
        """The mean of a value over the blocks of this rank, of which ``share`` have experts."""
        *plain, mixed = (value(kind) for kind in self.kinds)
        return plain[0] + self.share * (mixed - plain[0]) if plain else mixed

    def owned_from(self, stage: int) -> Array:
        """The parameters of a rank whose state is divided over the ranks from this ZeRO stage on. An expert
        is divided over those that have it, 1/ep of them."""
        divided = (self.owned - self.experts + self.experts * self.plans.ep) / self.ranks
        return np.where(self.plans.stage >= stage, divided, self.owned)

    def memory(self) -> PlanMemory:
        parts = {
            Part.WEIGHTS: 4 * self.owned_from(3),
            Part.GRADIENTS: self.gradients(),
            Part.OPTIMIZER_STATE: 8 * self.owned_from(1),
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
        cast, held = parts[Part.CAST_WEIGHTS], 4 * self.owned_from(2)
        # In a pipeline, gradients exist before the last forward, unless no backward runs before it; without,
        # they grow as activations shrink.
        before = self.pipelined & (self.flight < self.plans.micro_batches * self.plans.chunks)
        early = np.where(before & ~self.sharded, held, 0)
        working = always + early + cast + self.pipelined * self.sharded * (2 + 4 * before) * self.owned
        # FSDP holds the table at the loss, and messages of the table and of blocks in the last block.
        one_stage = self.sharded & ~self.pipelined
        loss = (
            working
            + one_stage * 4 * self.table
            + parts[Part.LOGITS_AND_LOSS]
            + self.waiting()
            + self.tokens * self.beside()
        )
        head = np.where(one_stage, parts[Part.UNITS], 4 * self.table * self.has_head)
        last = working + parts[Part.ACTIVATIONS] + head
        # After the backward of one micro-batch, all gradients exist while the others wait.
        whole = always + cast + np.where(self.sharded, parts[Part.UNITS], held)
        one_less = (whole + parts[Part.ACTIVATIONS] - self.waiting() / self.flight) * self.pipelined
        whole_block = np.maximum.reduce([self.kept(kind) + self.in_block(kind) for kind in self.kinds])
        all_but_one = np.maximum(held - 4 * self.table / np.where(self.plans.stage >= 2, self.ranks, 1), 0)
        first = always + all_but_one + parts[Part.UNITS] + self.tokens * whole_block
        end = always + parts[Part.GRADIENTS] + parts[Part.UNITS]
        sums = always + held + self.summed()
        update = always + np.minimum(parts[Part.GRADIENTS], held) + parts[Part.STEP_TEMPORARIES]
        return np.maximum.reduce([loss, last, first * (self.blocks > 0), end, sums, one_less, update])

    def gradients(self) -> Array:
        """Those of the parameters of this rank, and those that exist twice while they are cast or packed."""
        p, table, tied = self.plans, 4 * self.table, self.sizes.tied
        held = 4 * self.owned_from(2)
        in_bf16 = table / 2 * np.where(tied & (self.ranks > 1), 2, 1)
        ends = self.has_table | self.has_head
        whole = np.where(self.wrapped, (2 if tied else 1) * table, np.where(tied, 2 * table, 0))
        buckets = np.minimum(4 * self.owned / p.chunks, np.maximum(_BUCKET, 1.5 * table * ends))
        sharded = held + (2.5 if tied else 1) * table
        # With a wrapper, the gradient of an expert in fp32 exists beside its bucket; without, only in bf16.
        piped = np.where(self.wrapped, buckets + in_bf16 * (self.blocks == 0), in_bf16 * ends)
        added = np.where(
            self.pipelined, piped, np.maximum(whole, np.where(self.wrapped, 1, 0.5) * self.gate_up())
        )
        matrices = 4 * self.sizes.hidden * self.sizes.shared / p.tp * (self.blocks > 0)
        waiting = np.maximum(held, np.maximum(in_bf16 * ends, matrices))
        by_unit = np.where(self.pipelined, waiting, held + in_bf16)
        return np.where(self.sharded, by_unit, np.where(p.stage == 2, sharded, held + added))

    def gate_up(self) -> Array:
        """The gradient in fp32 of the gates and the up matrices of the experts of one block: two of their
        three matrices."""
        largest = max(kind.expert_parameters for kind in self.kinds)
        return 4 * 2 / 3 * largest / self.plans.ep * (self.blocks > 0)

    def summed(self) -> Array:
        """A message of the gradients that the ranks of sequence parallelism sum at the end: of experts,
        routers and norms, each of which has seen a part of the tokens. It is at most a bucket."""
        whole = 2 * self.sizes.hidden + self.sizes.router
        partial = (self.blocks * whole + self.experts * self.plans.ep) / self.ranks
        partial = np.where(self.sharded, partial, self.blocks * whole + self.experts)
        return np.where(self.plans.sequence_parallel, np.minimum(4 * partial, _BUCKET), 0)

    def temporaries(self) -> Array:
        foreach = self.step is OptimizerStep.FOREACH
        return 4 * self.owned_from(1) if foreach else np.zeros(len(self.plans))

    def cast_weights(self) -> Array:
        """The bf16 copies of autocast, until the end of a forward; of a sharded unit, its shard in bf16."""
        p = self.plans
        freed = (p.checkpointing == 2) & ((p.tp > 1) | self.pipelined)
        copies = np.where(freed, np.minimum(2, self.blocks), self.blocks * self.flight / p.chunks)
        head = np.where(self.has_head, self.table * self.head_flight(), 0)
        unit = np.maximum.reduce([self.block_of(kind) + kind.expert_parameters for kind in self.kinds])
        largest = np.maximum(
            unit * (self.blocks > 0), np.where(self.has_table | self.has_head, self.table, 0)
        )
        mixed = np.where(p.checkpointing == 2, np.minimum(1, self.blocks), copies) * self.expert
        return np.where(self.sharded, 2 * largest / self.ranks, 2 * (copies * self.block + mixed + head))

    def units(self) -> Array:
        """Of sharded training: whole parameters and messages. A pipeline keeps its parameters whole, in bf16,
        and sums their gradients in fp32. ZeRO 2 has the messages of two buckets."""
        block, table, tied = self.block, 4 * self.table, np.where(self.sizes.tied, 4 * self.table, 0)
        # If some blocks have experts, one of two neighbours has. With ep, experts have their own messages.
        every = self.sizes.mixed == 1
        alike = 12 * block + (12 if every else 6 / (self.sizes.mixed or 1)) * self.expert
        apart = np.where((self.plans.ep > 1) & every, 8 * block + 10 * self.expert, alike)
        in_turn = np.maximum(apart, 8 * (block + self.expert * (self.plans.ep == 1)) + table) + tied
        buckets = np.minimum(4 * self.owned, np.maximum(2 * _BUCKET, 4 * self.table + _BUCKET))
        whole = np.where(self.pipelined, 6 * self.owned, in_turn)
        return np.where(self.sharded, whole, np.where(self.plans.stage == 2, buckets, 0))

    def kept(self, z: ModelSizes) -> Array:
        """The bytes a token that a block keeps for its backward, without checkpointing."""
        p = self.plans
        h, s, plain = z.hidden, p.split, z.plain
        cast = np.where(p.tp > 1, 2 + 2 * plain, 6 + 4 * plain)
        inputs = np.where(self.sharded, (2 + 2 * plain) * h + 12 * h / s, 16 * h / s + cast * h)
        exchanged = (p.cp > 1) & (p.context != 0)
        features = (4 + 2 * exchanged) * z.queries + 4 * z.keys + np.where(p.fused, 6, 8) * z.shared
        return inputs - np.where(p.fused, 8 * h / s, 0) + features / p.tp + routed(z) / s

    def waiting(self) -> Array:
        """The activations between forward and backward, in all micro-batches in flight."""
        full = self.plans.checkpointing == 2
        return (
            self.tokens
            * self.flight
            * self.blocks
            / self.plans.chunks
            * np.where(full, self.input(), self.mean(self.kept))
        )

    def input(self) -> Array:
        """The bytes a token of the input of a block."""
        return np.where(self.sharded, 2, 4) * self.sizes.hidden / self.plans.split

    def in_block(self, z: ModelSizes) -> Array:
        """The bytes a token of the temporary tensors in the backward of a block: of its MLP or its experts,
        or of a norm."""
        p = self.plans
        part, wide = z.hidden / p.split, z.shared / p.tp
        gathered = np.where(self.sharded & p.sequence_parallel, 2 * z.hidden, 0)
        mlp = np.where(self.sharded, 2, 4) * part + 4 * wide + gathered
        freed = 8 * wide + gathered
        if z.moe is not None:  # the gradients of the results and of the inputs of experts, and their sums
            mlp = np.maximum(mlp, 6 * (z.moe.top_k + 1) * part)
            freed = freed + z.moe.top_k * (4 * z.hidden + 8 * z.moe.intermediate) / p.split
        return np.maximum(mlp, np.where(p.fused, 0, 18 * part - freed))

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
        recomputed = (p.checkpointing == 2) * 1.0
        input_kept = np.where(self.sharded, 0, self.input())
        in_block = np.maximum.reduce(
            [recomputed * (self.kept(kind) - input_kept) + self.in_block(kind) for kind in self.kinds]
        )
        in_block = in_block * (self.blocks > 0)
        last_norm = np.where(self.has_head, np.where(p.fused, 12, 24) * part, 0)
        # A partial gradient exists before and after it is scaled.
        scaled = np.where(p.sequence_parallel & ~self.sharded, self.gate_up(), 0)
        here = self.waiting() + self.tokens * (np.maximum(in_block, last_norm) + self.beside()) + scaled
        return np.maximum(here, self.summed())

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


def routed(z: ModelSizes) -> float:
    """Return the bytes a token that the router and the experts of a block keep: the input of the router in
    fp32, its logits and scores, the order of the rows; of each row its input, gate, up, their product and the
    result."""
    if z.moe is None:
        return 0.0
    rows = z.moe.top_k * (4 * z.hidden + 8 * z.moe.intermediate + 44)
    return z.mixed * (4 * z.hidden + 8 * z.moe.num_experts + rows)
