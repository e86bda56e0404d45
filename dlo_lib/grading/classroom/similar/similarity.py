"""List submissions that share more code than the exercise explains, for a person to compare.

Each answer and each added cell is fingerprinted (``fingerprints``). What every
student has does not count: the code, the text and the hints of the released notebook. What many students
share counts less, because it belongs to the exercise: a fingerprint weighs 1 if only the two have it, and 0
if a fifth of the class has it. ``matching`` compares submissions cell by cell.

The library, the lab's released files and its references are also compared, because a student could have
pasted them; a run of tokens that they contain does not count between students. What many students share with
them belongs to the exercise, unless a cell is ``WHOLE`` of such a source: then it is listed, however many
pasted it. Files with code beside the notebook are compared as cells are, and code in strings too; what cannot
be read is listed with its reason (``hidden_code``). No points depend on the
result. Cost: linear in the fingerprints; the pairs whose shared weight is small are not compared.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI

import dlo_lib
from dlo_lib.base.files import write_text
from dlo_lib.grading.classroom.gradebook.export import grades_folder
from dlo_lib.grading.classroom.gradebook.nbgrader_steps import require_release, submitted_students
from dlo_lib.grading.classroom.roster.tables import csv_text
from dlo_lib.grading.classroom.similar.fingerprints import fingerprints, marks
from dlo_lib.grading.classroom.similar.hidden_code import code_files, reasons
from dlo_lib.grading.classroom.similar.matching import Document, Match, compare
from dlo_lib.grading.judge.cells import Origin, rebuild_submission
from dlo_lib.grading.judge.intake import Invalid, read_submission
from dlo_lib.grading.lab.course import REFERENCES_FILE, LabInfo
from dlo_lib.grading.lab.names import defined_names
from dlo_lib.grading.lab.release import released_files
from dlo_lib.grading.lab.source import CellKind, LabSource, read_lab, source_folder

MAX_LINES, MAX_WIDTH = 120, 160  # of a fragment
SIMILAR, FRAGMENTS = "similar.csv", "similar.txt"


@dataclass(frozen=True)
class Given:
    """What every student of a lab has: the names that the notebook defines, and its fingerprints."""

    names: frozenset[str]
    known: frozenset[int]


def find_similar(course: NbGraderAPI, lab: LabInfo) -> list[Match]:
    """Return the matches of a lab, those with most evidence first.

    ``grades/<lab>/similar.csv`` lists them, ``similar.txt`` shows their cells one below the other.

    Raises:
        UserError: the lab was not released in this course.
    """
    require_release(course, lab)
    source = read_lab(source_folder(lab))
    given = given_code(source)
    texts: dict[str, dict[str, str]] = {}
    unread: list[Match] = []
    released = released_files(lab)
    given_files = frozenset().union(*map(fingerprints, _python(released).values()))
    class_: dict[str, Document] = {}
    for student in submitted_students(course, lab):
        place = Path(
            course.coursedir.format_path(course.coursedir.submitted_directory, student, lab.directory)
        )
        cells = submitted_cells(source, place / lab.notebook)
        files, closed = code_files(place, released)
        texts[student] = cells | files
        of_files = Given(given.names, given.known | given_files)
        class_[student] = {**document(cells, given), **document(files, of_files)}
        found = {name: "; ".join(reasons(text)) for name, text in texts[student].items()} | closed
        unread += [Match(student, name, 0.0, (), reason) for name, reason in found.items() if reason]
    sources = source_texts(source)
    matches = compare(class_, {name: document(parts, given) for name, parts in sources.items()})
    header = ["one", "other", "evidence", "cell_of_one", "cell_of_other", "score"]
    rows = [
        [match.one, match.other, f"{match.evidence:.1f}", cell.of_one, cell.of_other, f"{cell.score:.2f}"]
        for match in matches
        for cell in match.cells
    ]
    rows += [[match.one, match.reason, "", match.other, "", ""] for match in unread]
    folder = grades_folder(course, lab)
    write_text(folder / SIMILAR, csv_text(header, rows))
    write_text(folder / FRAGMENTS, fragments(matches, texts, sources, given))
    return [*matches, *unread]


def given_code(lab: LabSource) -> Given:
    """Return what every student of ``lab`` has: names and fingerprints of cells, text and hints."""
    names: set[str] = set()
    for cell in lab.cells:
        if cell.kind is not CellKind.TEXT:
            names |= _top_level_names(cell.released)
    own = frozenset(names)
    texts = [(cell.id, cell.released) for cell in lab.cells]
    texts += [(question, hint) for question, hints in lab.info.hints.items() for hint in hints]
    return Given(own, frozenset().union(*(fingerprints(text, own, cell) for cell, text in texts)))


def submitted_cells(lab: LabSource, notebook: Path) -> dict[str, str]:
    """Return the text of each cell that the student wrote; empty if the notebook is unreadable."""
    try:
        cells = rebuild_submission(read_submission(notebook, lab.info.directory)[1], lab).cells
    except Invalid:
        return {}
    return {cell.id: cell.source for cell in cells if cell.origin is not Origin.GIVEN}


def document(parts: Mapping[str, str], given: Given) -> dict[str, frozenset[int]]:
    """Return the fingerprints of each part, without those of the released notebook."""
    found = {name: fingerprints(text, given.names, name, given.known) for name, text in parts.items()}
    return {name: values for name, values in found.items() if values}


def source_texts(lab: LabSource) -> dict[str, dict[str, str]]:
    """Return the texts of the library, of the lab's released files, and of the course's answers, by part.

    Students have these answers in the released references.
    """
    root = Path(dlo_lib.__file__).parent
    texts = {
        f"dlo_lib/{path.relative_to(root).as_posix()}": path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*.py"))
    }
    texts |= {
        f"{lab.info.directory}/{name}": text for name, text in _python(released_files(lab.info)).items()
    }
    answers = {cell.id: cell.answer for cell in lab.cells if cell.kind is CellKind.SOLUTION}
    by_file = {name: {name: text} for name, text in texts.items()}
    return by_file | {f"{lab.info.directory}/{REFERENCES_FILE}": answers}


def _python(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: content.decode() for name, content in files.items() if name.endswith(".py")}


def fragments(
    matches: Iterable[Match],
    texts: Mapping[str, Mapping[str, str]],
    sources: Mapping[str, Mapping[str, str]],
    given: Given,
) -> str:
    """Return the cells of each match one below the other; ``>`` marks the lines of a shared passage.

    Characters that a terminal could take for a command are replaced.
    """
    lines = ["A > marks the lines that both have. Names, comments, layout and the order do not count."]
    every = {**texts, **sources}
    for match in matches:
        lines += ["", f"{'=' * 20} {match.one} - {match.other}: evidence {match.evidence:.1f}"]
        for cell in match.cells:
            one, other = texts[match.one][cell.of_one], every[match.other][cell.of_other]
            shared = document({cell.of_one: one}, given)[cell.of_one]
            shared &= document({cell.of_other: other}, given)[cell.of_other]
            lines += ["", f"{'-' * 20} score {cell.score:.2f}"]
            for name, part, text in ((match.one, cell.of_one, one), (match.other, cell.of_other, other)):
                lines += [f"[{name}: {part}]", *_marked(text, part, shared, given)]
    return "".join(f"{_printable(line)}\n" for line in lines)


def _marked(text: str, part: str, shared: frozenset[int], given: Given) -> list[str]:
    """Return the lines of ``text`` with a mark before the shared ones; far from them, lines are left out."""
    hit = {
        line
        for mark in marks(text, given.names, part)
        if mark.value in shared
        for line in range(mark.first, mark.last + 1)
    }
    lines = text.splitlines()
    near = [
        n
        for n in range(1, len(lines) + 1)
        if len(lines) <= MAX_LINES or {n - 2, n - 1, n, n + 1, n + 2} & hit
    ]
    return [f"{'>' if n in hit else ' '} {lines[n - 1]}"[:MAX_WIDTH] for n in near[:MAX_LINES]]


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


def _top_level_names(text: str) -> set[str]:
    """Return the names that a released cell defines or imports."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a magic of IPython
        return set()
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    return imported | set(defined_names(tree))
