"""The lint for check authors: what it refuses, and that every lab of the course passes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlo_lib.grading.lint import lint, lint_lab

ROOT = Path(__file__).parents[2]
LABS = [path.parent for root in (ROOT / "solutions", Path(__file__).parent) for path in sorted(root.rglob("checks.py"))]

GOOD = """
from dlo_lib.grading.contract import check, scenario

def twin(x):
    return x.sum()

def compare(t, run, want):
    for rank, got in enumerate(run.results):
        t.close(got, want, "the sum on rank {rank}", rank=rank)

@check("sum", points=1)
def check_sum(student, t):
    x = t.normal(4)
    run = student.ranks(summed, [{"x": x}])
    compare(t, run, twin(x))
    t.that(len(run.calls(0)) == 1, "one call is enough")

@check("sum", points=1)
def check_nothing(student, t):
    t.equal(student.total([]), 0, "the sum of nothing")
"""

BAD = {
    "compares nothing": '@check("sum", points=1)\ndef check_sum(student, t):\n    t.number(student.total(t.normal(3)), "the sum")\n',
    "draws no input": '@check("sum", points=1)\ndef check_sum(student, t):\n    t.equal(student.total([1, 2]), 3, "the sum")\n',
    "expects the constant 3": (
        '@check("sum", points=1)\ndef check_sum(student, t):\n    n = t.integer(1, 5)\n    t.equal(student.total([n, 2]), 3, "the sum")\n'
    ),
    "verify and measure the same run": (
        '@check("sum", points=1)\ndef check_sum(student, t):\n'
        "    x = t.normal(4)\n    run = student.ranks(summed, [x])\n    other = student.ranks(summed, [x])\n"
        '    t.close(run.results[0], x.sum(), "the sum")\n    t.that(other.bytes(0) == 4, "four bytes pass")\n'
    ),
}


def test_a_check_with_helpers_a_twin_and_an_edge_case_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(GOOD)
    assert lint([tmp_path / "checks.py"]) == []


@pytest.mark.parametrize("words", BAD)
def test_what_is_refused(tmp_path: Path, words: str) -> None:
    (tmp_path / "checks.py").write_text(BAD[words])
    (finding,) = lint_lab(tmp_path)
    assert words in str(finding)
    assert str(finding).startswith("checks.py, line ")
    assert "check_sum" in str(finding)


@pytest.mark.parametrize("lab", LABS, ids=lambda folder: folder.name)
def test_every_lab_passes(lab: Path) -> None:
    assert list(map(str, lint_lab(lab))) == []


def test_hidden_checks_count_for_a_question_too(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(BAD["draws no input"])
    (tmp_path / "hidden.py").write_text(GOOD.replace("check_sum", "check_other"))
    assert lint_lab(tmp_path) == []
