"""What fits: whether a training step fits a GPU, the largest batch that does, and how many ranks a global batch needs.

A step fits when its peak (``memory_footprint``) is at most the GPU's *usable* memory. Memory only grows with the batch, so the largest
one is found by doubling until it does not fit and then halving the gap: about 2 log2(largest) questions instead of ``largest``. Data
parallelism divides the global batch over ranks and nothing else: if one sequence a rank does not fit, no number of ranks helps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlo_lib.errors import UserError
from dlo_lib.hardware import Gpu
from dlo_lib.hardware import gpu as find_gpu
from dlo_lib.models import LlamaConfig
from dlo_lib.profiling.footprint import memory_footprint

UNBOUNDED = 2**62


def step_fits(model: str | LlamaConfig, gpu: str | Gpu, batch: int = 1, seq: int = 2048, **settings: Any) -> bool:
    """Whether a training step of ``batch`` sequences fits one ``gpu``; further settings as for ``memory_footprint``.

    Raises:
        UserError: an unknown name or a size below 1.
    """
    offered = find_gpu(gpu) if isinstance(gpu, str) else gpu
    return memory_footprint(model, batch, seq, **settings).peak_bytes <= offered.usable_bytes


def largest_batch(fits: Callable[[int], bool]) -> int:
    """The largest batch for which ``fits`` is true, 0 when not even 1 is. ``fits`` must not become true again once it was false.

    Raises:
        UserError: everything fits.
    """
    too_large = 1
    while fits(too_large):
        too_large *= 2
        if too_large > UNBOUNDED:
            raise UserError("every batch fits: check what decides it")
    largest = too_large // 2
    while too_large - largest > 1:
        middle = (largest + too_large) // 2
        if fits(middle):
            largest = middle
        else:
            too_large = middle
    return largest


def ranks_needed(model: str | LlamaConfig, gpu: str | Gpu, global_batch: int, seq: int = 2048, **settings: Any) -> int | None:
    """The fewest ranks over which data parallelism can spread ``global_batch`` sequences; None when no number of ranks is enough.

    Raises:
        UserError: an unknown name or a size below 1.
    """
    if global_batch < 1:
        raise UserError(f"global_batch is {global_batch}: use at least 1")
    largest = largest_batch(lambda batch: step_fits(model, gpu, batch, seq, **settings))
    return -(-global_batch // largest) if largest else None
