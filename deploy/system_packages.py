#!/usr/bin/env python3
"""Check the system packages that the tests use: install them in CI or a container, else print the command.

A missing package is not an error: the tests that need it are skipped, each with a line that says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

LIST = Path(__file__).with_name("system_packages.txt")


def main() -> int:
    """Run the command; return the exit status."""
    missing = [package for package in packages() if not is_installed(package)]
    if not missing:
        return 0
    as_root = "" if os.geteuid() == 0 else "sudo "
    cure = (
        f"{as_root}apt-get update && {as_root}apt-get install -y --no-install-recommends {' '.join(missing)}"
    )
    if not (may_install() and shutil.which("apt-get") and os.geteuid() == 0):
        print(
            f"system packages missing: {', '.join(missing)}; the tests that need them are skipped. "
            f"To install them: {cure}",
            flush=True,
        )
        return 0
    print(f"installing system packages: {', '.join(missing)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
    ):
        done = subprocess.run(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            print(
                f"could not install them ({done.stderr.strip().splitlines()[-1:]}); "
                "the tests that need them are skipped",
                flush=True,
            )
            break
    return 0


def packages() -> list[str]:
    """Return the packages of the list."""
    lines = (line.split("#")[0].strip() for line in LIST.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def is_installed(package: str) -> bool:
    """Whether a Debian package is installed."""
    if not shutil.which("dpkg-query"):
        return False
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package], capture_output=True, text=True
    )
    return done.stdout.strip() == "installed"


def may_install() -> bool:
    """Whether installing is allowed: only in CI and in containers, not on a user's machine."""
    return bool(os.environ.get("CI")) or any(
        Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")
    )


if __name__ == "__main__":
    sys.exit(main())
