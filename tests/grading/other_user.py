"""Run commands as other users of this machine, in tests that run as root."""

from __future__ import annotations

import sys
from pathlib import Path


def command_of(user: str, folder: Path, *command: str) -> list[str]:
    """Return the command line that runs ``command`` as ``user`` in ``folder``.

    The interpreter may be below a folder that only root can enter.
    """
    shown = [
        part for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)) for part in _reachable(Path(prefix))
    ]
    return [
        "bwrap",
        "--dev-bind",
        "/",
        "/",
        *shown,
        "--chdir",
        str(folder),
        "--",
        "runuser",
        "-u",
        user,
        "--",
        *command,
    ]


def _reachable(path: Path) -> list[str]:
    """Return the mounts that make ``path`` accessible if only root can enter a folder above it."""
    closed = [parent for parent in path.parents if not parent.stat().st_mode & 0o001]
    if not closed:
        return []
    above = [parent for parent in reversed(path.parents) if parent.is_relative_to(closed[-1])]
    made = [part for parent in above[1:] for part in ("--perms", "0755", "--dir", str(parent))]
    return ["--perms", "0755", "--tmpfs", str(closed[-1]), *made, "--ro-bind", str(path), str(path)]
