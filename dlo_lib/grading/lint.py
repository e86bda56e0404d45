"""A lint for check authors: what a check must not do, found in its source. Each finding names file, line, check and the cure.

    compares nothing   no comparison but t.number is reached from the check: it would give points to anybody
    draws nothing      no check of the question draws an input from ``t``: answers for fixed inputs can be written down
    constants          a comparison with a literal, for inputs that are drawn: what is expected should come from the twin
    another run        traffic or memory of a run whose results are not compared: verified in one run, measured in another

A helper counts for the check that calls it: what it is given is followed through the functions of the lab's own files. The lint reads; it
runs nothing. What it cannot follow it takes to be right: mutants show the rest.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

COMPARES = {"that", "equal", "close", "tensor", "items"}
DRAWS = {"normal", "integer", "integers", "uniform", "choice", "shuffled"}
MEASURES = {"calls", "bytes", "ring_bytes", "memory"}
EXPECTS = {"equal": 1, "close": 1}  # which argument is the expected value
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


def lint(files: Iterable[Path]) -> list[Finding]:
    """The findings on all checks in ``files`` of one lab: ``checks.py`` and ``hidden.py``."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8"), str(file)) for file in files}
    functions = {node.name: node for tree in trees.values() for node in tree.body if isinstance(node, FUNCTIONS)}
    readers = [
        (file, _Reader(node, functions))
        for file, tree in trees.items()
        for node in tree.body
        if isinstance(node, FUNCTIONS) and _is_check(node)
    ]
    drawn = {reader.question for _, reader in readers if reader.draws}  # an edge case may be fixed where another check draws
    return [finding for file, reader in readers for finding in reader.findings(file.name, reader.question in drawn)]


def lint_lab(folder: Path) -> list[Finding]:
    """The findings on the checks of the lab in ``folder``."""
    return lint(path for path in (folder / "checks.py", folder / "hidden.py") if path.is_file())


class _Reader:
    """Reads one check, with the helpers that it calls."""

    def __init__(
        self, check: ast.FunctionDef | ast.AsyncFunctionDef, functions: Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]
    ) -> None:
        self.check, self.functions = check, functions
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
        given = [*decorators[0].args, *(word.value for word in decorators[0].keywords if word.arg == "question")]
        return ast.unparse(given[0]) if given else ""

    def findings(self, file: str, question_draws: bool) -> Iterator[Finding]:
        """What is wrong."""

        def finding(line: int, text: str) -> Finding:
            return Finding(file, line, self.check.name, text)

        line = self.check.lineno
        if not self.names & COMPARES:
            yield finding(line, "compares nothing: anybody would pass it; compare with t.close, t.equal or t.that")
            return
        if not question_draws and self._gives_inputs():
            yield finding(line, "draws no input from t, nor does another check of the question: use t.normal, t.integer, ...")
        if self.draws:
            for call in self._of_trial(self.check):
                if (constant := _constant_expected(call)) is not None:
                    text = f"expects the constant {ast.unparse(constant)} for inputs that are drawn: compute it with the twin"
                    yield finding(call.lineno, text)
        yield from (finding(line, text) for line, text in self._measured_elsewhere())

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
        """Whether the student's code is called with something: a function without arguments, or a value, has nothing to draw."""
        return any(call.args or call.keywords for function in self._reached() for call in _calls_of_student(function))

    def _measured_elsewhere(self) -> Iterator[tuple[int, str]]:
        """Runs that are measured and whose results are compared with nothing."""
        runs = _runs(self.check)
        nodes = list(ast.walk(self.check))
        for name, line in runs.items():
            uses = [node for node in nodes if isinstance(node, ast.Attribute) and _is_name(node.value, name)]
            measured = [node for node in uses if node.attr in MEASURES]
            passed_on = any(isinstance(node, ast.Call) and any(_is_name(argument, name) for argument in node.args) for node in nodes)
            if measured and not passed_on and not any(node.attr == "results" for node in uses):
                how = f"measures {name}.{measured[0].attr}(...) of a run whose results it does not compare"
                yield line, f"{how}: verify and measure the same run"


def _is_check(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    called = [decorator.func for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
    return any(_is_name(function, "check") or (isinstance(function, ast.Attribute) and function.attr == "check") for function in called)


def _runs(function: ast.AST) -> dict[str, int]:
    """Names that hold a run: ``run = student.ranks(...)``; the line of the last."""
    runs: dict[str, int] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_ranks(node.value):
            runs |= {target.id: node.lineno for target in node.targets if isinstance(target, ast.Name)}
    return runs


def _is_ranks(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "ranks" and _is_name(call.func.value, "student")


def _calls_of_student(function: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if _is_name(node.func.value, "student") and node.func.attr != "get":
            yield node


def _constant_expected(call: ast.Call) -> ast.expr | None:
    """The literal number that ``t.equal`` or ``t.close`` compares with. 0, None, True and False are statements, not tables of answers."""
    if not isinstance(call.func, ast.Attribute) or (place := EXPECTS.get(call.func.attr)) is None or len(call.args) <= place:
        return None
    value = call.args[place]
    try:
        literal = ast.literal_eval(value)
    except (ValueError, TypeError):
        return None
    return None if literal in (0, None, True, False) or literal in ([], (), {}, "") else value


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
