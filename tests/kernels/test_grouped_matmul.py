"""Grouped matmul."""

from __future__ import annotations

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.kernels import grouped_matmul
from dlo_lib.kernels.dispatch import has_triton
from tests.kernels.parity import BACKENDS, NO_TRITON, check, dtypes_of, random, strided


def reference(rows, weights, counts):
    expert = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.einsum("rk,rkn->rn", rows, weights[expert])


@pytest.mark.parametrize("backend", BACKENDS)
def test_grouped_matmul(backend):
    counts = torch.tensor([3, 0, 18, 1])  # less than a tile, none, more than a tile
    for dtype in dtypes_of(backend):
        inputs = [strided(22, 19, dtype=dtype), random(4, 19, 5, dtype=dtype, seed=1), counts]
        check(grouped_matmul, reference, inputs, backend, factor=5)
        even = [
            random(52, 32, dtype=dtype),
            random(3, 32, 16, dtype=dtype, seed=1),
            torch.tensor([16, 33, 3]),
        ]
        check(grouped_matmul, reference, even, backend, factor=6)  # whole tiles, which are not masked
    check(grouped_matmul, reference, [random(0, 4), random(2, 4, 3), torch.zeros(2).long()], backend)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, 1], r"counts is \[1, 1\]: use numbers whose sum is that of the rows, 3"),
        ([4, -1], "use numbers whose sum"),
        ([3], r"counts has shape \(1,\)"),
    ],
)
def test_wrong_counts_are_refused(counts, message):
    """On the CPU: the host does not read counts on a GPU."""
    with torch.device("cpu"), pytest.raises(UserError, match=message):
        grouped_matmul(torch.ones(3, 4), torch.ones(2, 4, 5), torch.tensor(counts))


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_tiles_of_the_copy_engine(backend):
    """Experts begin and end inside of tiles; the gradient of the rows reads the weights transposed."""
    from dlo_lib.kernels.triton_code.tuning import trying

    bulk = {"BULK": 1}
    with trying("grouped_matmul.forward", bulk), trying("grouped_matmul.weight_gradient", bulk):
        for dtype in dtypes_of(backend):
            for inner, columns in ((32, 16), (40, 24)):
                inputs = [
                    random(52, inner, dtype=dtype),
                    random(4, inner, columns, dtype=dtype, seed=1),
                    torch.tensor([16, 30, 0, 6]),
                ]
                check(grouped_matmul, reference, inputs, backend, factor=6)


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_the_copy_engine_reads_aligned_matrices_only():
    from dlo_lib.kernels.triton_code.rows import in_bulk

    assert in_bulk(torch.ones(2, 8, 16))
    assert not in_bulk(torch.ones(2, 8, 16).mT)
    assert not in_bulk(torch.ones(8, 5))
    assert not in_bulk(torch.ones(5, 8, dtype=torch.bfloat16)[:, 1:])
    assert not in_bulk(torch.ones(8, 16).bfloat16()[:, 4:12])
    assert not in_bulk(torch.ones(1, 8).expand(4, 8))


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
@pytest.mark.parametrize("rows", [3, 40])
def test_rows_after_the_last_expert_give_0_in_the_kernel(rows):
    from dlo_lib.kernels.triton_code.grouped_matmul import grouped_forward

    out = grouped_forward(torch.ones(rows, 4), torch.ones(2, 4, 5), torch.tensor([1, 1]))
    assert out.tolist() == [[4.0] * 5] * 2 + [[0.0] * 5] * (rows - 2)
    out = grouped_forward(torch.ones(rows, 4), torch.ones(2, 4, 5), torch.tensor([0, 0]))
    assert not out.any()


def test_wrong_matrices_are_refused():
    with pytest.raises(UserError, match=r"they should be \(R, K\)"):
        grouped_matmul(torch.ones(3, 4), torch.ones(2, 5, 4), torch.tensor([1, 2]))
    with pytest.raises(UserError, match="use the same"):
        grouped_matmul(torch.ones(3, 4), torch.ones(2, 4, 5).half(), torch.tensor([1, 2]))


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
@pytest.mark.parametrize("counts", [[2, 40, 7], [50, 1, 1], [3, -1, 9], [-4, 2, 2]])
def test_the_kernels_reach_no_row_outside_of_the_rows_if_the_counts_are_wrong(counts):
    """The rows are the middle of a larger tensor, whose other rows are NaN or have a mark."""
    from dlo_lib.kernels.triton_code import grouped_matmul as module

    def middle(columns, outside):
        whole = torch.full((4 + 5 + 60, columns), outside)
        whole[4:9] = 1.0
        return whole, whole[4:9]

    (_, rows), (_, grad), (written, out) = middle(4, torch.nan), middle(6, torch.nan), middle(6, -1.0)
    weights, counts = torch.ones(3, 4, 6), torch.tensor(counts)
    start = module._prepare_forward(
        rows.device, rows.dtype, (5, 3, 4, 6), rows.stride(), weights.stride(), False
    )
    start(rows, weights, counts, out)
    reached = min(5, int(counts.clamp(min=0).sum()))
    assert out[:, 0].tolist() == [4.0] * reached + [0.0] * (5 - reached)
    assert written[:, 0].tolist() == [-1.0] * 4 + out[:, 0].tolist() + [-1.0] * 60
    sums = module.grouped_weight_gradient(rows, grad, counts).sum((1, 2)) / 24
    assert sums.sum() == reached
