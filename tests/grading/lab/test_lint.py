"""The lint for check authors: what it refuses, and that every lab of the course passes it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dlo_lib.grading.lab.course import given_folder
from dlo_lib.grading.lab.lint import lint_lab
from dlo_lib.grading.lab.lint_claims import scenarios, unmarked

ROOT = Path(__file__).parents[3]
LABS = [
    path.parent
    for root in (ROOT / "solutions", Path(__file__).parents[1])
    for path in sorted(root.rglob("hidden.py"))
]

GOOD = """
from dlo_lib.grading.checks.contract import check, scenario

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
    "compares nothing": (
        '@check("sum", points=1)\ndef check_sum(student, t):\n'
        '    t.number(student.total(t.normal(3)), "the sum")\n'
    ),
    "draws no input": (
        '@check("sum", points=1)\ndef check_sum(student, t):\n'
        '    t.equal(student.total([1, 2]), 3, "the sum")\n'
    ),
    "expects the constant 3": (
        '@check("sum", points=1)\ndef check_sum(student, t):\n    n = t.integer(1, 5)\n'
        '    t.equal(student.total([n, 2]), 3, "the sum")\n'
    ),
    "verify and measure the same run": (
        '@check("sum", points=1)\ndef check_sum(student, t):\n'
        "    x = t.normal(4)\n    run = student.ranks(summed, [x])\n    other = student.ranks(summed, [x])\n"
        '    t.close(run.results[0], x.sum(), "the sum")\n'
        '    t.that(other.bytes(0) == 4, "four bytes pass")\n'
    ),
}


HEAD = '@check("sum", points=1)\ndef check_sum(student, t):\n    n, x = t.integer(1, 5), t.normal(4)\n'

CONSTANTS = [
    't.that(student.total(n) == 3, "three")',
    't.that(3 == student.total(n), "three")',
    'got = student.total(n)\n    t.that(bool(float(got) == 3.5), "three and a half")',
    'got = t.number(student.total(n), "total")\n    t.that(abs(got - 3.5) < 1e-6, "three and a half")',
    (
        'first, second = t.items(student.total(n), 2, "totals")\n'
        '    t.that(n > 0 and second in (3, 4), "three or four")'
    ),
    (
        "run = student.ranks(summed, [n])\n    for rank, got in enumerate(run.results):\n"
        '        t.that(got == 3, "three")'
    ),
    'for got, want in zip(student.totals(n), [1, 2]):\n        t.that(got.item() == 7, "seven")',
    't.that(torch.equal(student.total(n), torch.tensor([1, 2])), "one and two")',
    't.close(student.total(n), torch.tensor([1.5]), "the total")',
    't.equal(student.total(n), WANTED, "the total")',
]

PROPERTIES = [
    't.that(len(student.total(n)) == 3, "three of them")',
    'got = student.total(x)\n    t.that(got.dim() == 2 and got.shape[0] == 4, "four rows")',
    'got = student.total(x)\n    t.that(bool(got.abs().max() == 127), "the largest is 127")',
    'got = student.total(n)\n    t.that(got == 0 or got is True, "nothing")',
    'got = student.total(n)\n    t.that(got > 3, "more than three")',
    'got = student.total(n)\n    t.that(got == 3 * n, "three times as much")',
    (
        'run = student.ranks(summed, [n])\n    t.equal(run.results, [n], "it")\n'
        '    t.that(len(run.calls(0)) == 3, "three calls")'
    ),
    'for rank, got in enumerate(student.totals(n)):\n        t.that(rank == 2 or got == n, "it")',
]

NOT_THE_STUDENTS = [
    't.that(True, "yes")',
    't.that(n == n, "it is itself")',
    't.close(x, x.clone(), "x")',
    'student.total(n)\n    t.equal(n + 1, 1 + n, "a sum")',
]

ELSEWHERE = [
    (
        't.close(student.total(x), x.sum(), "the sum")\n'
        '    t.that(student.ranks(summed, [x]).bytes(0) == 4 * n, "bytes")'
    ),
    'run = student.ranks(summed, [x])\n    t.close(run.results[0], x.sum(), "the sum")\n'
    '    run = student.ranks(summed, [x])\n    t.that(run.bytes(0) == 4 * n, "bytes")',
]


def write(lab: Path, text: str, module: str = "sums") -> None:
    (lab / "checks").mkdir(exist_ok=True)
    (lab / "checks" / f"{module}.py").write_text(text)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        *((body, "expects the constant") for body in CONSTANTS),
        *((body, "compares nothing that comes from the student") for body in NOT_THE_STUDENTS),
        *((body, "verify and measure the same run") for body in ELSEWHERE),
    ],
)
def test_what_gives_points_away_is_refused(tmp_path: Path, body: str, words: str) -> None:
    write(tmp_path, f"WANTED = 42\n{HEAD}    {body}\n")
    (finding,) = lint_lab(tmp_path, tmp_path)
    assert words in str(finding)


