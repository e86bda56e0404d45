"""What a lab teaches is withheld from the student's process while its checks run.

The library's own implementation of the step would otherwise be the answer. A withheld module can be imported, so that packages which
re-export it still load, but whatever is taken from it refuses to be used, with the reason.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn


class Withheld:
    """A name of a withheld module: any use of it says why it is not there."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ImportError(f"{self.__dict__['_name']} is what this lab teaches: it cannot be used while the lab's checks run")

    __call__ = __mro_entries__ = __iter__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class _Withholder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the taught modules, and all below them, before the real finders do."""

    def __init__(self, taught: Sequence[str]) -> None:
        self.taught = tuple(taught)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        below = any(name == module or name.startswith(f"{module}.") for module in self.taught)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if below else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__

        def missing(attribute: str) -> Withheld:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return Withheld(f"{name}.{attribute}")

        module.__getattr__ = missing  # type: ignore[method-assign]


def withhold(taught: Sequence[str]) -> None:
    """Withhold these modules in this process, for good. Must come before anything imports them.

    Raises:
        RuntimeError: one is there already.
    """
    if early := [name for name in taught if name in sys.modules]:
        raise RuntimeError(f"{early[0]} is loaded already: what a lab teaches must not be part of what grading needs")
    sys.meta_path.insert(0, _Withholder(taught))
