"""The folders that a program adds to ``sys.path``, found without running it.

    sys.path.append("src")                      sys.path.insert(0, str(Path(__file__).parent / "src"))
    sys.path += [os.path.join(ROOT, "src")]     sys.path[:0] = ["src"]                  site.addsitedir("src")

Strings, paths of ``os.path`` and ``pathlib``, ``__file__``, and names that are assigned such values are
evaluated. Another value is known only when the program runs, which the result has as ``computed``.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PATHS: dict[str, Callable[..., Any]] = {
    **{f"os.path.{name}": getattr(os.path, name) for name in ("join", "dirname", "abspath", "realpath")},
    **{f"os.path.{name}": getattr(os.path, name) for name in ("normpath", "expanduser", "basename")},
    **{"os.getcwd": os.getcwd, "os.fspath": os.fspath, "str": str, "Path": Path, "pathlib.Path": Path},
    **{"Path.cwd": Path.cwd, "pathlib.Path.cwd": Path.cwd, "Path.home": Path.home},
    **{"pathlib.Path.home": Path.home, "PurePath": Path, "pathlib.PurePath": Path},
}
_METHODS = ("resolve", "absolute", "expanduser", "joinpath", "as_posix", "with_name", "rstrip", "strip")
_ATTRIBUTES = ("parent", "parents")
_CONSTANTS = {"os.pardir": os.pardir, "os.curdir": os.curdir, "os.sep": os.sep}


class _NotKnown(Exception):
    """A value is known only when the program runs."""


@dataclass
class PathChanges:
    """What a program adds to the module path.

    Attributes:
        first: folders that come before the others.
        last: folders that come after the others.
        computed: lines that add a computed value.
    """

    first: list[Path] = field(default_factory=list)
    last: list[Path] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)


def changes(tree: ast.Module, file: Path, folder: Path) -> PathChanges:
    """Return what the program in ``file``, run in ``folder``, adds to the module path."""
    found = PathChanges()
    names: dict[str, Any] = {"__file__": str(file)}
    for node in _in_order(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            _assign(node.targets[0].id, node.value, names)
        for value, is_first in _added(node):
            try:
                given = _value(value, names)
                entries = given if isinstance(given, (list, tuple)) else [given]
                places = [folder / os.fspath(entry) for entry in entries]
            except (_NotKnown, TypeError):
                found.computed.append(node.lineno)
                continue
            (found.first if is_first else found.last).extend(Path(os.path.realpath(one)) for one in places)
    return found


def _in_order(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements in the order of the text, because names are assigned before they are used."""
    statements = (node for node in ast.walk(tree) if isinstance(node, ast.stmt))
    return iter(sorted(statements, key=lambda node: (node.lineno, node.col_offset)))


def _assign(name: str, value: ast.expr, names: dict[str, Any]) -> None:
    try:
        names[name] = _value(value, names)
    except _NotKnown:
        names.pop(name, None)


def _added(node: ast.stmt) -> Iterator[tuple[ast.expr, bool]]:
    """Yield each value that a statement adds to the module path, and whether it comes first."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        name = _dotted(call.func)
        if name == "sys.path.insert" and len(call.args) == 2:
            yield call.args[1], True
        elif name in ("sys.path.append", "sys.path.extend", "site.addsitedir") and call.args:
            yield call.args[0], False
    elif isinstance(node, ast.AugAssign) and _dotted(node.target) == "sys.path":
        yield node.value, False
    elif isinstance(node, ast.Assign):
        target = node.targets[0]
        whole = target.value if isinstance(target, ast.Subscript) else target
        if _dotted(whole) == "sys.path":
            yield from ((part, True) for part in _terms(node.value) if not _is_path_itself(part))


def _terms(value: ast.expr) -> Iterator[ast.expr]:
    """Yield the parts of a sum, and of a list with stars."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        yield from _terms(value.left)
        yield from _terms(value.right)
    elif isinstance(value, (ast.List, ast.Tuple)):
        yield from (part.value if isinstance(part, ast.Starred) else part for part in value.elts)
    else:
        yield value


def _is_path_itself(value: ast.expr) -> bool:
    inner = value.value if isinstance(value, ast.Subscript) else value
    if isinstance(inner, ast.Call) and inner.args:  # list(sys.path)
        inner = inner.args[0]
    return _dotted(inner) == "sys.path"


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of an expression.

    Raises:
        _NotKnown: it is known only when the program runs.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int)):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(part, names) for part in node.elts]
    if _dotted(node) in _CONSTANTS:
        return _CONSTANTS[_dotted(node)]
    try:
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Add)):
            left, right = _value(node.left, names), _value(node.right, names)
            return left / right if isinstance(node.op, ast.Div) else left + right
        if isinstance(node, ast.JoinedStr):
            return "".join(str(_value(_inside(part), names)) for part in node.values)
        if isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
            return getattr(_value(node.value, names), node.attr)
        if isinstance(node, ast.Subscript):
            return _value(node.value, names)[_value(node.slice, names)]
        if isinstance(node, ast.Call) and not node.keywords:
            return _called(node, names)
    except (TypeError, AttributeError, IndexError, ValueError, OSError, RuntimeError) as error:
        raise _NotKnown from error
    raise _NotKnown


def _called(node: ast.Call, names: dict[str, Any]) -> Any:
    given = [_value(part, names) for part in node.args]
    if function := _PATHS.get(_dotted(node.func)):
        return function(*given)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        return getattr(_value(node.func.value, names), node.func.attr)(*given)
    raise _NotKnown


def _inside(part: ast.expr) -> ast.expr:
    """Return the expression in braces of an f-string without a format."""
    if isinstance(part, ast.FormattedValue):
        if part.format_spec is not None or part.conversion != -1:
            raise _NotKnown
        return part.value
    return part