@pytest.mark.parametrize("body", PROPERTIES)
def test_a_property_may_hold_a_constant(tmp_path: Path, body: str) -> None:
    write(tmp_path, f"{HEAD}    {body}\n")
    assert lint_lab(tmp_path, tmp_path) == []


def test_a_check_with_helpers_a_twin_and_an_edge_case_is_accepted(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    assert lint_lab(tmp_path, tmp_path) == []


def test_a_helper_in_another_file_counts_for_the_check(tmp_path: Path) -> None:
    write(tmp_path, 'def right(t, got, want):\n    t.close(got, want, "the sum")\n', "helpers")
    call = "right(t, student.total(x), x.sum())\n"
    write(tmp_path, f"from .helpers import right\n\n{HEAD}    {call}")
    assert lint_lab(tmp_path, tmp_path) == []
    (tmp_path / "checks" / "helpers.py").unlink()
    write(tmp_path, f"from elsewhere import right\n\n{HEAD}    {call}")
    (finding,) = lint_lab(tmp_path, tmp_path)
    assert "compares nothing" in str(finding)


@pytest.mark.parametrize("words", BAD)
def test_what_is_refused(tmp_path: Path, words: str) -> None:
    write(tmp_path, BAD[words])
    (finding,) = lint_lab(tmp_path, tmp_path)
    assert words in str(finding)
    assert str(finding).startswith("sums.py, line ")
    assert "check_sum" in str(finding)


@pytest.mark.parametrize("lab", LABS, ids=lambda folder: folder.name)
def test_every_lab_passes(lab: Path) -> None:
    assert list(map(str, lint_lab(given_folder(lab), lab))) == []


def test_hidden_checks_count_for_a_question_too(tmp_path: Path) -> None:
    write(tmp_path, BAD["draws no input"])
    (tmp_path / "hidden.py").write_text(GOOD.replace("check_sum", "check_other"))
    assert lint_lab(tmp_path, tmp_path) == []


SCENARIO = """
from dlo_lib.grading.checks.contract import check, claimed, scenario

class Counting:
    def __init__(self):
        self.number, self.size = 0, 3

    def forward(self, x):
        self.number += 1
        return x

def collected(function, values):
    found = []
    function(lambda value: found.append(value))
    return found

@scenario
def watched(student, values):
    seen, times, own = [], [0.0], []
    model = Counting()

    def step(value):
        note(value)
        times[0] += 1.0

    def note(value):
        seen.append(value)

    def helped(value):
        own.append(value)
        return value

"""

CLAIMS = {
    "seen": "return [student.total(step, values), seen]",
    "now": "total = student.total(step)\n    now = times[0]\n    return total, now",
    "number": "student.total(model.forward)\n    return model.number",
    "found": "return collected(student.total, values)",
    "values": "student.total(values.append)\n    return len(values)",
}

EVIDENCE = [
    "return student.total(step, seen)",
    "return [student.total(step), claimed(seen), claimed(times[0])]",
    "helped(1)\n    own.append(student.total(step))\n    return own",
    "student.total(model.forward)\n    return model.size",
    "result = student.total(lambda: seen)\n    return result",
]


@pytest.mark.parametrize(("name", "body"), CLAIMS.items())
def test_a_scenario_marks_what_its_own_parts_have_written(tmp_path: Path, name: str, body: str) -> None:
    write(tmp_path, f"{SCENARIO}    {body}\n")
    (finding,) = lint_lab(tmp_path, tmp_path)
    assert f"watched returns {name}, which its own parts write" in str(finding)


@pytest.mark.parametrize("body", EVIDENCE)
def test_a_result_and_a_claimed_value_are_no_finding(tmp_path: Path, body: str) -> None:
    write(tmp_path, f"{SCENARIO}    {body}\n")
    assert lint_lab(tmp_path, tmp_path) == []


def test_no_scenario_of_a_lab_returns_what_its_parts_write() -> None:
    """There is no list of exceptions: values show it, or the judge sees it."""
    found = set()
    for file in (ROOT / "labs").glob("*/checks/*.py"):
        nodes = ast.parse(file.read_text()).body
        functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        lab = file.parts[-3]
        found |= {f"{lab}/{name}" for name, each in scenarios(functions) if any(unmarked(each, classes))}
    assert found == set()
