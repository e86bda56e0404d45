#!/usr/bin/env python3
"""Run every lab and the parallel forms on the promised pairs of PyTorch and Python, and write what was run.

    python3 deploy/compat.py [RELEASE[/PYTHON] ...]      such as 2.8, 2.13/3.13 or newest; default: all pairs
    python3 deploy/compat.py --suite FILE                the pair of .venv, from a run of the whole suite:
                                                         make test ARGS=--cpu-file=FILE

The pairs are those of ``deploy/compat_env.py``. On each of them, every lab passes its proof by the judge (the
reference, the untouched notebook, the mutants), its reference notebook runs in a kernel, and the rooms below
pass their tests. The results replace those of the same pair, lab and room in ``COMPATIBILITY.md``. A run that
is stopped changes nothing there.

Exit status 0: all tests passed; 1: a test failed, or a pair took more than its minutes; 2: a requirement is
missing, and one line gives the cure.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compat_table  # in this folder
import setup_env  # in this folder
from compat_env import (
    NEWEST,
    CompatError,
    Pair,
    environment,
    folder_of,
    in_use,
    interpreter,
    is_venv,
    promised_pairs,
    torch_of,
)
from compat_table import LABS, REFERENCE, Run

ROOT = Path(__file__).resolve().parents[1]
JOBS, MINUTES = 3, 120.0
NOT_PASSED = (
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "PYTHON",
    "TORCH",
)
NOTEBOOKS = "tests/labs/test_notebooks_run.py::test_reference_notebook_runs"
PROOFS = "tests/labs/test_every_lab.py"
MUTANTS = f"{PROOFS}::test_each_mutant_loses_its_points"
ROOMS = {
    "ddp": ["tests/parallel/ddp/test_ddp_parity.py"],
    "zero": ["tests/parallel/zero/test_zero_parity.py", "tests/parallel/zero/test_zero2.py"],
    "fsdp": ["tests/parallel/fsdp/test_fsdp_parity.py"],
    "pipeline": [
        "tests/parallel/pipeline/test_runtime.py",
        "tests/parallel/pipeline/test_split_backward.py",
        "tests/parallel/pipeline/test_tied_embeddings.py",
    ],
    "tensor": [
        "tests/parallel/tensor/test_layers.py",
        "tests/parallel/tensor/test_tensor_plans.py",
        "tests/parallel/tensor/test_async_tp.py",
    ],
    "context": ["tests/parallel/context/test_parity.py"],
    "expert": ["tests/parallel/expert/test_parity.py"],
    "checkpoints": ["tests/train/test_checkpoint.py"],
    "memory": [
        "tests/profiling/test_measure.py",
        "tests/profiling/test_measure_sharded.py",
        "tests/profiling/test_measure_compiled.py",
    ],
    "launch": ["tests/launch"],
    "tracing": ["tests/comm"],
    "notebook": ["tests/grading/notebook"],
    "judge": [
        "tests/grading/switch",
        *(
            f"tests/grading/judge/test_{name}.py"
            for name in ("judge", "leaks", "rank_limits", "run_without_ranks", "time_budget", "asked")
        ),
    ],
    "releases": ["tests/base/test_torch_compat.py", "tests/base/test_torch_version.py"],
}


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="*", metavar="RELEASE[/PYTHON]", help="a pair; default: all")
    parser.add_argument("--lab", action="append", metavar="LAB", help="only this lab; may be repeated")
    parser.add_argument(
        "--room", action="append", choices=[LABS, *ROOMS], help="only these tests; may be repeated"
    )
    parser.add_argument(
        "--without-mutants", action="store_true", help="leave the mutants out; the table shows fewer proofs"
    )
    parser.add_argument(
        "--suite", type=Path, metavar="FILE", help="run nothing: read what `make test` wrote with --cpu-file"
    )
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"processes of pytest (default {JOBS})")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the longest time of a pair")
    asked = parser.parse_args()
    try:
        if asked.suite:
            add_suite(asked.suite)
            print(compat_table.page(compat_table.read_record()))
            return 0
        if asked.lab and asked.room:
            raise CompatError("--lab and --room exclude each other: give one of them")
        rooms = [LABS] if asked.lab else asked.room or [LABS, *ROOMS]
        tests = tests_of(rooms, chosen_labs(asked.lab or []))
        tests += ["--deselect", MUTANTS] if asked.without_mutants else []
        uv = setup_env.find_uv()
        if uv is None:
            raise CompatError("uv is not available here: install it, and put it on PATH")
        ended = [try_pair(uv, pair, python, tests, asked) for pair, python in chosen_pairs(asked.pairs)]
    except (CompatError, setup_env.SetupError) as error:
        print(f"compat: {error}", file=sys.stderr)
        return 2
    print(compat_table.page(compat_table.read_record()))
    return 0 if all(ended) else 1


def chosen_pairs(asked: list[str]) -> list[tuple[Pair, str]]:
    """Return the pairs to run, each with its interpreter.

    A pair without an interpreter is left out with one line; one that the user named is an error.

    Raises:
        CompatError: an argument names no pair, or nothing can run.
    """
    pairs = promised_pairs()
    for word in asked:
        if not any(pair.is_named(word) for pair in pairs):
            known = ", ".join(pair.name for pair in pairs)
            raise CompatError(f'"{word}" is none of the promised pairs: use one of {known}')
    found = []
    for pair in pairs:
        named = any(pair.is_named(word) for word in asked)
        if asked and not named:
            continue
        python = interpreter(pair)
        number = ".".join(map(str, pair.python))
        if python is not None:
            found.append((pair, python))
        elif any("/" in word and pair.is_named(word) for word in asked):
            raise CompatError(f"no Python {number} is here for {pair.name}: install it, or set PYTHON")
        else:
            print(f"compat: {pair.name} is left out, because no Python {number} is here", flush=True)
    if not found:
        raise CompatError("none of the Pythons is here: install one, or set PYTHON")
    return found


def chosen_labs(asked: list[str]) -> list[str]:
    """Return the names of labs, such as 15_fsdp; a lab may be given by its number. Raises CompatError."""
    labs = sorted(file.parent.name for file in ROOT.glob("labs/*/lab.toml"))
    chosen = []
    for word in asked:
        matching = [lab for lab in labs if word == lab or lab.startswith(f"{word.zfill(2)}_")]
        if not matching:
            raise CompatError(f'no lab is called "{word}": use one of {", ".join(labs)}')
        chosen += matching
    return chosen


def tests_of(rooms: list[str], labs: list[str]) -> list[str]:
    """Return the arguments of pytest for these rooms; ``labs`` narrows the labs, none means all."""
    tests = [test for room in rooms if room != LABS for test in ROOMS[room]]
    if LABS in rooms:
        tests += [PROOFS, NOTEBOOKS]
    return [*tests, "-k", " or ".join(labs)] if labs else tests


def try_pair(uv: str, pair: Pair, python: str, tests: list[str], asked: argparse.Namespace) -> bool:
    """Run ``tests`` on a pair and write the results; return whether all passed.

    Raises:
        CompatError: another run uses the environment, it cannot be created, or pytest cannot begin.
    """
    with in_use(folder_of(pair)):
        return try_held_pair(uv, pair, python, tests, asked)


def try_held_pair(uv: str, pair: Pair, python: str, tests: list[str], asked: argparse.Namespace) -> bool:
    """Do the work of :func:`try_pair` while no other run may change the environment."""
    own = environment(uv, pair, python)
    torch = torch_of(own.parents[1])
    print(f"compat: {pair.name}, torch {torch.version} ...", flush=True)
    if pair.release == NEWEST:
        remind(torch)
    with tempfile.TemporaryDirectory(prefix="dlo-compat-") as folder:
        results = Path(folder) / "results.jsonl"
        began = time.monotonic()
        status = run_tests(own, tests, results, asked.jobs, began + 60 * asked.minutes)
        wall = time.monotonic() - began
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    if status is None:
        print(
            f"compat: {pair.name} was stopped after {asked.minutes:g} minutes; the page is not changed: "
            "run it again on an idle machine, or with more --minutes",
            file=sys.stderr,
        )
        return False
    if status not in (0, 1) or not lines:
        raise CompatError(f"pytest ended with status {status} on {pair.name}: see what it prints above")
    whole = not (asked.lab or asked.room or asked.without_mutants)
    record(pair, torch.version, own, lines, wall if whole else None)
    return status == 0


def add_suite(results: Path) -> None:
    """Put the results of the whole suite in .venv into the table.

    Raises:
        CompatError: there are none, or .venv is none of the promised pairs.
    """
    pair = next((pair for pair in promised_pairs() if is_venv(pair)), None)
    if pair is None:
        raise CompatError(".venv is none of the promised pairs: run `make setup-dev` with their Python")
    try:
        lines = results.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CompatError(f"cannot read {results} ({error.strerror}): give the file of --cpu-file") from error
    if not any(REFERENCE in line for line in lines):
        raise CompatError(f"{results} has no test of a lab: run `make test ARGS=--cpu-file={results}`")
    record(pair, torch_of(setup_env.VENV).version, setup_env.PYTHON, lines, None)


def record(pair: Pair, torch: str, python: Path, lines: list[str], whole_s: float | None) -> None:
    """Put the ``lines`` of ``--cpu-file`` into the table.

    Args:
        whole_s: the seconds of a run of all labs and rooms; None for another run.
    """
    run = Run(
        pair=pair.name,
        torch=torch,
        python=version_text(python),
        packages="newest" if pair.release == NEWEST else "pinned",
        tests=[json.loads(line) for line in lines],
        wall_s=whole_s or 0.0,
        whole=whole_s is not None,
    )
    known = compat_table.read_record()
    compat_table.add(known, run, {room: tuple(files) for room, files in ROOMS.items()})
    compat_table.write(known)


def remind(torch: importlib.metadata.Distribution) -> None:
    """Print one line if the index has a newer PyTorch than the one that `dlo doctor` calls the newest."""
    from dlo_lib.base.torch_version import release
    from dlo_lib.cli.doctor_packages import NEWEST_TORCH

    if release(torch.version) > NEWEST_TORCH:
        number = ".".join(map(str, release(torch.version)))
        file = "dlo_lib/cli/doctor_packages.py"
        print(f"compat: {number} is new: if it passes, set NEWEST_TORCH in {file}", flush=True)


def run_tests(python: Path, tests: list[str], results: Path, jobs: int, end: float) -> int | None:
    """Return the exit status of pytest, or None if it has not ended at ``end`` and was stopped.

    Each test runs in a process of pytest-xdist, so that a test that crashes Python fails and the rest runs.
    """
    settings = {name: value for name, value in os.environ.items() if name not in NOT_PASSED}
    settings["PATH"] = f"{python.parent}{os.pathsep}{settings.get('PATH', os.defpath)}"
    command = [str(python), "-m", "pytest", "-q", "-n", str(max(1, jobs)), "-p", "no:cacheprovider"]
    command += ["--tb=short", f"--cpu-file={results}", *tests]
    process = subprocess.Popen(command, cwd=ROOT, env=settings, start_new_session=True)
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def version_text(python: Path) -> str:
    """Return the version of an interpreter, such as 3.12.1. Raises CompatError."""
    done = setup_env.run([str(python), "-c", "import platform; print(platform.python_version())"])
    if done.returncode:
        raise CompatError(f"{python} does not run ({setup_env.last_line(done)}): remove its folder")
    return str(done.stdout).strip()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no process of the tests remains
    sys.exit(main())
