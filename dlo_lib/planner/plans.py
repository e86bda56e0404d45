"""Many plans at once: each field of a ``ParallelPlan`` as an array, with the sizes of the batch.

One ``ParallelPlan`` costs microseconds and one measurement seconds. A search has 100,000 candidates, so that
validity, memory and time are formulas on arrays. Every field has shape (plans,).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlo_lib.parallel.context import ContextKind
from dlo_lib.parallel.mesh import DIMENSIONS
from dlo_lib.parallel.pipeline import schedules
from dlo_lib.parallel.pipeline.table import ScheduleKind, in_a_v
from dlo_lib.parallel.plan import ParallelPlan, ZeroStage
from dlo_lib.planner.sizes import ModelSizes

Array = NDArray[Any]
SCHEDULES = tuple(ScheduleKind)
CONTEXTS = tuple(ContextKind)
DEGREES = (*DIMENSIONS, "ep")
ENTRIES = tuple(schedules.SCHEDULES[kind] for kind in SCHEDULES)
_SMALL = [entry.make(2, 4) for entry in ENTRIES]
_SPLIT = [index for index, table in enumerate(_SMALL) if table.splits_backward]
IN_A_V = [index for index, table in enumerate(_SMALL) if table.placement == in_a_v(2)]
"""The schedules whose first rank has both ends of the model."""
CHUNKS = {kind: table.stages // table.ranks for kind, table in zip(SCHEDULES, _SMALL)}
"""The stages of a rank; interleaved 1F1B may have more."""
_INTERLEAVED = SCHEDULES.index(ScheduleKind.INTERLEAVED)


class Checkpointing(enum.IntEnum):
    """What a block saves for its backward."""

    NONE = 0
    """All that its backward reads."""
    SELECTIVE = 1
    """All except the scores of attention, which are recomputed (arXiv:2205.05198). A flash kernel does this
    by itself, and there it is the same as ``NONE``."""
    FULL = 2
    """Its input only."""


@dataclass(frozen=True)
class Plans:
    """Fields of ``ParallelPlan`` and of the batch as arrays of shape (plans,).

    Attributes:
        pp, dp_replicate, dp_shard, cp, tp, ep: the degrees.
        sequence_parallel: bool.
        stage: the ZeRO stage, 0 to 3.
        schedule: the index in ``SCHEDULES``; it counts only where ``pp`` is above 1.
        chunks: the stages of a rank: 1, 2 in a V, and any number for interleaved 1F1B.
        context: the index in ``CONTEXTS``; it counts only where ``cp`` is above 1.
        micro_batch: the sequences in a micro-batch of one copy of the model.
        micro_batches: in a step of one copy.
        checkpointing: a ``Checkpointing``.
        fused: whether the operations of the model are fused kernels; bool.
        compiled: whether each block is compiled; bool.
    """

    pp: Array
    dp_replicate: Array
    dp_shard: Array
    cp: Array
    tp: Array
    ep: Array
    sequence_parallel: Array
    stage: Array
    schedule: Array
    chunks: Array
    context: Array
    micro_batch: Array
    micro_batches: Array
    checkpointing: Array
    fused: Array
    compiled: Array

    @classmethod
    def of(cls, **values: Any) -> Plans:
        """Return plans from numbers, sequences and arrays, which are broadcast to one length. What is not
        given is 1, or 0 where it is a choice; ``schedule`` is 1F1B."""
        given: dict[str, Any] = {field.name: 1 for field in fields(cls)}
        given |= dict.fromkeys(("sequence_parallel", "fused", "compiled"), False)
        given |= dict.fromkeys(("stage", "context", "checkpointing"), 0)
        given["schedule"] = SCHEDULES.index(ScheduleKind.ONE_F_ONE_B)
        arrays = np.broadcast_arrays(*(np.atleast_1d(value) for value in (given | values).values()))
        return cls(**dict(zip(given | values, arrays)))

    @classmethod
    def of_plans(cls, plans: Sequence[ParallelPlan], **batch: Any) -> Plans:
        """Return the arrays of ``ParallelPlan``s; ``batch``: the other fields. The number of micro-batches is
        that of each plan."""
        names = (*DEGREES, "sequence_parallel", "micro_batches")
        rows = {name: [getattr(plan, name) for plan in plans] for name in names}
        kinds = [plan.schedule or ScheduleKind.ONE_F_ONE_B for plan in plans]
        rows["schedule"] = [SCHEDULES.index(kind) for kind in kinds]
        rows["chunks"] = [CHUNKS[kind] for kind in kinds]
        rows["stage"] = [int(plan.stage) for plan in plans]
        rows["context"] = [CONTEXTS.index(plan.context_kind) for plan in plans]
        return cls.of(**(rows | batch))

    def __len__(self) -> int:
        return len(self.pp)

    def __getitem__(self, index: Any) -> Plans:
        """Return the plans that a mask or an array of indices selects."""
        return Plans(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @property
    def gpus(self) -> Array:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def copies(self) -> Array:
        """The copies of the model with different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def split(self) -> Array:
        """The part of the sequence that norms and dropouts have on a rank, as a divisor."""
        return np.where(self.sequence_parallel, self.tp, 1)

    def plan(self, index: int) -> ParallelPlan:
        """Return the ``ParallelPlan`` of one row."""
        pipelined = self.pp[index] > 1
        degrees: dict[str, Any] = {name: int(getattr(self, name)[index]) for name in DEGREES}
        return ParallelPlan(
            **degrees,
            sequence_parallel=bool(self.sequence_parallel[index]),
            context_kind=CONTEXTS[self.context[index]],
            zero_stage=ZeroStage(int(self.stage[index])),
            schedule=SCHEDULES[self.schedule[index]] if pipelined else None,
            micro_batches=int(self.micro_batches[index]) if pipelined else 1,
        )


