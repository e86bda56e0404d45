#!/usr/bin/env python3
"""Run what needs a GPU, in one command: the tests, the Triton kernels on the card, and their benchmark.

    python3 deploy/gpu.py [--to FOLDER] [--pairs N] [--only NAME ...]

Needs a PyTorch with CUDA and Triton, and nothing else of `make setup-dev` but pytest and its plugins. A step
that fails does not stop the others. The output of each step is a file in FOLDER, so that what was measured
before an interruption is kept.

Exit status: 0 if every step passed, 1 if one failed, 2 if PyTorch sees no GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ["pytest", "-n", "0", "-p", "no:cacheprovider", "-q"]


def steps(pairs: int) -> dict[str, list[str]]:
    """Return the arguments of each step's Python by name, the quick ones first."""
    return {
        "kernels": [*PYTEST, "tests/kernels"],
        "report": ["dlo_lib.kernels", "report"],
        "tests": [*PYTEST, "-m", "gpu", "tests"],
        "benchmark": ["benchmarks", "kernels", "--pairs", str(pairs)],
    }


def main() -> int:
    """Run the steps; return the exit status."""
    parser = argparse.ArgumentParser(description="Run the tests and the benchmark that need a GPU.")
    parser.add_argument("--to", type=Path, default=ROOT / "runs" / "gpu", help="the folder of the outputs")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of measurements of a row")
    parser.add_argument(
        "--only", nargs="+", choices=steps(1), metavar="NAME", help=f"of {', '.join(steps(1))}"
    )
    arguments = parser.parse_args()
    search_path = [str(ROOT), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search_path))}
    environment.pop("TRITON_INTERPRET", None)
    card = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"],
        capture_output=True,
        text=True,
    )
    if card.returncode:
        print("gpu: PyTorch sees no GPU here: run this command on a machine that has one", file=sys.stderr)
        return 2
    arguments.to.mkdir(parents=True, exist_ok=True)
    print(f"gpu: {card.stdout.strip()}, outputs in {arguments.to}", flush=True)
    failed = False
    for name, command in steps(arguments.pairs).items():
        if arguments.only and name not in arguments.only:
            continue
        began = time.monotonic()
        log = arguments.to / f"{name}.txt"
        with open(log, "w", encoding="utf-8") as file:
            status = subprocess.run(
                [sys.executable, "-m", *command], cwd=ROOT, env=environment, stdout=file, stderr=file
            ).returncode
        failed |= status != 0
        last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        print(f"gpu: {name}: status {status} after {time.monotonic() - began:.0f} s: {last}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
