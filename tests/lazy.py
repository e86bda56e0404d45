"""Modules that are imported when a test first uses them, because every test process collects every file."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazy:
    """A module that takes seconds to import; :func:`getattr` imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for fixtures among the names of a test file
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
