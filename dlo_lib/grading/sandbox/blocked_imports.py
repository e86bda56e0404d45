"""Block the use of the modules that a lab teaches while the lab's checks run in the student's process.

Without the block, a student could return the implementation of the library as the answer. A blocked module
can be imported, so that packages which re-export it still load, but each use of one of its names raises
``ImportError`` with the reason.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn


class BlockedName:
    """A name of a blocked module: each use of it raises ``ImportError`` with the reason."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        name = self.__dict__["_name"]
        raise ImportError(f"{name} is what this lab teaches: it cannot be used while the lab's checks run")

    __call__ = __mro_entries__ = __iter__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class _BlockingFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the taught modules and their submodules before the standard finders do."""

    def __init__(self, taught: Sequence[str]) -> None:
        self.taught = tuple(taught)

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        below = any(name == module or name.startswith(f"{module}.") for module in self.taught)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if below else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__

        def missing(attribute: str) -> BlockedName:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return BlockedName(f"{name}.{attribute}")

        module.__getattr__ = missing  # type: ignore[method-assign]


def block_imports(taught: Sequence[str]) -> None:
    """Block the modules ``taught`` in this process until it ends. Call it before anything imports them.

    Raises:
        RuntimeError: one of the modules is already imported.
    """
    if early := [name for name in taught if name in sys.modules]:
        raise RuntimeError(f"{early[0]} is already imported: grading must not need what a lab teaches")
    sys.meta_path.insert(0, _BlockingFinder(taught))
