"""The examples of the page for check authors run, pass a right answer, fail their mutants, and pass
the lint.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlo_lib.grading.checks.contract import Check
from dlo_lib.grading.checks.outcome import Outcome, run_check
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.lint import lint_lab
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.grading.lab.mutants import read_mutants
from dlo_lib.grading.lab.source import Cell, CellKind, LabSource
from dlo_lib.grading.notebook.local_student import LocalStudent

PAGE = Path(__file__).parents[3] / "solutions" / "CHECKS.md"
SHAPE, EVIDENCE, PROOFS, MUTANTS, TABLE = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
)
RIGHT = (
    "def all_reduce_mean(x):\n    total = x.clone()\n    dist.all_reduce(total)\n"
    "    return total / dist.get_world_size()\n"
)


TWIN = """
def order_of(seed, count):
    return [(seed * 7 + step * step) % 11 for step in range(count)]
"""
CONTINUES = """
def largest_batch(fits, limit):
    good, bad = 0, limit + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good

class ResumableOrder:
    def __init__(self, seed):
        self.seed, self.done = seed, 0
    def step(self):
        self.done += 1
        return (self.seed * 7 + (self.done - 1) ** 2) % 11
    def state_dict(self):
        return {"done": self.done}
    def load_state_dict(self, state):
        self.done = state["done"]
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "lab.toml").write_text(
        'number = 90\nname = "page"\ntitle = "The page"\ncore = false\nminutes = 5\n'
    )
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "mean.py").write_text(SHAPE + PROOFS)
    return tmp_path


@pytest.fixture
def evidence(lab: Path) -> Path:
    (lab / "checks" / "mean.py").write_text(EVIDENCE + TWIN)
    return lab


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("", "", {}),
        ("bad - good > 1", "bad > good", {"check_tries": "the search does not end"}),
        (
            "good, bad = 0, limit + 1",
            "good, bad = 0, 10**9",
            {"check_tries": "tries"},
        ),
        (
            'return {"done": self.done}',
            "ResumableOrder.kept = self.done; return {'done': getattr(ResumableOrder, 'kept', 0) * 0}",
            {"check_resume": "the order is"},
        ),
    ],
    ids=["right", "endless", "many tries", "a state in the class"],
)
def test_the_examples_of_evidence(evidence: Path, old: str, new: str, says: dict[str, str]) -> None:
    own = load_checks(evidence)
    found = {
        check.name: outcome(check, CONTINUES.replace(old, new) if old else CONTINUES)
        for question in ("search", "resume")
        for check in own.of(question)
    }
    failed = {name: result.message for name, result in found.items() if not result.passed}
    assert set(failed) == set(says)
    assert all(words in failed[name] for name, words in says.items())
    assert lint_lab(evidence, evidence) == []


def checks(lab: Path) -> dict[str, Check]:
    return {check.name: check for check in load_checks(lab).of("mean")}


def outcome(check: Check, source: str) -> Outcome:
    names = {"torch": torch, "dist": dist}
    exec(compile(source, "<cell mean>", "exec"), names)
    return run_check(check, LocalStudent(names, check.seconds), seed=1)


def test_the_examples_pass_on_a_right_answer(lab: Path) -> None:
    found = {name: outcome(check, RIGHT) for name, check in checks(lab).items()}
    assert {name: result.message for name, result in found.items() if not result.passed} == {}
    assert set(found) == {"check_every_rank", "check_traffic", "check_memory", "check_received_is_used"}


@pytest.mark.parametrize(("text", "count"), [(MUTANTS, 2), (TABLE, 1)], ids=["list", "table"])
def test_the_mutant_is_caught_by_the_check_that_it_names(text: str, count: int, lab: Path) -> None:
    (lab / "mutants.py").write_text(text)
    info = LabInfo("07_mean", 7, "mean", "Mean", core=True, minutes=10)
    source = LabSource(
        info,
        lab,
        lab,
        (Cell("mean", CellKind.SOLUTION, RIGHT, RIGHT), Cell("test_mean", CellKind.TEST, "", "", 4.0)),
    )
    mutants = read_mutants(source.folder)
    assert len(mutants) == count
    for mutant in mutants:
        planted = mutant.planted(source)
        assert planted.question == "mean"
        failed = {
            name: result
            for name, check in checks(lab).items()
            if not (result := outcome(check, planted.answer)).passed
        }
        assert list(failed) == [mutant.fails]
        assert mutant.says in failed[mutant.fails].message


def test_the_examples_pass_the_lint(lab: Path) -> None:
    assert lint_lab(lab, lab) == []
