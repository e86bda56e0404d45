"""Right answers that look unlike the solution, made of it: each must earn all points."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable

from dlo_lib.grading.lab.source import LabSource


def by_keyword(lab: LabSource, question: str) -> str:
    """Return the solution behind functions that take any arguments, and pass them on."""
    wrapper = """

def _by_keyword(function):
    import functools
    import inspect

    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        return function(*bound.args, **bound.kwargs)

    del wrapper.__wrapped__
    return wrapper


"""
    return _with(lab, question, wrapper, "_by_keyword")


def as_objects(lab: LabSource, question: str) -> str:
    """Return the solution with objects that can be called instead of functions."""
    wrapper = '''

class _Called:
    """An object that can be called as a function."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


'''
    return _with(lab, question, wrapper, "_Called")


def made_by_a_function(lab: LabSource, question: str) -> str:
    """Return the solution inside a function that returns its names."""
    source = lab.solution(question).source
    names = ", ".join(f'"{name}": {name}' for name in _names(source))
    imports = [ast.unparse(node) for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    body = textwrap.indent(f"{source}\nreturn {{{names}}}", "    ")
    return "\n".join([*imports, f"def _made():\n{body}\n\n\nglobals().update(_made())"])


def bare(lab: LabSource, question: str) -> str:
    """Return the solution without comments, documentation and, in functions, annotations."""
    return ast.unparse(ast.fix_missing_locations(_Bare().visit(ast.parse(lab.solution(question).source))))


class _Bare(ast.NodeTransformer):
    """Removes the documentation and annotations of functions that no decorator reads."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if ast.get_docstring(node) is not None and len(node.body) > 1:
            node.body = node.body[1:]
        if not node.decorator_list:
            node.returns = None
            for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                each.annotation = None
        return node


def _with(lab: LabSource, question: str, wrapper: str, name: str) -> str:
    source = lab.solution(question).source
    plain = [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and not node.decorator_list
    ]
    return "\n".join([source, wrapper, *(f"{each} = {name}({each})" for each in plain)])


def _names(source: str) -> list[str]:
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [each.id for each in node.targets if isinstance(each, ast.Name)]
    return names


GENERATORS: dict[str, Callable[..., str]] = {
    "as_objects": as_objects,
    "bare": bare,
    "by_keyword": by_keyword,
    "made_by_a_function": made_by_a_function,
}
