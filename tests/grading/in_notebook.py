"""The points of an answer in a notebook, without a kernel: its cells run here, and the notebook's ``student``
answers the checks. The judge must give the same points.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from IPython.core.inputtransformer2 import TransformerManager

import dlo_lib.grading
import dlo_lib.launch
from dlo_lib.grading.checks.outcome import Outcome, run_check, seed_for
from dlo_lib.grading.judge.judge import reference_submission
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.notebook.local_student import LocalStudent

SECRET = "mutants"  # as the judge's, so that both draw the same inputs
PATIENCE = 5  # times the seconds of a check: a machine that runs tests is loaded


class _Silent:
    """Replaces ``Lab`` and the shell: a cell can call its methods, which do nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _refuse(*_: object, **__: object) -> NoReturn:
    raise PermissionError("a demonstration on ranks is not part of an answer")


@contextlib.contextmanager
def _as_in_a_notebook(lab: LabSource) -> Iterator[None]:
    folder, path = os.getcwd(), list(sys.path)
    replaced = [(dlo_lib.grading, "Lab", _Silent), (dlo_lib.launch, "run_ranks", _refuse)]
    before = [getattr(module, name) for module, name, _ in replaced]
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        os.chdir(lab.folder)
        sys.path.insert(0, str(lab.folder))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.chdir(folder)
        sys.path[:] = path
        for (module, name, _), value in zip(replaced, before):
            setattr(module, name, value)


def names_of(lab: LabSource, question: str, answer: str) -> dict[str, Any]:
    """Return the names of a notebook with the reference solution, and ``answer`` to one question.

    A cell that fails does not stop the next ones, as in a notebook; what it defines is absent then.
    """
    names: dict[str, Any] = {"__name__": "__main__", "get_ipython": _Silent}
    with _as_in_a_notebook(lab):
        for cell in reference_submission(lab, {question: answer}).cells:
            file = f"<cell {cell.id}>"
            source = TransformerManager().transform_cell(cell.source)
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            with contextlib.suppress(Exception):
                exec(compile(source, file, "exec"), names)
    return names


def outcomes_in_notebook(lab: LabSource, question: str, answer: str) -> list[Outcome]:
    """Return the outcome of each check of ``question``, the hidden ones too."""
    names = names_of(lab, question, answer)
    return [
        run_check(
            check,
            LocalStudent(names, PATIENCE * check.seconds),
            seed_for(SECRET, lab.info.directory, check),
        )
        for check in load_checks(lab.given, lab.folder).of(question)
    ]
