"""Compare the fingerprints of submissions cell by cell, with each other and with sources.

- the *score* of two cells is the weight that they share, divided by the weight of the lighter one. It is 1
  for two equal cells, and also if the whole of one is inside the other. A cell whose fingerprints all weigh
  0 has no score: it tells nothing.
- the *evidence* of two submissions is the sum over their cells of the shared weight times the square of the
  score, where a weight of 1 is K tokens in a row. It counts up to half as much again if a second cell is
  equal too, because two coincidences are rarer than one of the same size. A pair of a class of 100 is listed
  from 5.5: at least about 100 equal tokens that no other student has, in cells that are equal as a whole, or
  more in cells that differ in part. A small class shows less of what the exercise explains: two students may
  be the only ones with an answer that others would give too. Of 8 to 60 students, a pair is listed from 8.9.

The square separates a copied answer from resemblance: students who solve the same exercise alone share a
little in many cells.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dlo_lib.grading.classroom.similar.fingerprints import size

LEAST_EVIDENCE = {4: 5.5, 8: 8.9, 60: 8.9, 100: 5.5}  # students of a class → evidence of a listed pair
LEAST_OF_SOURCE = 3.0  # evidence that a cell comes from the library or from a reference
SECOND = 0.5  # what an equal second cell with as much evidence as the first adds
LEAST_SCORE = 0.3  # of the cells that are shown
WHOLE = 0.8  # the score from which a cell is a source's, although many students have it
MOST_SHARED = (10, 0.2)  # a fingerprint that this number or part of the class has weighs 0
COMMON = (
    6,
    0.2,
)  # against the library: shared by more students than this number and part, it is the exercise

Document = Mapping[str, frozenset[int]]  # a part's name (a cell, a file) → its fingerprints


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


def least_evidence(students: int) -> float:
    """Return the evidence from which a pair of a class of ``students`` is listed."""
    sizes = sorted(LEAST_EVIDENCE)
    students = min(max(students, sizes[0]), sizes[-1])
    above = next(size for size in sizes if size >= students)
    below = max(size for size in sizes if size <= students)
    part = (students - below) / (above - below) if above > below else 0.0
    return LEAST_EVIDENCE[below] + part * (LEAST_EVIDENCE[above] - LEAST_EVIDENCE[below])


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
    found, least = [], least_evidence(len(class_))
    for (one, other), bound in shared.items():
        if bound * (1 + SECOND) < least:
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
        if (match := _match(one, other, cells, of_class=True)).evidence >= least:
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


def _all(document: Document) -> frozenset[int]:
    return frozenset().union(*document.values())


def _all_of(documents: Mapping[str, Document]) -> frozenset[int]:
    return frozenset().union(*(_all(document) for document in documents.values()))
