"""Imports without the garbage collector: they leave little garbage, and what they keep is searched often.

A command that imports when it runs cannot name its imports: it lets the collector look rarely.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 200_000
"""The new objects after which the collector looks at them in a process that lets it look rarely."""
FROZEN_AT_START = 1000
"""More objects than Python freezes when it starts: Python 3.12 freezes some hundreds."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Inside, garbage in cycles is not collected. What is there at the end is old: only a full collection
    looks at it, unless objects are frozen already. An import of torch and its compiler then costs 2.0 s of
    CPU time instead of 2.5.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # Otherwise the collector looks at all that was created inside next, as at new objects.
            if gc.get_freeze_count() < FROZEN_AT_START:
                gc.freeze()
                gc.unfreeze()  # to the oldest generation
            gc.enable()


def collect_rarely() -> None:
    """Let the collector look after ``NEW_OBJECTS`` new objects, not after 700 (2,000 since Python 3.13): for
    a process that ends soon and keeps nearly all that it creates. It saves half of what
    :func:`without_collector` saves. At the end of Python, the collector looks at nothing: with nbgrader
    imported, this saves 0.4 s of CPU time.
    """
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)
