"""One configuration of `benchmarks.card_train`: `python -m benchmarks.card_train_run CASE FOLDER`.

It imports everything, computes what `measure_memory` expects, waits for a line on standard input, trains, and
writes FOLDER/NAME.json.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._inductor.compile_fx
from torch.profiler import ProfilerActivity, profile

from benchmarks.card_train import CARD, EVERY, MEASURED, WARMUP, Case
from dlo_lib.base.errors import UserError
from dlo_lib.base.lifetime import die_with
from dlo_lib.kernels import Kernels
from dlo_lib.models import Llama, model_config
from dlo_lib.optim import Precision
from dlo_lib.profiling import MemoryReport, measure_memory
from dlo_lib.train import TrainConfig, loop, prepare, read_metrics, train
from dlo_lib.train.config import Auto

SEQ = 2048 if CARD else 64
GIB = 2**30


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Train; return the row of the table."""
    out = folder / "runs" / case.name
    steps = WARMUP + MEASURED + case.profile
    config = TrainConfig(
        model=case.model,
        data="python",
        seq=SEQ,
        batch=Auto.AUTO if isinstance(case.batch, str) else case.batch,
        steps=steps,
        lr=3e-4,
        log_every=EVERY,
        precision=Precision.BF16 if CARD else Precision.FP32,
        kernels=Kernels(case.kernels),
        compile=case.compile,
        fp8=case.fp8,
        out=out,
    )
    _replace(loop, "save", lambda *_: out)  # no checkpoint
    if CARD:
        _replace(prepare, "Llama", partial(Llama, device="cuda"))
    if case.profile:
        profiled = _profiled(loop.train_step, steps, folder / f"{case.name}-profile.txt")
        _replace(loop, "train_step", profiled)
    train(config)
    lines = read_metrics(out)
    measured = [line for line in lines if WARMUP < line.step <= WARMUP + MEASURED]
    sequences = json.loads((out / "config.json").read_text())["batch"]
    rate = MEASURED * sequences * SEQ / sum(line.step_seconds * EVERY for line in measured)
    mfus = [line.mfu * rate / line.tokens_per_second for line in measured if line.mfu is not None]
    return {
        "tokens_per_second": rate,
        "sequences": sequences,
        "mfu": mfus[-1] if mfus else None,
        "peak_gib": measured[-1].peak_bytes / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if CARD else None,
        "loss": next(line.loss for line in lines if line.step == 10),
        "compile_seconds": lines[0].compile_seconds,
        "parts": {
            name: getattr(measured[-1], f"{name}_seconds")
            for name in ("load", "forward", "backward", "optimizer")
        },
        "attention": _attention(case) if CARD else None,
        "gpu": measured[-1].gpu,
    }


def _replace(module: ModuleType, name: str, by: Any) -> None:
    """Replace a name of ``module`` in this process, which has no other work."""
    getattr(module, name)
    setattr(module, name, by)


def _expected(case: Case) -> float | None:
    """Return what `measure_memory` says, in GiB; None where the batch is not known yet, or where this release
    of PyTorch cannot measure a compiled step."""
    if isinstance(case.batch, str):
        return None
    try:
        report = _report(case, case.batch)
    except UserError as error:
        print(error)
        return None
    return report.peak_bytes / GIB


def _report(case: Case, batch: int) -> MemoryReport:
    return measure_memory(
        case.model,
        batch,
        SEQ,
        precision="bf16" if CARD else "fp32",
        parallel="none",
        kernels=case.kernels,
        compile=case.compile,
        fp8=case.fp8,
    )


def _attention(case: Case) -> str:
    """Return the name of the backend of attention that PyTorch chooses for this model."""
    sizes = model_config(case.model)
    q, k = (
        torch.zeros(1, SEQ, heads, sizes.head_dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        for heads in (sizes.num_heads, sizes.num_kv_heads)
    )
    choice = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=True)
    names = ("math", "flash", "efficient", "cudnn")
    return names[choice] if 0 <= choice < len(names) else str(choice)


def _profiled(step: Any, last: int, to: Path) -> Any:
    """Return ``step``, which in call number ``last`` also writes the kernels and their times to ``to``."""
    calls = 0

    def train_step(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < last:
            return step(*arguments, **options)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CARD else [])]
        with profile(activities=kinds) as seen:
            result = step(*arguments, **options)
            if CARD:
                torch.cuda.synchronize()
        by = "self_cuda_time_total" if CARD else "self_cpu_time_total"
        averages = seen.key_averages()
        to.write_text(averages.table(sort_by=by, row_limit=45, max_name_column_width=90))
        return result

    return train_step


if __name__ == "__main__":
    die_with(os.getppid())
    case, folder = Case(**json.loads(sys.argv[1])), Path(sys.argv[2])
    expected = _expected(case)
    if not sys.stdin.readline():
        sys.exit("it is not the turn of this configuration any more")
    (folder / f"{case.name}.json").write_text(json.dumps({**run(case, folder), "expected_gib": expected}))
