"""Mutants: planted wrong solutions, each aimed at one check, that keep a lab's checks honest."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.errors import UserError
from dlo_lib.grading.source import LabSource

FIELDS: dict[str, type | tuple[type, ...]] = {"QUESTION": str, "LOSES": (int, float), "FAILS": str, "SAYS": str}


@dataclass(frozen=True)
class Mutant:
    """A wrong solution of ``question``: it loses ``loses`` points, by failing only check ``fails``, whose message holds ``says``."""

    name: str
    what: str
    question: str
    loses: float
    fails: str
    says: str
    source: str


def read_mutant(file: Path) -> Mutant:
    """The mutant in ``file``.

    Raises:
        UserError: it lacks its docstring or one of QUESTION, LOSES, FAILS, SAYS.
    """
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in FIELDS:
            values[node.targets[0].id] = ast.literal_eval(node.value)
    what = ast.get_docstring(tree)
    missing = [name for name, kind in FIELDS.items() if not isinstance(values.get(name), kind)]
    if missing or not what:
        raise UserError(f"{file}: no {missing[0] if missing else 'docstring'}: a mutant says what is wrong, and what it loses where")
    return Mutant(file.stem, what, values["QUESTION"], float(values["LOSES"]), values["FAILS"], values["SAYS"], source)


def mutants_of(lab: LabSource) -> list[Path]:
    """The files of a lab's mutants, in order."""
    return sorted((lab.folder / "mutants").glob("*.py"))
