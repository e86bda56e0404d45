"""What the other threads of a rank do while its main thread waits, as far as a deadlock depends on it.

A rank that waits in one thread may still communicate in another. Two rules keep an explanation from being
false: a wait of the main thread proves nothing while another thread may communicate, and a wait of another
thread counts as that of the rank only while the main thread waits for that thread without a limit of time, as
in ``thread.join()``, and no thread computes.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

import torch.distributed

Wait = TypeVar("Wait")
_POLL_S = 0.5
_PYTHON, _OURS = sysconfig.get_path("stdlib") + os.sep, str(Path(__file__).parents[2]) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_AT_THE_START = ("_bootstrap", "_bootstrap_inner", "run")
_COMMUNICATION = str(Path(torch.distributed.__file__).parent) + os.sep


class HelperThreads(Generic[Wait]):
    """The threads of this process other than the one that creates the object, the main thread.

    ``stand_in`` is called, by a thread of this object, with the wait of another thread that has become the
    wait of the rank.
    """

    def __init__(self, stand_in: Callable[[Wait], None]) -> None:
        self.main = threading.get_ident()
        self._stand_in = stand_in
        self._communicating: set[int] = set()
        self._waits: dict[int, Wait] = {}
        self._standing_in: Wait | None = None
        self._lock = threading.Lock()
        self._monitor: threading.Thread | None = None
        self._stopped = False

    def is_main(self, in_backward: bool) -> bool:
        """Whether this is the main thread, or a thread of autograd on its behalf (on a GPU)."""
        ident = threading.get_ident()
        return ident == self.main or (in_backward and ident not in _python_threads())

    def communicates(self) -> None:
        """Record that this thread, which is not the main one, makes a call."""
        self._communicating.add(threading.get_ident())

    def waits(self, wait: Wait) -> None:
        """Record that this thread, which is not the main one, waits."""
        with self._lock:
            self._waits[threading.get_ident()] = wait
            if self._monitor is None:
                self._monitor = threading.Thread(target=self._watch, name="dlo-helpers", daemon=True)
                self._monitor.start()

    def waited(self, wait: Wait, then: Callable[[], None] = lambda: None) -> None:
        """Record that this thread waits no more; call ``then`` if its wait was that of the rank."""
        with self._lock:
            self._waits.pop(threading.get_ident(), None)
            if self._standing_in is not None and self._standing_in == wait:
                self._standing_in = None
                then()

    def stop(self) -> None:
        """End the thread of this object."""
        self._stopped = True

    def may_communicate(self) -> bool:
        """Whether another thread of this process may communicate while the main thread waits.

        If so, no conclusion follows from the wait. A thread that has communicated may do so again. Of the
        other threads only those count that run user code: not an idle worker of a pool, a timer, or the
        monitor of a progress bar.
        """
        if threading.active_count() == 1:
            return False
        others = _python_threads() - {self.main}
        if others & self._communicating:
            return True
        frames = sys._current_frames()
        return any(ident in frames and not _is_parked(frames[ident]) for ident in others)

    def _watch(self) -> None:
        while not self._stopped:
            time.sleep(_POLL_S)
            with self._lock:
                if self._standing_in is None and len(self._waits) == 1 and self._main_waits():
                    (self._standing_in,) = self._waits.values()
                    self._stand_in(self._standing_in)

    def _main_waits(self) -> bool:
        """Whether the main thread waits for other threads without a limit of time, and all of these wait."""
        frames = sys._current_frames()
        main = frames.get(self.main)
        if main is None or main.f_code.co_filename != threading.__file__ or _ends_soon(main):
            return False
        others = _python_threads() - {self.main, threading.get_ident()} - self._waits.keys()
        return all(ident in frames and _is_parked(frames[ident]) for ident in others)


def _python_threads() -> set[int]:
    return {thread.ident for thread in threading.enumerate() if thread.ident is not None}


def _ends_soon(frame: FrameType | None) -> bool:
    """Whether a wait in the module ``threading`` ends after a time, or is that for a thread to start."""
    assert frame is not None
    if frame.f_locals.get("timeout", None) not in (None, -1):
        return True
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        if frame.f_code is threading.Thread.start.__code__:
            return True
        frame = frame.f_back
    return False


def _is_parked(frame: FrameType) -> bool:
    """Whether a thread with this innermost frame waits in code that is not the user's.

    A thread that begins, or that is inside ``torch.distributed`` before its call is recorded, is about to
    communicate: ``Thread(target=dist.send)`` runs no code of the user.
    """
    file = frame.f_code.co_filename
    if file == threading.__file__ and frame.f_code.co_name in _AT_THE_START:
        return False
    if not file.startswith((_PYTHON, _OURS)) and not any(
        f"{os.sep}{folder}{os.sep}" in file for folder in _INSTALLED
    ):
        return False
    caller: FrameType | None = frame
    while caller is not None and not caller.f_code.co_filename.startswith(_COMMUNICATION):
        caller = caller.f_back
    return caller is None
