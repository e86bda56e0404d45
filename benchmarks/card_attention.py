"""The sizes, candidate tiles and measurements of ``benchmarks.card_tune_attention``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlo_lib.kernels.triton_code import flash_attention as code
from dlo_lib.kernels.triton_code.launch import recorded
from dlo_lib.kernels.triton_code.tuning import compiled_for, trying

SMOKE = "--smoke" in sys.argv
DEVICE = torch.device("cpu" if SMOKE else "cuda")
SIZES = [(32, 4, 2, 32)] if SMOKE else [(2048, 24, 8, 128), (16384, 24, 8, 128), (2048, 32, 8, 64)]
PEERS = [SDPBackend.MATH] if SMOKE else [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
NAMES = ("ROWS", "COLS", "num_warps", "num_stages", "BULK", "AHEAD")
TILES = {  # the first of each list is that of tuning.toml
    ("forward", 128): [
        (64, 64, 4, 3, 1, 0), (64, 64, 4, 2, 1, 1), (64, 64, 4, 3, 1, 1), (64, 32, 4, 4, 1, 1),
        (64, 32, 4, 3, 1, 0), (64, 128, 4, 1, 1, 0), (64, 64, 4, 2, 0, 0), (64, 64, 4, 3, 0, 0),
        (64, 64, 4, 2, 0, 1), (64, 64, 4, 3, 0, 1), (128, 64, 8, 3, 0, 1), (128, 128, 8, 2, 0, 0),
    ],
    ("forward", 64): [
        (64, 128, 4, 2, 1, 0), (128, 64, 4, 3, 1, 0), (64, 128, 4, 3, 1, 0), (128, 64, 4, 2, 1, 0),
        (64, 64, 4, 2, 1, 0), (64, 64, 4, 4, 1, 1), (64, 64, 4, 3, 0, 0), (64, 64, 4, 3, 0, 1),
        (128, 64, 4, 3, 0, 0), (64, 128, 4, 2, 0, 0),
    ],
    ("dq", 128): [
        (128, 64, 8, 3, 1, 0), (64, 64, 4, 2, 1, 0), (128, 64, 8, 3, 1, 1), (64, 64, 4, 2, 1, 1),
        (64, 32, 4, 3, 1, 1), (64, 32, 4, 3, 1, 0), (128, 64, 8, 4, 1, 0), (64, 64, 4, 2, 0, 0),
        (128, 64, 8, 3, 0, 0),
    ],
    ("dq", 64): [
        (128, 64, 8, 3, 1, 0), (128, 64, 8, 4, 1, 0), (64, 64, 4, 2, 1, 0), (64, 64, 4, 3, 1, 1),
        (128, 64, 8, 3, 1, 1), (128, 64, 4, 3, 1, 0), (128, 64, 8, 3, 0, 0), (64, 128, 4, 3, 0, 0),
    ],
    ("dkv", 128): [(64, 64, 4, 2, 1, 0)],
    ("dkv", 64): [
        (64, 64, 4, 3, 1, 0), (64, 64, 4, 4, 1, 0), (128, 64, 4, 2, 1, 0), (64, 64, 4, 3, 0, 0),
        (64, 128, 8, 3, 0, 0),
    ],
}  # fmt: skip
BETWEEN = [(4096, 24, 8, 128), (8192, 24, 8, 128)]
"""Sizes that decide for which lengths the tiles of the forward are used: the first three are timed."""
CASES = [(*size, causal) for size, causal in product([*SIZES, *([] if SMOKE else BETWEEN)], (True, False))]
Case = tuple[int, int, int, int, bool]
Candidate = tuple[str, Case, tuple[int, ...]]


def candidates() -> list[Candidate]:
    """Every kernel, size and tile; the sizes of 2048 tokens first, because they take less time."""
    if SMOKE:
        return [(kernel, case, (16, 16, 4, 2, 1, 0)) for kernel in ("forward", "dq", "dkv") for case in CASES]
    found: list[tuple[str, Case, tuple[int, ...]]] = []
    for case in sorted(CASES):
        for (kernel, dim), tiles in TILES.items():
            if dim != case[3] or (kernel != "forward" and case[:4] in BETWEEN):
                continue
            timed = tiles[:3] if case[:4] in BETWEEN else tiles
            # Serialised by ptxas: the products of a loop with a mask whose tiles pointers read.
            found += [(kernel, case, tile) for tile in timed if tile[4] or kernel == "dkv" or not case[4]]
    return found


def tensors(case: Case, device: torch.device | str) -> list[Tensor]:
    """q, k, v and the gradient of the output, with the strides of heads that are cut from a projection."""
    seq, heads, kv_heads, dim, _ = case
    make = torch.empty if str(device) == "meta" else torch.randn
    counts = (heads, kv_heads, kv_heads, heads)
    dtype = torch.float32 if SMOKE else torch.bfloat16
    return [make(1, seq, n, dim, device=device, dtype=dtype).transpose(1, 2) for n in counts]


def compile_one(candidate: Candidate, capability: int) -> None:
    """Compile a candidate as its launch would, so that Triton's cache on the disk has it."""
    kernel, case, tile = candidate
    q, k, v, grad = tensors(case, "meta")
    values = dict(zip(NAMES, tile))
    with trying(f"flash_attention.{kernel}", values), compiled_for(capability), recorded() as launches:
        lse = torch.empty(q.shape[:3], device="meta")
        if kernel == "forward":
            code.attention_forward(q, k, v, case[4])
        else:
            code.attention_backward(grad, q, k, v, q, lse, case[4])
    for launch in launches:
        if launch.kernel.__name__ == f"_{kernel}_kernel":
            launch.kernel.warmup(**launch.arguments, **launch.options, grid=launch.grid)


