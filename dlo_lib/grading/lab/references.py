"""The references of a lab: the course's answers to the questions that later cells use, for a student who is
stuck.

They are the solution cells of the lab's text, so that there is no second implementation. A release holds them
in ``references.json``, each encoded in base64, so that a reader of the file sees no answer by accident.
The encoding protects nothing: a student who wants to decode it can. ``dlo release --without-references``
leaves the file out. ``notebook.reference`` runs them.
"""

from __future__ import annotations

import ast
import base64
import json

from dlo_lib.grading.lab.source import CellKind, LabSource


def references(lab: LabSource) -> dict[str, str]:
    """Question → the code of its solution cell, for each question that later steps are built on.

    These are the questions whose solution defines a function or a class that a later cell uses, or that
    another question needs. The others have no reference, because a student can leave them out.
    """
    needed = {step for steps in lab.info.needs.values() for step in steps}
    found = {}
    for place, cell in enumerate(lab.cells):
        if cell.kind is CellKind.SOLUTION and (names := _functions(cell.answer)):
            later = [other.source for other in lab.cells[place + 1 :] if other.kind is not CellKind.TEXT]
            if cell.id in needed or any(names & _used(text) for text in later):
                found[cell.id] = cell.answer
    return found


def references_text(lab: LabSource) -> str:
    """The content of ``references.json`` of a release."""
    encoded = {
        question: base64.b64encode(text.encode()).decode() for question, text in references(lab).items()
    }
    return json.dumps(encoded, indent=1, sort_keys=True) + "\n"


def undeclared_needs(lab: LabSource) -> list[str]:
    """One line for each earlier question that a solution needs and ``lab.toml`` does not list."""
    defined: dict[str, set[str]] = {}
    lines = []
    for cell in lab.cells:
        if cell.kind is CellKind.SOLUTION:
            names = _used(cell.answer)
            stated = lab.info.needed_by(cell.id)
            lines += [
                (
                    f"{cell.id} calls what {other} defines: "
                    f"add {other!r} to needs under [steps.{cell.id}] in lab.toml"
                )
                for other, theirs in defined.items()
                if theirs & names and other not in stated
            ]
            defined[cell.id] = _functions(cell.answer)
    return lines


def _functions(text: str) -> set[str]:
    return {node.name for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def _used(text: str) -> set[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a cell with magics
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
