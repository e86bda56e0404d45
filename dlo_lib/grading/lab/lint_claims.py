"""For the lint: what a scenario returns that its own parts have written while the student's code ran.

A list that a nested function fills, a count in a hook, an attribute of a class whose objects the student's
code gets: the student's code can write all of them. A scenario marks them, ``claimed(seen)``, so that no
check can score them. A nested function that only the scenario calls is none of these.

The functions read one function body and no order of statements. They take a result of ``student.NAME(...)``
for evidence, also if such a value is passed to it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from dlo_lib.grading.lab.lint_flow import STUDENT, is_name

CLAIMED = "claimed"
WRITES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault",
    "update",
}  # fmt: skip
INNER = (ast.FunctionDef, ast.Lambda, ast.ClassDef)


def unmarked(
    function: ast.FunctionDef, classes: Mapping[str, ast.ClassDef] | None = None
) -> Iterator[tuple[int, str]]:
    """Yield line and name of each value that ``function`` returns unmarked and that its parts have written
    out of its sight. ``classes``: those of its module, by name.
    """
    own = _own_names(function)
    known = {name for part in _escaping(function) for name in _written(part)} & own
    known |= {name for method in _passed_methods(function) for name in _root(method.value)}
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    sent = [part for name, part in (classes or {}).items() if name in used]
    attributes = {name for part in [*_classes(function), *sent] for name in _attributes_written(part)}
    while (more := known | set(_bound_to(function, known, attributes))) != known:
        known = more
    for node in _statements(function):
        if isinstance(node, ast.Return) and node.value is not None:
            for name in dict.fromkeys(_mentioned(node.value, known, attributes)):
                yield node.lineno, name


def _statements(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of its inner functions and classes."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, INNER):
            yield child
            yield from _statements(child)


def _own_names(function: ast.FunctionDef) -> set[str]:
    stored = {
        node.id
        for node in _statements(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return stored | {argument.arg for argument in function.args.args}


def _escaping(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the inner functions that something else than ``function`` can call: lambdas, classes, functions
    whose name is used in another way than to call it, and what these call."""
    inner = [node for node in ast.walk(function) if isinstance(node, INNER) and node is not function]
    called = {id(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    passed = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and id(node) not in called}
    found = [
        part
        for part in inner
        if not isinstance(part, ast.FunctionDef) or part.name in passed or _in_class(part, function)
    ]
    for part in found:
        yield part
        used = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
        found += [other for other in inner if getattr(other, "name", "") in used and other not in found]


def _in_class(part: ast.AST, function: ast.AST) -> bool:
    return any(part in ast.walk(node) for node in ast.walk(function) if isinstance(node, ast.ClassDef))


def _classes(function: ast.AST) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(function) if isinstance(node, ast.ClassDef))


def _written(part: ast.AST) -> Iterator[str]:
    """Yield the names whose values an inner function changes: by a method, an item, an attribute, or as a
    nonlocal name."""
    shared = {name for node in ast.walk(part) if isinstance(node, ast.Nonlocal) for name in node.names}
    for node in ast.walk(part):
        match node:
            case ast.Call(func=ast.Attribute(value=target, attr=method)) if method in WRITES:
                yield from _root(target)
            case ast.Subscript(value=target, ctx=ast.Store()) | ast.Attribute(value=target, ctx=ast.Store()):
                yield from _root(target)
            case ast.Name(id=name, ctx=ast.Store()) if name in shared:
                yield name


def _attributes_written(part: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes that methods of a class change, without those that only ``__init__`` sets."""
    for method in part.body:
        if not isinstance(method, ast.FunctionDef) or method.name == "__init__" or not method.args.args:
            continue
        this = method.args.args[0].arg
        for node in ast.walk(method):
            match node:
                case ast.Call(func=ast.Attribute(value=target, attr=name)) if name in WRITES:
                    yield from _attribute_of(target, this)
                case ast.Subscript(value=target, ctx=ast.Store()):
                    yield from _attribute_of(target, this)
                case ast.Attribute(value=ast.Name(id=owner), attr=name, ctx=ast.Store()) if owner == this:
                    yield name


def _attribute_of(target: ast.AST, owner: str) -> Iterator[str]:
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        if isinstance(target, ast.Attribute) and is_name(target.value, owner):
            yield target.attr
        target = target.value


def _passed_methods(function: ast.AST) -> Iterator[ast.Attribute]:
    """Yield ``found.append`` that is passed on and not called."""
    called = {id(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr in WRITES and id(node) not in called:
            yield node


def _root(target: ast.AST) -> Iterator[str]:
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
    if isinstance(target, ast.Name):
        yield target.id


def _bound_to(function: ast.AST, known: set[str], attributes: set[str]) -> Iterator[str]:
    """Yield the names that get a value of ``known``, by an assignment, a loop, or an ``append``."""
    for node in _statements(function):
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs = [(target, value) for target in targets]
            case ast.AugAssign(target=target, value=value) | ast.For(target=target, iter=value):
                pairs = [(target, value)]
            case ast.NamedExpr(target=target, value=value):
                pairs = [(target, value)]
            case ast.Call(func=ast.Attribute(value=ast.Name() as target, attr=method), args=[*_, value]) if (
                method in WRITES
            ):
                pairs = [(target, value)]
            case _:
                continue
        for target, value in pairs:
            if any(True for _ in _mentioned(value, known, attributes)):
                yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _mentioned(node: ast.AST, known: set[str], attributes: set[str]) -> Iterator[str]:
    """Yield the names of ``known`` and ``attributes`` in an expression, outside of ``claimed(...)``, inner
    functions, and calls of the student's functions."""
    match node:
        case ast.Call(func=ast.Name(id=name)) if name == CLAIMED:
            return
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name == STUDENT:
            return
        case ast.Lambda():
            return
        case ast.Name(id=name) if name in known:
            yield name
        case ast.Attribute(attr=name) if name in attributes:
            yield name
    for child in ast.iter_child_nodes(node):
        yield from _mentioned(child, known, attributes)


def scenarios(functions: Mapping[str, ast.FunctionDef]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the scenarios among ``functions``, and the functions that are sent with them, each with the name
    of its first scenario."""
    seen: set[str] = set()
    left = [(name, name) for name, function in functions.items() if _is_scenario(function)]
    while left:
        of, name = left.pop(0)
        if name in seen:
            continue
        seen.add(name)
        yield of, functions[name]
        used = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
        left += [(of, other) for other in sorted(used & functions.keys())]


def _is_scenario(function: ast.FunctionDef) -> bool:
    return any(is_name(decorator, "scenario") for decorator in function.decorator_list)
