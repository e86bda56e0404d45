"""The answers that need no declaration: those of the generators, for each question of a lab."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dlo_lib.grading.checks.quiz_question import NAME as QUIZ
from dlo_lib.grading.lab.source import LabSource
from tests.grading.answers import LESS, Answer, Kind, declared, unusual
from tests.grading.answers.communication import collective_only, communicates
from tests.grading.answers.generators import GENERATORS, has_functions, instead_of

FORGERIES = ("forged_comparisons", "from_the_frames", "emptied_lists")


def all_answers(lab: LabSource, kind: Kind) -> list[Answer]:
    """Return the declared answers of ``lab`` and the generated ones; of two with the same generator and
    question the declared one."""
    own = declared(lab.info.directory, kind)
    known = {(answer.by, answer.question) for answer in own if answer.by}
    made = generated_hostile(lab) if kind is Kind.HOSTILE else generated_odd(lab)
    return [*own, *(answer for answer in made if (answer.by, answer.question) not in known)]


def generated_hostile(lab: LabSource) -> Iterator[Answer]:
    """Yield the attacks on each question whose answer is code."""
    library = instead_of(lab)
    for question in _of_code(lab):
        source = lab.solution(question).source
        for by in FORGERIES:
            yield _made(lab, Kind.HOSTILE, by, question)
        if lab.info.taught:
            yield _made(lab, Kind.HOSTILE, "taught_module", question)
        if communicates(source):
            yield _made(lab, Kind.HOSTILE, "alone", question, LESS)
            if collective_only(source):
                yield _made(lab, Kind.HOSTILE, "everything_gathered", question, LESS)
        if question in library:
            yield _made(lab, Kind.HOSTILE, "of_the_library", question)


def generated_odd(lab: LabSource) -> Iterator[Answer]:
    """Yield unusual forms of the solution of each question whose answer is code."""
    for by in unusual.GENERATORS:
        for question in _of_code(lab):
            yield _made(lab, Kind.ODD, by, question)


def one_a_question(lab: LabSource, kind: Kind) -> list[Answer]:
    """Return one answer to each question for ``make test``: of each generator in turn, and declared ones."""
    by_question: dict[str, list[Answer]] = {}
    for answer in all_answers(lab, kind):
        by_question.setdefault(answer.question, []).append(answer)
    chosen = []
    for place, own in enumerate(by_question.values()):
        made = [answer for answer in own if answer.by and answer.earns is None]
        some = made + [answer for answer in own if not answer.by][:1]
        chosen.append((some or own)[place % len(some or own)])
    return chosen


def _of_code(lab: LabSource) -> list[str]:
    return [name for name in lab.questions if name != QUIZ and has_functions(lab, name)]


def _made(
    lab: LabSource,
    kind: Kind,
    by: str,
    question: str,
    earns: float | str | None = None,
    values: Mapping[str, Any] | None = None,
) -> Answer:
    does = " ".join((GENERATORS[by].__doc__ or "").split("\n")[0].split())
    return Answer(lab.info.directory, kind, by, question, does, earns=earns, by=by, values=values or {})
