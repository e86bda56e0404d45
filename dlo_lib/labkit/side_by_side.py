"""The student's form beside the standard library's: time, memory, bytes and lines of code in one table."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dlo_lib.base.text import columns, tr


@dataclass(frozen=True)
class Form:
    """One form of a step: what it is called, and what was measured. None was not measured.

    Attributes:
        lines: lines of code that a user writes for it; see :func:`lines_of`.
        seconds: the time of what was measured, such as a step.
        nbytes: payload that a rank passes to communication in it.
        memory: bytes at its peak.
    """

    name: str
    lines: int | None = None
    seconds: float | None = None
    nbytes: float | None = None
    memory: float | None = None


def table(forms: Iterable[Form], measured: str = "a step") -> str:
    """Return the table, with a row for each form and a column for each quantity that was measured.

    ``measured``: what takes the time, as the heading names it.
    """
    from dlo_lib.labkit.figures import ms, size  # imports matplotlib, which workers of the judge do not need

    rows = list(forms)
    shown: list[tuple[str, list[str]]] = [("", [form.name for form in rows])]
    kinds: list[tuple[str, str, Callable[[float], str]]] = [
        ("seconds", tr("time of {measured}", measured=measured), ms),
        ("memory", tr("memory"), size),
        ("nbytes", tr("communicated"), size),
        ("lines", tr("lines of code"), "{:g}".format),
    ]
    for name, heading, text in kinds:
        values = [getattr(form, name) for form in rows]
        if any(value is not None for value in values):
            shown.append((heading, ["-" if value is None else text(value) for value in values]))
    return columns([tuple(heading for heading, _ in shown), *zip(*(column for _, column in shown))])


def lines_of(*objects: Callable[..., object] | str) -> int | None:
    """Return the number of lines of code of functions, classes or texts of code, without empty lines,
    comments and docstrings; None if the source of one is not available, as for a reference solution.
    """
    try:
        texts = [textwrap.dedent(each if isinstance(each, str) else _source(each)) for each in objects]
    except (OSError, TypeError):
        return None
    total = 0
    for text in texts:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                and ast.get_docstring(node) is not None
            ):
                node.body = node.body[1:] or [ast.Pass()]
        total += sum(bool(line) for line in ast.unparse(tree).splitlines())
    return total


def _source(code: Callable[..., object]) -> str:
    try:
        text = _text_of(code)
        if not inspect.isclass(code) or _defines(text, code.__name__):
            return text
    except (OSError, TypeError, SyntaxError):
        if not inspect.isclass(code):
            raise
    # Python finds only the methods of a class of a notebook. From 3.13 on it takes the lines with the numbers
    # of the class from the file of the running program.
    methods = _methods(code)
    if not methods:
        raise OSError(f"the source of {code.__name__} is not available")
    bodies = [textwrap.dedent(_text_of(method)) for method in methods]
    return "class Methods:\n" + textwrap.indent("\n".join(bodies), "    ")


def _text_of(code: Callable[..., object]) -> str:
    """Return what ``inspect.getsource`` finds.

    Python 3.13 stores the program of ``python -c`` as the text of ``<string>``. That is also the file of what
    ``exec`` defines, such as the methods of a dataclass, whose text is not known.
    """
    if getattr(getattr(code, "__code__", None), "co_filename", "") == "<string>":
        raise OSError("the source is not available")
    return inspect.getsource(code)


def _defines(text: str, name: str) -> bool:
    """Return whether ``text`` is the definition of a class ``name``."""
    first = ast.parse(textwrap.dedent(text)).body[:1]
    return any(isinstance(node, ast.ClassDef) and node.name == name for node in first)


def _methods(owner: type) -> list[Callable[..., object]]:
    """Return the functions that the body of a class defines, those of static methods, class methods and
    properties included.
    """
    found: list[Callable[..., object]] = []
    for each in vars(owner).values():
        if isinstance(each, staticmethod | classmethod):
            found.append(each.__func__)
        elif isinstance(each, property):
            found += [function for function in (each.fget, each.fset, each.fdel) if function is not None]
        elif inspect.isfunction(each):
            found.append(each)
    return found
