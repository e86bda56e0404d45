"""The fused operations on a CPU, forward and backward, at the sizes of a small Llama: is the PyTorch twin
slower than the operators that it replaces? The peer of FlashAttention is PyTorch's fused attention, that of
AdamW its fused step.

On a GPU `python -m benchmarks.card_table FOLDER` measures with CUDA events, and `make gpu` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.paired import Row, compare, take_turns
from dlo_lib import kernels
from dlo_lib.base.errors import UserError
from dlo_lib.kernels.llama import summed_cross_entropy
from dlo_lib.models import llama
from dlo_lib.optim import step

TOKENS, HIDDEN, WIDE, VOCAB = 512, 1024, 2816, 32_064
HEADS, KV_HEADS, HEAD_DIM, EXPERTS = 24, 8, 128, 8
Action = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """An operation: ours, PyTorch's operators, and the shapes of its floating-point inputs."""

    ours: Action
    eager: Action
    shapes: tuple[tuple[int, ...], ...]


def _targets() -> Tensor:
    return torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(0))


def _angles(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(TOKENS), torch.linspace(1, 0.01, HEAD_DIM // 2))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _eager_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernels.flash_attention(q, k, v, True)


def _grouped(rows: Tensor, weights: Tensor) -> Tensor:
    return kernels.grouped_matmul(rows, weights, _counts())


def _loop_over_experts(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.cat([part @ weight for part, weight in zip(rows.split(_counts().tolist()), weights)])


def _counts() -> Tensor:
    counts = torch.full((EXPERTS,), TOKENS // EXPERTS)
    counts[0], counts[1] = counts[0] + 17, counts[1] - 17
    return counts


def cases(dtype: torch.dtype) -> dict[str, Case]:
    """Return the operations with a backward, for inputs of ``dtype``."""
    cos, sin = _angles(dtype)
    targets = _targets()
    rows, wide = (TOKENS, HIDDEN), (TOKENS, WIDE)
    heads, kv = (1, HEADS, TOKENS, HEAD_DIM), (1, KV_HEADS, TOKENS, HEAD_DIM)
    return {
        "vector_add": Case(kernels.vector_add, torch.add, (rows, rows)),
        "softmax": Case(kernels.softmax, lambda x: torch.softmax(x, -1), ((TOKENS * 8, TOKENS),)),
        "rms_norm": Case(
            lambda x, w: kernels.rms_norm(x, w, 1e-5),
            lambda x, w: llama.rms_norm(x, w, 1e-5),
            (rows, (HIDDEN,)),
        ),
        "layer_norm": Case(
            kernels.layer_norm,
            lambda x, w, b: F.layer_norm(x, (HIDDEN,), w, b),
            (rows, (HIDDEN,), (HIDDEN,)),
        ),
        "rope": Case(lambda x: kernels.rope(x, cos, sin), lambda x: llama.apply_rope(x, cos, sin), (heads,)),
        "swiglu": Case(kernels.swiglu, lambda gate, up: F.silu(gate) * up, (wide, wide)),
        "cross_entropy": Case(
            lambda x: summed_cross_entropy(x[None], targets[None]),
            lambda x: step.summed_cross_entropy(x[None], targets[None]),
            ((TOKENS, VOCAB),),
        ),
        "linear_cross_entropy": Case(
            lambda x, w: kernels.linear_cross_entropy(x, w, targets),
            lambda x, w: step.summed_cross_entropy((x @ w.T)[None], targets[None]) / TOKENS,
            (rows, (VOCAB, HIDDEN)),
        ),
        "flash_attention": Case(_flash, _eager_attention, (heads, kv, kv)),
        "grouped_matmul": Case(_grouped, _loop_over_experts, (rows, (EXPERTS, HIDDEN, WIDE))),
    }


DTYPES = (torch.bfloat16, torch.float32)  # what is trained with first, if time runs out
ROWS = len(DTYPES) * (len(cases(torch.float32)) + 1)
SECONDS = (5.0, 1.0)


def rows(pairs: int = 15) -> Iterator[Row]:
    if torch.cuda.is_available():
        raise UserError("this measures a CPU: python -m benchmarks.card_table FOLDER measures the GPU")
    for dtype in DTYPES:
        short = str(dtype).removeprefix("torch.")
        for name, case in cases(dtype).items():
            inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in case.shapes]
            yield _row(f"{name}, {short}", case, inputs, pairs)
        yield _adamw(short, dtype, pairs)


def _row(name: str, case: Case, inputs: list[Tensor], pairs: int) -> Row:
    with torch.no_grad():
        grad = torch.randn_like(case.eager(*inputs))

    def turn(action: Action) -> Callable[[], None]:
        def once() -> None:
            for tensor in inputs:
                tensor.grad = None
            action(*inputs).backward(grad)

        return once

    return compare(name, "PyTorch", 1, take_turns(turn(case.ours), turn(case.eager), pairs))


def _adamw(short: str, dtype: torch.dtype, pairs: int) -> Row:
    def optimizer(cls: Any, **options: Any) -> Callable[[], None]:
        params = [torch.randn(shape).to(dtype).requires_grad_() for shape in ((WIDE, HIDDEN), (HIDDEN,))]
        for param in params:
            param.grad = torch.randn_like(param)
        made = cls(params, lr=1e-3, **options)

        return lambda: made.step()

    turns = take_turns(optimizer(kernels.FusedAdamW), optimizer(torch.optim.AdamW, fused=True), pairs)
    return compare(f"adamw, {short}", "PyTorch, fused", 1, turns)
