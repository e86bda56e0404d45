"""Computes whether a training step fits on a GPU, the largest batch that fits, and the number of ranks that a
global batch needs.

A step fits if its peak (``memory_footprint``) is at most the *usable* memory of the GPU. The memory grows
with the batch. The largest batch is found by doubling until it does not fit, and then by bisection, with
about 2 log2(largest) evaluations. Data parallelism divides only the global batch over the ranks: if one
sequence does not fit on a rank, it does not fit on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.hardware import Gpu
from dlo_lib.hardware import gpu as find_gpu
from dlo_lib.models import LlamaConfig
from dlo_lib.profiling.footprint import memory_footprint

UNBOUNDED = 2**62


def step_fits(
    model: str | LlamaConfig, gpu: str | Gpu, batch: int = 1, seq: int = 2048, **settings: Any
) -> bool:
    """Return whether a training step of ``batch`` sequences of ``seq`` tokens fits on one ``gpu``.

    Args:
        settings: other arguments of ``memory_footprint``.

    Raises:
        UserError: a name is unknown, or a size is below 1.
    """
    offered = find_gpu(gpu) if isinstance(gpu, str) else gpu
    return memory_footprint(model, batch, seq, **settings).peak_bytes <= offered.usable_bytes


def largest_batch(fits: Callable[[int], bool]) -> int:
    """Return the largest batch for which ``fits`` is True; 0 if ``fits(1)`` is False.

    Args:
        fits: a monotonic function: if it is False for a batch, it is False for every larger batch.

    Raises:
        UserError: every batch fits.
    """
    too_large = 1
    while fits(too_large):
        too_large *= 2
        if too_large > UNBOUNDED:
            raise UserError("every batch fits: check the function `fits`")
    largest = too_large // 2
    while too_large - largest > 1:
        middle = (largest + too_large) // 2
        if fits(middle):
            largest = middle
        else:
            too_large = middle
    return largest


def ranks_needed(
    model: str | LlamaConfig,
    gpu: str | Gpu,
    global_batch: int,
    seq: int = 2048,
    **settings: Any,
) -> int | None:
    """Return the smallest number of ranks over which data parallelism can distribute ``global_batch``
    sequences; None if one sequence does not fit on a rank.

    Raises:
        UserError: a name is unknown, or a size is below 1.
    """
    require_count("global_batch", global_batch)
    largest = largest_batch(lambda batch: step_fits(model, gpu, batch, seq, **settings))
    return -(-global_batch // largest) if largest else None
