"""Answers that avoid the work earn what their right values earn and no more: right results from another
source, messages with other numbers, tables for the sizes that a check uses, memory that is freed only while
it is measured. Odd but right answers earn all.

``python -m tests.grading.answers`` prints the table of their points.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlo_lib.grading.lab.source import read_lab
from tests.grading.answers import HERE, ROOT, Answer, OpenLabs, answers, submissions

TRICKS, ODD = answers("tricks"), answers("odd")


@pytest.fixture(scope="module")
def labs() -> Iterator[OpenLabs]:
    opened = OpenLabs()
    yield opened
    opened.close()


def test_the_class_has_thirty_tricks_and_fifteen_odd_answers_to_labs_10_and_15() -> None:
    for listed, least in ((TRICKS, 30), (ODD, 15)):
        assert len({answer.name for answer in listed if answer.lab[:2] in ("10", "15")}) >= least
        assert len({answer.name for answer in listed}) == len(listed)


def test_every_answer_of_a_submission_is_to_a_question_of_its_lab() -> None:
    """The command judges them, because they are too many for a test."""
    for kind, least in (("hostile", 35), ("odd", 15)):
        own = submissions(kind)
        labs = {lab: read_lab(ROOT / "solutions" / lab) for lab in {answer.lab for answer in own}}
        assert len({answer.name for answer in own}) >= least
        assert len({(answer.name, answer.question) for answer in own}) == len(own)
        for answer in own:
            assert answer.tries, answer.name
            assert answer.text, answer.name
            assert 0 <= answer.must_earn(labs[answer.lab]) <= labs[answer.lab].test(answer.question).points
        headers = "".join(file.read_text() for file in (HERE / "submissions" / kind).glob("*.py"))
        assert headers.count("# == ") == len({answer.name for answer in own})
        assert headers.count("# %% ") == len(own)


@pytest.mark.slow
@pytest.mark.parametrize("answer", [*TRICKS, *ODD], ids=lambda answer: answer.name)
def test_an_answer_earns_what_it_does(labs: OpenLabs, answer: Answer) -> None:
    report = labs.judged(answer)
    said = {check.name: check.message for check in report.checks}
    assert report.points == answer.must_earn(labs.lab(answer.lab)), said
