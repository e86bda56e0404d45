"""Stages of pipelines on arrays: blocks of a stage, micro-batches in flight, and the bubble.

The formulas are those of ``parallel.pipeline``: of ``partition``, which balances the head against the blocks,
and of the entries in ``schedules``, which the simulator confirms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dlo_lib.parallel.pipeline.schedules import ScheduleEntry
from dlo_lib.planner.plans import ENTRIES, IN_A_V, Array, Plans
from dlo_lib.planner.sizes import ModelSizes


@dataclass(frozen=True)
class Stages:
    """The blocks of the first and of the last rank, of shape (plans,), and whether the last rank of the
    pipeline has the head: not in a V, where the first rank has both ends."""

    first: Array
    last: Array
    largest: Array
    """Of one stage; a rank has ``chunks`` stages."""
    head_on_first: Array


def head_in_blocks(sizes: ModelSizes, seq: int) -> float:
    """Return the FLOPs of the output projection as a number of blocks."""
    return sizes.table / (sizes.matrices + sizes.queries * (seq + 1))


def balanced_stages(plans: Plans, sizes: ModelSizes, seq: int) -> Stages:
    """Return the blocks of the ranks as ``partition`` cuts them: the largest stage has the fewest blocks that
    are possible with the head on the last stage."""
    count = plans.pp * plans.chunks
    head = head_in_blocks(sizes, seq)
    others = np.maximum(count - 1, 1)

    def slowest(blocks: Array) -> Array:
        return np.maximum(blocks, np.maximum(sizes.layers - blocks * (count - 1), 0) + head)

    even = np.ceil((sizes.layers + head) / count)
    best = np.minimum(slowest(even), slowest(np.maximum(even - 1, 0)))
    last = np.maximum(sizes.layers - np.floor(best + 1e-9) * (count - 1), 0)
    largest = np.where(count > 1, np.ceil((sizes.layers - last) / others), sizes.layers)
    last = np.where(count > 1, last, sizes.layers)
    in_a_v = (plans.pp > 1) & np.isin(plans.schedule, IN_A_V)

    def up_to(stage: Array) -> Array:
        """The blocks of the stages before ``stage``: the early ones have the most, and each has one."""
        before = np.minimum(largest * stage, sizes.layers - last - np.maximum(count - 1 - stage, 0))
        return np.where(stage >= count, sizes.layers, np.where(stage == 0, 0, np.maximum(before, 0)))

    def blocks(rank: Array | int) -> Array:
        total = np.zeros(len(plans))
        for chunk in range(int(plans.chunks.max(initial=1))):
            looped = chunk * plans.pp + rank
            stage = np.where(in_a_v & (chunk % 2 == 1), (chunk + 1) * plans.pp - 1 - rank, looped)
            total += np.where(chunk < plans.chunks, up_to(stage + 1) - up_to(stage), 0)
        return total

    return Stages(
        first=blocks(0),
        last=blocks(plans.pp - 1),
        largest=largest,
        head_on_first=in_a_v | (plans.pp == 1),
    )


def _choose(plans: Plans, formula: Callable[[ScheduleEntry], Array | float], alone: float) -> Array:
    """Return the value of ``formula`` for the schedule of each plan; ``alone`` without a pipeline."""
    rows = np.stack([np.broadcast_to(formula(entry), (len(plans),)) for entry in ENTRIES])
    chosen = rows[plans.schedule, np.arange(len(plans))]
    return np.where(plans.pp > 1, chosen, alone)


def in_flight(plans: Plans, rank: Array | int) -> Array:
    """Return the micro-batches whose activations a rank holds, each for 1 / chunks of its blocks."""
    p, m, v = plans.pp, plans.micro_batches, plans.chunks
    return _choose(plans, lambda entry: entry.in_flight(p, m, v, rank), 1.0)


def bubble(plans: Plans, forward: Array, inputs: Array, weights: Array) -> Array:
    """Return the time for which a rank waits in a step, in the unit of the arguments.

    Args:
        forward, inputs, weights: the time of one micro-batch on all stages of a rank, of the three parts.
            Recomputation belongs to ``inputs``.
    """
    p, m, v = plans.pp, plans.micro_batches, plans.chunks
    return _choose(plans, lambda entry: entry.bubble(p, m, v, forward, inputs, weights), 0.0)
