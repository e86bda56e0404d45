"""List submissions that share more code than the exercise explains, for a person to compare.

Each answer and each added cell is fingerprinted (:mod:`dlo_lib.grading.classroom.fingerprints`). What every
student has does not count: the code, the text and the hints of the released notebook. What many students
share counts less, because it belongs to the exercise: a fingerprint weighs 1 if only the two have it, and 0
if a fifth of the class has it. Two submissions are compared cell by cell:

- the *score* of two cells is the weight that they share, divided by the weight of the lighter one. It is 1
  for two equal cells, and also if the whole of one is inside the other. A cell whose fingerprints all weigh
  0 has no score: it tells nothing.
- the *evidence* of two submissions is the sum over their cells of the shared weight times the square of the
  score, where a weight of 1 is K tokens in a row. It counts up to half as much again if a second cell is
  equal too, because two coincidences are rarer than one of the same size. A pair is listed from
  ``LEAST_EVIDENCE``: at least about 55 equal tokens that no other student has, in cells that are equal as a
  whole, or more in cells that differ in part.

The square separates a copied answer from resemblance: students who solve the same exercise alone share a
little in many cells.

The library, the lab's released files and its references are also compared, because a student could have
pasted them; a run of tokens that they contain does not count between students. What many students share with
them belongs to the exercise, unless a cell is ``WHOLE`` of such a source: then it is listed, however many
pasted it. Files with code beside the notebook are compared as cells are, and code in strings too; what cannot
be read is listed with its reason (:mod:`~dlo_lib.grading.classroom.hidden_code`). No points depend on the
result. Cost: linear in the fingerprints; the pairs whose shared weight is small are not compared.
"""

from __future__ import annotations

import ast
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI

import dlo_lib
from dlo_lib.files import write_text
from dlo_lib.grading.classroom.batch import require_release, submitted_students
from dlo_lib.grading.classroom.export import grades_folder
from dlo_lib.grading.classroom.fingerprints import fingerprints, marks, size
from dlo_lib.grading.classroom.hidden_code import code_files, reasons
from dlo_lib.grading.classroom.tables import csv_text
from dlo_lib.grading.judge.cells import Origin, rebuild_submission
from dlo_lib.grading.judge.intake import Invalid, read_submission
from dlo_lib.grading.lab.course import REFERENCES_FILE, LabInfo
from dlo_lib.grading.lab.names import defined_names
from dlo_lib.grading.lab.release import released_files
from dlo_lib.grading.lab.source import CellKind, LabSource, read_lab, source_folder

LEAST_EVIDENCE = 5.5  # of a pair of students
LEAST_OF_SOURCE = 3.0  # evidence that a cell comes from the library or from a reference
SECOND = 0.5  # what an equal second cell with as much evidence as the first adds
LEAST_SCORE = 0.3  # of the cells that are shown
WHOLE = 0.8  # the score from which a cell is a source's, although many students have it
MOST_SHARED = (10, 0.2)  # a fingerprint that this number or part of the class has weighs 0
COMMON = (
    6,
    0.2,
)  # against the library: shared by more students than this number and part, it is the exercise
MAX_LINES, MAX_WIDTH = 120, 160  # of a fragment
SIMILAR, FRAGMENTS = "similar.csv", "similar.txt"

Document = Mapping[str, frozenset[int]]  # a part's name (a cell, a file) → its fingerprints


@dataclass(frozen=True)
class Given:
    """What every student of a lab has: the names that the notebook defines, and its fingerprints."""

    names: frozenset[str]
    known: frozenset[int]


@dataclass(frozen=True)
class CellMatch:
    """Two similar cells: the score is the share in [0, 1] of the telling code of the lighter one."""

    of_one: str
    of_other: str
    score: float
    evidence: float


@dataclass(frozen=True)
class Match:
    """Two texts to compare, with the cells in which they are similar, those with most evidence first."""

    one: str
    other: str
    evidence: float
    cells: tuple[CellMatch, ...]
    reason: str = ""
    """Why a cell or a file of ``one`` cannot be compared; ``other`` is then its name."""


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


def compare(class_: Mapping[str, Document], sources: Mapping[str, Document]) -> list[Match]:
    """Return the pairs of a class, and of the class with ``sources``, that share enough."""
    counts = Counter(value for student in class_ for value in _all(class_[student]))
    pasted = counts.keys() & _all_of(sources)
    weights = {
        value: size(value) * _weight(number, len(class_))
        for value, number in counts.items()
        if value not in pasted
    }
    found = _pairs(class_, weights)
    common = max(COMMON[0], COMMON[1] * len(class_))
    exercise = frozenset(value for value in pasted if counts[value] > common)
    found += _from_sources(class_, sources, exercise)
    return sorted(found, key=lambda match: (-match.evidence, match.one, match.other))


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


