"""The fused operations, forward and backward, at the sizes of a Llama: against PyTorch's operators and, on a
GPU, against `torch.compile` and Liger-Kernel where it is installed (`pip install --no-deps liger-kernel`; it
needs Triton and nothing else). The peer of FlashAttention is PyTorch's fused attention, that of AdamW its
fused step.

On a CPU ours is the PyTorch twin, and the question is whether a call without a GPU is slower than the
operators that it replaces. On a GPU the note of a memory-bound operation has the share of the bandwidth that
a copy of 1 GiB reaches there: the bytes that the operation must read and write, divided by its time.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.paired import Row, compare, measure, take_turns
from dlo_lib import kernels
from dlo_lib.kernels.llama import summed_cross_entropy
from dlo_lib.models import llama
from dlo_lib.optim import step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS, HIDDEN, WIDE, VOCAB = (
    (2048, 3072, 8192, 128_256) if DEVICE.type == "cuda" else (512, 1024, 2816, 32_064)
)
HEADS, KV_HEADS, HEAD_DIM, EXPERTS = 24, 8, 128, 8
COPIED = 1 << 30
"""Bytes of the copy that measures the bandwidth."""

Action = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """An operation: ours, PyTorch's operators, the shapes of its floating-point inputs, and the bytes that it
    must move forward and backward as a multiple of the bytes of its first input; None if arithmetic limits
    it."""

    ours: Action
    eager: Action
    shapes: tuple[tuple[int, ...], ...]
    moved: float | None = None


def _targets() -> Tensor:
    return torch.randint(VOCAB, (TOKENS,), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))


def _angles(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.outer(
        torch.arange(TOKENS, device=DEVICE), torch.linspace(1, 0.01, HEAD_DIM // 2, device=DEVICE)
    )
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
    counts = torch.full((EXPERTS,), TOKENS // EXPERTS, device=DEVICE)
    counts[0], counts[1] = counts[0] + 17, counts[1] - 17
    return counts


def cases(dtype: torch.dtype) -> dict[str, Case]:
    """Return the operations with a backward, for inputs of ``dtype``."""
    cos, sin = _angles(dtype)
    targets = _targets()
    rows, wide = (TOKENS, HIDDEN), (TOKENS, WIDE)
    heads, kv = (1, HEADS, TOKENS, HEAD_DIM), (1, KV_HEADS, TOKENS, HEAD_DIM)
    return {
        "vector_add": Case(kernels.vector_add, torch.add, (rows, rows), 3),
        "softmax": Case(kernels.softmax, lambda x: torch.softmax(x, -1), ((TOKENS * 8, TOKENS),), 5),
        "rms_norm": Case(
            lambda x, w: kernels.rms_norm(x, w, 1e-5),
            lambda x, w: llama.rms_norm(x, w, 1e-5),
            (rows, (HIDDEN,)),
            5,
        ),
        "layer_norm": Case(
            kernels.layer_norm,
            lambda x, w, b: F.layer_norm(x, (HIDDEN,), w, b),
            (rows, (HIDDEN,), (HIDDEN,)),
            5,
        ),
        "rope": Case(
            lambda x: kernels.rope(x, cos, sin), lambda x: llama.apply_rope(x, cos, sin), (heads,), 4
        ),
        "swiglu": Case(kernels.swiglu, lambda gate, up: F.silu(gate) * up, (wide, wide), 8),
        "cross_entropy": Case(
            lambda x: summed_cross_entropy(x[None], targets[None]),
            lambda x: step.summed_cross_entropy(x[None], targets[None]),
            ((TOKENS, VOCAB),),
            3,
        ),
        "linear_cross_entropy": Case(
            lambda x, w: kernels.linear_cross_entropy(x, w, targets),
            lambda x, w: step.summed_cross_entropy((x @ w.T)[None], targets[None]) / TOKENS,
            (rows, (VOCAB, HIDDEN)),
        ),
        "flash_attention": Case(_flash, _eager_attention, (heads, kv, kv)),
        "grouped_matmul": Case(_grouped, _loop_over_experts, (rows, (EXPERTS, HIDDEN, WIDE))),
    }


def liger(dtype: torch.dtype) -> dict[str, Action]:
    """Return the operations of Liger-Kernel by the names of ``cases``. It has none of the others.

    Its losses write the gradient over the logits, so a turn begins with what the turn before has left.
    """
    import liger_kernel.transformers.functional as functional  # needs Triton

    cos, sin = _angles(dtype)
    targets = _targets()
    keys = torch.zeros(1, 1, TOKENS, HEAD_DIM, device=DEVICE, dtype=dtype)
    return {
        "softmax": functional.liger_softmax,
        "rms_norm": lambda x, w: functional.liger_rms_norm(x, w, 1e-5, in_place=False),
        "layer_norm": lambda x, w, b: functional.liger_layer_norm(x, w, b, 1e-5),
        "rope": lambda x: functional.liger_rope(x, keys, cos, sin)[0],
        "swiglu": functional.liger_swiglu,
        "cross_entropy": lambda x: functional.liger_cross_entropy(x, targets, reduction="sum"),
        "linear_cross_entropy": lambda x, w: functional.liger_fused_linear_cross_entropy(x, w, targets),
    }


DTYPES = (torch.bfloat16, torch.float32)  # what is trained with first, if time runs out
WITH_LIGER = DEVICE.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None
ROWS = len(DTYPES) * (len(cases(torch.float32)) * (2 if DEVICE.type == "cuda" else 1) + 7 * WITH_LIGER + 1)
SECONDS = (5.0, 1.0)


def rows(pairs: int = 15) -> Iterator[Row]:
    if DEVICE.type == "cuda" and not WITH_LIGER:
        print("Liger-Kernel is not installed, so its rows are missing", file=sys.stderr)
    for dtype in DTYPES:
        short = str(dtype).removeprefix("torch.")
        of_liger = liger(dtype) if WITH_LIGER else {}
        for name, case in cases(dtype).items():
            inputs = [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in case.shapes]
            yield _row(f"{name}, {short}", "PyTorch", case, case.eager, inputs, pairs)
            if DEVICE.type == "cuda":
                compiled = torch.compile(case.eager, mode="max-autotune-no-cudagraphs")
                yield _row(f"{name}, {short}", "torch.compile", case, compiled, inputs, pairs)
            if name in of_liger:
                require_equal(name, case.eager, of_liger[name], inputs)
                yield _row(f"{name}, {short}", "Liger-Kernel", case, of_liger[name], inputs, pairs)
        yield _adamw(short, dtype, pairs)


def require_equal(name: str, eager: Action, theirs: Action, inputs: list[Tensor]) -> None:
    """Compare the output and the gradients of a peer with PyTorch's, so that no other operation is timed.

    Raises:
        AssertionError: they differ by more than rounding.
    """
    found = []
    with torch.no_grad():
        grad = torch.randn_like(eager(*inputs))
    for action in (eager, theirs):
        copies = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        output = action(*(copy * 1 for copy in copies))  # a peer may write into its inputs
        kept = output.detach().clone()
        output.backward(grad)
        found.append([kept, *(copy.grad for copy in copies)])
    share = 1e-3 if inputs[0].dtype == torch.float32 else 5e-2
    for mine, other in zip(*found):
        torch.testing.assert_close(
            other, mine, rtol=share, atol=share * mine.abs().max().item(), msg=lambda m: f"{name}: {m}"
        )


def _row(name: str, peer: str, case: Case, theirs: Action, inputs: list[Tensor], pairs: int) -> Row:
    with torch.no_grad():
        grad = torch.randn_like(case.eager(*inputs))

    def turn(action: Action) -> Callable[[], None]:
        def once() -> None:
            for tensor in inputs:
                tensor.grad = None
            action(*inputs).backward(grad)
            _finish()

        return once

    turns = take_turns(turn(case.ours), turn(theirs), pairs)
    note = ""
    if DEVICE.type == "cuda" and case.moved is not None:
        seconds = statistics.median(turn.wall for turn in turns.ours)
        share = case.moved * inputs[0].nbytes / seconds / _copied_per_second()
        note = f"{share:.0%} of the bandwidth of a copy"
    return compare(name, peer, 1, turns, note=note)


def _adamw(short: str, dtype: torch.dtype, pairs: int) -> Row:
    def optimizer(cls: Any, **options: Any) -> Callable[[], None]:
        params = [
            torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
            for shape in ((WIDE, HIDDEN), (HIDDEN,))
        ]
        for param in params:
            param.grad = torch.randn_like(param)
        made = cls(params, lr=1e-3, **options)

        def once() -> None:
            made.step()
            _finish()

        return once

    turns = take_turns(optimizer(kernels.FusedAdamW), optimizer(torch.optim.AdamW, fused=True), pairs)
    return compare(f"adamw, {short}", "PyTorch, fused", 1, turns)


def _finish() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def _copied_per_second() -> float:
    """Return the bytes per second, read and written, of a copy on the device."""
    source = torch.empty(COPIED // 4, device=DEVICE)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        _finish()

    copy()
    return 2 * COPIED / min(measure(copy).wall for _ in range(5))
