"""Measures the loss of a linear layer and AdamW on a GPU, at the sizes of Llama 3.2, and writes JSON.

    PYTHONPATH=. python -m benchmarks.card_loss FOLDER        about 40 s
    TRITON_INTERPRET=1 PYTHONPATH=.venv-kernels .venv/bin/python -m benchmarks.card_loss FOLDER --smoke

Times are medians in ms, of forward and backward for a loss. Memory is the peak in GB above the inputs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlo_lib.kernels import CrossEntropyTerms, FusedAdamW, KernelBackend, linear_cross_entropy, using
from dlo_lib.kernels.triton_code import cross_entropy, loss_and_gradient
from dlo_lib.kernels.triton_code.tuning import trying

SMOKE = "--smoke" in sys.argv
DEVICE = torch.device("cpu" if SMOKE else "cuda")
HIDDEN, VOCAB, TOKENS = (32, 100, (24,)) if SMOKE else (3072, 128_256, (2048, 8192))
START, LIMIT = time.perf_counter(), 1e9 if SMOKE else 50.0
RESULTS: dict[str, Any] = {}
code = importlib.import_module("dlo_lib.kernels.linear_cross_entropy")


def record(name: str, make: Callable[[], Callable[[], Any]], moved: float = 0, work: float = 0) -> None:
    """Time ``make()()``; ``moved`` bytes and ``work`` operations give TB/s and TFLOP/s."""
    if time.perf_counter() - START > LIMIT:
        RESULTS[name] = "no time left"
        return
    try:
        call = make()
        call()
        before = synchronized()
        times = [timed(call) for _ in range(2 if SMOKE else 8)][1:]
        row = {"ms": round(statistics.median(times), 4)}
        if not SMOKE:
            row["peak GB"] = round((torch.cuda.max_memory_allocated() - before) / 1e9, 3)
        row |= {"TB/s": round(moved / row["ms"] / 1e9, 3)} if moved else {}
        RESULTS[name] = row | ({"TFLOP/s": round(work / row["ms"] / 1e9, 1)} if work else {})
    except Exception as error:  # noqa: BLE001  the other measurements are still of use
        RESULTS[name] = f"{type(error).__name__}: {str(error)[:200]}"
    print(f"{time.perf_counter() - START:5.1f} s  {name}: {RESULTS[name]}", flush=True)


def synchronized() -> int:
    """Wait for the device, forget the peak, and return the bytes that are allocated."""
    if SMOKE:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    if SMOKE:
        call()
        return 1e3 * (time.perf_counter() - start)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def eager(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), targets)


def inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16().requires_grad_()
    w = (torch.randn(VOCAB, HIDDEN, device=DEVICE) / HIDDEN**0.5).to(dtype).requires_grad_()
    return x, w, torch.randint(VOCAB, (tokens,), device=DEVICE)


def losses(tokens: int, autocast: bool) -> None:
    x, w, targets = inputs(tokens, torch.float32 if autocast else torch.bfloat16)

    def step(loss: Callable[..., Tensor], **options: Any) -> Callable[[], None]:
        def call() -> None:
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
                out = loss(x, w, targets, **options)
            (out * 0.37).backward()
            x.grad = w.grad = None

        return call

    name, work = f"{tokens} {'autocast' if autocast else 'bf16'}", 6.0 * tokens * HIDDEN * VOCAB
    for rows in (2048,) if SMOKE else (2048, 4096) if autocast else (1024, 1536, 2048, 3072, 4096):
        most = 16 if SMOKE else rows
        record(f"{name}: ours, {rows} rows", partial(step, linear_cross_entropy, chunk_rows=most), 0, work)
    with mock.patch.object(code, "_has_wide_products", return_value=False):
        record(f"{name}: ours, dW added apart", lambda: step(linear_cross_entropy), 0, work)
    record(f"{name}: eager", lambda: step(eager), 0, work)
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        record(f"{name}: Liger", lambda: step(lambda x, w, t: liger(x, w.to(x.dtype), t)), 0, work)
    if not SMOKE and not (autocast and tokens == TOKENS[0]):
        record(f"{name}: compiled", lambda: step(torch.compile(eager, dynamic=False)), 0, work)


def errors() -> None:
    """The largest error of each gradient, against fp32 and divided by its largest element."""
    x, w, targets = inputs(1024 if not SMOKE else 24, torch.bfloat16)
    wide, weight = (tensor.detach().float().requires_grad_() for tensor in (x, w))
    exacts = torch.autograd.grad(eager(wide, weight, targets) * 0.37, (wide, weight))
    rows = 8 if SMOKE else 256
    forms: dict[str, Callable[..., Tensor]] = {
        "one chunk": partial(linear_cross_entropy, chunk_rows=1024),
        "chunks": partial(linear_cross_entropy, chunk_rows=rows),
        "eager": eager,
    }
    for name, loss in forms.items():
        mine = torch.autograd.grad(loss(x, w, targets) * 0.37, (x, w))
        found = []
        for grad, exact in zip(mine, exacts):
            found.append(((grad.float() - exact).abs().max() / exact.abs().max()).item())
        RESULTS[f"error of dx and dW, {name}"] = [float(f"{value:.2e}") for value in found]


def kernels() -> None:
    """The losses and the gradient of the logits, in place, in one kernel or two."""
    rows, terms = TOKENS[0], CrossEntropyTerms()
    logits = torch.randn(rows, VOCAB, device=DEVICE).bfloat16()
    targets, ones = torch.randint(VOCAB, (rows,), device=DEVICE), torch.ones((), device=DEVICE).expand(rows)
    losses = torch.empty(rows, device=DEVICE)
    moved = 2.0 * logits.numel() * 2

    def together() -> None:
        loss_and_gradient.loss_and_gradient(logits, targets, terms, losses)

    def apart() -> None:
        _, lse = cross_entropy.row_losses(logits, targets, terms)
        cross_entropy.logits_gradient(ones, logits, targets, lse, terms, logits)

    record("copy of the logits", lambda: logits.clone, moved)
    sizes = [(1024, s, 32) for s in (1, 2, 3)] + [(2048, 1, 32), (512, 2, 16), (512, 1, 8), (1024, 2, 16)]
    for lanes, stages, warps in sizes[: 1 if SMOKE else None]:
        tile = {"LANES": lanes, "STAGES": stages, "num_warps": warps} if not SMOKE else {}
        with trying("loss_and_gradient", tile):
            record(f"loss and gradient {tile}", lambda: together, moved)
    record("loss, then gradient", lambda: apart, moved)


def products() -> None:
    """The products that make dW, for chunks of several sizes, and the last pass over dW."""
    dw, scale = torch.zeros(VOCAB, HIDDEN, device=DEVICE), torch.full((), 0.5, device=DEVICE)
    narrow = torch.empty_like(dw, dtype=torch.bfloat16)
    for out in (dw, narrow):
        moved = dw.numel() * (4.0 + out.element_size())
        record(f"scaled to {out.dtype}", lambda: partial(loss_and_gradient.scaled, dw, scale, out), moved)  # noqa: B023
    for k in () if SMOKE else (512, 1024, 1536, 2048, 3072, 4096):
        a, b = (torch.randn(k, n, device=DEVICE).bfloat16() for n in (VOCAB, HIDDEN))
        work = 2.0 * k * dw.numel()
        record(f"dW += a.T @ b, {k} rows", lambda: lambda: code.product(a.T, b, dw, add=True), 0, work)  # noqa: B023
        record(f"dW = a.T @ b, {k} rows", lambda: lambda: code.product(a.T, b, dw), 0, work)  # noqa: B023
        record(f"bf16 a.T @ b, {k} rows", lambda: lambda: torch.mm(a.T, b, out=narrow), 0, work)  # noqa: B023


def adamw() -> None:
    layer = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]
    shapes = [(128_256, 2048), (2048,)] + 16 * [*layer, (2048,), (2048,)]
    if SMOKE:
        shapes = [(70, 20), (20,), (3, 3)]
    params = [nn.Parameter(torch.randn(shape, device=DEVICE) * 0.02) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    moved = 28.0 * sum(param.numel() for param in params)
    tiles = [(8192, 2048, 8), (2048, 2048, 8), (4096, 1024, 4), (8192, 1024, 4), (1024, 1024, 4)]
    tiles += [(65536, 2048, 8), (2048, 1024, 4), (16384, 1024, 8), (4096, 4096, 16)]
    kinds: dict[str, Any] = {"torch fused": (torch.optim.AdamW, {"fused": True}, {})}
    kinds["torch foreach"] = (torch.optim.AdamW, {"foreach": True}, {})
    for chunk, block, warps in tiles[: 1 if SMOKE else None]:
        tile = {"CHUNK": chunk, "BLOCK": block, "num_warps": warps} if not SMOKE else {}
        kinds[f"ours {tile}"] = (FusedAdamW, {}, tile)
    for name, (kind, options, tile) in kinds.items():
        optimizer = kind(params, lr=1e-5, **options)
        with trying("adamw", tile):
            record(f"AdamW, {name}", lambda: optimizer.step, moved)  # noqa: B023
            synchronized()
            start = time.perf_counter()
            optimizer.step()
            if isinstance(RESULTS[f"AdamW, {name}"], dict):
                RESULTS[f"AdamW, {name}"]["CPU ms"] = round(1e3 * (time.perf_counter() - start), 3)


def main() -> None:
    torch.manual_seed(0)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    RESULTS["device"] = "interpreted" if SMOKE else torch.cuda.get_device_name()
    parts: list[Callable[[], None]] = [errors, kernels, products, adamw]
    parts += [partial(losses, tokens, autocast) for tokens in TOKENS for autocast in (False, True)]
    for part in parts:
        try:
            with using(KernelBackend.TRITON):
                part()
        except Exception as error:  # noqa: BLE001  the other parts are still of use
            RESULTS[f"part {part}"] = f"{type(error).__name__}: {str(error)[:500]}"
            print(RESULTS[f"part {part}"], flush=True)
        RESULTS["torch"], RESULTS["seconds"] = torch.__version__, round(time.perf_counter() - START, 1)
        (folder / "loss.json").write_text(json.dumps(RESULTS, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
