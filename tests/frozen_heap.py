"""Hides from Python's garbage collector what the tests of a file share with all others.

The items of 7,000 tests and the modules that they import are over a million objects. Each full collection
looks at all of them, which takes 0.5 s. ``torch.compile`` and the measurements of memory collect before each
measurement, so most of the CPU time of their tests was the collector's. What a test creates is collected as
before.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest


class FrozenHeap:
    """Freezes the heap before the first test of each file."""

    def __init__(self) -> None:
        self.file = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        gc.disable()  # imports and collection leave little garbage
        try:
            return (yield)
        finally:
            gc.enable()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        file = item.nodeid.partition("::")[0]
        if file != self.file:
            self.file = file
            gc.collect()  # no garbage is kept
            gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FrozenHeap(), "frozen-heap")
