"""The memory-bound kernels with their inputs, twins and candidate settings, for ``card_tune_rows``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dlo_lib.kernels.grouped_matmul import grouped_forward
from dlo_lib.kernels.rms_norm import rms_norm_backward, rms_norm_forward
from dlo_lib.kernels.triton_code import grouped_matmul, norms, rows

DEVICE = "cpu" if "--smoke" in sys.argv else "cuda"
EPS = 1e-5
TILES = "ROWS COLS INNER num_warps num_stages BULK"


class Case(NamedTuple):
    """A kernel; ``passes`` is how often a bf16 tensor of the given size is read or written, fp32 twice."""

    name: str
    table: str
    passes: int
    inputs: Callable[[int, int], tuple[Any, ...]]
    ours: Callable[..., Any]
    twin: Callable[..., Any]
    candidates: list[dict[str, int]]
    sizes: list[tuple[int, int]]


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def settings(names: str, *values: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(names.split(), each)) for each in values]


def of_norm(m: int, n: int) -> tuple[Any, ...]:
    x = r(m, n)
    return r(m, n), x, r(n), x.float().mean(-1), torch.rsqrt(x.float().var(-1, correction=0) + EPS)


def of_rms_norm(m: int, n: int) -> tuple[Any, ...]:
    grad, x, weight, _, inverse = of_norm(m, n)
    return grad, x, weight, inverse


def rms_norm_twin(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> Any:
    return rms_norm_backward(grad, x, weight, inverse[:, None])


def of_expert_rows(m: int, n: int) -> tuple[Any, ...]:
    uneven = torch.tensor([m // 8 + off for off in (-7, 3, 1, 0, -1, 5, -3, 2)], device=DEVICE)
    return r(m, 8192), r(8, n, 8192).mT, uneven.clamp(min=0)


def sums(parts: Tensor) -> Tensor:
    out = torch.empty(parts.shape[-1], dtype=torch.bfloat16, device=parts.device)
    rows.sum_parts(parts, out)
    return out


def layer_norm_backward(grad: Tensor, x: Tensor, w: Tensor, mean: Tensor, r: Tensor) -> Any:
    wide = grad.float(), x.float(), w.shape, mean[:, None], r[:, None], w.float(), w.float(), [True] * 3
    return torch.ops.aten.native_layer_norm_backward(*wide)


LOOP, FORWARD = "ROWS STAGES RELOAD BIAS programs num_warps", "ROWS STAGES programs num_warps"
CASES = [
    Case("layer_norm", "norms.forward", 2, lambda m, n: (r(m, n), r(n), r(n), EPS),
         lambda *args: norms.layer_norm_forward(*args)[0],
         lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
         settings(FORWARD, (1, 0, 1, 8), (1, 2, 1, 16), (1, 3, 1, 16), (1, 4, 1, 16), (1, 3, 1, 8)),
         [(4096, 16384)]),
    Case("rms_norm", "norms.forward", 2, lambda m, n: (r(m, n), r(n), EPS), norms.rms_norm_forward,
         rms_norm_forward, settings(FORWARD, (1, 0, 1, 8), (1, 3, 1, 16), (1, 3, 2, 16)), [(4096, 16384)]),
    Case("rms_norm, backward", "norms.backward", 3, of_rms_norm, norms.rms_norm_backward, rms_norm_twin,
         settings(LOOP, (1, 1, 2, 0, 1, 16), (1, 2, 3, 0, 1, 16), (1, 3, 3, 0, 1, 16), (1, 3, 3, 0, 1, 32)),
         [(4096, 16384)]),
    Case("layer_norm, backward", "norms.backward", 3, of_norm, norms.layer_norm_backward, layer_norm_backward,
         settings(LOOP, (1, 1, 1, 0, 1, 32), (1, 1, 2, 0, 1, 16), (1, 3, 3, 0, 1, 16), (1, 1, 2, 1, 1, 16),
                  (1, 3, 3, 1, 1, 16)), [(4096, 16384)]),
    Case("gradient of a bias", "rows.sum_parts", 1, lambda m, n: (r(1, m, n),), sums,
         lambda parts: parts[0].float().sum(0),
         settings("PARTS COLS num_warps", (128, 32, 8), (64, 64, 8), (32, 128, 8), (64, 128, 16)),
         [(4096, 16384)]),
    Case("grouped_matmul, rows", "grouped_matmul.forward", 1, of_expert_rows, grouped_matmul.grouped_forward,
         grouped_forward, settings(TILES, (128, 256, 64, 8, 4, 1)), [(2048, 3072)]),
    Case("rms_norm, backward", "norms.backward", 3, of_rms_norm, norms.rms_norm_backward, rms_norm_twin,
         settings(LOOP, (1, 3, 0, 0, 2, 8), (1, 3, 0, 0, 1, 16)), [(2048, 3072)]),
]  # fmt: skip
"""The first candidate of each case is today's, or the best one of the measurements on an H200 on 2026-11-27.
The counts of ``of_expert_rows`` are uneven: most tiles of an expert begin or end inside of 128 rows."""
