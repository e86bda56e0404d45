"""Times a call of each fused operation on a card: python -m benchmarks.card_launch FOLDER

``chosen`` is our function as users call it; ``kernel`` is Triton at every size, whatever
``dispatch.SMALLEST`` says; ``eager`` is PyTorch's own operators. ``cpu`` is the time of Python until a call
is enqueued, ``all`` the time of a call in a loop until the GPU is idle, the larger of what the CPU and the
GPU need. FOLDER/launch.json receives every time, from which ``SMALLEST`` is chosen. ``--smoke`` runs tiny
sizes on a CPU, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import dlo_lib.kernels as ours
from dlo_lib.kernels.dispatch import SMALLEST, KernelBackend, using
from dlo_lib.kernels.triton_code.launch import launch
from dlo_lib.models.llama import apply_rope, rms_norm

SMOKE = "--smoke" in sys.argv
DEVICE = "cpu" if SMOKE else "cuda"
SIZES = [(4, 32), (8, 64)] if SMOKE else [(256, 1024), (1024, 1024), (2048, 3072), (4096, 4096)]
LARGE = [] if SMOKE else [(8192, 4096), (16384, 4096), (16384, 8192)]
"""Sizes of the memory-bound operations only."""
CALLS, LIMIT = (2, 60.0) if SMOKE else (20, 27.0)
SLOWER = 1.05
"""A call that takes this many times as long as eager is listed."""
HEAD = 16 if SMOKE else 128
VOCAB = 128 if SMOKE else 32768
Action = Callable[..., Tensor]


def make(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16().requires_grad_()


def heads(rows: int, columns: int, share: int = 1) -> Tensor:
    return make(1, rows, max(1, columns // HEAD // share), HEAD).detach().transpose(1, 2).requires_grad_()


def _losses(rows: int, columns: int) -> tuple[Action, Action, list[Tensor]]:
    targets = torch.randint(columns, (rows,), device=DEVICE)
    return (
        lambda x: ours.cross_entropy(x, targets),
        lambda x: F.cross_entropy(x.float(), targets),
        [make(rows, columns)],
    )


def _head(rows: int, columns: int) -> tuple[Action, Action, list[Tensor]]:
    targets = torch.randint(VOCAB, (rows,), device=DEVICE)
    return (
        lambda x, w: ours.linear_cross_entropy(x, w, targets),
        lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets),
        [make(rows, columns), make(VOCAB, columns)],
    )


def _experts(rows: int, columns: int) -> tuple[Action, Action, list[Tensor]]:
    counts = torch.full((4,), rows // 4, device=DEVICE)

    def loop(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([part @ matrix for part, matrix in zip(x.split(rows // 4), w)])

    return (
        lambda x, w: ours.grouped_matmul(x, w, counts),
        loop,
        [make(rows, columns), make(4, columns, columns)],
    )


def _rope(rows: int, columns: int) -> tuple[Action, Action, list[Tensor]]:
    cos, sin = (torch.randn(rows, HEAD, device=DEVICE).bfloat16() for _ in range(2))
    return lambda x: ours.rope(x, cos, sin), lambda x: apply_rope(x, cos, sin), [heads(rows, columns)]


CASES: dict[str, Callable[[int, int], tuple[Action, Action, list[Tensor]]]] = {
    "vector_add": lambda m, n: (ours.vector_add, torch.add, [make(m, n), make(m, n)]),
    "softmax": lambda m, n: (ours.softmax, lambda x: torch.softmax(x, -1), [make(m, n)]),
    "rms_norm": lambda m, n: (ours.rms_norm, lambda x, w: rms_norm(x, w, 1e-5), [make(m, n), make(n)]),
    "layer_norm": lambda m, n: (
        ours.layer_norm,
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        [make(m, n), make(n), make(n)],
    ),
    "rope": _rope,
    "swiglu": lambda m, n: (ours.swiglu, lambda x, y: F.silu(x) * y, [make(m, n), make(m, n)]),
    "cross_entropy": _losses,
    "linear_cross_entropy": _head,
    "flash_attention": lambda m, n: (
        lambda q, k, v: ours.flash_attention(q, k, v, True),
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape != k.shape
        ),
        [heads(m, n), heads(m, n, 4), heads(m, n, 4)],
    ),
    "grouped_matmul": _experts,
}


def actions(name: str, size: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """Return the calls to be timed by name: forward without and with its backward, ours and eager."""
    fused, eager, inputs = CASES[name](*size)
    found: dict[str, Callable[[], Any]] = {}
    for who, action in (("chosen", fused), ("kernel", fused), ("eager", eager)):
        found[f"{who} forward"] = partial(action, *inputs)
        found[f"{who} both"] = partial(both, action, inputs, torch.ones_like(action(*inputs)))
    return found


def both(action: Action, inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(action(*inputs), inputs, grad)


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, a, b, c, scale, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, x * scale + (a + b + c), mask=offsets < n)


def launches() -> dict[str, Callable[[], Any]]:
    """Return a launch of one kernel with 7 arguments: ours, and Triton's own."""
    args = (torch.ones(1024, device=DEVICE), torch.ones(1024, device=DEVICE), 1024, 3, 4, 5, 0.5)
    grid, meta = (8,), {"BLOCK": 128, "num_warps": 4}
    return {
        "kernel forward": lambda: launch(_copy_kernel, grid, *args, **meta),
        "eager forward": lambda: _copy_kernel[grid](*args, **meta),
    }


