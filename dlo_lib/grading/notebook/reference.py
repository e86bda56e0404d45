"""The reference of a question, which a stuck student loads for the later steps (see ``lab.references``)."""

from __future__ import annotations

import ast
import base64
import binascii
import json
import linecache
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.lab.course import REFERENCES_FILE, read_lab_info
from dlo_lib.grading.lab.names import defined_names


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
    file = folder / REFERENCES_FILE
    try:
        encoded = json.loads(file.read_text(encoding="utf-8"))
        return {
            question: base64.b64decode(text, validate=True).decode() for question, text in encoded.items()
        }
    except FileNotFoundError:
        raise UserError(
            tr(
                "no {name} in {folder}: this course is released without references",
                name=REFERENCES_FILE,
                folder=folder,
            )
        ) from None
    except (ValueError, AttributeError, TypeError, binascii.Error):
        raise UserError(tr("{file} is damaged: `dlo lab` restores it", file=file)) from None
