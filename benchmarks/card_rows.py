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
from dlo_lib.kernels.rope import rotate
from dlo_lib.kernels.swiglu import swiglu_backward, swiglu_forward
from dlo_lib.kernels.triton_code import (
    cross_entropy,
    grouped_matmul,
    norms,
    rope,
    rows,
    softmax,
    swiglu,
    vector_add,
)

SIZES, LONG, PARTS = (
    [(16384, 4096), (8192, 8192), (2048, 3072)],
    [(4096, 128_256)],
    [(264, 8192), (132, 4096)],
)
DEVICE = "cpu" if "--smoke" in sys.argv else "cuda"
EPS, TERMS = 1e-5, CrossEntropyTerms()


class Case(NamedTuple):
    """A kernel; ``passes`` is how often a bf16 tensor of the given size is read or written, fp32 twice."""

    name: str
    table: str
    passes: int
    inputs: Callable[[int, int], tuple[Any, ...]]
    ours: Callable[..., Any]
    twin: Callable[..., Any]
    candidates: list[dict[str, int]]
    sizes: list[tuple[int, int]] = SIZES


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


def of_rope(m: int, n: int) -> tuple[Any, ...]:
    angle = r(m, 64).float()
    return r(1, m, n // 128, 128).transpose(1, 2), angle.cos().bfloat16(), angle.sin().bfloat16(), 1  # type: ignore[attr-defined]


def of_loss(m: int, n: int) -> tuple[Any, ...]:
    logits = r(m, n)
    targets = torch.arange(m, device=logits.device) * 31 % n
    return torch.full((m,), 0.5, device=logits.device), logits, targets, row_losses(logits, targets, TERMS)[1]


def of_experts(m: int, n: int) -> tuple[Any, ...]:
    return r(m, n), r(8, n, 8192), torch.full((8,), m // 8, device=DEVICE)


def of_expert_gradient(m: int, n: int) -> tuple[Any, ...]:
    return r(m, n), r(m, 8192), torch.full((8,), m // 8, device=DEVICE)


def sums(parts: Tensor) -> Tensor:
    out = torch.empty(parts.shape[-1], dtype=torch.bfloat16, device=parts.device)
    rows.sum_parts(parts, out)
    return out


def layer_norm_backward(grad: Tensor, x: Tensor, w: Tensor, mean: Tensor, r: Tensor) -> Any:
    wide = grad.float(), x.float(), w.shape, mean[:, None], r[:, None], w.float(), w.float(), [True] * 3
    return torch.ops.aten.native_layer_norm_backward(*wide)


FLAT = settings("BLOCK num_warps", (1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (512, 2))
HELD = settings("ROWS num_warps", (1, 2), (1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (2, 16), (4, 8))
LOOPS = settings(
    "ROWS STAGES programs num_warps",
    (1, 1, 2, 8), (1, 1, 4, 4), (1, 2, 2, 8), (1, 3, 2, 8), (1, 1, 1, 16), (1, 2, 1, 16), (1, 3, 1, 16),
    (1, 4, 2, 8),
)  # fmt: skip
HEADS = settings(
    "HEADS POSITIONS num_warps",
    (8, 1, 2), (8, 2, 4), (8, 4, 4), (16, 1, 4), (32, 1, 4), (32, 1, 8), (8, 1, 1), (16, 1, 2),
)  # fmt: skip
LANES = settings(
    "LANES STAGES num_warps",
    (512, 1, 8), (256, 1, 4), (512, 1, 4), (1024, 1, 8), (512, 3, 8), (1024, 1, 16), (1024, 3, 16),
    (256, 4, 4),
)  # fmt: skip
CASES = [
    Case("vector_add", "vector_add", 3, lambda m, n: (r(m, n), r(m, n)), vector_add.add, torch.add, FLAT),
    Case("softmax", "softmax.forward", 2, lambda m, n: (r(m, n),), softmax.softmax_forward,
         lambda x: x.softmax(-1), HELD),
    Case("softmax, backward", "softmax.backward", 3, lambda m, n: (r(m, n), r(m, n).softmax(-1)),
         softmax.softmax_backward, lambda g, y: torch._softmax_backward_data(g, y, -1, y.dtype), HELD),
    Case("rms_norm", "norms.forward", 2, lambda m, n: (r(m, n), r(n), EPS), norms.rms_norm_forward,
         rms_norm_forward, HELD),
    Case("layer_norm", "norms.forward", 2, lambda m, n: (r(m, n), r(n), r(n), EPS),
         lambda *args: norms.layer_norm_forward(*args)[0],
         lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps), HELD[1:4]),
    Case("rms_norm, backward", "norms.backward", 3, of_rms_norm,
         norms.rms_norm_backward, rms_norm_twin, LOOPS),
    Case("layer_norm, backward", "norms.backward", 3, of_norm, norms.layer_norm_backward, layer_norm_backward,
         LOOPS),
    Case("rope", "rope", 2, of_rope, rope.rotate, rotate, HEADS),
    Case("swiglu", "swiglu.forward", 3, lambda m, n: (r(m, n), r(m, n)), swiglu.swiglu_forward,
         swiglu_forward, FLAT),
    Case("swiglu, backward", "swiglu.backward", 5, lambda m, n: (r(m, n), r(m, n), r(m, n)),
         swiglu.swiglu_backward, swiglu_backward, FLAT),
    Case("cross_entropy", "cross_entropy.losses", 1, lambda m, n: (*of_loss(m, n)[1:3], TERMS),
         cross_entropy.row_losses, row_losses, LANES, LONG),
    Case("cross_entropy, backward", "cross_entropy.gradient", 2, lambda m, n: (*of_loss(m, n), TERMS),
         cross_entropy.logits_gradient, logits_gradient, FLAT, LONG),
    Case("softmax of long rows", "softmax.long", 3, lambda m, n: (r(m, n),), softmax.softmax_forward,
         lambda x: x.softmax(-1),
         settings("LANES STAGES num_warps", (1024, 1, 16), (512, 1, 8), (1024, 3, 16), (1024, 1, 8)),
         [(4096, 32768)]),
    Case("rms_norm, backward, long rows", "norms.backward", 3, of_rms_norm,
         norms.rms_norm_backward, rms_norm_twin,
         settings("ROWS RELOAD programs num_warps", (1, 1, 1, 16), (1, 1, 1, 32), (1, 1, 2, 16)),
         [(4096, 16384)]),
    Case("sum of the parts", "rows.sum_parts", 2, lambda m, n: (r(1, m, n).float(),), sums,
         lambda parts: parts[0].sum(0),
         settings("PARTS COLS num_warps", (128, 32, 8), (64, 32, 4), (128, 16, 4), (256, 16, 8), (32, 64, 4)),
         PARTS),
    Case("grouped_matmul", "grouped_matmul.forward", 1, of_experts, grouped_matmul.grouped_forward,
         grouped_forward,
         settings("ROWS COLS INNER num_warps num_stages", (128, 128, 64, 8, 3), (128, 128, 64, 8, 4),
                  (128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (64, 256, 64, 4, 4), (128, 256, 64, 8, 4)),
         [(2048, 3072)]),
    Case("grouped_matmul, weights", "grouped_matmul.weight_gradient", 1, of_expert_gradient,
         grouped_matmul.grouped_weight_gradient, grouped_weight_gradient,
         settings("ROWS COLS INNER num_warps num_stages", (64, 128, 128, 8, 3), (64, 128, 128, 8, 4),
                  (64, 256, 128, 8, 3), (64, 128, 128, 4, 3), (32, 256, 128, 8, 4), (64, 256, 128, 8, 4)),
         [(2048, 3072)]),
]  # fmt: skip
