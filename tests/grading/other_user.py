"""Commands of other users of this machine, for tests that run as root."""

from __future__ import annotations

import sys
from pathlib import Path


def command_of(user: str, folder: Path, *command: str) -> list[str]:
    """The command line that runs ``command`` as ``user`` in ``folder``; the interpreter may lie below a folder that is root's alone."""
    shown = [part for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)) for part in _reachable(Path(prefix))]
    return ["bwrap", "--dev-bind", "/", "/", *shown, "--chdir", str(folder), "--", "runuser", "-u", user, "--", *command]


def _reachable(path: Path) -> list[str]:
    """Mounts that let others pass to ``path`` where a folder above it is for root alone."""
    closed = [parent for parent in path.parents if not parent.stat().st_mode & 0o001]
    if not closed:
        return []
    above = [parent for parent in reversed(path.parents) if parent.is_relative_to(closed[-1])]
    made = [part for parent in above[1:] for part in ("--perms", "0755", "--dir", str(parent))]
    return ["--perms", "0755", "--tmpfs", str(closed[-1]), *made, "--ro-bind", str(path), str(path)]
