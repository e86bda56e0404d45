"""The references of a lab: the course's answers to the questions that later cells use, for a student who is
stuck.

They are the solution cells of the lab's text, so that there is no second implementation. A release holds them
in ``references.json``, each encoded in base64, so that a reader of the file sees no answer by accident.
The encoding protects nothing: a student who wants to decode it can. ``dlo release --without-references``
leaves the file out.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import linecache
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlo_lib.errors import UserError
from dlo_lib.grading.lab.course import REFERENCES_FILE as FILE
from dlo_lib.grading.lab.course import read_lab_info
from dlo_lib.grading.lab.source import CellKind, LabSource, defined_names
from dlo_lib.text import tr


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


def use_reference(folder: Path, question: str, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Run the reference of ``question`` and return what it defines, by name.

    It runs in a copy of ``namespace`` in which the references of the questions that it needs have run before,
    so that it does not call a student's function. ``namespace`` itself does not change.

    Raises:
        UserError: the release holds no references, or none for this question; the file is damaged; a cell
            above the question has not run.
    """
    sources = _read(folder)
    if question not in sources:
        raise UserError(tr("{question} has no reference: no later step uses it", question=question))
    own = dict(namespace)
    before = read_lab_info(folder).needed_by(question)
    for step in [*(step for step in before if step in sources), question]:
        name = f"<reference of {step}>"
        # Python finds the source of a function by the name of its file: torch.compile and tracebacks need it.
        linecache.cache[name] = (len(sources[step]), None, sources[step].splitlines(keepends=True), name)
        try:
            exec(compile(sources[step], name, "exec"), own)
        except NameError as error:
            raise UserError(
                tr("{error}: run the cells above {question} first", error=error, question=question)
            ) from error
    return {name: own[name] for name in defined_names(ast.parse(sources[question]))}


def _read(folder: Path) -> dict[str, str]:
    file = folder / FILE
    try:
        encoded = json.loads(file.read_text(encoding="utf-8"))
        return {
            question: base64.b64decode(text, validate=True).decode() for question, text in encoded.items()
        }
    except FileNotFoundError:
        raise UserError(
            tr("no {name} in {folder}: this course is released without references", name=FILE, folder=folder)
        ) from None
    except (ValueError, AttributeError, TypeError, binascii.Error):
        raise UserError(tr("{file} is damaged: `dlo lab` restores it", file=file)) from None


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
