"""Every lab below solutions/, found by itself: the reference earns everything, the untouched notebook
nothing, a mutant loses what it says.

A new lab needs no new test. A mutant that no longer loses its points shows that a check has become too weak.
These are the rules of `dlo release`, which also judges each mutant by the other checks of its question: they
must pass, so that one mistake gets one message. Here only `make proofs` (``--every-check``) does so, because
it costs three times as much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

from dlo_lib.grading.judge.judge import zygote_for
from dlo_lib.grading.judge.lab_proof import (
    SECRET,
    STATIC_RULES,
    Rule,
    idle_faults,
    mutant_faults,
    reference_faults,
    untouched_faults,
)
from dlo_lib.grading.lab.course import LabInfo, find_lab, source_folder, source_labs
from dlo_lib.grading.lab.mutants import Mutant, read_mutants
from dlo_lib.grading.lab.source import LabSource, read_lab
from dlo_lib.grading.sandbox.host import Zygote
from tests.grading.answers import Kind
from tests.grading.answers.generated import one_a_question
from tests.grading.answers.judging import judged, judged_together, lost

ZYGOTES = 2
LABS = source_labs()
MUTANTS = [(lab, mutant) for lab in LABS for mutant in read_mutants(source_folder(lab))]

every_lab = pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.directory)


@functools.cache
def _source(directory: str) -> LabSource:
    return read_lab(source_folder(find_lab(directory, LABS)))


def source_of(lab: LabInfo) -> LabSource:
    """The source of a lab, read when a test first needs it, because every test process collects this file."""
    return _source(lab.directory)


@pytest.fixture(scope="module")
def zygote_of() -> Iterator[Callable[[LabInfo], Zygote]]:
    """One zygote a lab, shared by its tests. The last two are kept, because each has up to 390 MB of memory,
    and pytest-xdist runs the tests of a lab one after another.
    """
    started: dict[str, Zygote] = {}

    def get(lab: LabInfo) -> Zygote:
        if lab.directory not in started:
            if len(started) == ZYGOTES:
                started.pop(next(iter(started))).close()
            started[lab.directory] = zygote_for(source_of(lab))
        return started[lab.directory]

    yield get
    for zygote in started.values():
        zygote.close()


@pytest.mark.slow
@every_lab
def test_the_reference_scores_full_marks(lab: LabInfo, zygote_of: Callable[[LabInfo], Zygote]) -> None:
    assert reference_faults(source_of(lab), zygote_of(lab)) == []


@every_lab
def test_the_untouched_notebook_scores_nothing(lab: LabInfo, zygote_of: Callable[[LabInfo], Zygote]) -> None:
    assert untouched_faults(source_of(lab), zygote_of(lab)) == []


@pytest.mark.slow
@every_lab
def test_what_does_nothing_earns_nothing(lab: LabInfo, zygote_of: Callable[[LabInfo], Zygote]) -> None:
    assert idle_faults(source_of(lab), zygote_of(lab)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lab", "mutant"), MUTANTS, ids=[f"{lab.directory}-{mutant.name}" for lab, mutant in MUTANTS]
)
def test_each_mutant_loses_its_points(
    lab: LabInfo, mutant: Mutant, zygote_of: Callable[[LabInfo], Zygote], pytestconfig: pytest.Config
) -> None:
    every_check = pytestconfig.getoption("--every-check")
    assert mutant_faults(source_of(lab), mutant, zygote_of(lab), every_check=every_check) == []


@pytest.mark.slow
@every_lab
def test_one_hostile_answer_to_each_question_earns_what_it_must(
    lab: LabInfo, zygote_of: Callable[[LabInfo], Zygote]
) -> None:
    """``make proofs`` judges the others: tests/grading/answers."""
    source, found = source_of(lab), []
    for answer in one_a_question(source, Kind.HOSTILE):
        report = judged(answer, source, zygote_of(lab), SECRET)
        if not answer.as_expected(report.points, source):
            found.append(f"{answer.name} earns {report.points:g}: {lost(report)}")
    assert found == []


@pytest.mark.slow
@every_lab
def test_one_odd_answer_to_each_question_earns_all(
    lab: LabInfo, zygote_of: Callable[[LabInfo], Zygote]
) -> None:
    """They are one submission, which costs as much as the solution."""
    source = source_of(lab)
    answers = one_a_question(source, Kind.ODD)
    reports = judged_together(answers, source, zygote_of(lab), SECRET)
    assert [
        f"{answer.name} earns {reports[answer.question].points:g}: {lost(reports[answer.question])}"
        for answer in answers
        if not answer.as_expected(reports[answer.question].points, source)
    ] == []


@every_lab
@pytest.mark.parametrize("rule", STATIC_RULES.values(), ids=lambda rule: rule.__name__)
def test_every_rule_holds_on_paper(lab: LabInfo, rule: Rule) -> None:
    assert rule(source_of(lab)) == []
