#!/usr/bin/env python3
"""Test the Triton kernels of dlo_lib.kernels: on the GPU, or without one in Triton's interpreter and compiled
ahead of time.

    python3 deploy/kernels.py [ARGUMENTS OF PYTEST]
    python3 deploy/kernels.py report [--operation NAME] [--dtype bf16] [--sm 90] [--size 3b] [--ptx FOLDER]

`report` compiles every kernel for sm_80 to sm_120 and prints its registers, spills, shared memory and the
least time by the data sheet. Its exit status is 1 if a kernel spills or does not fit.
Triton is installed into .venv-kernels (a download of 286 MB, 1.0 GB on disk), because in .venv its import
would add 1.5 s of CPU time to every process that imports torch.optim. If PyTorch brings Triton itself, as
its CUDA builds do, that Triton is tested.

Exit status: that of pytest or of the report; 2: a requirement is missing, and one line gives the cure.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import setup_env  # in this folder

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-kernels"
TRITON = "3.9.0"
UNPACKED_GB = 1.4
"""The installed files and the download."""


def main() -> int:
    """Run the command; return the exit status."""
    try:
        search_path = [] if importlib.util.find_spec("triton") else [str(installed())]
    except setup_env.SetupError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 2
    before = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path + ([before] if before else []))}
    environment.pop("TRITON_INTERPRET", None)  # the interpreter replaces the compiler
    if sys.argv[1:2] == ["report"]:
        report = [sys.executable, "-m", "dlo_lib.kernels", *sys.argv[1:]]
        return subprocess.run(report, cwd=ROOT, env=environment).returncode
    tests = [sys.executable, "-m", "pytest", "-n", "0", "tests/kernels", *sys.argv[1:]]
    return subprocess.run(tests, cwd=ROOT, env=environment).returncode


def installed() -> Path:
    """Return the folder with Triton, which is installed there if it is missing.

    Raises:
        SetupError: there is no wheel for this machine, no space, or no network.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        raise setup_env.SetupError(
            f"Triton has no wheel for {sys.platform} on {machine}: run this on Linux on x86-64 or arm64"
        )
    version = FOLDER / f"triton-{TRITON}.dist-info"
    if (version / "RECORD").exists():
        return FOLDER
    setup_env.require_space(UNPACKED_GB)
    uv = setup_env.find_uv()
    if uv is None:
        raise setup_env.SetupError("uv is not available here: run `make setup`, which installs it")
    print(f"kernels: installing Triton {TRITON} into {FOLDER} (286 MB)", flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    command = [
        uv,
        "--quiet",
        "pip",
        "install",
        "--python",
        sys.executable,
        "--target",
        str(FOLDER),
        "--no-deps",
        # A first index that lists Triton without a usable version must not hide the others.
        "--index-strategy",
        "unsafe-best-match",
    ]
    done = subprocess.run(
        [*command, f"triton=={TRITON}"], env=setup_env.uv_settings(), stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise setup_env.SetupError(f"uv cannot install Triton ({said[:300]}): check the network and the disk")
    return FOLDER


if __name__ == "__main__":
    sys.exit(main())
