"""What a compression keeps, and what error feedback adds to it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.comm.compression.error_feedback import ErrorFeedback
from dlo_lib.comm.compression.low_rank import first_factors, is_worth, orthonormal
from dlo_lib.comm.compression.one_bit_mean import OneBitMean
from dlo_lib.comm.compression.signs import packed, unpacked
from dlo_lib.comm.compression.sparse import largest, scattered
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks

STEPS = 40


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1001])
def test_signs_are_bits_with_the_nearest_scale(size: int):
    x = drawn(size)
    bits, scale = packed(x)
    assert bits.dtype == torch.uint8
    assert len(bits) == -(-size // 8)
    back = unpacked(bits, scale, size)
    assert torch.equal(back, torch.where(x >= 0, scale, -scale))
    for other in (0.9 * scale, 1.1 * scale):
        assert size == 0 or (x - back).norm() < (x - unpacked(bits, other, size)).norm()


def test_the_largest_elements_are_kept_and_repeated_positions_add():
    x = torch.tensor([3.0, -5.0, 0.0, 4.0, -1.0])
    values, positions = largest(x, 2)
    assert values.tolist() == [-5, 4]
    assert positions.tolist() == [1, 3]
    both = scattered(torch.cat([values, values]), torch.cat([positions, positions]), 5)
    assert both.tolist() == [0, -10, 0, 8, 0]


def test_with_error_feedback_the_sum_of_what_is_sent_is_the_sum_of_the_gradients_except_for_one_error():
    kept, lost = ErrorFeedback(), ErrorFeedback(enabled=False)
    sums = {feedback: torch.zeros(50) for feedback in (kept, lost)}
    exact = torch.zeros(50)
    for step in range(STEPS):
        gradient = drawn(50, seed=step) + torch.linspace(0, 1, 50)  # small elements have a direction too
        exact += gradient
        for feedback, total in sums.items():
            corrected = feedback.corrected("g", gradient)
            sent = scattered(*largest(corrected, 5), 50)
            feedback.keep("g", corrected, sent)
            total += sent
    torch.testing.assert_close((exact - sums[kept]).norm().item(), kept.norm(), rtol=1e-4, atol=0)
    assert (exact - sums[kept]).norm() < 0.5 * (exact - sums[lost]).norm()
    kept.keep("g", torch.tensor([1.0, torch.inf, torch.nan]), torch.zeros(3))  # an overflow
    assert kept.state_dict()["g"].tolist() == [1, 0, 0]
    assert torch.equal(kept.corrected("g", torch.ones(2)), torch.ones(2))  # another size has no error


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_columns_are_orthonormal_and_keep_their_span(rank: int, dtype: torch.dtype):
    matrices = drawn(2, 9, rank, dtype=torch.float64).to(dtype)
    columns = orthonormal(matrices).double()
    close = 0.05 if dtype == torch.bfloat16 else 1e-5
    eye = torch.eye(rank, dtype=torch.float64).expand(2, rank, rank)
    torch.testing.assert_close(columns.mT @ columns, eye, rtol=0, atol=close)
    projected = columns @ (columns.mT @ matrices.double())
    torch.testing.assert_close(projected, matrices.double(), rtol=0, atol=10 * close)
    assert torch.equal(orthonormal(torch.zeros(1, 4, 2), eps=1e-8), torch.zeros(1, 4, 2))


def test_the_power_iteration_finds_a_matrix_of_low_rank_and_small_matrices_are_not_worth_it():
    matrix = drawn(1, 12, 2) @ drawn(1, 2, 9, seed=1)
    q = first_factors(1, 9, 2, seed=5, like=matrix)
    assert torch.equal(q, first_factors(1, 9, 2, seed=5, like=matrix))
    p = orthonormal(matrix @ q)
    torch.testing.assert_close(p @ (matrix.mT @ p).mT, matrix, rtol=1e-4, atol=1e-4)
    assert is_worth(12, 9, 2, 2.0)
    assert not is_worth(12, 9, 3, 2.0)  # 63 elements of 108


def means_of_a_rank(size: int) -> tuple[float, float, int, list[float]]:
    """Return how far the sums of means are from the exact ones with and without error feedback, the bytes of
    a call, and the last mean."""
    rank, world = dist.get_rank(), dist.get_world_size()
    means = OneBitMean(), OneBitMean(error_feedback=False)
    exact, sums = torch.zeros(size), [torch.zeros(size), torch.zeros(size)]
    for step in range(STEPS):
        if step == STEPS // 2:  # a resumed run
            saved, resumed = means[0].state_dict(), OneBitMean()
            resumed.load_state_dict(saved)
            means = resumed, means[1]
        everyone = [drawn(size, seed=world * step + other) + 0.3 for other in range(world)]
        exact += torch.stack(everyone).mean(0)
        for total, mean in zip(sums, means):
            with trace_collectives() as trace:
                found = mean(everyone[rank])
            total += found
    bytes_of_one = trace.bytes("all_to_all", rank) + trace.bytes("all_gather", rank)
    distances = [float((exact - total).norm() / exact.norm()) for total in sums]
    return distances[0], distances[1], bytes_of_one, found.tolist()


@pytest.mark.parametrize(("world", "size"), [(3, 1001), (2, 5)])
def test_the_one_bit_mean_is_equal_on_all_ranks_and_right_over_many_steps(world: int, size: int):
    results = run_ranks(means_of_a_rank, world, size)
    assert all(result[3] == results[0][3] for result in results)
    for kept, lost, sent, _ in results:
        assert kept < 0.12
        assert kept < 0.6 * lost
        part = -(-size // (8 * world)) * world
        assert sent == 2 * part + 2 * 4 * world  # the bits of two exchanges, and the scales
