"""Every fused operation at the sizes of Llama 3.2 3B with 2048 tokens, for the report and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dlo_lib.kernels.adamw import FusedAdamW
from dlo_lib.kernels.cross_entropy import cross_entropy
from dlo_lib.kernels.flash_attention import FlashAttention
from dlo_lib.kernels.grouped_matmul import grouped_matmul
from dlo_lib.kernels.layer_norm import layer_norm
from dlo_lib.kernels.linear_cross_entropy import linear_cross_entropy
from dlo_lib.kernels.rms_norm import rms_norm
from dlo_lib.kernels.rope import rope
from dlo_lib.kernels.softmax import softmax
from dlo_lib.kernels.swiglu import swiglu
from dlo_lib.kernels.vector_add import vector_add

TOKENS, HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EXPERTS = 2048, 3072, 8192, 24, 8, 128, 128_256, 8

Make = Callable[..., Tensor]
"""Creates a tensor of a shape that requires a gradient."""


def run_forward_and_backward(name: str, dtype: torch.dtype, device: torch.device | str) -> None:
    """Run the operation ``name`` of ``CASES`` once, with its backward. The values of the tensors are
    not initialised."""

    def make(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).requires_grad_()

    out = CASES[name](make)
    if out is not None:
        out.backward(torch.empty_like(out))


def _attention(make: Make, is_causal: bool, head_dim: int) -> Tensor:
    q = make(1, TOKENS, HEADS, head_dim).transpose(1, 2)
    k, v = (make(1, TOKENS, KV_HEADS, head_dim).transpose(1, 2) for _ in range(2))
    return FlashAttention.apply(q, k, v, is_causal)


def _targets(like: Tensor) -> Tensor:
    return torch.empty(like.shape[0], dtype=torch.int64, device=like.device)


def _rope(make: Make) -> Tensor:
    x = make(1, TOKENS, HEADS, HEAD_DIM).transpose(1, 2)
    table = torch.empty(TOKENS, HEAD_DIM, dtype=x.dtype, device=x.device)
    return rope(x, table, table)


def _cross_entropy(make: Make) -> Tensor:
    logits = make(TOKENS, VOCAB)
    return cross_entropy(logits, _targets(logits))


def _linear_cross_entropy(make: Make) -> Tensor:
    x = make(TOKENS, HIDDEN)
    return linear_cross_entropy(x, make(VOCAB, HIDDEN), _targets(x))


def _grouped_matmul(make: Make) -> Tensor:
    rows = make(TOKENS, HIDDEN)
    counts = torch.empty(EXPERTS, dtype=torch.int64, device=rows.device)
    return grouped_matmul(rows, make(EXPERTS, HIDDEN, WIDE), counts)


def _adamw(make: Make) -> None:
    param = make(WIDE, HIDDEN)
    optimizer = FusedAdamW([param])
    param.grad = torch.empty_like(param)
    optimizer.step()


CASES: Mapping[str, Callable[[Make], Tensor | None]] = {
    "vector_add": lambda make: vector_add(make(TOKENS, HIDDEN), make(TOKENS, HIDDEN)),
    "softmax": lambda make: softmax(make(HEADS * TOKENS, TOKENS)),
    "rms_norm": lambda make: rms_norm(make(TOKENS, HIDDEN), make(HIDDEN)),
    "layer_norm": lambda make: layer_norm(make(TOKENS, HIDDEN), make(HIDDEN), make(HIDDEN)),
    "rope": _rope,
    "swiglu": lambda make: swiglu(make(TOKENS, WIDE), make(TOKENS, WIDE)),
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "adamw": _adamw,
    "flash_attention": lambda make: _attention(make, False, HEAD_DIM),
    "flash_attention, causal": lambda make: _attention(make, True, HEAD_DIM),
    "flash_attention, causal, 64": lambda make: _attention(make, True, 64),
    "grouped_matmul": _grouped_matmul,
}
