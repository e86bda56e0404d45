"""A lint for check authors: what a check must not do, found in its source. Each finding names file, line,
check and the cure.

    compares nothing   the check reaches no comparison except t.number, or compares nothing that comes from
                       the student: every answer passes
    draws nothing      no check of the question draws an input from ``t``: answers for fixed inputs can be
                       written down
    constants          a comparison with a literal, for inputs that are drawn: what is expected should come
                       from the twin; also as t.that(x == 3), t.that(abs(x - 3) < 1e-6),
                       torch.tensor([1, 2]), or a constant of the file
    claims             a scenario that returns what its own parts write while the student's code runs, which
                       that code can write too: mark it with claimed(...), which no comparison takes
    another run        traffic or memory of a run whose results are not compared: verified in one run,
                       measured in another

A helper counts for the check that calls it: the lint follows the arguments through the functions of the lab's
files, and of those of ``dlo_lib.grading.checks`` and ``dlo_lib.labkit`` that they import. It runs no code. It
accepts what it cannot follow, because mutants show the rest.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.grading.lab.declared import CHECKS_FOLDER, HIDDEN
from dlo_lib.grading.lab.lint_claims import scenarios, unmarked
from dlo_lib.grading.lab.lint_flow import (
    constant_expected,
    direct_answers,
    from_the_student,
    is_name,
    literal,
    measured_elsewhere,
    mentions,
)

ROOT = Path(__file__).parents[2]
# what authors import
LIBRARY = {"dlo_lib.grading.checks": ROOT / "grading" / "checks", "dlo_lib.labkit": ROOT / "labkit"}
COMPARES = {"that", "equal", "close", "tensor", "items"}
DRAWS = {"normal", "integer", "integers", "uniform", "choice", "shuffled"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Finding:
    """What is wrong with a check, and what to do."""

    file: str
    line: int
    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.check} {self.text}"


def lint(files: Iterable[Path], given: Path) -> list[Finding]:
    """The findings on all checks in ``files`` of one lab, those of ``checks/`` and ``hidden.py``,
    and in what they import. ``given`` has the folder ``checks/``."""
    trees = _with_imported(files, given)
    functions = {
        node.name: node for tree in trees.values() for node in tree.body if isinstance(node, FUNCTIONS)
    }
    constants = {
        target.id
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and literal(node.value) is not None
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    readers = [
        (file, _Reader(node, functions, constants))
        for file, tree in trees.items()
        for node in tree.body
        if isinstance(node, FUNCTIONS) and _is_check(node)
    ]
    # an edge case may be fixed where another check draws
    drawn = {reader.question for _, reader in readers if reader.draws}
    return [*_unmarked_claims(trees, given)] + [
        finding
        for file, reader in readers
        for finding in reader.findings(file.name, reader.question in drawn)
    ]


def _unmarked_claims(trees: Mapping[Path, ast.Module], given: Path) -> Iterator[Finding]:
    for file, tree in trees.items():
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for name, function in scenarios(functions):
            for line, value in unmarked(function, classes):
                text = (
                    f"returns {value}, which its own parts write while the student's code runs, and that "
                    "code can write too: show it as claimed(...), score a result or what t.asked counts"
                )
                yield Finding(file.name, line, name, text)


def lint_lab(given: Path, source: Path) -> list[Finding]:
    """The findings on the visible checks in ``given`` and the hidden ones in ``source`` of a lab."""
    return lint([*sorted((given / CHECKS_FOLDER).glob("*.py")), *source.glob(f"{HIDDEN}.py")], given)


def _with_imported(files: Iterable[Path], given: Path) -> dict[Path, ast.Module]:
    """The trees of ``files``, and of the files of the lab and of this package from which they import."""
    trees: dict[Path, ast.Module] = {}
    new = list(files)
    while new:
        file = new.pop(0)
        if file not in trees:
            trees[file] = ast.parse(file.read_text(encoding="utf-8"), str(file))
            new += [
                path
                for node in trees[file].body
                if isinstance(node, ast.ImportFrom) and (path := _imported(node, file, given)) is not None
            ]
    return trees


def _imported(node: ast.ImportFrom, file: Path, given: Path) -> Path | None:
    package, _, name = (node.module or "").rpartition(".")
    if node.level == 1:  # ".twins" in checks/, ".checks.twins" in hidden.py: the two folders are one package
        beside = given if package == CHECKS_FOLDER else file.parent
        path = beside.joinpath(*filter(None, package.split(".")), f"{name}.py")
    elif node.level == 0 and package in LIBRARY and file.parent not in LIBRARY.values():
        path = LIBRARY[package] / f"{name}.py"
    else:
        return None
    return path if path.is_file() else None


class _Reader:
    """Reads one check, with the helpers that it calls."""

    def __init__(
        self,
        check: ast.FunctionDef | ast.AsyncFunctionDef,
        functions: Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef],
        constants: Collection[str],
    ) -> None:
        self.check, self.functions, self.constants = check, functions, constants
        self.trials = {argument.arg for argument in check.args.args[1:2]} | {"t"}
        calls = [call for function in self._reached() for call in self._of_trial(function)]
        self.names = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}

    @property
    def draws(self) -> bool:
        """Whether an input comes from ``t``."""
        return bool(self.names & DRAWS)

    @property
    def question(self) -> str:
        """The question of the check, as its decorator is written."""
        decorators = [decorator for decorator in self.check.decorator_list if isinstance(decorator, ast.Call)]
        given = [
            *decorators[0].args,
            *(word.value for word in decorators[0].keywords if word.arg == "question"),
        ]
        return ast.unparse(given[0]) if given else ""

    def findings(self, file: str, question_draws: bool) -> Iterator[Finding]:
        """What is wrong."""

        def finding(line: int, text: str) -> Finding:
            return Finding(file, line, self.check.name, text)

        line = self.check.lineno
        if not self.names & COMPARES:
            yield finding(
                line, "compares nothing: every answer passes; compare with t.close, t.equal or t.that"
            )
            return
        if not self._compares_the_students():
            yield finding(line, "compares nothing that comes from the student: every answer passes")
        if not question_draws and self._gives_inputs():
            yield finding(
                line,
                "draws no input from t, nor does another check of the question: use t.normal, t.integer, ...",
            )
        if self.draws:
            answers = direct_answers(self.check)
            for call in self._of_trial(self.check):
                if (constant := constant_expected(call, answers, self.constants)) is not None:
                    text = (
                        f"expects the constant {ast.unparse(constant)} for inputs that are drawn: "
                        "compute it with the twin"
                    )
                    yield finding(call.lineno, text)
        yield from (finding(line, text) for line, text in measured_elsewhere(self.check))

    # -- what is read

    def _reached(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        reached, new = [self.check], [self.check]
        while new:
            named = {node.id for node in ast.walk(new.pop()) if isinstance(node, ast.Name)}
            for name in sorted(named & self.functions.keys()):
                if (function := self.functions[name]) not in reached:
                    reached.append(function)
                    new.append(function)
        return reached

    def _of_trial(self, function: ast.AST) -> Iterator[ast.Call]:
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id in self.trials:
                yield node

    def _gives_inputs(self) -> bool:
        """Whether the student's code is called with something: a function without arguments, or a
        value, has nothing to draw."""
        return any(
            call.args or call.keywords for function in self._reached() for call in _calls_of_student(function)
        )

    def _compares_the_students(self) -> bool:
        """Whether a comparison has something of the student's in it; a helper that compares is taken to."""
        if any(self._compared(function) for function in self._reached()[1:]):
            return True
        names = from_the_student(self.check)
        return any(mentions(argument, names) for call in self._compared(self.check) for argument in call.args)

    def _compared(self, function: ast.AST) -> list[ast.Call]:
        return [
            call
            for call in self._of_trial(function)
            if isinstance(call.func, ast.Attribute) and call.func.attr in COMPARES
        ]


def _is_check(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    called = [decorator.func for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
    return any(
        is_name(function, "check") or (isinstance(function, ast.Attribute) and function.attr == "check")
        for function in called
    )


def _calls_of_student(function: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if is_name(node.func.value, "student") and node.func.attr != "get":
            yield node
