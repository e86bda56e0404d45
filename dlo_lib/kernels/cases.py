"""Every fused operation at the sizes of Llamas, for the report and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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

KV_HEADS, HEAD_DIM, EXPERTS = 8, 128, 8


@dataclass(frozen=True)
class Size:
    """The sizes of the tensors of all cases.

    Attributes:
        tokens: rows of most operations, and the sequence of the attention.
        hidden, wide, vocab: elements of a row of the model, of its MLP and of the logits.
        heads: of 128 elements each. Keys and values have 8.
    """

    tokens: int
    hidden: int
    wide: int
    heads: int
    vocab: int


SIZES: Mapping[str, Size] = {
    "small": Size(256, 1024, 2816, 8, 32_768),
    "3b": Size(2048, 3072, 8192, 24, 128_256),
    "8b": Size(16384, 4096, 14336, 32, 128_256),
    "70b": Size(16384, 8192, 28672, 64, 128_256),
}
"""Those of Llama 3 by the number of parameters, with sequences of 2048 and 16384 tokens, and small ones."""

Make = Callable[..., Tensor]
"""Creates a tensor of a shape that requires a gradient."""
Case = Callable[[Make, Size], "Tensor | None"]


def run_forward_and_backward(
    name: str, dtype: torch.dtype, device: torch.device | str, size: Size = SIZES["3b"]
) -> None:
    """Run the operation ``name`` of ``CASES`` or ``EDGES`` once, with its backward. The values of the tensors
    are not initialised."""

    def make(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).requires_grad_()

    out = (CASES[name] if name in CASES else EDGES[name])(make, size)
    if out is not None:
        out.backward(torch.empty_like(out))


def products(kernel: str, name: str, size: Size) -> int:
    """Return the floating-point operations of the matrix products of a kernel of the case ``name``; 0 if it
    multiplies no matrices.

    The kernels of the attention compute 2 products of queries * keys * head dim in the forward, 3 for the
    gradient of the queries, and 4 for those of keys and values.
    """
    if name == "grouped_matmul":
        return 2 * size.tokens * size.hidden * size.wide
    if not name.startswith("flash_attention"):
        return 0
    count = {"forward": 2, "dq": 3, "dkv": 4}.get(kernel.removesuffix("_kernel"), 0)
    pairs = size.tokens**2 // (2 if "causal" in name else 1)
    return 2 * count * size.heads * pairs * (64 if name.endswith("64") else HEAD_DIM)


def _attention(make: Make, size: Size, is_causal: bool, head_dim: int) -> Tensor:
    q = make(1, size.tokens, size.heads, head_dim).transpose(1, 2)
    k, v = (make(1, size.tokens, KV_HEADS, head_dim).transpose(1, 2) for _ in range(2))
    return FlashAttention.apply(q, k, v, is_causal)


def _targets(like: Tensor) -> Tensor:
    return torch.empty(like.shape[0], dtype=torch.int64, device=like.device)


def _rope(make: Make, size: Size) -> Tensor:
    x = make(1, size.tokens, size.heads, HEAD_DIM).transpose(1, 2)
    table = torch.empty(size.tokens, HEAD_DIM, dtype=x.dtype, device=x.device)
    return rope(x, table, table)


def _cross_entropy(make: Make, size: Size) -> Tensor:
    logits = make(size.tokens, size.vocab)
    return cross_entropy(logits, _targets(logits))


def _linear_cross_entropy(make: Make, size: Size) -> Tensor:
    x = make(size.tokens, size.hidden)
    return linear_cross_entropy(x, make(size.vocab, size.hidden), _targets(x))


def _grouped_matmul(make: Make, size: Size) -> Tensor:
    rows = make(size.tokens, size.hidden)
    counts = torch.empty(EXPERTS, dtype=torch.int64, device=rows.device)
    return grouped_matmul(rows, make(EXPERTS, size.hidden, size.wide), counts)


def _adamw(make: Make, size: Size) -> None:
    param = make(size.wide, size.hidden)
    optimizer = FusedAdamW([param])
    param.grad = torch.empty_like(param)
    optimizer.step()


CASES: Mapping[str, Case] = {
    "vector_add": lambda make, s: vector_add(make(s.tokens, s.hidden), make(s.tokens, s.hidden)),
    "softmax": lambda make, s: softmax(make(s.heads * s.tokens, s.tokens)),
    "rms_norm": lambda make, s: rms_norm(make(s.tokens, s.hidden), make(s.hidden)),
    "layer_norm": lambda make, s: layer_norm(make(s.tokens, s.hidden), make(s.hidden), make(s.hidden)),
    "rope": _rope,
    "swiglu": lambda make, s: swiglu(make(s.tokens, s.wide), make(s.tokens, s.wide)),
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "adamw": _adamw,
    "flash_attention": lambda make, s: _attention(make, s, False, HEAD_DIM),
    "flash_attention, causal": lambda make, s: _attention(make, s, True, HEAD_DIM),
    "flash_attention, causal, 64": lambda make, s: _attention(make, s, True, 64),
    "grouped_matmul": _grouped_matmul,
}

# The rows of the rules of tuning.toml, the longest that a program holds, and one that is longer.
_ROWS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384)
_ODD = Size(tokens=1000, hidden=0, wide=0, heads=8, vocab=0)


def _norm(norm: Callable[..., Tensor], weights: int, columns: int) -> Case:
    return lambda make, s: norm(make(64, columns), *(make(columns) for _ in range(weights)))


def _softmax(columns: int) -> Case:
    return lambda make, s: softmax(make(64, columns))


def _losses(rows: int, vocab: int) -> Case:
    def case(make: Make, size: Size) -> Tensor:
        logits = make(rows, vocab)
        return cross_entropy(logits, _targets(logits))

    return case


def _small_linear_loss(make: Make, size: Size) -> Tensor:
    x = make(64, 64)
    return linear_cross_entropy(x, make(1000, 64), _targets(x))


def _heads_of_rope(heads: int, head_dim: int) -> Case:
    def case(make: Make, size: Size) -> Tensor:
        x = make(1, 64, heads, head_dim).transpose(1, 2)
        table = torch.empty(64, head_dim, dtype=x.dtype, device=x.device)
        return rope(x, table, table)

    return case


EDGES: Mapping[str, Case] = {
    **{f"softmax, {columns}": _softmax(columns) for columns in (*_ROWS, 20_000)},
    **{f"rms_norm, {columns}": _norm(rms_norm, 1, columns) for columns in _ROWS},
    **{f"layer_norm, {columns}": _norm(layer_norm, 2, columns) for columns in _ROWS},
    **{f"rope, {heads} x {dim}": _heads_of_rope(heads, dim) for heads in (1, 2, 8) for dim in (64, HEAD_DIM)},
    "cross_entropy, 64 x 200": _losses(64, 200),
    "cross_entropy, 64 x 50,257": _losses(64, 50_257),
    "cross_entropy, 2048 x 50,257": _losses(2048, 50_257),
    "linear_cross_entropy, 64 x 1000": _small_linear_loss,
    "flash_attention, 64": lambda make, s: _attention(make, s, False, 64),
    "flash_attention, 1000 x 96": lambda make, s: _attention(make, _ODD, False, 96),
    "flash_attention, causal, 1000 x 96": lambda make, s: _attention(make, _ODD, True, 96),
}
"""Operations of shapes that the cases leave out: every rule of ``tuning.toml`` holds for one of both. Only
"flash_attention, 64" depends on the size."""
