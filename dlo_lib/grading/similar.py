"""Submissions that share more than chance and the exercise explain, listed for a person to look at. Nothing is judged by it.

Each answer and each cell of a student's own is fingerprinted (:mod:`dlo_lib.grading.fingerprints`), without what the released notebook
already says. What many of a class share is the exercise, not a copy, and does not count. The library and the lab's released files are among
the sources, as far as a student could have pasted them. Cost: linear in the fingerprints; no pair that shares none is looked at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI

import dlo_lib
from dlo_lib.files import write_text
from dlo_lib.grading.batch import released, submitted_students
from dlo_lib.grading.cells import Origin, take
from dlo_lib.grading.course import LabInfo
from dlo_lib.grading.export import grades_folder
from dlo_lib.grading.fingerprints import fingerprints, hashes
from dlo_lib.grading.intake import Invalid, find_submission, read_notebook
from dlo_lib.grading.release import released_files
from dlo_lib.grading.source import CellKind, LabSource, read_lab, source_folder
from dlo_lib.grading.tables import csv_text

LEAST_SHARED = 10  # fingerprints: about 60 tokens in a row, or several shorter passages
LEAST_SHARE = 0.4  # of the shorter of two submissions
LEAST_OF_SOURCE = 8  # fingerprints shared with a file of the library, however long the submission
MANY = (6, 0.2)  # what more submissions than this number and this part of the class share is the exercise
SIMILAR = "similar.csv"

Document = Mapping[str, frozenset[int]]  # a part's name (a cell, a file) → its fingerprints


@dataclass(frozen=True)
class Match:
    """Two texts to be laid side by side: ``shared`` fingerprints, their part of each, and the cells they are in."""

    one: str
    other: str
    shared: int
    share_of_one: float
    share_of_other: float
    cells_of_one: tuple[str, ...]
    cells_of_other: tuple[str, ...]


def similar(course: NbGraderAPI, lab: LabInfo) -> list[Match]:
    """The matches of a lab, the most shared first; also in ``grades/<lab>/similar.csv``.

    Raises:
        UserError: the lab was never released in this course.
    """
    released(course, lab)
    source = read_lab(source_folder(lab))
    class_ = {}
    for student in submitted_students(course, lab):
        place = Path(course.coursedir.format_path(course.coursedir.submitted_directory, student, lab.directory)) / lab.notebook
        class_[student] = submission_document(source, place)
    matches = compare(class_, source_documents(source))
    header = ["one", "other", "shared", "share_of_one", "share_of_other", "cells_of_one", "cells_of_other"]
    rows = [
        [match.one, match.other, str(match.shared), f"{match.share_of_one:.2f}", f"{match.share_of_other:.2f}",
         " ".join(match.cells_of_one), " ".join(match.cells_of_other)]
        for match in matches
    ]  # fmt: skip
    write_text(grades_folder(course, lab) / SIMILAR, csv_text(header, rows))
    return matches


def compare(class_: Mapping[str, Document], sources: Mapping[str, Document]) -> list[Match]:
    """The pairs of a class, and of the class with ``sources``, that share enough to be looked at."""
    owners: dict[int, list[str]] = defaultdict(list)
    for student in sorted(class_):
        for mark in _all(class_[student]):
            owners[mark].append(student)
    most = max(MANY[0], MANY[1] * len(class_))
    telling = {mark: students for mark, students in owners.items() if len(students) <= most}
    in_sources: dict[int, list[str]] = defaultdict(list)
    for name in sorted(sources):
        for mark in _all(sources[name]):
            if mark in telling:
                in_sources[mark].append(name)
    pairs: Counter[tuple[str, str]] = Counter()
    for mark, students in telling.items():
        for place, one in enumerate(students):
            pairs.update((one, other) for other in students[place + 1 :])
            pairs.update((one, name) for name in in_sources.get(mark, ()))
    documents = {**sources, **class_}
    found = []
    for (one, other), shared in pairs.items():
        least = LEAST_OF_SOURCE if other in sources else LEAST_SHARED
        if shared < least:
            continue
        match = _match(one, documents[one], other, documents[other], telling.keys())
        if other in sources or max(match.share_of_one, match.share_of_other) >= LEAST_SHARE:
            found.append(match)
    return sorted(found, key=lambda match: (-match.shared, match.one, match.other))


def submission_document(lab: LabSource, notebook: Path) -> Document:
    """The fingerprints of a submission by cell; empty when it cannot be read."""
    try:
        cells = take(read_notebook(find_submission(notebook, lab.info.directory)[0]), lab).cells
    except Invalid:
        return {}
    given = released_hashes(lab)
    parts = {cell.id: frozenset(fingerprints(cell.source, given)) for cell in cells if cell.origin is not Origin.GIVEN}
    return {name: marks for name, marks in parts.items() if marks}


def released_hashes(lab: LabSource) -> frozenset[int]:
    """The hashes of everything that the notebook holds when students get it."""
    return frozenset(value for cell in lab.cells if cell.kind is not CellKind.TEXT for value in hashes(cell.released))


def source_documents(lab: LabSource) -> dict[str, Document]:
    """The library, and the Python files that the lab releases, by file."""
    root = Path(dlo_lib.__file__).parent
    given = released_hashes(lab)
    texts = {f"dlo_lib/{path.relative_to(root).as_posix()}": path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
    texts |= {
        f"{lab.info.directory}/{name}": content.decode() for name, content in released_files(lab.info).items() if name.endswith(".py")
    }
    return {name: {name: frozenset(fingerprints(text, given))} for name, text in texts.items()}


def _match(one: str, of_one: Document, other: str, of_other: Document, telling: Iterable[int]) -> Match:
    shared = _all(of_one) & _all(of_other) & set(telling)
    shares = [len(shared) / max(1, len(_all(document))) for document in (of_one, of_other)]
    cells = [tuple(name for name, marks in document.items() if marks & shared) for document in (of_one, of_other)]
    return Match(one, other, len(shared), shares[0], shares[1], cells[0], cells[1])


def _all(document: Document) -> set[int]:
    return set().union(*document.values())
