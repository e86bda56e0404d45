"""What the files of a lab say about its checks, read without importing them: questions, points, titles.

Reading takes milliseconds. Importing the checks imports PyTorch, which formgrader and the commands that list
labs do not need.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.checks.quiz_question import NAME as QUIZ
from dlo_lib.grading.checks.quiz_question import POINTS as QUIZ_POINTS
from dlo_lib.grading.checks.quiz_question import Answer
from dlo_lib.grading.lab.course import IN_GRADING_FILE, given_folder, read_lab_info

CHECKS_FOLDER = "checks"
HIDDEN = "hidden"
ANSWERS = "ANSWERS"  # in hidden.py: the right answers of the quiz


@dataclass(frozen=True)
class Declared:
    """What the decorator and the docstring of a check say, read without importing it."""

    question: str
    points: float
    title: str


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
    """The points of each question of the lab whose source is in ``folder``, hidden checks included,
    without running its checks.

    The points of a question are those of its checks. They are read from the decorators ``@check("question",
    points=1)``, whose arguments are literals, and every question of the quiz has one visible point for an
    answer to all questions, and one hidden point for each right answer.

    Raises:
        UserError: a decorator names its question or its points by something else than a literal.
    """
    points: dict[str, float] = {}
    given = given_folder(folder)
    for name in check_modules(given):
        for check in _declared_in(given / CHECKS_FOLDER / f"{name}.py"):
            points[check.question] = points.get(check.question, 0.0) + check.points
    for check in declared_hidden(folder):
        points[check.question] = points.get(check.question, 0.0) + check.points
    if read_lab_info(given).quiz:
        points[QUIZ] = points.get(QUIZ, 0.0) + QUIZ_POINTS
    return points


def declared_hidden(folder: Path) -> list[Declared]:
    """The checks of ``hidden.py`` in the lab's source ``folder``, and one entry for all answers of the quiz.

    Raises:
        UserError: there is no ``hidden.py``, or as in :func:`declared_points`.
    """
    file = folder / f"{HIDDEN}.py"
    if not file.is_file():
        raise UserError(f"no {file.name} in {file.parent}: a lab has hidden checks")
    found = _declared_in(file)
    if quiz := read_lab_info(given_folder(folder)).quiz:
        found.append(Declared(QUIZ, QUIZ_POINTS * len(quiz), "The answers are right"))
    return found


def declared_answers(folder: Path) -> dict[str, Answer]:
    """The right answers of the quiz: ``ANSWERS`` in ``hidden.py`` of the lab's ``folder``, in the quiz's
    order.

    Raises:
        UserError: a question has no answer, or one that is not ``Answer("a", "why")`` of two literals: what
            students read must not depend on what ran before.
    """
    quiz = read_lab_info(given_folder(folder)).quiz
    if not quiz:
        return {}
    file = folder / f"{HIDDEN}.py"
    rows = _dict_called(ANSWERS, _parsed(file))
    answers = {}
    for question in quiz:
        row = rows.get(question)
        given = [*row.args, *(word.value for word in row.keywords)] if isinstance(row, ast.Call) else []
        try:
            option, why = map(ast.literal_eval, given)
        except (ValueError, TypeError):
            raise UserError(
                f'{file}: {ANSWERS} must have {question!r}: Answer("a", "the reason"), two literals and no '
                "f-string"
            ) from None
        answers[question] = Answer(str(option), str(why))
    return answers


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


def _dict_called(name: str, tree: ast.Module) -> dict[str, ast.expr]:
    """The values of the dict ``name`` of a module by key; empty if it has none."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value if isinstance(node, ast.Assign) else None
            pairs = zip(value.keys, value.values) if isinstance(value, ast.Dict) else ()
            found = {str(key.value): row for key, row in pairs if isinstance(key, ast.Constant)}
    return found


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{file} is not valid Python: {error}") from error


def _declared_in(file: Path) -> list[Declared]:
    return [
        _declared(file, node, call)
        for node in _parsed(file).body
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
