"""Times candidate settings of the memory-bound kernels on a card: python -m benchmarks.card_tune_rows FOLDER

Each candidate of a table of ``tuning.toml`` is compared with the PyTorch twin, and timed by CUDA events with
a flushed cache. FOLDER/tune_rows.json receives every time, and the share of the bandwidth of a copy in the
same run. ``--smoke`` with TRITON_INTERPRET=1 interprets one candidate of each kernel on a CPU, untimed.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.card_rows import CASES, DEVICE, Case, r
from dlo_lib.kernels.triton_code.tuning import trying

LIMIT = 14.0
"""Seconds after which nothing more is measured."""


def compile_all(jobs: list[tuple[int, tuple[int, int], dict[str, int]]]) -> None:
    """Compile candidates, so that Triton's cache on the disk has them; logits have fewer rows."""
    for number, size, values in jobs:
        case = CASES[number]
        try:
            with trying(case.table, values):
                case.ours(*case.inputs(256 if size[1] > 32_768 else size[0], size[1]))
        except Exception:  # noqa: BLE001 - the other candidates are measured
            print(f"{case.name} {size} {values}: {traceback.format_exc(limit=-1)}", flush=True)


def error_of(ours: Any, exact: Any) -> float:
    """Return the largest error of an output, divided by the largest element of that output."""
    pairs = zip(ours, exact) if isinstance(ours, tuple) else [(ours, exact)]
    errors = [
        ((a.float() - b.float().view(a.shape)).abs().max() / b.float().abs().max()).item() for a, b in pairs
    ]
    return max(errors)


def measure(case: Case, size: tuple[int, int], copied: float, timed: bool) -> list[dict[str, Any]]:
    """Return a record of each candidate: its error, and its median time in ms."""
    from triton.testing import do_bench

    found: list[dict[str, Any]] = []
    try:
        args = case.inputs(*size)
        exact = case.twin(*args)
    except Exception as error:  # noqa: BLE001 - the other cases are measured
        return [{"name": case.name, "table": case.table, "size": size, "failed": repr(error)[:300]}]
    for values in case.candidates[: None if timed else 1]:
        record: dict[str, Any] = {"name": case.name, "table": case.table, "size": size, "values": values}
        found.append(record)
        try:
            with trying(case.table, values):
                record["error"] = error_of(case.ours(*args), exact)
                if timed:
                    record["ms"] = do_bench(lambda: case.ours(*args), warmup=5, rep=20, return_mode="median")
                    moved = 2 * case.passes * size[0] * size[1]
                    record["share"] = moved / record["ms"] / 1e6 / copied
        except Exception as error:  # noqa: BLE001 - the other candidates are measured
            record["failed"] = repr(error)[:300]
    return found


def main(folder: Path) -> None:
    timed, started = DEVICE == "cuda", time.monotonic()
    places = [(number, size) for which in range(3) for number, case in enumerate(CASES)
              for size in case.sizes[which : which + 1]]  # fmt: skip
    copied, records = 1.0, []
    jobs = [(number, size, values) for number, size in places for values in CASES[number].candidates]
    if not timed:
        jobs = [(number, (8, 128), values) for number, _, values in jobs[:2]]
    many = 14 if timed else 1
    with ProcessPoolExecutor(many, multiprocessing.get_context("spawn")) as pool:
        work = [pool.submit(compile_all, jobs[start::many]) for start in range(many)]
    print("processes that failed:", [part.exception() for part in work if part.exception()])
    print(f"compiled in {time.monotonic() - started:.1f} s", flush=True)
    if timed:
        from triton.testing import do_bench

        x, y = r(16384, 16384), r(16384, 16384)
        copied = 4 * x.numel() / do_bench(lambda: y.copy_(x), warmup=5, rep=50, return_mode="median") / 1e6
        print(f"copy: {copied:.0f} GB/s", flush=True)
    for number, size in places:
        if timed and time.monotonic() - started > LIMIT:
            print(f"{LIMIT:.0f} s are over: {CASES[number].name} {size} and what follows is not measured")
            break
        found = measure(CASES[number], size if timed else (8, 128), copied, timed)
        records += found
        best = min(found, key=lambda record: record.get("ms", float("inf")))
        wrong = [record for record in found if "failed" in record or not record["error"] < 0.03]
        print(CASES[number].name, size, {**best, "wrong": wrong}, flush=True)
        text = json.dumps({"copy_gb_s": copied, "records": records}, indent=1)
        (folder / "tune_rows.json").write_text(text, encoding="utf-8")
    print(f"{time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
