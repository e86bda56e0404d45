"""Times candidate tiles of FlashAttention on a card: python -m benchmarks.card_tune_attention FOLDER

A pool of processes compiles the candidates of ``card_attention.py``. Another process times them by CUDA
events with a flushed cache, and compares each with the FLASH_ATTENTION backend of PyTorch, which is timed
too, as is CUDNN_ATTENTION. If that process fails or is silent, the next one omits the candidate. ``--smoke``
with TRITON_INTERPRET=1 interprets one candidate of each kernel on a CPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.card_attention import (
    CASES,
    DEVICE,
    PEERS,
    SMOKE,
    Case,
    candidates,
    compile_one,
    exact_of,
    tensors,
    time_candidate,
    time_peer,
    work_of,
)

LIMIT, COMPILING, SILENCE = 40.0, 18.0, 10.0
"""Seconds in all, of the compilation, and of one measurement."""


def jobs() -> list[tuple[str, Case, tuple[int, ...]]]:
    """Return all measurements. Those of one case are adjacent, and short cases come first."""
    found = [("peer", case, (number,)) for case in CASES for number in range(len(PEERS))] + candidates()
    return sorted(found, key=lambda job: (job[1][0], -job[1][3], not job[1][4], job[0] != "peer"))


def measure(done: set[str]) -> None:
    """Print a line before and after each measurement that is not in ``done``."""
    case = None
    for kernel, wanted, tile in jobs():
        record: dict[str, Any] = {"name": f"{kernel} {wanted} {tile}", "kernel": kernel, "case": wanted}
        record["tile"] = tile
        if record["name"] in done:
            continue
        print(json.dumps(record | {"failed": "it stopped the process"}), flush=True)
        try:
            if case != wanted:
                torch.manual_seed(0)
                case, inputs = wanted, tensors(wanted, DEVICE)
                exact = exact_of(case, inputs)
            if kernel == "peer":
                time_peer(record, case, inputs)
            else:
                time_candidate(record, case, inputs, exact)
        except Exception as error:  # noqa: BLE001 - the other candidates are measured
            record["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(record), flush=True)
        if "CUDA error" in record.get("failed", ""):
            os._exit(3)  # this process cannot use the card any more


def lines_of(command: list[str], end: float) -> list[str]:
    """Return what a process printed until its end, SILENCE, or the time ``end``."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    arrived: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            arrived.put(line)
        arrived.put("")

    threading.Thread(target=read, daemon=True).start()
    lines, silence = [], 2 * SILENCE  # until the first line
    try:
        while line := arrived.get(timeout=max(0.0, min(silence, end - time.monotonic()))):
            lines.append(line)
            silence = SILENCE
    except queue.Empty:
        process.kill()
    process.wait()
    return lines


def compile_all(start: float) -> str:
    """Compile each candidate once, in 14 processes."""
    capability = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    pool = ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn"))
    first: dict[Any, Case] = {}
    for kernel, case, tile in candidates():  # the length of a sequence changes no binary
        first.setdefault((kernel, case[3:], tile), case)
    work = [pool.submit(compile_one, (key[0], case, key[2]), capability) for key, case in first.items()]
    done, late = wait(work, timeout=COMPILING)
    failed = [str(future.exception())[:100] for future in done if future.exception()]
    for process in (pool._processes or {}).values() if late else ():
        process.kill()
    pool.shutdown(wait=not late, cancel_futures=True)
    seconds = time.monotonic() - start
    return f"compiled {len(done)} of {len(work)} in {seconds:.1f} s; failed: {sorted(set(failed)) or 'none'}"


def print_table(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print and return, for each case, the best tiles with the ratios of the backends' times to ours."""
    table = []
    for case in CASES:
        right = [
            r for r in records if r["case"] == list(case) and "failed" not in r and r.get("error", 0) < 0.02
        ]
        best = {r["kernel"]: r for r in sorted(right, key=lambda r: -r.get("ms", 0))}
        row: dict[str, Any] = {"case": case} | {
            k: [r["tile"], r["ms"]] for k, r in best.items() if k != "peer"
        }
        ours = {"forward": best.get("forward", {}).get("ms")}
        if "dq" in best and "dkv" in best:
            ours["backward"] = best["dq"]["ms"] + best["dkv"]["ms"]
        for direction, ms in ours.items():
            if not ms:
                continue
            row[f"{direction} TFLOP/s"] = round(work_of(direction, case) / ms / 1e9, 1)
            for peer in (r for r in right if r["kernel"] == "peer"):
                row[f"{direction} {peer['backend']}"] = [peer[direction], round(peer[direction] / ms, 3)]
        table.append(row)
        print(json.dumps(row), flush=True)
    return table


def main() -> None:
    if "--measure" in sys.argv:
        measure(set(json.loads(Path(sys.argv[-1]).read_text())))
        return
    start, folder = time.monotonic(), Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "tune_attention.json"
    compiled = "interpreted" if SMOKE else compile_all(start)
    print(compiled, flush=True)
    records: dict[str, dict[str, Any]] = {}
    left = out.with_suffix(".done.json")
    while len(records) < len(jobs()) and time.monotonic() - start < LIMIT - 5:
        left.write_text(json.dumps(list(records)))
        command = [sys.executable, "-m", "benchmarks.card_tune_attention", "--measure", str(left)]
        lines = lines_of(command + (["--smoke", str(left)] if SMOKE else []), start + LIMIT)
        records |= {record["name"]: record for record in map(json.loads, lines)}
        if not lines:
            break
    table = print_table(list(records.values()))
    for record in records.values():
        if "failed" in record or record.get("error", 0) > 0.02:
            print(record["name"], record.get("failed", record.get("error")), flush=True)
    card = "CPU" if SMOKE else torch.cuda.get_device_name()
    seconds = round(time.monotonic() - start, 1)
    whole = {"card": card, "compiled": compiled, "seconds": seconds, "table": table}
    out.write_text(json.dumps(whole | {"measurements": list(records.values())}, indent=1))
    print(f"{len(records)} of {len(jobs())} measurements, {seconds} s, {out}")


if __name__ == "__main__":
    main()
