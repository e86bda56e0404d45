"""The Python files of a lab: the visible checks in ``checks/`` and, for an instructor, the
hidden ones in ``hidden.py``.

Every module of ``checks/`` is imported; no list names them. The files form a package that is named after the
folder, so that one process can hold several labs, and ``hidden.py`` can say ``from .checks.twins import
mean`` wherever it is. The checks of the quiz are made here, from its questions in ``lab.toml`` and from
``ANSWERS`` in ``hidden.py``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

from dlo_lib.base.errors import UserError
from dlo_lib.base.torch_version import check_torch
from dlo_lib.grading.checks.contract import Check
from dlo_lib.grading.checks.quiz import quiz_complete, quiz_right
from dlo_lib.grading.checks.quiz_question import POINTS, Answer, Question
from dlo_lib.grading.lab.course import read_lab_info
from dlo_lib.grading.lab.declared import ANSWERS, CHECKS_FOLDER, HIDDEN, check_modules


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

    def only(self, names: Collection[str]) -> LabChecks:
        """The same without the checks that ``names`` does not contain."""
        visible, hidden = (
            tuple(check for check in checks if check.name in names) for checks in (self.visible, self.hidden)
        )
        return replace(self, visible=visible, hidden=hidden)


def load_checks(folder: Path, hidden: Path | None = None) -> LabChecks:
    """Load the checks of the lab in ``folder``, and those of ``hidden.py`` in the folder
    ``hidden`` if it is given. They are loaded again only if a file has changed since.

    Raises:
        UserError: a file is absent or does not load, two checks have one name, or
            ``ANSWERS`` does not fit the quiz, or PyTorch is too old for the lab.
    """
    files = _files_of(folder) if hidden is None else (*_files_of(folder), *_files_of(hidden))
    return _load_checks(folder, hidden, files)


def _files_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return the path, the time of the last change and the size of each file of a lab."""
    files = sorted((*folder.glob("*.py"), *folder.glob("*.toml"), *folder.glob(f"{CHECKS_FOLDER}/*.py")))
    return tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)


@functools.lru_cache(maxsize=32)
def _load_checks(folder: Path, hidden: Path | None, files: tuple[tuple[str, int, int], ...]) -> LabChecks:
    check_torch()
    info = read_lab_info(folder)
    quiz = {name: Question(row["text"], _options(row)) for name, row in info.quiz.items()}
    package = _package(folder, hidden)
    visible = [
        check
        for name in check_modules(folder)
        for check in _checks_in(_load(package, f"{CHECKS_FOLDER}.{name}"))
    ]
    visible = list(dict.fromkeys(visible))  # a module may import a check of another
    if quiz:
        visible.append(quiz_complete(quiz, POINTS))
    secret: list[Check] = []
    if hidden is not None:
        module = _load(package, HIDDEN)
        secret = [check for check in _checks_in(module) if check not in visible]
        secret += _answer_checks(hidden, quiz, getattr(module, ANSWERS, {}))
    names = [check.name for check in (*visible, *secret)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two checks of {folder.name} are called {twice[0]}: rename one")
    return LabChecks(tuple(visible), tuple(secret), info.hints, quiz)


def _options(row: Mapping[str, str]) -> dict[str, str]:
    return {letter: text for letter, text in row.items() if letter != "text"}


def _answer_checks(
    hidden: Path, quiz: Mapping[str, Question], answers: Mapping[str, Answer]
) -> tuple[Check, ...]:
    try:
        return quiz_right(quiz, answers, POINTS)
    except ValueError as error:
        raise UserError(f"{hidden / HIDDEN}.py: {error}: correct {ANSWERS}") from error


def _package(folder: Path, hidden: Path | None) -> str:
    # The instructor's folder is first: a file called hidden.py beside the visible checks does not count.
    folders = [str(path.resolve()) for path in (hidden, folder) if path is not None]
    name = f"_dlo_lab_{hashlib.sha256(repr(folders).encode()).hexdigest()[:12]}"
    for known in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        del sys.modules[known]  # the files may have changed since
    # The folder of the checks is registered here, because a file called checks.py beside
    # it would be found first.
    for package, places in (
        (name, folders),
        (f"{name}.{CHECKS_FOLDER}", [f"{folder}/{CHECKS_FOLDER}" for folder in folders]),
    ):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = places
    importlib.invalidate_caches()
    return name


def _load(package: str, module: str) -> ModuleType:
    folders = ", ".join(sys.modules[package].__path__)
    file = f"{module.replace('.', '/')}.py"
    try:
        return importlib.import_module(f"{package}.{module}")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.{module}":
            raise UserError(f"{file} of {folders} does not load: {error}") from error
        raise UserError(f"no {file} in {folders}: it is beside the notebook; `dlo lab` restores it") from None
    except Exception as error:
        raise UserError(f"{file} of {folders} does not load: {type(error).__name__}: {error}") from error


def _checks_in(module: ModuleType) -> list[Check]:
    found: list[Check] = []
    for value in vars(module).values():
        found += [
            item
            for item in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(item, Check) and item not in found
        ]
    return found
