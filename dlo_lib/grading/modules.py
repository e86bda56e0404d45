"""A lab's own Python files, loaded: ``checks.py``, ``reference.py`` and, for an instructor, ``hidden.py``.

They form a package of their own that is named after the folder, so that several labs live in one process and ``hidden.py`` can say
``from .checks import twin`` wherever it lies.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from dlo_lib.errors import UserError
from dlo_lib.grading.contract import Check
from dlo_lib.grading.quiz import Question

Reference = Mapping[str, Mapping[str, Callable[..., Any]]]


@dataclass(frozen=True)
class LabChecks:
    """The checks of a lab in the order of its files, hints by question, and the quiz."""

    visible: tuple[Check, ...]
    hidden: tuple[Check, ...] = ()
    hints: Mapping[str, Sequence[str]] = field(default_factory=dict)
    quiz: Mapping[str, Question] = field(default_factory=dict)

    @property
    def questions(self) -> tuple[str, ...]:
        """The questions that have a check."""
        return tuple(dict.fromkeys(check.question for check in (*self.visible, *self.hidden)))

    def of(self, question: str) -> list[Check]:
        """The checks of ``question``, the visible ones first."""
        return [check for check in (*self.visible, *self.hidden) if check.question == question]


def load_checks(folder: Path, hidden: Path | None = None) -> LabChecks:
    """Load ``checks.py`` of the lab in ``folder`` and, if told where it lies, ``hidden.py`` of folder ``hidden``.

    Raises:
        UserError: a file is absent or does not load.
    """
    package = _package(folder, hidden)
    module = _load(package, "checks")
    visible = _checks_in(module)
    secret = [check for check in _checks_in(_load(package, "hidden")) if check not in visible] if hidden is not None else []
    names = [check.name for check in (*visible, *secret)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two checks of {folder.name} are called {twice[0]}: rename one")
    return LabChecks(tuple(visible), tuple(secret), getattr(module, "HINTS", {}), getattr(module, "QUIZ", {}))


def load_reference(folder: Path) -> Reference:
    """``REFERENCE`` of ``reference.py``: question → name in the notebook → callable.

    Raises:
        UserError: the file is absent or does not load.
    """
    return _load(_package(folder, None), "reference").REFERENCE


def _package(folder: Path, hidden: Path | None) -> str:
    folders = [str(path.resolve()) for path in (folder, hidden) if path is not None]
    name = f"_dlo_lab_{hashlib.sha256(repr(folders).encode()).hexdigest()[:12]}"
    for known in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        del sys.modules[known]  # the files may have changed since
    package = ModuleType(name)
    package.__path__ = folders
    sys.modules[name] = package
    importlib.invalidate_caches()
    return name


def _load(package: str, file: str) -> ModuleType:
    folders = ", ".join(sys.modules[package].__path__)
    try:
        return importlib.import_module(f"{package}.{file}")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.{file}":
            raise UserError(f"{file}.py of {folders} does not load: {error}") from error
        raise UserError(f"no {file}.py in {folders}: it lies beside the notebook; `dlo lab` brings it back") from None
    except Exception as error:
        raise UserError(f"{file}.py of {folders} does not load: {type(error).__name__}: {error}") from error


def _checks_in(module: ModuleType) -> list[Check]:
    found: list[Check] = []
    for value in vars(module).values():
        found += [
            item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, Check) and item not in found
        ]
    return found
