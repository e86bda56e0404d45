"""The search for the best plan: all valid plans of a request, their memory and time, and why others lose.

Every combination of degrees, stages, schedules, micro-batches and checkpointing is a row of arrays
(``Plans``). Rows that break a rule or do not fit the memory are removed first; the time is computed for the
others. A plan is on the Pareto front if no other plan is at least as fast with less memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.hardware import GpuNodes
from dlo_lib.models import LlamaConfig
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.planner.calibration import library_stack
from dlo_lib.planner.cost import StepCost, step_cost
from dlo_lib.planner.memory import largest_memory
from dlo_lib.planner.plans import (
    CHUNKS,
    SCHEDULES,
    Array,
    Checkpointing,
    Plans,
    allowed,
    refused_models,
    refused_plans,
)
from dlo_lib.planner.sizes import ModelSizes
from dlo_lib.planner.stack import Stack

GIB = 2**30
_TRIED = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED, ScheduleKind.ZB_H1, ScheduleKind.ZB_V)
"""The schedules that a search tries. The others need more memory or time than one of these."""


@dataclass(frozen=True)
class PlanRequest:
    """What a search is for.

    Args:
        model: a name, a configuration, or sizes.
        nodes: the GPUs and their links.
        gpus: how many.
        batch: the sequences of a step, of all GPUs.
        seq: the tokens of a sequence.
        memory_bytes: the memory of a GPU for tensors; None for its usable memory.
        fused: whether the operations of the model are fused kernels, which need less memory.
        dtype: of the matrix products.

    Raises:
        UserError: a size is below 1, or a name is unknown.
    """

    model: str | LlamaConfig | ModelSizes
    nodes: GpuNodes
    gpus: int
    batch: int
    seq: int = 4096
    memory_bytes: int | None = None
    fused: bool = False
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("gpus", "batch", "seq"):
            require_count(name, getattr(self, name))
        ModelSizes.of(self.model)

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.model)

    @property
    def limit(self) -> int:
        return self.nodes.gpu.usable_bytes if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True)
class Found:
    """Plans of a request, the fastest first.

    Attributes:
        plans: those that are valid and fit; (plans,).
        memory: the peak of the rank that needs the most, bytes, (plans,).
        cost: their time.
        tried: the number of candidates.
    """

    request: PlanRequest
    stack: Stack
    plans: Plans
    memory: Array
    cost: StepCost
    tried: int

    @property
    def pareto(self) -> Array:
        """The rows for which no other plan is as fast with less memory, the fastest first."""
        least = np.minimum.accumulate(self.memory)
        return np.flatnonzero(np.r_[True, self.memory[1:] < least[:-1]])

    def interval(self, row: int) -> tuple[float, float]:
        """Return the 90 % interval of the seconds of a step."""
        seconds = float(self.cost.seconds[row])
        return seconds * (1 - self.stack.spread), seconds * (1 + self.stack.spread)

    def too_close(self, row: int, other: int) -> bool:
        """Return whether the model cannot say which plan is faster. Two plans of one stack share most of the
        error of their computation; what they do not share is taken as a third of the spread."""
        one, two = self.cost.seconds[row], self.cost.seconds[other]
        return bool(abs(one - two) < self.stack.spread / 3 * min(one, two))


def powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def candidates(request: PlanRequest) -> Plans:
    """Return all combinations that have the GPUs and the batch of the request; rules are not checked yet."""
    sizes = request.sizes
    rows = list(_degrees(sizes, request))
    choices = list(_choices())
    degrees, chosen = np.array(rows).reshape(-1, 7), np.array(choices)
    index, choice = np.divmod(np.arange(len(degrees) * len(chosen)), len(chosen))
    pp, replicate, shard, cp, tp, ep, micro_batch = degrees[index].T
    stage, kind, chunks, checkpointing, sequence_parallel, context = chosen[choice].T
    copies = replicate * shard
    plans = Plans.of(
        pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep, micro_batch=micro_batch,
        micro_batches=request.batch // (copies * micro_batch), stage=stage, schedule=kind, chunks=chunks,
        checkpointing=checkpointing, sequence_parallel=sequence_parallel.astype(bool), context=context,
        fused=request.fused,
    )  # fmt: skip
    # A choice that a plan does not have would make it several equal rows.
    first = SCHEDULES.index(ScheduleKind.ONE_F_ONE_B)
    same = (
        ((pp == 1) & (kind != first))
        | ((cp == 1) & (context != 0))
        | ((tp == 1) & (sequence_parallel != 0))
        | ((copies * cp == 1) & (stage != 0))
        | ((stage == 3) & (shard * cp == 1))
    )
    return plans[~same]


def _degrees(sizes: ModelSizes, request: PlanRequest) -> Iterator[tuple[int, ...]]:
    experts = [1] if sizes.moe is None else powers_of_two(sizes.moe.num_experts)
    for tp in powers_of_two(min(request.gpus, 2 * request.nodes.gpus_per_node)):
        for pp in divisors(request.gpus):
            if request.gpus % (tp * pp) or pp > sizes.layers + 2:
                continue
            for cp in powers_of_two(min(8, request.gpus // (tp * pp))):
                copies, rest = divmod(request.gpus, tp * pp * cp)
                if rest or request.batch % copies:
                    continue
                each = request.batch // copies
                shards = {one for one in (*powers_of_two(copies), copies) if copies % one == 0}
                batches = [one for one in powers_of_two(min(each, 16)) if each % one == 0]
                for shard, ep, micro_batch in itertools.product(sorted(shards), experts, batches):
                    yield pp, copies // shard, shard, cp, tp, ep, micro_batch


def _choices() -> Iterator[tuple[int, ...]]:
    for stage, kind in itertools.product(range(4), _TRIED):
        for checkpointing in (Checkpointing.NONE, Checkpointing.FULL):
            for sequence_parallel, context in itertools.product((0, 1), (0, 1)):
                yield stage, SCHEDULES.index(kind), CHUNKS[kind], checkpointing, sequence_parallel, context


def valid_plans(request: PlanRequest, plans: Plans) -> Array:
    """Return where a candidate breaks no rule of the library and of the model, (plans,) bool."""
    rules = refused_plans(plans) | refused_models(plans, request.sizes, request.seq)
    return allowed(rules)


def search(request: PlanRequest, stack: Stack | None = None) -> Found:
    """Return all plans of the request that are valid and fit, the fastest first; of equally fast ones, that
    with the fewest dimensions. ``stack``: None for this library.

    Raises:
        UserError: there is none. The message names the nearest request that is possible.
    """
    stack = library_stack(request.nodes) if stack is None else stack
    plans = candidates(request)
    tried = len(plans)
    plans = plans[valid_plans(request, plans)]
    memory = largest_memory(request.sizes, plans, request.seq).peak
    fits = memory <= request.limit
    if not fits.any():
        raise UserError(_impossible(request, memory))
    plans, memory = plans[fits], memory[fits]
    cost = step_cost(request.sizes, plans, request.seq, request.nodes, stack, request.dtype)
    degrees = (plans.pp, plans.tp, plans.cp, plans.dp_replicate, plans.ep)
    dimensions = np.add.reduce([(degree > 1).astype(int) for degree in degrees])
    order = np.lexsort((memory, dimensions, np.round(cost.seconds, 9)))
    return Found(request, stack, plans[order], memory[order], cost.rows(order), tried)


def _impossible(request: PlanRequest, memory: Array) -> str:
    """Say why nothing fits, and the nearest number of GPUs or memory for which something does."""
    asked = f"no plan of {request.gpus} GPUs and {request.batch} sequences of {request.seq} tokens"
    if not len(memory):
        near = -(-request.batch // request.gpus) * request.gpus
        return f"{asked} keeps the rules: use a batch of {near}"
    least = memory.min() / GIB
    needs = f"{asked} fits in {request.limit / GIB:.1f} GiB; the smallest needs {least:.1f} GiB"
    for factor in (2, 4, 8, 16, 32, 64):
        larger = replace(request, gpus=request.gpus * factor)
        plans = candidates(larger)
        plans = plans[valid_plans(larger, plans)]
        if len(plans) and largest_memory(larger.sizes, plans, larger.seq).peak.min() <= larger.limit:
            return f"{needs}: use {larger.gpus} GPUs"
    return f"{needs}: use shorter sequences, or a GPU with more memory"
