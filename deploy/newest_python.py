#!/usr/bin/env python3
"""Run `make test-fast` on the newest supported Python of this machine, with Triton.

    python3 deploy/newest_python.py [--minutes N] [ARGUMENTS OF PYTEST]

The last commit is cloned into a temporary folder of this checkout, where the set-up creates another .venv. It
installs the CUDA build of PyTorch, because that requires Triton. The .venv of this checkout is not changed.
Tests that fail run once more, one after another, as in `make test`. On a machine without a Python that is
newer than that of .venv, it prints one line and passes.

Exit status: that of make; 1 also after N minutes (default 30); 2 also if a requirement is missing, and one
line gives the cure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import setup_env  # in this folder

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 30.0
AGAIN = "--last-failed --last-failed-no-failures=none --cpu-file=/dev/null"
OF_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the longest time of everything")
    asked, for_pytest = parser.parse_known_args()
    here = sys.version_info[:2]
    version, python = newest()
    if version <= here:
        print(f"newest: no supported Python here is newer than {here[0]}.{here[1]}, that of .venv")
        return 0
    print(f"newest: make test-fast on {python} ({version[0]}.{version[1]}), with Triton", flush=True)
    try:
        # On the disk of this checkout uv links what its cache has.
        with tempfile.TemporaryDirectory(prefix=".newest-", dir=ROOT, ignore_cleanup_errors=True) as folder:
            clone = clone_into(Path(folder))
            return run_suite(clone, python, " ".join(for_pytest), time.monotonic() + 60 * asked.minutes)
    except setup_env.SetupError as error:
        print(f"newest: {error}", file=sys.stderr)
        return 2
    except TimeoutError:
        print(
            f"newest: stopped after {asked.minutes:g} minutes: "
            "run it again on an idle machine, or with more --minutes",
            file=sys.stderr,
        )
        return 1


def newest() -> tuple[tuple[int, ...], str]:
    """Return the newest supported Python here, as (version, path)."""
    found: list[tuple[tuple[int, ...], str]] = [(tuple(sys.version_info[:2]), sys.executable)]
    for path in candidates():
        version = setup_env.version_of(path)
        if version in setup_env.SUPPORTED:
            found.append((version, path))
    return max(found, key=lambda each: each[0])  # the first of several


def candidates() -> list[str]:
    """Return interpreters that may run here: those on PATH, then pyenv's, the newest first."""
    names = ["python3", *(f"python{major}.{minor}" for major, minor in sorted(setup_env.SUPPORTED))]
    on_path = [path for name in names if (path := shutil.which(name))]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    of_pyenv = sorted(pyenv.glob("versions/3.*/bin/python"), key=lambda path: numbers(path.parts[-3]))
    return [*on_path, *map(str, reversed(of_pyenv))]


def numbers(version: str) -> list[int]:
    """Return the numbers of a version, to sort by.

    >>> numbers("3.13.0")
    [3, 13, 0]
    """
    return [int(part) for part in re.findall(r"\d+", version)]


def clone_into(folder: Path) -> Path:
    """Return a clone of the last commit of this checkout, in ``folder``.

    Raises:
        SetupError: this checkout is no clone, or the disk is full.
    """
    clone = folder / "clone"
    done = setup_env.run(["git", "clone", "--quiet", str(ROOT), str(clone)])
    if done.returncode:
        raise setup_env.SetupError(
            f"cannot clone {ROOT} ({setup_env.last_line(done)}): run this in a clone with free space"
        )
    return clone


def run_suite(clone: Path, python: str, for_pytest: str, end: float) -> int:
    """Return the exit status of `make test-fast` in ``clone``, which runs a second time what fails.

    Raises:
        TimeoutError: it has not ended at ``end``, a time of ``time.monotonic``. Its processes are stopped.
    """
    environment = {name: value for name, value in os.environ.items() if name not in (*OF_MAKE, "PYTHONPATH")}
    environment |= {"PYTHON": python, "TORCH": "cuda"}

    def make(*arguments: str) -> int:
        command = ["make", "--no-print-directory", "-C", str(clone), *arguments]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            return process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    status = make("setup-dev")
    if status:
        return status
    status = make("test-fast", f"ARGS={for_pytest}")
    if status:
        print("\nnewest: what failed runs once more, one test after another", flush=True)
        status = make("test-fast", "JOBS=0", f"ARGS={for_pytest} {AGAIN}")
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # neither the processes nor the folder remain
    sys.exit(main())
