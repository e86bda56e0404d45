#!/usr/bin/env python3
"""Test the library with the oldest supported and the newest release of PyTorch, by a part of the suite.

    python3 deploy/compat.py [RELEASE ...]      default: the oldest of pyproject.toml and the one of
                                                constraints.txt

uv creates the environments in ``$XDG_CACHE_HOME/dlo-compat`` (3 to 8 GB each with a CUDA build), where they
are kept. The output ends with a table of results. Exit status 0: all tests passed; 1: a test failed; 2: a
requirement is missing, and one line gives the cure.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import setup_env  # in this folder

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlo-compat"
EXTRAS = "labs,dev"
# torch requires certain versions of these, and older releases require other ones than constraints.txt has.
CHOSEN_BY_TORCH = ("torch", "sympy", "triton")
ROOMS = {
    "launch": ["tests/launch/test_run_ranks.py", "tests/launch/test_place.py"],
    "explainer": ["tests/comm/deadlock/test_explainer.py", "tests/comm/tracing/test_tap.py"],
    "tracer": ["tests/comm/tracing/test_trace.py"],
    "ddp": ["tests/parallel/test_ddp_parity.py"],
    "zero": ["tests/parallel/test_zero_parity.py", "tests/parallel/test_zero2.py"],
    "fsdp, hsdp": ["tests/parallel/test_fsdp_parity.py"],
    "pipeline": ["tests/parallel/pipeline/test_runtime.py"],
    "checkpoints": ["tests/train/test_checkpoint.py"],
    "a lab": [
        "tests/labs/test_every_lab.py::test_the_reference_scores_full_marks[10_collectives]",
        "tests/labs/test_every_lab.py::test_the_untouched_notebook_scores_nothing[10_collectives]",
    ],
    "a job": ["tests/cluster/test_local.py::test_a_function_runs_on_as_many_ranks_as_it_asks_for"],
}


class CompatError(Exception):
    """A missing requirement and its cure, in one line."""


@dataclass(frozen=True)
class Outcome:
    """The result of one room's tests on one release. ``counts``: pytest's last line without its time."""

    release: str
    room: str
    ok: bool
    counts: str
    wall_s: float
    cpu_s: float


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="a release of PyTorch, such as 2.8.0")
    parser.add_argument(
        "--room", action="append", choices=list(ROOMS), help="test only this room; may be repeated"
    )
    asked = parser.parse_args()
    outcomes = []
    try:
        uv = setup_env.find_uv()
        if uv is None:
            raise CompatError("uv is not available here: install it, and put it on PATH")
        for release in asked.releases or [oldest_release(), newest_release()]:
            python = environment(uv, release)
            outcomes += [try_room(python, release, room) for room in asked.room or ROOMS]
    except (CompatError, setup_env.SetupError) as error:
        print(f"compat: {error}", file=sys.stderr)
        return 2
    print(table(outcomes))
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def oldest_release() -> str:
    """Return the first patch release of the minor release in pyproject.toml: 2.6 means that 2.6.0 works."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (least,) = (match[1] for need in needs if (match := re.fullmatch(r"torch>=([\d.]+)", need)))
    return least if least.count(".") == 2 else f"{least}.0"


def newest_release() -> str:
    """Return the release in constraints.txt, with which everything is tested."""
    (newest,) = re.findall(
        r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    return newest


def environment(uv: str, release: str) -> Path:
    """Return the interpreter of an environment with this release of PyTorch.

    The environment is created if it is missing or was created from other requirements.
    """
    folder = CACHE / f"torch-{release}"
    python, stamp, wanted = folder / "bin" / "python", folder / "made-from", fingerprint(release)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"compat: creating {folder} ...", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    constraints = CACHE / f"constraints-{release}.txt"
    constraints.write_text(constraints_for(release), encoding="utf-8")
    run_uv(uv, "venv", "--clear", "--python", base_python(), str(folder))
    run_uv(
        uv, "pip", "install", "--python", str(python), "--index-strategy", "unsafe-best-match", "-c",
        str(constraints),
        f"torch=={release}", "-e", f"{ROOT}[{EXTRAS}]",
    )  # fmt: skip
    stamp.write_text(wanted, encoding="utf-8")
    return python


def constraints_for(release: str) -> str:
    """Return the project's constraints without the packages whose versions PyTorch determines."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.partition("==")[0] not in CHOSEN_BY_TORCH]
    return "\n".join([*kept, f"torch=={release}", ""])


def fingerprint(release: str) -> str:
    """Return a hash of everything that determines the environment."""
    parts = [
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
        constraints_for(release),
        str(ROOT),
        base_python(),
    ]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def base_python() -> str:
    """Return ``$PYTHON``, or the interpreter of .venv, or this one."""
    own = ROOT / ".venv" / "bin" / "python"
    return os.environ.get("PYTHON") or (str(own) if own.exists() else sys.executable)


def run_uv(uv: str, *arguments: str) -> None:
    done = subprocess.run(
        [uv, "--quiet", *arguments], env=setup_env.uv_settings(), stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise CompatError(
            f"uv {arguments[0]} failed ({said[:300]}): check the network, the disk and the release's number"
        )


def try_room(python: Path, release: str, room: str) -> Outcome:
    """Run the tests of ``room``; print pytest's output if one fails."""
    print(f"compat: torch {release}, {room} ...", flush=True)
    before, began = cpu_of_children(), time.monotonic()
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        *ROOMS[room],
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, flush=True)
    lines = done.stdout.strip().splitlines()
    counts = re.sub(r" in [\d.]+s.*", "", lines[-1].strip("= ")) if lines else "no output"
    return Outcome(
        release, room, done.returncode == 0, counts, time.monotonic() - began, cpu_of_children() - before
    )


def cpu_of_children() -> float:
    """Return the CPU seconds (user and system) of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(outcomes: list[Outcome]) -> str:
    """Return the results as a table."""
    rows = [("torch", "room", "", "tests", "wall s", "CPU s")]
    rows += [
        (it.release, it.room, "ok" if it.ok else "FAILED", it.counts, f"{it.wall_s:.0f}", f"{it.cpu_s:.0f}")
        for it in outcomes
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
