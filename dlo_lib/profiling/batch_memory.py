"""The memory of a training step against its batch, measured, and the largest batch that fits.

On a GPU, the peak is that of PyTorch's allocator (``max_memory_allocated``), and a step that does not fit
raises ``OutOfMemoryError``, which counts as "does not fit". On a CPU, a step that does not fit would take the
memory of the whole machine. There the peak is measured by ``MemoryTracker`` and compared with a given limit,
such as the usable memory of a card, and a batch whose step exceeds it must still fit in the machine.

The peak grows nearly linearly with the batch: weights, gradients and optimiser state do not depend on it, and
activations are proportional to it. The search does not rely on that, only on the fact that the peak grows.

Cost: two steps for each measured batch; the search measures about 2 log2(largest) batches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from itertools import accumulate

import torch

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.profiling.capacity import largest_batch
from dlo_lib.profiling.tracker import MemoryTracker

BuildStep = Callable[[int], Callable[[], object]]
"""Creates model, optimiser and a batch of this size, and returns the function that trains one step."""


def step_peak(build: Callable[[], Callable[[], object]], device: torch.device | str = "cpu") -> int:
    """Return the most bytes of tensors that exist at the same time during the second step.

    Weights, gradients, optimiser state and activations count, each storage once. The first step creates what
    is kept for all steps. On a CPU, the temporary memory inside an operator does not count.

    Args:
        build: creates the model and the inputs, and returns the function that runs one step. On a CPU, what
            exists before counts only from its first use in an operator that returns it; on a GPU, all tensors
            of the process count.
        device: where the step runs.

    Raises:
        torch.OutOfMemoryError: the step does not fit on the GPU.
    """
    if torch.device(device).type != "cpu":
        step = build()
        step()
        torch.accelerator.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    with MemoryTracker() as tracker:
        step = build()
        step()
        gc.collect()  # a graph of the first step that is part of a cycle
        before = len(tracker.events())
        step()
        held = list(accumulate(event.bytes for event in tracker.events()))
    return max(held[max(0, before - 1) :], default=0)


def memory_of_batches(
    build: BuildStep, batches: Iterable[int], device: torch.device | str = "cpu"
) -> dict[int, int | None]:
    """Return the peak of a step in bytes for each batch; None where the step does not fit on the GPU.

    Raises:
        UserError: a batch is below 1.
    """
    found: dict[int, int | None] = {}
    for batch in batches:
        require_count("batch", batch)
        found[batch] = _peak_or_none(build, batch, device)
    return found


def largest_measured_batch(
    build: BuildStep,
    limit_bytes: int | None = None,
    device: torch.device | str = "cpu",
    most: int = 1 << 20,
) -> int:
    """Return the largest batch whose step fits, by doubling and bisection; 0 if a batch of 1 does not fit.

    Args:
        limit_bytes: the memory that a step may take, such as ``gpu("h100-80").usable_bytes``. On a GPU, None
            means the memory that the allocator gets.
        most: no larger batch is tried.

    Raises:
        UserError: there is no limit on a CPU, or ``most`` is below 1.
    """
    require_count("most", most)
    if limit_bytes is None and torch.device(device).type == "cpu":
        raise UserError(
            "on a CPU the search needs limit_bytes: give the memory of a card, or of a part of this machine"
        )

    def fits(batch: int) -> bool:
        if batch > most:
            return False
        peak = _peak_or_none(build, batch, device)
        return peak is not None and (limit_bytes is None or peak <= limit_bytes)

    return largest_batch(fits)


def _peak_or_none(build: BuildStep, batch: int, device: torch.device | str) -> int | None:
    try:
        return step_peak(lambda: build(batch), device)
    except torch.OutOfMemoryError:
        pass
    # Outside of the handler: the exception holds the frames of the step, and they hold its tensors.
    gc.collect()
    torch.cuda.empty_cache()
    return None
