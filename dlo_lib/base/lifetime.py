"""End a process together with its parent, also if the parent is killed; tell whether a process still runs.

On Linux, the kernel sends the signal (prctl(2), PR_SET_PDEATHSIG) to this process, but not to its children.
On other systems, a thread checks twice a second whether the parent has changed. If this process leads a
process group, the thread sends the signal to the group."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Send the signal ``how`` to this process when its ``parent`` ends; exit at once if the parent has
    already ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
    else:
        threading.Thread(target=_watch, args=(parent, how), daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(1)


def start_time(process: int) -> int:
    """Return the start time of a process in clock ticks since boot, because process ids are used again.

    0 if it does not run. Without /proc: 1 if it runs.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] == "Z" else int(fields[19])
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return 0
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return 0
    except PermissionError:
        pass  # another user's: it runs
    return 1


def _watch(parent: int, how: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    if os.getpgrp() == os.getpid():
        os.killpg(0, how)
    else:
        os.kill(os.getpid(), how)
