"""Names in a text of Python."""

from __future__ import annotations

import ast


def defined_names(tree: ast.Module) -> list[str]:
    """The names that a text defines at its top level: functions, classes and variables."""
    names = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names
