"""How a process ended, in words: the signal named, and a kill for lack of memory told from any other.

The kernel's out-of-memory killer sends a plain SIGKILL, but counts it: ``oom_kill`` of ``/proc/vmstat`` grows for every victim on the
machine, whether the machine or a job's control group was full, and containers can read it. So the count is taken before and after.
No torch here.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from dlo_lib.text import tr

_ROOT = Path("/")
_NO_LIMIT = 1 << 60  # version 1 of control groups writes a huge number


class MemoryKills:
    """Notices whether the kernel has killed for lack of memory since this was made. ``root`` is where ``proc`` and ``sys`` are."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._before = self._count()

    def any(self) -> bool | None:
        """Whether there was one; None where the kernel does not say."""
        now = self._count()
        return None if now is None or self._before is None else now > self._before

    def limit(self) -> int | None:
        """Bytes that the control group of this process may use; None when there is no limit, or none that can be read."""
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
    """A wait status (of ``os.waitpid``) in words; a negative one is the errno with which the rank could not be started."""
    if status < 0:
        return tr("could not be started ({error}): close other programs, use fewer ranks or raise `ulimit -u`", error=os.strerror(-status))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
        return tr("was killed by {name}", name=name) + (_why_killed(kills) if number == signal.SIGKILL else "")
    return tr(
        "ended its process with status {status} before the function returned (os._exit?)", status=os.waitstatus_to_exitcode(status)
    )  # fmt: skip


def _why_killed(kills: MemoryKills | None) -> str:
    short_of_memory = kills.any() if kills is not None else None
    if short_of_memory is None or kills is None:
        return tr(" (out of memory?)")
    if not short_of_memory:
        return tr(", not for lack of memory: by a person, another program, or a job's time limit")
    limit = kills.limit()
    allowed = tr(" (this job may use {gib:.1f} GiB)", gib=limit / 2**30) if limit is not None else ""
    return tr(": out of memory{allowed}. Use smaller batches or a smaller model, fewer ranks, or ask for more memory", allowed=allowed)


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
