"""Refuse the class of a library where students write theirs.

A scenario runs the student's code in ``with without("torch.amp.GradScaler")``: the class, and every class
that inherits from it, raises :class:`LibraryUsed`, which says what to do. ``lab.check(..., instead=...)``
shows the library's form on purpose: there the check passes no name (``student.is_own``).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from dlo_lib.base.text import tr


class LibraryUsed(RuntimeError):
    """The student's code uses what the exercise asks them to write."""


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Let classes and functions of libraries raise :class:`LibraryUsed` in the block.

    A class raises in each method that it defines, also in an object that was made before. A function of
    Python raises under each name that it has; of a decorated one, the function that the decorator wraps.

    Args:
        names: full names, such as ``"torch.optim.lr_scheduler.OneCycleLR"``.

    Raises:
        TypeError: a name is no class, and no function of Python without free variables.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            module, _, last = name.rpartition(".")
            found = getattr(importlib.import_module(module), last)
            if inspect.isclass(found):
                for method, function in list(vars(found).items()):
                    if inspect.isfunction(function):
                        stack.enter_context(_replaced(found, method, _raising(name)))
                    elif isinstance(function, (staticmethod, classmethod)):
                        stack.enter_context(_replaced(found, method, staticmethod(_raising(name))))
            elif inspect.isfunction(plain := inspect.unwrap(found)) and not plain.__closure__:
                stack.enter_context(_raising_code(plain, name))
            else:
                raise TypeError(f"{name} is no class and no plain function: its calls cannot be refused")
        yield


def refuse(*names: str) -> None:
    """Do as :func:`without` until this process ends: in a rank.

    Args:
        names: full names.

    Raises:
        TypeError: as there.
    """
    block = without(*names)
    block.__enter__()
    atexit.register(block.__exit__, None, None, None)


def _raising(name: str) -> Any:
    def refuse(*_: object, **__: object) -> None:
        raise LibraryUsed(tr("{name} does what you are asked to write: write it yourself", name=name))

    return refuse


@contextlib.contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _raising_code(function: Any, name: str) -> Iterator[None]:
    """Replace the code of a function, because other names may hold it."""
    scope: dict[str, Any] = {}
    call = f"__import__({__name__!r}, fromlist=['_raising'])._raising({name!r})()"
    exec(f"def refuse(*args, **kwargs):\n    {call}\n", scope)
    before, function.__code__ = function.__code__, scope["refuse"].__code__
    try:
        yield
    finally:
        function.__code__ = before
