#!/usr/bin/env python3
"""Run what needs a GPU, in one command and at most eight minutes: the tests of the kernels, the table of the
operations, training, and the other tests that need a GPU.

    python3 deploy/gpu.py [PART ...] [--to FOLDER] [--again]

The machine needs PyTorch with CUDA, Triton and pytest with its plugins; nothing is installed. Every part has
a time limit and a folder in runs/gpu with its output. A part that fails or reaches its limit does not stop
the others. A second run leaves out the parts that are done and continues the others: tests that passed and
rows that were measured are not repeated. --again repeats all.

After each part, FOLDER (runs/gpu by default) has two files: summary.txt with what was printed here and the
end of each output, and results.tar.gz with all outputs.

Exit status: 0 if every part passed, 1 if one failed, 2 if PyTorch sees no GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "runs" / "gpu"
TOTAL = 480.0
"""Seconds of the whole run."""
SHOWN = 15
"""Lines of each output in the summary."""
PACKED = (".txt", ".json", ".jsonl", ".toml", ".md", ".png", ".csv")
"""What results.tar.gz has."""
LARGEST = 4 << 20
"""Bytes of a file in results.tar.gz."""


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Attributes:
        arguments: returns the arguments of Python for the folder of the part and its limit in seconds.
        limit: the most seconds that the part may take.
        by_default: whether it runs if no part is named.
    """

    arguments: Callable[[Path, float], list[str]]
    limit: float
    by_default: bool = False


def module(name: str, *more: str) -> Callable[[Path, float], list[str]]:
    """Return the arguments that run the module ``name`` with the folder as its argument."""
    return lambda folder, limit: ["-m", name, str(folder), *more]


def queue(processes: int, tests: Callable[[], list[str]]) -> Callable[[Path, float], list[str]]:
    """Return the arguments that run ``tests()`` in this number of processes.

    The queue stops 5 seconds before the limit, so that it can print what it has.
    """
    return lambda folder, limit: [
        *("-m", "tests.shared_queue", str(folder), "--processes", str(processes)),
        *("--limit", str(max(limit - 5, 1)), *tests()),
    ]


def gpu_tests() -> list[str]:
    """Return the arguments of pytest for the tests with the mark ``gpu``.

    The other files are not collected, because this machine may lack what they import. The tests of
    tests/profiling need most of the memory, so that only one process runs them.
    """
    files = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    marked = [file for file in files if "mark.gpu" in (ROOT / file).read_text(encoding="utf-8")]
    return ["--alone", "tests/profiling", "-m", "gpu", *marked]


PARTS = {
    "kernels": Part(queue(12, lambda: ["tests/kernels"]), 120, by_default=True),
    "table": Part(module("benchmarks.card_table", "--limit", "140"), 145, by_default=True),
    "training": Part(module("benchmarks.card_train", "145"), 150, by_default=True),
    "tests": Part(queue(3, gpu_tests), 65, by_default=True),
    "search-launch": Part(module("benchmarks.card_launch"), 30),
    "search-rows": Part(module("benchmarks.card_tune_rows"), 60),
    "search-attention": Part(module("benchmarks.card_tune_attention"), 100),
    "search-loss": Part(module("benchmarks.card_loss"), 60),
    # in the folder of the training, whose compiled code it uses
    "check": Part(lambda folder, limit: ["-m", "benchmarks.card_check", str(folder.parent / "training")], 90),
    "labs": Part(module("benchmarks.card_labs"), 300),
    "report": Part(lambda folder, limit: ["-m", "dlo_lib.kernels", "report", "--jobs", "12"], 120),
}
GROUPS = {"search": [name for name in PARTS if name.startswith("search-")]}
CARD = """
import torch
properties = torch.cuda.get_device_properties(0)
try:
    import triton
    triton = triton.__version__
except ImportError:
    triton = "not installed"
print(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, "
      f"PyTorch {torch.__version__}, Triton {triton}")
"""