def refused_plans(plans: Plans) -> dict[str, Array]:
    """Return, for each rule of ``ParallelPlan`` and of the mesh, where it is broken: bool arrays of shape
    (plans,) by the sentence of the rule."""
    p = plans
    part = (p.stage == 1) | (p.stage == 2)
    whole = (p.stage == 0) & (p.dp_shard != 1) & (p.ep == 1)
    return {
        "sequence parallelism is along tp, which is 1": p.sequence_parallel & (p.tp == 1),
        "dp_shard ranks share nothing without ZeRO": whole,
        "ZeRO stages 1 and 2 are over all copies of the model": part & (p.dp_replicate != 1),
        "ZeRO stages 1 and 2 are not combined with tp or ep": part & ((p.tp != 1) | (p.ep != 1)),
        "ZeRO stages 1 and 2 are not combined with a pipeline": part & (p.pp != 1),
        "ep divides dp_shard x cp": p.dp_shard * p.cp % p.ep != 0,
        "a combined context needs the ranks that exchange heads": (p.cp > 1)
        & (p.context == CONTEXTS.index(ContextKind.COMBINED)),
    }


def refused_models(plans: Plans, sizes: ModelSizes, seq: int) -> dict[str, Array]:
    """Return where a plan does not fit the model or the sequences, by the sentence of the rule."""
    p = plans
    ring = p.context == CONTEXTS.index(ContextKind.RING)
    pieces = np.where(p.cp > 1, np.where(ring, 2 * p.cp, p.cp), 1)
    sharded = p.stage == 3
    pipelined = p.pp > 1
    tp = sizes.kv_heads % p.tp + sizes.heads % p.tp + sizes.intermediate % p.tp + sizes.vocab % p.tp
    heads = (
        (p.cp > 1) & (p.context == CONTEXTS.index(ContextKind.ULYSSES)) & (sizes.heads % (p.cp * p.tp) != 0)
    )
    return {
        "tp divides the heads, the key heads, the MLP and the vocabulary": tp != 0,
        "the stages of a pipeline are at most the pieces of the model": p.pp * p.chunks > sizes.layers + 2,
        "the ranks of cp and of sequence parallelism divide the sequence": seq % (pieces * p.split) != 0,
        "Ulysses exchanges whole heads": heads,
        "a schedule that splits the backward needs whole parameters": pipelined
        & sharded
        & np.isin(p.schedule, _SPLIT),
        "tied embeddings lie at both ends of a V": pipelined
        & sharded
        & np.isin(p.schedule, IN_A_V)
        & sizes.tied,
        "interleaved 1F1B has at least as many micro-batches as stages": pipelined
        & (p.schedule == _INTERLEAVED)
        & (p.micro_batches < p.pp),
        "ep divides the experts, of which there are some": (p.ep > 1)
        & ((1 if sizes.moe is None else sizes.moe.num_experts) % p.ep != 0),
    }


def allowed(rules: dict[str, Array]) -> Array:
    """Return where no rule is broken: bool, shape (plans,)."""
    return ~np.logical_or.reduce(list(rules.values()))
