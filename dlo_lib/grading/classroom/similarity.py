"""List submissions that share more code than chance and the exercise explain, for a person to compare.

Each answer and each added cell is fingerprinted (:mod:`dlo_lib.grading.classroom.fingerprints`), without the
code of the released notebook. A passage that many students share belongs to the exercise and does not count.
The library and the lab's released files are also compared, because a student could have pasted them. No
points depend on the result. Cost: linear in the fingerprints; pairs without a common fingerprint cost
nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI

import dlo_lib
from dlo_lib.files import write_text
from dlo_lib.grading.classroom.batch import require_release, submitted_students
from dlo_lib.grading.classroom.export import grades_folder
from dlo_lib.grading.classroom.fingerprints import fingerprints, hashes
from dlo_lib.grading.classroom.tables import csv_text
from dlo_lib.grading.judge.cells import Origin, rebuild_submission
from dlo_lib.grading.judge.intake import Invalid, find_submission, read_notebook
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.references import FILE
from dlo_lib.grading.lab.release import released_files
from dlo_lib.grading.lab.source import CellKind, LabSource, read_lab, source_folder

LEAST_SHARED = 10  # fingerprints: about 60 tokens in a row, or several shorter passages
LEAST_SHARE = 0.4  # of the shorter of two submissions
LEAST_OF_SOURCE = 8  # fingerprints shared with a file of the library, however long the submission
MANY = (6, 0.2)  # shared by more submissions than this number and this part of the class: the exercise
SIMILAR = "similar.csv"

Document = Mapping[str, frozenset[int]]  # a part's name (a cell, a file) → its fingerprints


@dataclass(frozen=True)
class Match:
    """Two texts to compare: the number of shared fingerprints, their share of each text, and their cells."""

    one: str
    other: str
    shared: int
    share_of_one: float
    share_of_other: float
    cells_of_one: tuple[str, ...]
    cells_of_other: tuple[str, ...]


def find_similar(course: NbGraderAPI, lab: LabInfo) -> list[Match]:
    """Return the matches of a lab, those that share most first; write them to ``grades/<lab>/similar.csv``.

    Raises:
        UserError: the lab was not released in this course.
    """
    require_release(course, lab)
    source = read_lab(source_folder(lab))
    class_ = {}
    for student in submitted_students(course, lab):
        place = (
            Path(course.coursedir.format_path(course.coursedir.submitted_directory, student, lab.directory))
            / lab.notebook
        )
        class_[student] = submission_document(source, place)
    matches = compare(class_, source_documents(source))
    header = ["one", "other", "shared", "share_of_one", "share_of_other", "cells_of_one", "cells_of_other"]
    rows = [
        [match.one, match.other, str(match.shared), f"{match.share_of_one:.2f}",
         f"{match.share_of_other:.2f}",
         " ".join(match.cells_of_one), " ".join(match.cells_of_other)]
        for match in matches
    ]  # fmt: skip
    write_text(grades_folder(course, lab) / SIMILAR, csv_text(header, rows))
    return matches


def compare(class_: Mapping[str, Document], sources: Mapping[str, Document]) -> list[Match]:
    """Return the pairs of a class, and of the class with ``sources``, that share enough."""
    owners: dict[int, list[str]] = defaultdict(list)
    for student in sorted(class_):
        for mark in _all(class_[student]):
            owners[mark].append(student)
    most = max(MANY[0], MANY[1] * len(class_))
    distinctive = {mark: students for mark, students in owners.items() if len(students) <= most}
    in_sources: dict[int, list[str]] = defaultdict(list)
    for name in sorted(sources):
        for mark in _all(sources[name]):
            if mark in distinctive:
                in_sources[mark].append(name)
    pairs: Counter[tuple[str, str]] = Counter()
    for mark, students in distinctive.items():
        for place, one in enumerate(students):
            pairs.update((one, other) for other in students[place + 1 :])
            pairs.update((one, name) for name in in_sources.get(mark, ()))
    documents = {**sources, **class_}
    found = []
    for (one, other), shared in pairs.items():
        least = LEAST_OF_SOURCE if other in sources else LEAST_SHARED
        if shared < least:
            continue
        match = _match(one, documents[one], other, documents[other], distinctive.keys())
        if other in sources or max(match.share_of_one, match.share_of_other) >= LEAST_SHARE:
            found.append(match)
    return sorted(found, key=lambda match: (-match.shared, match.one, match.other))


def submission_document(lab: LabSource, notebook: Path) -> Document:
    """Return the fingerprints of a submission by cell; empty if it is unreadable."""
    try:
        cells = rebuild_submission(read_notebook(find_submission(notebook, lab.info.directory)[0]), lab).cells
    except Invalid:
        return {}
    given = released_hashes(lab)
    parts = {
        cell.id: frozenset(fingerprints(cell.source, given))
        for cell in cells
        if cell.origin is not Origin.GIVEN
    }
    return {name: marks for name, marks in parts.items() if marks}


def released_hashes(lab: LabSource) -> frozenset[int]:
    """Return the hashes of the released notebook."""
    return frozenset(
        value for cell in lab.cells if cell.kind is not CellKind.TEXT for value in hashes(cell.released)
    )


def source_documents(lab: LabSource) -> dict[str, Document]:
    """Return the fingerprints of the library, of the lab's released files, and of the course's answers.

    Students have these answers in the released references.
    """
    root = Path(dlo_lib.__file__).parent
    given = released_hashes(lab)
    texts = {
        f"dlo_lib/{path.relative_to(root).as_posix()}": path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*.py"))
    }
    texts |= {
        f"{lab.info.directory}/{name}": content.decode()
        for name, content in released_files(lab.info).items()
        if name.endswith(".py")
    }
    answers = {
        f"{lab.info.directory}/{FILE}": {
            cell.id: cell.answer for cell in lab.cells if cell.kind is CellKind.SOLUTION
        }
    }
    parts = {name: {name: text} for name, text in texts.items()} | answers
    return {
        name: {part: frozenset(fingerprints(text, given)) for part, text in document.items()}
        for name, document in parts.items()
    }


def _match(one: str, of_one: Document, other: str, of_other: Document, distinctive: Iterable[int]) -> Match:
    shared = _all(of_one) & _all(of_other) & set(distinctive)
    shares = [len(shared) / max(1, len(_all(document))) for document in (of_one, of_other)]
    cells = [
        tuple(name for name, marks in document.items() if marks & shared) for document in (of_one, of_other)
    ]
    return Match(one, other, len(shared), shares[0], shares[1], cells[0], cells[1])


def _all(document: Document) -> set[int]:
    return set().union(*document.values())