def _pairs(class_: Mapping[str, Document], weights: Mapping[int, float]) -> list[Match]:
    owners: dict[int, list[str]] = defaultdict(list)
    for student in sorted(class_):
        for value in _all(class_[student]):
            if weights.get(value, 0.0):
                owners[value].append(student)
    shared: Counter[tuple[str, str]] = Counter()  # an upper bound of the evidence
    for value, students in owners.items():
        weight = weights[value]
        for place, one in enumerate(students):
            for other in students[place + 1 :]:
                shared[one, other] += weight  # type: ignore[assignment]
    telling = {
        student: {
            cell: frozenset(v for v in values if v in owners) for cell, values in class_[student].items()
        }
        for student in class_
    }
    weigh = _weigher(weights)
    totals = {
        student: {cell: _totals(values, weights) for cell, values in parts.items()}
        for student, parts in class_.items()
    }
    found = []
    for (one, other), bound in shared.items():
        if bound * (1 + SECOND) < LEAST_EVIDENCE:
            continue
        cells = []
        for name, values in telling[one].items():
            in_common = ((weigh(values & theirs), part) for part, theirs in telling[other].items())
            weight, part = max(in_common, default=(0.0, ""))
            if weight:
                # Statements have the name of their cell: of two different cells, only runs can be equal.
                which = 0 if part == name else 1
                score = weight / min(totals[one][name][which], totals[other][part][which])
                cells.append(CellMatch(name, part, score, weight * score**2))
        if (match := _match(one, other, cells, of_class=True)).evidence >= LEAST_EVIDENCE:
            found.append(match)
    return found


def _from_sources(
    class_: Mapping[str, Document], sources: Mapping[str, Document], exercise: frozenset[int]
) -> list[Match]:
    """Return the matches with ``sources``; what is in ``exercise`` counts only in a cell that is a source's
    as a whole.
    """
    weights = {value: size(value) for value in _all_of(sources)}
    places: dict[int, list[tuple[str, str]]] = defaultdict(list)
    wanted = _all_of(class_)
    for name in sorted(sources):
        for part, values in sources[name].items():
            for value in values & wanted:
                places[value].append((name, part))
    totals = {
        (name, part): _totals(sources[name][part], weights)
        for name, part in {p for v in places.values() for p in v}
    }
    found = []
    for student in sorted(class_):
        cells: dict[str, list[CellMatch]] = defaultdict(list)
        for cell, values in class_[student].items():
            by_place: dict[tuple[str, str], set[int]] = defaultdict(set)
            for value in values:
                for place in places.get(value, ()):
                    by_place[place].add(value)
            own = {value: size(value) for value in values}
            rare = {value: weight for value, weight in own.items() if value not in exercise}
            weigh, every, telling = _weigher(own), _totals(values, own), _totals(values, rare)
            for (name, part), both in by_place.items():
                which = 0 if part == cell else 1
                whole = weigh(both) / min(every[which], totals[name, part][which])
                # Short answers that the exercise forces are equal too.
                if whole < WHOLE or weigh(both) * whole**2 < LEAST_OF_SOURCE:
                    both -= exercise
                    whole = weigh(both) / telling[which] if both else 0.0
                if both:
                    cells[name].append(CellMatch(cell, part, whole, weigh(both) * whole**2))
        matches = [_match(student, name, _best_parts(every)) for name, every in cells.items()]
        found += [match for match in matches if match.evidence >= LEAST_OF_SOURCE]
    return found


def _best_parts(cells: Iterable[CellMatch]) -> list[CellMatch]:
    """Keep one part for each cell of the student: the one that it shares most with."""
    best: dict[str, CellMatch] = {}
    for cell in sorted(cells, key=lambda cell: (cell.evidence, cell.of_other)):
        best[cell.of_one] = cell
    return list(best.values())


def _match(one: str, other: str, cells: Iterable[CellMatch], of_class: bool = False) -> Match:
    every = sorted(cells, key=lambda cell: (-cell.evidence, cell.of_one))
    evidence = math.fsum(cell.evidence for cell in every)
    if of_class and len(every) > 1 and every[0].evidence:
        least = min(cell.score for cell in every[:2])
        evidence *= 1 + SECOND * least**2 * every[1].evidence / every[0].evidence
    shown = tuple(cell for cell in every if cell.score >= LEAST_SCORE)
    return Match(one, other, evidence, shown or tuple(every[:1]))


def _totals(values: Iterable[int], weights: Mapping[int, float]) -> tuple[float, float]:
    """Return the weight of all fingerprints of a cell, and that of its runs."""
    known = [value for value in values if value in weights]
    weigh = _weigher(weights)
    return weigh(known), weigh(value for value in known if value >= 0)


def _weight(number: int, students: int) -> float:
    """Return the weight of a fingerprint that ``number`` students have, two of them the pair."""
    most = max(MOST_SHARED[0], MOST_SHARED[1] * students)
    return max(0.0, 1 - math.log(max(1, number - 1)) / math.log(1 + most))


def _weigher(weights: Mapping[int, float]) -> Callable[[Iterable[int]], float]:
    return lambda values: math.fsum(weights[value] for value in values)


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


def _all(document: Document) -> frozenset[int]:
    return frozenset().union(*document.values())


def _all_of(documents: Mapping[str, Document]) -> frozenset[int]:
    return frozenset().union(*(_all(document) for document in documents.values()))