def compile_all(name: str) -> None:
    """Run each call of an operation once, so that Triton's cache on the disk has its kernels."""
    with using(KernelBackend.TRITON):
        for size in SIZES + (LARGE if name in SMALLEST else []):
            for action in actions(name, size).values():
                action()


def finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(who: str, action: Callable[[], Any]) -> dict[str, float]:
    """Return microseconds of a call: of Python, and until the GPU is idle; the better of three loops."""
    best = {"cpu": float("inf"), "all": float("inf")}
    forced = who == "kernel" or SMOKE
    with using(KernelBackend.TRITON) if forced else contextlib.nullcontext():
        for _ in range(3):
            action()
            finish()
            began = time.perf_counter()
            for _ in range(CALLS):
                action()
            enqueued = time.perf_counter() - began
            finish()
            for what, seconds in (("cpu", enqueued), ("all", time.perf_counter() - began)):
                best[what] = min(best[what], 1e6 * seconds / CALLS)
    return best


def main() -> None:
    began, records = time.monotonic(), []
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if not SMOKE:
        with ProcessPoolExecutor(10, multiprocessing.get_context("spawn")) as pool:
            for name, job in [(name, pool.submit(compile_all, name)) for name in CASES]:
                if job.exception() is not None:
                    print(f"{name}: {job.exception()}", flush=True)
    print(f"{time.monotonic() - began:.1f} s until the kernels are compiled; µs of a call: cpu / all")
    columns = [f"{who} {what}" for what in ("forward", "both") for who in ("chosen", "kernel", "eager")]
    print(" " * 34 + "".join(f"{column:>18}" for column in columns))
    jobs = [("launch", (1, 1024)), *((name, size) for size in SIZES for name in CASES)]
    jobs += [(name, size) for size in LARGE for name in SMALLEST]
    for name, size in jobs:
        if time.monotonic() - began > LIMIT:
            print("the time is up")
            break
        record: dict[str, Any] = {"name": name, "size": size}
        try:
            calls = launches() if name == "launch" else actions(name, size)
            record |= {what: timed(what.split()[0], action) for what, action in calls.items()}
        except Exception as error:  # noqa: BLE001 - the other operations are measured
            record["error"] = f"{type(error).__name__}: {error}"[:300]
        records.append(record)
        shown = [record.get(column) for column in columns]
        cells = "".join(f"{time['cpu']:9.1f}{time['all']:9.1f}" if time else f"{'-':>18}" for time in shown)
        print(f"{name:22}{size[0]:6}{size[1]:6}{cells} {record.get('error', '')}", flush=True)
        (folder / "launch.json").write_text(json.dumps(records, indent=1))
    for record in records:
        for what in ("forward", "both"):
            if f"chosen {what}" in record:
                ratio = record[f"chosen {what}"]["all"] / record[f"eager {what}"]["all"]
                if ratio > SLOWER:
                    print(f"slower than eager: {record['name']} {record['size']} {what}: {ratio:.2f}")


if __name__ == "__main__":
    main()
