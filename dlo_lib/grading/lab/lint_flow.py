"""For the lint: what in a check's source comes from the student's code, followed
through the names it is given.

A name is the student's when it is bound to an expression with ``student``, or another such name, in it. It is
an *answer* when it is what the student's code returned, as it is: not a length, a shape or a sum of it, of
which a constant may be a property. The functions read one function body and no order of statements; where
that is too coarse they take the check to be right.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

STUDENT = "student"
MEASURES = {"calls", "bytes", "ring_bytes", "memory"}
EXPECTS = {"equal": 1, "close": 1}  # which argument is the expected value
EQUALS = {"equal", "allclose", "isclose", "array_equal"}  # functions whose answer t.that may check
CHECKED = {"items", "number", "tensor"}  # methods of the trial that return their argument
CONVERTS = {"float", "int", "bool", "str", "round", "list", "tuple"}
CONVERTS_ITSELF = {"item", "tolist", "double", "float"}
TENSORS = {"tensor", "as_tensor"}


def from_the_student(function: ast.AST) -> set[str]:
    """The names in ``function`` that hold something of the student's."""
    known = {STUDENT}
    while True:
        found = {
            name.id
            for target, value in _bindings(function)
            if mentions(value, known)
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        }
        if found <= known:
            return known
        known |= found


def mentions(node: ast.AST, names: Collection[str]) -> bool:
    """Whether one of ``names`` stands in ``node``."""
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def direct_answers(function: ast.AST) -> set[str]:
    """The names in ``function`` that hold an answer."""
    known: set[str] = set()
    while True:
        found = {
            name for target, value in _bindings(function) for name in _answers_bound(target, value, known)
        }
        if found <= known:
            return known
        known |= found


def constant_expected(
    call: ast.Call, answers: Collection[str], constants: Collection[str]
) -> ast.expr | None:
    """The constant that a comparison of the trial's compares an answer with: a literal, a tensor of
    literals, or one of ``constants``.

    0, 1, None, True and False are statements, not tables of answers.
    """
    if not isinstance(call.func, ast.Attribute) or not call.args:
        return None
    if (place := EXPECTS.get(call.func.attr)) is not None:
        wanted = call.args[place] if len(call.args) > place else None
        return wanted if wanted is not None and _is_constant(wanted, constants) else None
    if call.func.attr != "that":
        return None
    for one, other in _equated(call.args[0]):
        for got, wanted in ((one, other), (other, one)):
            if _is_answer(got, answers) and _is_constant(wanted, constants):
                return wanted
    return None


def measured_elsewhere(function: ast.AST) -> Iterator[tuple[int, str]]:
    """Runs that are measured and whose results are compared with nothing: line, and what is wrong."""
    nodes = list(ast.walk(function))
    bound = sorted(
        (node.lineno, target.id)
        for node in nodes
        if isinstance(node, ast.Assign) and is_run(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    )
    for line, name in bound:
        until = min((later for later, other in bound if other == name and later > line), default=float("inf"))
        mine = [node for node in nodes if line <= getattr(node, "lineno", 0) < until]
        uses = [node for node in mine if isinstance(node, ast.Attribute) and is_name(node.value, name)]
        measured = [node for node in uses if node.attr in MEASURES]
        passed_on = any(
            isinstance(node, ast.Call) and any(is_name(argument, name) for argument in node.args)
            for node in mine
        )
        if measured and not passed_on and not any(node.attr == "results" for node in uses):
            yield line, _elsewhere(f"{name}.{measured[0].attr}(...)")
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in MEASURES and is_run(node.value):
            yield node.lineno, _elsewhere(f"student.ranks(...).{node.attr}(...)")


def is_run(node: ast.AST) -> bool:
    """``student.ranks(...)``."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "ranks"
        and is_name(node.func.value, STUDENT)
    )


def is_name(node: ast.AST, name: str) -> bool:
    """Whether ``node`` is that name."""
    return isinstance(node, ast.Name) and node.id == name


def literal(node: ast.AST) -> object:
    """The value of a literal that is not trivial; None of anything else."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return None if value in (0, None, True, False) or value in ([], (), {}, "") else value


def _elsewhere(what: str) -> str:
    return f"measures {what} of a run whose results it does not compare: verify and measure the same run"


def _bindings(function: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """What is bound, and to what."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((target, value) for target in targets)
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.AugAssign(target=target, value=value)
            ):
                yield target, value
            case (
                ast.NamedExpr(target=target, value=value)
                | ast.For(target=target, iter=value)
                | ast.comprehension(target=target, iter=value)
            ):
                yield target, value
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                yield target, value
            case ast.Call(
                func=ast.Attribute(value=ast.Name() as target, attr="append" | "extend" | "add" | "update"),
                args=[value, *_],
            ):
                yield target, value


def _answers_bound(target: ast.AST, value: ast.AST, known: Collection[str]) -> Iterator[str]:
    """Names in ``target`` that hold an answer when it is bound to ``value``."""
    match target, value:
        case ast.Tuple(elts=[_, second]), ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
            yield from _answers_bound(second, inner, known)
        case ast.Tuple(elts=parts), ast.Call(func=ast.Name(id="zip"), args=sources) if len(parts) == len(
            sources
        ):
            for part, source in zip(parts, sources):
                yield from _answers_bound(part, source, known)
        case ((ast.Name() | ast.Tuple() | ast.List() | ast.Starred()), _) if _is_answer(value, known):
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _is_answer(node: ast.AST, known: Collection[str]) -> bool:
    """Whether ``node`` is what the student's code returned, or a part of it, or that as another type."""
    match node:
        case ast.Name(id=name):
            return name in known
        case ast.Subscript(value=inner) | ast.Starred(value=inner):
            return _is_answer(inner, known)
        case ast.Attribute(attr="results"):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="student"), attr=attribute)):
            return attribute != "ranks"
        case ast.Call(func=ast.Attribute(value=ast.Name(), attr=attribute), args=[inner, *_]) if (
            attribute in CHECKED
        ):
            return _is_answer(inner, known)
        case ast.Call(func=ast.Attribute(value=inner, attr=attribute)) if attribute in CONVERTS_ITSELF:
            return _is_answer(inner, known)
        case ast.Call(func=ast.Name(id=name), args=[inner, *_]) if name in CONVERTS:
            return _is_answer(inner, known)
    return False


def _is_constant(node: ast.AST, constants: Collection[str]) -> bool:
    match node:
        case ast.Name(id=name):
            return name in constants
        case ast.Call(func=ast.Attribute(attr=attribute), args=[inner, *_]) if attribute in TENSORS:
            return literal(inner) is not None
    return literal(node) is not None


def _equated(claim: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Pairs of which ``claim`` says that they are equal, or nearly."""
    for node in ast.walk(claim):
        match node:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
                yield left, right
            case ast.Compare(
                left=left,
                ops=[ast.In()],
                comparators=[
                    ast.Tuple(elts=[right, *_]) | ast.List(elts=[right, *_]) | ast.Set(elts=[right, *_])
                ],
            ):
                yield left, right
            case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=left, op=ast.Sub(), right=right)]):
                yield left, right
            case ast.Call(func=ast.Attribute(attr=attribute), args=[left, right, *_]) if attribute in EQUALS:
                yield left, right
