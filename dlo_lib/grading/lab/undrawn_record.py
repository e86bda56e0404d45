"""``undrawn.json`` of a lab: what its checks never vary, and why this is right.

``dlo release`` writes it (``judge.undrawn_values``) beside the solutions of the lab; students never get it.
Each entry of ``arguments`` and ``constants`` needs a reason: ``because`` maps a pattern, such as ``*.dtype``,
to a sentence. Reasons are kept when the lists are written again. ``of`` identifies the checks and solutions
from which the lists were made.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import io
import json
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.grading.lab.declared import CHECKS_FOLDER, HIDDEN
from dlo_lib.grading.lab.source import CellKind, LabSource

FILE = "undrawn.json"


@dataclass(frozen=True)
class UndrawnRecord:
    """What the checks of a lab never vary.

    Attributes:
        of: :func:`key_of` the lab.
        arguments: ``question: function(argument)`` → its only value.
        constants: ``question`` → function → the constant that earns most, and ``points``.
        varied: ``question: function(argument)`` → one value of an argument that does vary.
        because: pattern → why these entries are right.
    """

    of: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Mapping[str, str | float]] = field(default_factory=dict)
    varied: Mapping[str, str] = field(default_factory=dict)
    because: Mapping[str, str] = field(default_factory=dict)

    def without_reason(self) -> list[str]:
        """Return the entries for which there is no reason, one line each."""
        entries = {f"{name} is always {value}": name for name, value in self.arguments.items()}
        entries |= {f"{name}: a constant earns {own['points']}": name for name, own in self.constants.items()}
        return [
            line
            for line, name in entries.items()
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.because)
        ]

    def unused_reasons(self) -> list[str]:
        """Return the patterns that fit no entry."""
        names = (*self.arguments, *self.constants)
        return [pattern for pattern in self.because if not fnmatch.filter(names, pattern)]


def read_undrawn(folder: Path) -> UndrawnRecord | None:
    """Return the record in ``folder``, which is ``solutions/NN_name``; None if there is none.

    Raises:
        UserError: it cannot be read.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        return UndrawnRecord(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read ({error}): remove it, `dlo release` writes it again"
        ) from error


def write_undrawn(folder: Path, record: UndrawnRecord) -> None:
    """Write ``record`` into ``folder``."""
    write_text(folder / FILE, json.dumps(vars(record), indent=1, ensure_ascii=False) + "\n")


def key_of(lab: LabSource) -> str:
    """Return what identifies the checks and the solutions of ``lab``, without comments and documentation."""
    files = [*sorted((lab.given / CHECKS_FOLDER).glob("*.py")), lab.folder / f"{HIDDEN}.py"]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    texts += [cell.answer for cell in lab.cells if cell.kind is CellKind.SOLUTION]
    return hashlib.sha256("\n".join(map(_code, texts)).encode()).hexdigest()[:16]


def _code(text: str) -> str:
    """Return ``text`` without comments, documentation and white space: the same on each release of Python, as
    ``ast.unparse`` is not."""
    lines = text.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            written = node.body[0]
            for row in range(written.lineno, (written.end_lineno or written.lineno) + 1):
                lines[row - 1] = ""
    return "".join("".join(lines).split())