def main() -> int:
    """Run the parts; return the exit status."""
    arguments = _parsed()
    names = [each for name in arguments.parts for each in GROUPS.get(name, [name])]
    names = list(dict.fromkeys(names)) or [name for name, part in PARTS.items() if part.by_default]
    environment = _environment()
    card = subprocess.run([sys.executable, "-c", CARD], capture_output=True, text=True, env=environment)
    if card.returncode:
        print(
            "gpu: PyTorch sees no GPU here: use a machine that has one, and a PyTorch for CUDA",
            file=sys.stderr,
        )
        return 2
    began = time.monotonic()
    lines: list[str] = []

    def say(line: str) -> None:
        print(f"gpu: {line}", flush=True)
        lines.append(line)

    say(f"{card.stdout.strip()}, outputs in {arguments.to}")
    failed = False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which stops the part that runs
    for name in names:
        left = arguments.total - (time.monotonic() - began)
        folder = arguments.parts_folder / name
        if arguments.again:
            shutil.rmtree(folder, ignore_errors=True)
        if (folder / "done.txt").exists():
            say(f"{name}: done before ({(folder / 'done.txt').read_text().strip()}); --again repeats it")
        elif left < 5:
            failed = True
            say(f"{name}: not run, because {arguments.total:.0f} s are over")
        else:
            status, line = _run(name, min(PARTS[name].limit, left), folder, environment)
            failed |= status != 0
            say(line)
        _pack(arguments.to, arguments.parts_folder, names, lines)
    say(f"all parts took {time.monotonic() - began:.0f} s")
    _pack(arguments.to, arguments.parts_folder, names, lines)
    return int(failed)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the tests and the measurements that need a GPU.")
    every = [*PARTS, *GROUPS]
    default = [name for name, part in PARTS.items() if part.by_default]
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(every)}; without one: {', '.join(default)}"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="as PART")
    parser.add_argument("--to", type=Path, default=KEPT, help="the folder of the summary and the archive")
    parser.add_argument(
        "--parts-folder", type=Path, default=KEPT, metavar="FOLDER", help="the folder of the outputs"
    )
    parser.add_argument("--again", action="store_true", help="repeat what is done")
    parser.add_argument("--total", type=float, default=TOTAL, metavar="SECONDS", help="for all parts")
    arguments = parser.parse_args()
    arguments.parts += arguments.only
    for name in arguments.parts:
        if name not in every:
            parser.error(f"{name!r} is no part: use {', '.join(every)}")
    arguments.to, arguments.parts_folder = arguments.to.resolve(), arguments.parts_folder.resolve()
    return arguments


def _environment() -> dict[str, str]:
    search_path = [str(ROOT), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search_path))}
    environment.pop("TRITON_INTERPRET", None)  # the interpreter replaces the compiler
    environment["PYTHONUNBUFFERED"] = "1"  # a part that is stopped keeps its output
    return environment


def _run(name: str, limit: float, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run the part; return its exit status and the line to print. Its processes are stopped at the limit."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    log = folder / "output.txt"
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, *PARTS[name].arguments(folder, limit)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            status, why = process.wait(limit), ""
        except subprocess.TimeoutExpired:
            status, why = 124, f", stopped at its limit of {limit:.0f} s"
        finally:
            _stop(process)
    last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    line = f"{name}: status {status} after {time.monotonic() - began:.0f} s{why}: {last[:200]}"
    if status == 0:
        (folder / "done.txt").write_text(time.strftime("%Y-%m-%d %H:%M\n"), encoding="utf-8")
    return status, line


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it started, if they still run."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            continue


def _pack(to: Path, parts: Path, names: list[str], lines: list[str]) -> None:
    """Write summary.txt of the parts ``names``, and results.tar.gz of all that have outputs."""
    to.mkdir(parents=True, exist_ok=True)
    pieces = ["\n".join(lines)]
    outputs = [(name, parts / name / "output.txt") for name in names]
    for name, output in outputs:
        if output.exists():
            end = output.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:]
            pieces.append("\n".join([f"== {name}", *end]))
    (to / "summary.txt").write_text("\n\n".join(pieces) + "\n", encoding="utf-8")
    temporary = to / "results.tar.gz.part"
    with tarfile.open(temporary, "w:gz") as archive:
        for name in PARTS:
            for path in sorted((parts / name).rglob("*")):
                inner = path.relative_to(parts)
                if any(folder.startswith(("temporary", "cache")) for folder in inner.parts):
                    continue  # of tests and of compilers
                if path.suffix in PACKED and path.is_file() and path.stat().st_size <= LARGEST:
                    archive.add(path, arcname=inner.as_posix())
    temporary.replace(to / "results.tar.gz")


if __name__ == "__main__":
    sys.exit(main())
