#!/usr/bin/env python3
"""Make the project's own Python environment in .venv, or do nothing when it is already the right one.

Called by the Makefile; needs nothing but some python3. What decides the result: pyproject.toml, constraints.txt and

    TORCH         cpu or cuda: the build of PyTorch; unset: what is installed already, else cpu
    TORCH_INDEX   URL of the package index that holds that build (see pytorch.org, "Get started"); unset: pip's own configuration
    PYTHON        the interpreter to build on; unset: the first of python3, python3.13, python3.12, python3.11 that fits

Exit status 0: .venv is ready. 2: one line says what is missing and the cure.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
SUPPORTED = {(3, 11), (3, 12), (3, 13)}
# Downloads in GB, rounded up, as seen with torch 2.13 on Linux x86-64; the CUDA build brings its own CUDA libraries.
TORCH_DOWNLOAD_GB = {"cpu": 0.2, "cuda": 3.5}
OTHER_DOWNLOAD_GB = {"labs": 0.25, "labs,dev": 0.35}


class SetupError(Exception):
    """What is missing and the cure, in one line."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", choices=list(OTHER_DOWNLOAD_GB), default="labs", help="what is installed beside the library")
    extras = parser.parse_args().extras
    try:
        with one_at_a_time():
            if not is_ready(extras):
                build(extras)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    return 0


def build(extras: str) -> None:
    torch, index = torch_choice()
    python = find_python()
    if not (VENV / "bin" / "python").exists() or version_of(VENV / "bin" / "python") != version_of(python):
        make_venv(python)
    stamp_file().unlink(missing_ok=True)
    pip("install", "--quiet", "--upgrade", "pip", "setuptools", "wheel")
    index_options = ["--index-url", index] if index else []
    constraints = ["-c", str(ROOT / "constraints.txt")]
    if installed_torch() != torch:
        announce(torch, extras, pip_would_bring_cuda(constraints, index_options))
        replace = ["--force-reinstall"] if installed_torch() else []
        pip("install", *replace, *constraints, *index_options, "torch")
    print(f"setup: installing the rest (about {OTHER_DOWNLOAD_GB[extras]:.2f} GB, 2 minutes) ...", flush=True)
    # torch is there already: the second index, if any, is not asked again.
    pip("install", "--quiet", "--no-build-isolation", *constraints, "-e", f"{ROOT}[{extras}]")
    stamp_file().write_text(fingerprint(extras), encoding="utf-8")
    print(f"setup: ready in {VENV}", flush=True)


def torch_choice() -> tuple[str, str | None]:
    torch = os.environ.get("TORCH") or installed_torch() or "cpu"
    if torch not in TORCH_DOWNLOAD_GB:
        raise SetupError(f'TORCH is "{torch}": use TORCH=cpu or TORCH=cuda')
    return torch, os.environ.get("TORCH_INDEX") or None


def announce(torch: str, extras: str, brings_cuda: bool) -> None:
    """Say the size of what comes, and stop before gigabytes that were not asked for."""
    if torch == "cpu" and brings_cuda:
        raise SetupError(
            "pip would fetch the CUDA build of PyTorch here (about 3.5 GB): set TORCH_INDEX to the URL of PyTorch's index of CPU builds "
            "(pytorch.org, Get started), or say TORCH=cuda to have it"
        )
    if torch == "cuda" and not brings_cuda:
        raise SetupError("pip finds only a CPU build of PyTorch here: set TORCH_INDEX to the URL of PyTorch's index for your CUDA")
    size = TORCH_DOWNLOAD_GB[torch] + OTHER_DOWNLOAD_GB[extras]
    free = shutil.disk_usage(ROOT).free / 1e9
    print(f"setup: downloading about {size:.1f} GB (PyTorch, {torch} build, and JupyterLab), once; {free:.0f} GB are free here", flush=True)
    if free < 3 * size:
        raise SetupError(f"{free:.1f} GB free is too little for {3 * size:.1f} GB once unpacked: free some space or clone elsewhere")


def pip_would_bring_cuda(constraints: list[str], index_options: list[str]) -> bool:
    """Whether the torch that pip resolves to depends on CUDA libraries; asked from metadata alone, nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip("install", "--quiet", "--dry-run", "--no-deps", "--report", str(report), *constraints, *index_options, "torch")
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    needs = [need for item in found for need in item["metadata"].get("requires_dist", [])]
    return any(need.startswith(("nvidia-", "cuda-")) and "extra ==" not in need for need in needs)


def find_python() -> str:
    asked = os.environ.get("PYTHON")
    candidates = [asked] if asked else ["python3", "python3.13", "python3.12", "python3.11", "/usr/bin/python3"]
    seen = []
    for name in candidates:
        path = shutil.which(name)
        if path and (version := version_of(path)):
            seen.append(f"{name} is {version[0]}.{version[1]}")
            if version in SUPPORTED:
                return path
    raise SetupError(f"needs Python 3.11, 3.12 or 3.13 ({'; '.join(seen) or 'none found'}): install one, or set PYTHON=/path/to/python")


def version_of(python: str | Path) -> tuple[int, int] | None:
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    major, minor = done.stdout.split()
    return int(major), int(minor)


def make_venv(python: str) -> None:
    if VENV.exists():
        shutil.rmtree(VENV)
    done = subprocess.run([python, "-m", "venv", str(VENV)], capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupError(f"{python} cannot make a virtual environment: on Debian and Ubuntu, apt-get install python3-venv")


def pip(*arguments: str) -> None:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or ["no message"])[-1]
        raise SetupError(f"pip {arguments[0]} failed ({reason}): check the network and the disk, then run the same again")


def installed_torch() -> str | None:
    """The build in .venv: "cpu", "cuda", or None when there is none."""
    for file in VENV.glob("lib/python3.*/site-packages/torch/version.py"):
        return "cpu" if re.search(r"^cuda\b[^=]*= None", file.read_text(encoding="utf-8"), re.MULTILINE) else "cuda"
    return None


def fingerprint(extras: str) -> str:
    """What the environment was made from: a change in any of it makes it again (in place)."""
    parts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    parts += [str(ROOT).encode(), torch_choice()[0].encode()]
    return f"{extras} {hashlib.sha256(b'|'.join(parts)).hexdigest()}"


def is_ready(extras: str) -> bool:
    """Ready for ``extras``; the developers' environment serves a student too."""
    if not stamp_file().exists():
        return False
    stamp = stamp_file().read_text(encoding="utf-8")
    return stamp in {fingerprint(extras), fingerprint("labs,dev")}


def stamp_file() -> Path:
    return VENV / ".made-from"


class one_at_a_time:
    """Two `make` at once: the second waits for the first."""

    def __enter__(self) -> None:
        self.lock = open(ROOT / ".setup.lock", "w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def __exit__(self, *exception: object) -> None:
        self.lock.close()


if __name__ == "__main__":
    sys.exit(main())
