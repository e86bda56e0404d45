"""The rows of the race's leaderboard that are no entries: the baseline, and references of the course.

The check that measures the entries trains them too, with the images and seeds that the class secret gives, so
that differences to an entry are those of the same seeds. Cost: 2 to 3 s of CPU time a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dlo_lib.base.errors import UserError
from dlo_lib.base.provenance import Provenance
from dlo_lib.base.text import tr
from dlo_lib.grading.checks.outcome import run_check, seed_for
from dlo_lib.grading.classroom.feedback.leaderboard import Entry
from dlo_lib.grading.lab.course import REFERENCES_FILE, LabInfo, course_root
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.grading.notebook.local_student import LocalStudent
from dlo_lib.grading.notebook.reference import use_reference
from dlo_lib.labkit import race

LAB = "the_race"
_PATIENCE = 10
"""Times the seconds of a check: the machine may be busy, and nothing is graded."""


def reference_rows(lab: LabInfo, secret: str, check: str) -> list[Entry]:
    """Return the baseline, the baseline's model with the course's rule, and the course's entry; nothing for
    another lab than the race. Without ``references.json`` there is only the baseline.

    Args:
        secret: of the class.
        check: the name of the check that measured the entries.

    Raises:
        UserError: the lab has no such check, or the check measured nothing.
    """
    if lab.name != LAB:
        return []
    folder = course_root() / "labs" / lab.directory
    checks = load_checks(folder)
    found = [each for each in (*checks.visible, *checks.hidden) if each.name == check]
    if not found:
        raise UserError(f"{lab.directory} has no check {check}: grade the lab again")
    rows = []
    for name, code in _codes(folder).items():
        student = LocalStudent(code, _PATIENCE * found[0].seconds)
        outcome = run_check(found[0], student, seed_for(secret, lab.directory, found[0]))
        measured = outcome.measured
        if "scores" not in measured:
            raise UserError(f"{check} measured nothing of {name}: {outcome.message}")
        scores = tuple(map(float, measured["scores"]))
        run = Provenance.read(measured.get("run"))
        rows.append(Entry(name, scores, measured.get("flops"), run, check))
    return rows


def _codes(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return what a notebook of each row defines, by the name of the row."""
    unknown = {"commit": "0" * 7}  # the check wants one; a row shows none
    baseline = {
        "ENTRY": {**race.BASELINE, **unknown},
        "augment": lambda images, seed: images,
        "loss": F.cross_entropy,
        "update": race.plain_update,
    }
    rows: dict[str, Mapping[str, Any]] = {tr("the baseline"): baseline}
    if not (folder / REFERENCES_FILE).is_file():
        return rows
    cells: dict[str, Any] = {"torch": torch, "math": math, "F": F, "race": race}
    solved = {**cells}
    for question in ("augment", "update", "race"):
        solved |= use_reference(folder, question, cells)
    rule = {"ENTRY": {**race.BASELINE, "rate": solved["ENTRY"]["rate"], **unknown}}
    rows[tr("the baseline's model, the course's rule")] = {**solved, **rule}
    rows[tr("the course's entry")] = {**solved, "ENTRY": {**solved["ENTRY"], **unknown}}
    return rows