def work_of(kernel: str, case: Case) -> float:
    """The operations of the products that a direction needs: 2 of the forward, 5 of the backward."""
    seq, heads, _, dim, causal = case
    return (4 if kernel == "forward" else 10) * seq**2 * heads * dim / (2 if causal else 1)


def median(function: Callable[[], Any]) -> float:
    if SMOKE:
        function()
        return 1.0
    from triton.testing import do_bench

    return float(do_bench(function, warmup=5, rep=20, return_mode="median"))


def sdpa(backend: SDPBackend, case: Case, inputs: list[Tensor]) -> tuple[Tensor, list[Tensor], bool]:
    """Return the output of a backend, its inputs, and whether it takes grouped heads, else repeated ones."""
    refused = None
    for grouped in (True, False):
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        if not grouped:
            k, v = (x.repeat_interleave(case[1] // case[2], 1).detach().requires_grad_() for x in (k, v))
        try:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=case[4], enable_gqa=grouped)
            return out, [q, k, v], grouped
        except RuntimeError as error:
            refused = error
    raise RuntimeError(f"{backend.name} refuses {case}: {refused}")


def exact_of(case: Case, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the output and the gradients of q, k and v of the first backend of ``PEERS``."""
    out, leaves, _ = sdpa(PEERS[0], case, inputs)
    grads = torch.autograd.grad(out, leaves, inputs[3])
    return out.detach(), *(g.unflatten(1, (x.shape[1], -1)).sum(2) for g, x in zip(grads, inputs))


def time_peer(record: dict[str, Any], case: Case, inputs: list[Tensor]) -> None:
    """Time the forward and the backward of the backend of number ``record["tile"]``."""
    backend = PEERS[record["tile"][0]]
    out, leaves, grouped = sdpa(backend, case, inputs)
    record |= {"backend": backend.name, "grouped": grouped}

    def forward() -> Tensor:
        q, k, v = leaves
        return F.scaled_dot_product_attention(q, k, v, is_causal=case[4], enable_gqa=grouped)

    with sdpa_kernel(backend):
        record["forward"] = median(forward)
    record["backward"] = median(lambda: torch.autograd.grad(out, leaves, inputs[3], retain_graph=True))


def time_candidate(
    record: dict[str, Any], case: Case, inputs: list[Tensor], exact: tuple[Tensor, ...]
) -> None:
    """Time one of our kernels, and record its largest error as a part of the largest element."""
    kernel, (q, k, v, grad) = record["kernel"], inputs
    out, lse = code.attention_forward(q, k, v, case[4])
    with trying(f"flash_attention.{kernel}", dict(zip(NAMES, record["tile"]))):
        if kernel == "forward":
            call: Callable[..., Any] = partial(code.attention_forward, q, k, v, case[4])
            pairs = [(call()[0], exact[0])]
        elif kernel == "dq":
            call = partial(code.query_gradient, grad, q, k, v, out, lse, case[4])
            pairs = [(call()[0], exact[1])]
        else:
            rows = code.query_gradient(grad, q, k, v, out, lse, case[4])[1]
            call = partial(code.key_gradients, grad, q, k, v, rows, case[4])
            pairs = list(zip(call(), exact[2:]))
        record["error"] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        record["ms"] = median(call)
    products = {"forward": 2, "dq": 3, "dkv": 4}[kernel]
    record["TFLOP/s"] = round(products / 2 * work_of("forward", case) / record["ms"] / 1e9, 1)
