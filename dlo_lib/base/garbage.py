"""Imports without the garbage collector: they leave little garbage, and what they keep is searched often.

A command that imports when it runs cannot name its imports: it lets the collector look rarely.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 200_000
"""The new objects after which the collector looks at them in a process that lets it look rarely."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Inside, garbage in cycles is not collected. An import of torch and its compiler then costs 3.3 s of
    CPU time instead of 3.8.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_rarely() -> None:
    """Let the collector look after ``NEW_OBJECTS`` new objects, not after 700 (2,000 since Python 3.13): for
    a process that ends soon and keeps nearly all that it creates. It saves half of what
    :func:`without_collector` saves.
    """
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
