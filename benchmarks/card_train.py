"""The speed and the memory of training on one GPU, eager, with fused kernels, compiled, and with both:

    python -m benchmarks.card_train FOLDER [SECONDS [PART ...]]

Each configuration is a run of `dlo_lib.train` in a process with a time limit. The run differs from that of a
user in two ways: the weights are drawn on the GPU, because a CPU takes longer than the measurement, and no
checkpoint is written. The rates are those of 10 steps; the first 5 steps compile and fill the caches. The
next process imports PyTorch while the current one trains, and does not touch the GPU before its turn.

With PARTs, only the configurations run whose name has one of them, such as fp8 or auto.

FOLDER/training.json has what is measured so far, FOLDER/NAME.txt the output of a configuration. Inductor's
cache is in FOLDER/cache. A second run leaves out what FOLDER has. Without a GPU, the model is a small one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

CARD = torch.cuda.is_available()
WARMUP, MEASURED, EVERY = 5, 10, 5
LIMIT = 110.0 if CARD else 300.0
"""Seconds of one configuration, from its turn. A search of the batch compiles about six shapes."""


@dataclass(frozen=True)
class Case:
    """A configuration: the model, and the options of `dlo_lib.train` that are compared. With `profile`, one
    more step writes the times of its kernels to FOLDER/NAME-profile.txt."""

    model: str
    batch: int | str
    kernels: str = "eager"
    compile: bool = False
    fp8: bool = False
    profile: bool = False

    @property
    def name(self) -> str:
        kind = {"eager": "compile", "fused": "compile-fused"}[self.kernels] if self.compile else self.kernels
        return f"{self.model}-{kind}{'-fp8' * self.fp8}-batch{self.batch}"


def cases() -> list[Case]:
    """Return the configurations, the most important first."""
    small = "llama-3.2-1b" if CARD else "tiny"
    auto: int | str = "auto" if CARD else 16
    return [
        Case(small, 2),
        Case(small, 2, "fused"),
        Case(small, 2, compile=True),
        Case(small, 2, "fused", compile=True),
        Case(small, 8, "fused", compile=True, profile=True),
        Case(small, 8, compile=True, profile=True),
        Case(small, 8, "fused", profile=True),
        Case(small, 8, profile=True),
        *([Case(small, 8, "fused", compile=True, fp8=True)] if CARD else []),
        Case(small, auto, "fused", compile=True),
        *([Case("llama-3.2-3b", auto, "fused", compile=True)] if CARD else []),
    ]


def main(folder: Path, seconds: float = 170.0, parts: Sequence[str] = ("",)) -> int:
    """Run the configurations that fit in ``seconds``, of those whose name has one of ``parts``; return 1 if
    one failed."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "training.json"
    rows: list[dict[str, Any]] = json.loads(results.read_text()) if results.exists() else []
    done = {row["name"] for row in rows if "tokens_per_second" in row}
    rows = [row for row in rows if row["name"] in done]
    wanted = [case for case in cases() if any(part in case.name for part in parts)]
    left = [case for case in wanted if case.name not in done]
    waiting = _start(left[0], folder) if left else None
    for case, following in zip(left, [*left[1:], None]):
        process = waiting
        assert process is not None
        if seconds - (time.monotonic() - began) < 15:
            process.kill()
            print(f"{case.name} and what follows: no time left", flush=True)
            break
        waiting = _start(following, folder) if following else None
        row = _measure(case, process, folder, min(LIMIT, seconds - (time.monotonic() - began)))
        rows.append(row)
        results.write_text(json.dumps(rows, indent=1) + "\n")
        print(_line(row), flush=True)
    return int(any("tokens_per_second" not in row for row in rows))


def _start(case: Case, folder: Path) -> subprocess.Popen[str]:
    """Start the process of ``case``, which imports and then waits for a line."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder.resolve() / "cache" / "inductor"),
        "DLO_CACHE": str(folder.resolve() / "cache"),
        "PYTHONUNBUFFERED": "1",
        **os.environ,
    }
    with open(folder / f"{case.name}.txt", "w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "benchmarks.card_train_run", json.dumps(asdict(case)), str(folder)]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, text=True
        )


def _measure(case: Case, process: subprocess.Popen[str], folder: Path, limit: float) -> dict[str, Any]:
    """Give the process its turn, wait for it, and return its row, or what went wrong."""
    began = time.monotonic()
    found = folder / f"{case.name}.json"
    found.unlink(missing_ok=True)
    try:
        process.communicate("go\n", timeout=limit)
        error = f"status {process.returncode}" if process.returncode else None
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        error = f"not done after {limit:.0f} s"
    seconds = round(time.monotonic() - began, 1)
    row: dict[str, Any] = {"name": case.name, **asdict(case), "seconds": seconds}
    if found.exists():
        return {**row, **json.loads(found.read_text())}
    said = (folder / f"{case.name}.txt").read_text(errors="replace").strip().splitlines()
    return {**row, "error": f"{error}: {said[-1] if said else 'no output'}"}


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    compiled = "" if row["compile_seconds"] is None else f", compiled in {row['compile_seconds']:.1f} s"
    expected = "" if row["expected_gib"] is None else f" (measure_memory {row['expected_gib']:.1f})"
    return (
        f"{row['name']}: {row['tokens_per_second']:,.0f} tokens/s{mfu} with batch {row['sequences']}, "
        f"{row['peak_gib']:.1f} GiB{expected}, loss {row['loss']:.3f}{compiled}, "
        f"{row['seconds']:.0f} s in all"
    )


if __name__ == "__main__":
    limit = float(sys.argv[2]) if len(sys.argv) > 2 else 170.0
    sys.exit(main(Path(sys.argv[1]), limit, sys.argv[3:] or ("",)))
