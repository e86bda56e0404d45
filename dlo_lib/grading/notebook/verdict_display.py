"""The output of ``lab.check`` in a notebook: a sign of life while a check runs longer than a second, then the
verdict in its place. Outside a notebook only the verdict is printed.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dlo_lib.grading.checks.verdict import Shown, show

EVERY_S = 1.0  # of an update


class VerdictDisplay:
    """One output, which :meth:`show` replaces."""

    def __init__(self) -> None:
        self._shell = _shell()
        self._handle: Any = None

    @contextmanager
    def alive(self, says: Callable[[float], str]) -> Iterator[None]:
        """Show ``says(seconds)`` once a second, until the block ends.

        The kernel's main thread runs the check, so another thread shows it, as an output of the same cell.
        """
        if self._shell is None:
            yield
            return
        ended, began = threading.Event(), time.perf_counter()

        def tick() -> None:
            while not ended.wait(EVERY_S):
                self.show(Shown(says(time.perf_counter() - began)))

        thread = threading.Thread(target=contextvars.copy_context().run, args=(tick,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def stop(self, shown: Shown) -> None:
        """Show ``shown`` in place of the sign of life, if there was one."""
        if self._handle is not None:
            self.show(shown)

    def show(self, shown: Shown) -> None:
        """Show ``shown`` in place of what this output has."""
        if self._shell is None:
            show(shown)
        elif self._handle is None:
            from IPython.display import display

            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)


def _shell() -> Any:
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()
