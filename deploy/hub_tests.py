#!/usr/bin/env python3
"""Run the tests of deploy/hub with a real JupyterHub; root only, because they create Unix users.

    python3 deploy/hub_tests.py [ARGUMENTS OF PYTEST]
    python3 deploy/hub_tests.py benchmark [ARGUMENTS OF `python -m benchmarks hub`]

A Hub with the course is installed into a folder that all users can read (/var/tmp/dlo-hub-tests or
$DLO_HUB_TESTS): uv installs the packages of the servers, npm the proxy. It is kept for the next call; the
library is installed anew in each call.

Exit status: that of pytest or of the benchmark; 2: a requirement is missing, and one line gives the cure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import setup_env  # in this folder

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("DLO_HUB_TESTS", "/var/tmp/dlo-hub-tests"))
PYTHON = FOLDER / "venv" / "bin" / "python"
PROXY = FOLDER / "npm" / "node_modules" / ".bin" / "configurable-http-proxy"
UNPACKED_GB = 2.0


def main() -> int:
    """Run the command; return the exit status."""
    try:
        install()
    except setup_env.SetupError as error:
        print(f"hub: {error}", file=sys.stderr)
        return 2
    environment = {**os.environ, "DLO_HUB_ENVIRONMENT": str(FOLDER / "venv"), "DLO_HUB_PROXY": str(PROXY)}
    python, arguments = str(ROOT / ".venv" / "bin" / "python"), sys.argv[1:]
    if arguments[:1] == ["benchmark"]:
        command = [python, "-m", "benchmarks", "hub", *arguments[1:]]
    else:
        command = [python, "-m", "pytest", "-n", "0", "tests/hub", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def install() -> None:
    """Create the environment and the proxy, or update them.

    Raises:
        SetupError: something is missing for it.
    """
    if os.geteuid() != 0:
        raise setup_env.SetupError("the tests create Unix users: run this as root, in a container")
    if shutil.which("npm") is None:
        raise setup_env.SetupError("the Hub's proxy needs Node.js: apt-get install -y nodejs npm")
    uv = setup_env.find_uv()
    if uv is None:
        raise setup_env.SetupError("uv is not available here: run `make setup`, which installs it")
    FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not PYTHON.exists():
        setup_env.require_space(UNPACKED_GB)
        run([python_for_all(), "-m", "venv", str(FOLDER / "venv")], "the environment")
    options = ["--python", str(PYTHON), "--index-strategy", "unsafe-best-match"]
    options += ["-c", str(ROOT / "constraints.txt"), "--link-mode", "copy"]
    print(f"hub: installing a JupyterHub into {FOLDER} ...", flush=True)
    install = [uv, "--quiet", "pip", "install", *options, "--reinstall-package", "dlo-lib"]
    run([*install, f"{copy_of_source()}[labs,hub]"], "the Hub")
    compiles = "import compileall, dlo_lib; compileall.compile_dir(dlo_lib.__path__[0], quiet=1)"
    run([str(PYTHON), "-I", "-c", compiles], "the compiled files of the library")
    if not PROXY.exists():
        run(["npm", "install", "--silent", "--prefix", str(FOLDER / "npm"), PROXY.name], "the proxy")


def copy_of_source() -> Path:
    """Return a copy of what is installed: users may not be able to read the checkout."""
    source = FOLDER / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "dlo_lib", source / "dlo_lib", ignore=shutil.ignore_patterns("__pycache__"))
    return source


def python_for_all() -> str:
    """Return a supported interpreter that all users can run: not one below a folder that only root can enter.

    Raises:
        SetupError: there is none.
    """
    for name in (os.environ.get("PYTHON", ""), "/usr/bin/python3", "/usr/local/bin/python3"):
        path = Path(name).resolve() if name else None
        if path is None or setup_env.version_of(name) not in setup_env.SUPPORTED:
            continue
        if all(folder.stat().st_mode & 0o001 for folder in path.parents):
            return name
    raise setup_env.SetupError(
        f"no {setup_env.SUPPORTED_PYTHONS} for all users: apt-get install -y python3-venv"
    )


def run(command: list, what: str) -> None:
    done = subprocess.run(command, env=setup_env.uv_settings(), stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise setup_env.SetupError(f"cannot install {what} ({said[-300:]}): check the network and the disk")


if __name__ == "__main__":
    sys.exit(main())
