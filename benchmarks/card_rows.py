"""The memory-bound kernels with their inputs, twins and candidate settings, for ``card_tune_rows``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dlo_lib.kernels import CrossEntropyTerms
from dlo_lib.kernels.cross_entropy import logits_gradient, row_losses
from dlo_lib.kernels.grouped_matmul import grouped_forward, grouped_weight_gradient
from dlo_lib.kernels.rms_norm import rms_norm_backward, rms_norm_forward
from dlo_lib.kernels.triton_code import cross_entropy, grouped_matmul, norms, rows, softmax

DEVICE = "cpu" if "--smoke" in sys.argv else "cuda"
EPS, TERMS = 1e-5, CrossEntropyTerms()
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


def of_loss(m: int, n: int) -> tuple[Any, ...]:
    logits = r(m, n)
    targets = torch.arange(m, device=logits.device) * 31 % n
    return torch.full((m,), 0.5, device=logits.device), logits, targets, row_losses(logits, targets, TERMS)[1]


def of_experts(m: int, n: int) -> tuple[Any, ...]:
    return r(m, n), r(8, n, 8192), torch.full((8,), m // 8, device=DEVICE)


def of_expert_rows(m: int, n: int) -> tuple[Any, ...]:
    return r(m, 8192), r(8, n, 8192).mT, torch.full((8,), m // 8, device=DEVICE)


def of_expert_gradient(m: int, n: int) -> tuple[Any, ...]:
    return r(m, n), r(m, 8192), torch.full((8,), m // 8, device=DEVICE)


def sums(parts: Tensor) -> Tensor:
    out = torch.empty(parts.shape[-1], dtype=torch.bfloat16, device=parts.device)
    rows.sum_parts(parts, out)
    return out


def layer_norm_backward(grad: Tensor, x: Tensor, w: Tensor, mean: Tensor, r: Tensor) -> Any:
    wide = grad.float(), x.float(), w.shape, mean[:, None], r[:, None], w.float(), w.float(), [True] * 3
    return torch.ops.aten.native_layer_norm_backward(*wide)


LOOP = "ROWS STAGES RELOAD programs num_warps"
CASES = [
    Case("rms_norm, backward", "norms.backward", 3, of_rms_norm, norms.rms_norm_backward, rms_norm_twin,
         settings(LOOP, (1, 1, 1, 1, 32), (1, 2, 1, 1, 32), (1, 2, 2, 1, 32), (1, 2, 2, 1, 16),
                  (1, 1, 2, 1, 16)), [(4096, 16384)]),
    Case("layer_norm, backward", "norms.backward", 3, of_norm, norms.layer_norm_backward, layer_norm_backward,
         settings(LOOP, (1, 1, 1, 1, 32), (1, 2, 2, 1, 32), (1, 2, 2, 1, 16)), [(4096, 16384)]),
    Case("rms_norm, backward", "norms.backward", 3, of_rms_norm, norms.rms_norm_backward, rms_norm_twin,
         settings(LOOP, (1, 3, 0, 2, 8), (1, 3, 0, 3, 8), (1, 3, 0, 3, 4), (1, 3, 0, 4, 4)),
         [(16384, 4096), (2048, 3072)]),
    Case("layer_norm, backward", "norms.backward", 3, of_norm, norms.layer_norm_backward, layer_norm_backward,
         settings(LOOP, (1, 3, 0, 2, 8), (1, 3, 0, 3, 8)), [(16384, 4096)]),
    Case("layer_norm, backward", "norms.backward", 3, of_norm, norms.layer_norm_backward, layer_norm_backward,
         settings(LOOP, (1, 3, 0, 1, 16), (1, 4, 0, 1, 16), (1, 3, 2, 1, 16)), [(8192, 8192)]),
    Case("layer_norm", "norms.forward", 2, lambda m, n: (r(m, n), r(n), r(n), EPS),
         lambda *args: norms.layer_norm_forward(*args)[0],
         lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
         settings("ROWS num_warps", (1, 4), (2, 8), (1, 2)), [(16384, 4096)]),
    Case("layer_norm", "norms.forward", 2, lambda m, n: (r(m, n), r(n), r(n), EPS),
         lambda *args: norms.layer_norm_forward(*args)[0],
         lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
         settings("ROWS num_warps", (1, 8), (1, 16), (1, 32)), [(4096, 16384)]),
    Case("cross_entropy, backward", "cross_entropy.gradient", 2, lambda m, n: (*of_loss(m, n), TERMS),
         cross_entropy.logits_gradient, logits_gradient,
         settings("BLOCK num_warps", (1024, 4), (2048, 8), (2048, 4), (4096, 8)),
         [(4096, 128_256), (4096, 50_257)]),
    Case("cross_entropy", "cross_entropy.losses", 1, lambda m, n: (*of_loss(m, n)[1:3], TERMS),
         cross_entropy.row_losses, row_losses,
         settings("LANES STAGES num_warps", (512, 1, 8), (256, 1, 4)), [(4096, 50_257)]),
    Case("sum of the parts", "rows.sum_parts", 2, lambda m, n: (r(1, m, n).float(),), sums,
         lambda parts: parts[0].sum(0),
         settings("PARTS COLS num_warps", (256, 16, 8), (128, 16, 4), (512, 8, 8)), [(264, 3072)]),
    Case("grouped_matmul", "grouped_matmul.forward", 1, of_experts, grouped_matmul.grouped_forward,
         grouped_forward,
         settings(TILES, (128, 256, 64, 8, 4, 0), (128, 256, 64, 8, 4, 1), (128, 256, 64, 8, 3, 1),
                  (128, 128, 64, 4, 3, 1), (64, 128, 64, 4, 4, 1), (256, 128, 64, 8, 3, 1)),
         [(2048, 3072)]),
    Case("grouped_matmul, rows", "grouped_matmul.forward", 1, of_expert_rows, grouped_matmul.grouped_forward,
         grouped_forward,
         settings(TILES, (128, 256, 64, 8, 4, 0), (128, 256, 64, 8, 4, 1), (128, 128, 64, 4, 3, 1),
                  (64, 128, 64, 4, 4, 1)),
         [(2048, 3072)]),
    Case("grouped_matmul, weights", "grouped_matmul.weight_gradient", 1, of_expert_gradient,
         grouped_matmul.grouped_weight_gradient, grouped_weight_gradient,
         settings(TILES, (64, 128, 128, 4, 3, 0), (64, 128, 128, 4, 3, 1), (64, 256, 128, 8, 3, 1),
                  (64, 128, 128, 4, 2, 1), (64, 128, 64, 4, 3, 1), (128, 128, 128, 8, 2, 1)),
         [(2048, 3072)]),
    Case("fp32 softmax", "softmax.forward", 4, lambda m, n: (r(m, n).float(),), softmax.softmax_forward,
         lambda x: x.softmax(-1), settings("ROWS num_warps", (1, 4), (1, 8), (1, 16)), [(8192, 4096)]),
    Case("fp32 rms_norm", "norms.forward", 4, lambda m, n: (r(m, n).float(), r(n).float(), EPS),
         norms.rms_norm_forward, rms_norm_forward,
         settings("ROWS num_warps", (1, 4), (1, 8)), [(8192, 4096)]),
    Case("fp32 rms_norm, backward", "norms.backward", 6,
         lambda m, n: tuple(x.float() for x in of_rms_norm(m, n)), norms.rms_norm_backward, rms_norm_twin,
         settings(LOOP, (1, 3, 0, 2, 8), (1, 3, 0, 1, 16), (1, 2, 0, 2, 8)), [(8192, 4096)]),
]  # fmt: skip
"""The first candidate of each case is the best one of the measurement on an H200 on 2026-11-27."""
