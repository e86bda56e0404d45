"""Answers that avoid the work earn what their right values earn and no more: right results from another
source, messages with other numbers, tables for the sizes that a check uses, memory that is freed only while
it is measured. Odd but right answers earn all.

``python -m tests.grading.answers`` prints the table of their points.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.grading.answers import Answer, OpenLabs, answers

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


@pytest.mark.slow
@pytest.mark.parametrize("answer", [*TRICKS, *ODD], ids=lambda answer: answer.name)
def test_an_answer_earns_what_it_does(labs: OpenLabs, answer: Answer) -> None:
    report = labs.judged(answer)
    said = {check.name: check.message for check in report.checks}
    assert report.points == answer.must_earn(labs.lab(answer.lab)), said
