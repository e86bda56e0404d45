"""A process that ends with the one that started it, even where that was killed and could not say so.

On Linux the kernel sends the signal (prctl(2), PR_SET_PDEATHSIG), to this process and not to what it starts. Elsewhere a thread looks
twice a second whether the parent has changed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From here on this process is killed when ``parent``, which started it, ends; at once, where it has already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it went before we asked
        os._exit(1)


def _watch(parent: int) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
