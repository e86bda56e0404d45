"""The largest batch that fits on a GPU, and the number of ranks that data parallelism needs."""

from __future__ import annotations

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.hardware import gpu
from dlo_lib.profiling import memory_footprint
from dlo_lib.profiling.capacity import largest_batch, ranks_needed, step_fits


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 5, 7, 8, 9, 1000, 2**40 + 1])
def test_the_largest_batch_is_exact_and_needs_few_evaluations(limit: int) -> None:
    evaluated: list[int] = []

    def fits(batch: int) -> bool:
        evaluated.append(batch)
        return batch <= limit

    assert largest_batch(fits) == limit
    assert len(evaluated) <= 2 * limit.bit_length() + 1


def test_a_batch_that_always_fits_is_an_error() -> None:
    with pytest.raises(UserError, match="every batch fits"):
        largest_batch(lambda batch: True)


def test_the_limit_is_the_usable_memory_and_not_the_nominal_memory() -> None:
    device = gpu("a100-80")
    between = [
        batch
        for batch in range(1, 64)
        if device.usable_bytes < memory_footprint("llama-3.2-1b", batch).peak_bytes <= device.memory_bytes
    ]
    assert between
    assert not any(step_fits("llama-3.2-1b", "a100-80", batch) for batch in between)


def test_ranks_divide_only_the_batch() -> None:
    largest = largest_batch(lambda batch: step_fits("llama-3.2-3b", "a100-80", batch))
    assert largest >= 1
    assert ranks_needed("llama-3.2-3b", "a100-80", 64) == -(-64 // largest)
    assert ranks_needed("llama-3.2-3b", "a100-40", 64) is None
    with pytest.raises(UserError, match="global_batch is 0"):
        ranks_needed("llama-3.2-3b", "a100-80", 0)
