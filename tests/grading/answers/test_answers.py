"""The hostile and the odd answers to the labs: there are enough of them, and each fits its lab.

With ``make proofs`` (``--every-check``) each earns what it must. ``make test`` judges one of each kind to
each question in tests/labs/test_every_lab.py, where the processes of the labs run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from dlo_lib.grading.lab.course import LabInfo, source_folder, source_labs
from dlo_lib.grading.lab.source import LabSource, read_lab
from tests.grading.answers import HERE, ROOT, Answer, Kind, declared, labs_with_answers
from tests.grading.answers.generated import all_answers
from tests.grading.answers.generators import GENERATORS
from tests.grading.answers.judging import OpenLabs, judged, lost

LABS = source_labs()
LEAST = {Kind.HOSTILE: 8, Kind.ODD: 4}
every_lab = pytest.mark.parametrize("info", LABS, ids=lambda info: info.directory)
every_kind = pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)


def source(info: LabInfo) -> LabSource:
    """The source of a lab."""
    return read_lab(source_folder(info))


@every_lab
@every_kind
def test_each_lab_has_enough_answers_and_each_fits_its_lab(info: LabInfo, kind: Kind) -> None:
    lab = source(info)
    answers = all_answers(lab, kind)
    assert len(answers) >= LEAST[kind]
    assert len({answer.name for answer in answers}) == len(answers)
    for answer in answers:
        assert answer.question in lab.questions, answer.name
        assert answer.does, answer.name
        assert 0 <= answer.most(lab) <= lab.test(answer.question).points, answer.name
        text = answer.source(lab)
        assert text.strip(), answer.name
        ast.parse(text.replace("!", "", 1) if text.startswith("!") else text)


def test_every_header_of_every_file_is_read() -> None:
    assert set(labs_with_answers()) <= {info.directory for info in LABS}
    for name in labs_with_answers():
        for kind in Kind:
            text = "".join(file.read_text("utf-8") for file in (HERE / name).glob(f"{kind.value}_*.py"))
            assert text.count("\n# %% ") == len(declared(name, kind)), name
        others = [
            file for file in (HERE / name).glob("*.py") if not file.name.startswith(("hostile_", "odd_"))
        ]
        assert others == []


def test_a_patch_changes_the_solution_and_keeps_the_rest() -> None:
    lab = read_lab(ROOT / "solutions" / "21_expert_parallel")
    patch = "# - flat.argsort(stable=True)\n# + flat.argsort()"
    text = Answer("21_expert_parallel", Kind.HOSTILE, "unstable", "order", "sorts", patch).source(lab)
    assert text == lab.solution("order").answer.replace("argsort(stable=True)", "argsort()")


def test_every_generator_says_what_it_makes() -> None:
    assert all((make.__doc__ or "").startswith("Return ") for make in GENERATORS.values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "answer" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("--every-check"):
        every = [answer for info in LABS for kind in Kind for answer in all_answers(source(info), kind)]
        metafunc.parametrize("answer", every, ids=lambda answer: answer.name)
        return
    reason = "NOT TESTED HERE: all hostile and odd answers (make proofs does)"
    metafunc.parametrize("answer", [pytest.param(None, marks=pytest.mark.skip(reason=reason), id="none")])


@pytest.fixture(scope="module")
def labs() -> Iterator[OpenLabs]:
    """The processes of the last lab."""
    opened = OpenLabs()
    yield opened
    opened.close()


def test_an_answer_earns_what_it_must(labs: OpenLabs, answer: Answer) -> None:
    lab, zygote = labs.lab(answer.lab), labs.zygote(answer.lab)
    report = judged(answer, lab, zygote)
    assert answer.as_expected(report.points, lab), (report.points, lost(report))
