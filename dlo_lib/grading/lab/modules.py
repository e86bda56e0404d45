"""The Python files of a lab: the visible checks in ``checks/`` and, for an instructor, the
hidden ones in ``hidden.py``.

Every module of ``checks/`` is imported; no list names them. The files form a package that is named after the
folder, so that one process can hold several labs, and ``hidden.py`` can say ``from .checks.twins import
mean`` wherever it is. The checks of the quiz are made here, from its questions in ``lab.toml`` and from
``ANSWERS`` in ``hidden.py``.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from dlo_lib.errors import UserError
from dlo_lib.grading.checks.contract import Check
from dlo_lib.grading.checks.quiz import NAME as QUIZ
from dlo_lib.grading.checks.quiz import POINTS as QUIZ_POINTS
from dlo_lib.grading.checks.quiz import Answer, Question, quiz_complete, quiz_right
from dlo_lib.grading.lab.course import IN_GRADING_FILE, read_lab_info
from dlo_lib.text import tr
from dlo_lib.torch_version import check_torch

CHECKS_FOLDER = "checks"
HIDDEN = "hidden"
ANSWERS = "ANSWERS"  # in hidden.py: the right answers of the quiz


@dataclass(frozen=True)
class Declared:
    """What the decorator and the docstring of a check say, read without importing it."""

    question: str
    points: float
    title: str


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
    info = read_lab_info(folder)
    check_torch(oldest=info.torch, what=info.directory)
    quiz = {name: Question(row["text"], _options(row)) for name, row in info.quiz.items()}
    package = _package(folder, hidden)
    visible = [
        check
        for name in check_modules(folder)
        for check in _checks_in(_load(package, f"{CHECKS_FOLDER}.{name}"))
    ]
    visible = list(dict.fromkeys(visible))  # a module may import a check of another
    if quiz:
        visible.append(quiz_complete(quiz, QUIZ_POINTS))
    secret: list[Check] = []
    if hidden is not None:
        module = _load(package, HIDDEN)
        secret = [check for check in _checks_in(module) if check not in visible]
        secret += _answer_checks(hidden, quiz, getattr(module, ANSWERS, {}))
    names = [check.name for check in (*visible, *secret)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two checks of {folder.name} are called {twice[0]}: rename one")
    return LabChecks(tuple(visible), tuple(secret), info.hints, quiz)


def check_modules(folder: Path) -> list[str]:
    """The names of the modules in ``checks/`` of a lab's folder, sorted.

    Raises:
        UserError: there is none.
    """
    names = sorted(path.stem for path in (folder / CHECKS_FOLDER).glob("*.py"))
    if not names:
        raise UserError(f"no {CHECKS_FOLDER}/ in {folder}: it is beside the notebook; `dlo lab` restores it")
    return names


def declared_points(folder: Path) -> dict[str, float]:
    """The points of each question of the lab in ``folder``, hidden checks included,
    without running its checks.

    The points of a question are those of its checks. They are read from the decorators ``@check("question",
    points=1)``, whose arguments are literals, and every question of the quiz has one visible point for an
    answer to all questions, and one hidden point for each right answer. Reading takes milliseconds; importing
    the checks imports PyTorch.

    Raises:
        UserError: a decorator names its question or its points by something else than a literal.
    """
    points: dict[str, float] = {}
    for name in check_modules(folder):
        for check in _declared_in(folder / CHECKS_FOLDER / f"{name}.py"):
            points[check.question] = points.get(check.question, 0.0) + check.points
    for check in declared_hidden(folder):
        points[check.question] = points.get(check.question, 0.0) + check.points
    if read_lab_info(folder).quiz:
        points[QUIZ] = points.get(QUIZ, 0.0) + QUIZ_POINTS
    return points


def declared_hidden(folder: Path) -> list[Declared]:
    """The checks of ``hidden.py`` in the lab's ``folder``, and one entry for all answers of the quiz.

    Raises:
        UserError: there is no ``hidden.py``, or as in :func:`declared_points`.
    """
    file = folder / f"{HIDDEN}.py"
    if not file.is_file():
        raise UserError(f"no {file.name} in {file.parent}: a lab has hidden checks")
    found = _declared_in(file)
    if quiz := read_lab_info(folder).quiz:
        found.append(Declared(QUIZ, QUIZ_POINTS * len(quiz), "The answers are right"))
    return found


def read_in_grading(folder: Path) -> dict[str, tuple[tuple[str, float], ...]]:
    """Question → title and points of each hidden check, from ``in_grading.json``; empty without that file.

    Raises:
        UserError: the file is damaged.
    """
    file = folder / IN_GRADING_FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {
            str(question): tuple((str(title), float(points)) for title, points in rows)
            for question, rows in found.items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError):
        raise UserError(tr("{file} is damaged: `dlo lab` restores it", file=file)) from None


def _declared_in(file: Path) -> list[Declared]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{file} is not valid Python: {error}") from error
    return [
        _declared(file, node, call)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
    ]


def _declared(file: Path, function: ast.FunctionDef, call: ast.Call) -> Declared:
    given = dict(zip(("question", "points"), call.args)) | {word.arg: word.value for word in call.keywords}
    title = (ast.get_docstring(function) or function.name).splitlines()[0]
    try:
        question, points = ast.literal_eval(given["question"]), ast.literal_eval(given["points"])
        return Declared(str(question), float(points), title)
    except (KeyError, ValueError, TypeError):
        where = f"{file}, line {call.lineno}"
        raise UserError(
            f'{where}: give the question and its points as literals: @check("loss", points=1)'
        ) from None


def _options(row: Mapping[str, str]) -> dict[str, str]:
    return {letter: text for letter, text in row.items() if letter != "text"}


def _answer_checks(
    hidden: Path, quiz: Mapping[str, Question], answers: Mapping[str, Answer]
) -> tuple[Check, ...]:
    try:
        return quiz_right(quiz, answers, QUIZ_POINTS)
    except ValueError as error:
        raise UserError(f"{hidden / HIDDEN}.py: {error}: correct {ANSWERS}") from error


def _package(folder: Path, hidden: Path | None) -> str:
    folders = [str(path.resolve()) for path in (folder, hidden) if path is not None]
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
