"""The end of a process in words: the name of the signal, and whether it was killed because memory ran out.

The kernel's out-of-memory killer sends a plain SIGKILL, but it counts its victims: ``oom_kill`` in
``/proc/vmstat`` grows for every victim on the machine, whether the memory of the machine or of a job's
control group was full. Containers can read it too. Therefore the count is read before and after. This module
does not import torch.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from dlo_lib.base.text import tr

_ROOT = Path("/")
_NO_LIMIT = 1 << 60  # version 1 of control groups writes a huge number


class MemoryKills:
    """Detects kills of the kernel's out-of-memory killer since this object was created.

    ``root`` is the folder that holds ``proc`` and ``sys``.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._before = self._count()

    def any(self) -> bool | None:
        """Whether there was a kill; None if the kernel has no such count."""
        now = self._count()
        return None if now is None or self._before is None else now > self._before

    def limit(self) -> int | None:
        """Return the memory limit of this control group in bytes.

        None if there is none or it is unreadable.
        """
        for name, folder in self._groups():
            text = _read(folder / name)
            if text is not None and text.strip().isdigit() and int(text) < _NO_LIMIT:
                return int(text)
        return None

    def _count(self) -> int | None:
        found = re.search(r"^oom_kill (\d+)$", _read(self._root / "proc/vmstat") or "", re.MULTILINE)
        return int(found[1]) if found else None

    def _groups(self) -> list[tuple[str, Path]]:
        mounted = self._root / "sys/fs/cgroup"
        groups = []
        for line in (_read(self._root / "proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                groups.append(("memory.max", mounted / path.lstrip("/")))
            elif "memory" in controllers.split(","):
                groups.append(("memory.limit_in_bytes", mounted / "memory" / path.lstrip("/")))
        return groups


def describe_exit(status: int, kills: MemoryKills | None = None) -> str:
    """Return a wait status (of ``os.waitpid``) in words.

    A negative status is the errno with which the process could not be started.
    """
    if status < 0:
        return tr(
            "could not be started ({error}): close other programs, use fewer ranks or raise `ulimit -u`",
            error=os.strerror(-status),
        )
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
        return tr("was killed by {name}", name=name) + (
            _why_killed(kills) if number == signal.SIGKILL else ""
        )
    return tr(
        "ended its process with status {status} before the function returned (os._exit?)",
        status=os.waitstatus_to_exitcode(status)
    )  # fmt: skip


def _why_killed(kills: MemoryKills | None) -> str:
    short_of_memory = kills.any() if kills is not None else None
    if short_of_memory is None or kills is None:
        return tr(" (out of memory?)")
    if not short_of_memory:
        return tr(", but memory did not run out: a user, another program or a job's time limit killed it")
    limit = kills.limit()
    allowed = tr(" (this job may use {gib:.1f} GiB)", gib=limit / 2**30) if limit is not None else ""
    return tr(
        ": out of memory{allowed}. Use smaller batches or a smaller model, "
        "fewer ranks, or ask for more memory",
        allowed=allowed,
    )


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
