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
SHAPE, PROOFS, MUTANTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
RIGHT = (
    "def all_reduce_mean(x):\n    total = x.clone()\n    dist.all_reduce(total)\n"
    "    return total / dist.get_world_size()\n"
)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "lab.toml").write_text(
        'number = 90\nname = "page"\ntitle = "The page"\ncore = false\nminutes = 5\n'
    )
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "mean.py").write_text(SHAPE + PROOFS)
    return tmp_path


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


def test_the_mutant_is_caught_by_the_check_that_it_names(lab: Path) -> None:
    (lab / "mutants.py").write_text(MUTANTS)
    info = LabInfo("07_mean", 7, "mean", "Mean", core=True, minutes=10)
    source = LabSource(
        info,
        lab,
        lab,
        (Cell("mean", CellKind.SOLUTION, RIGHT, RIGHT), Cell("test_mean", CellKind.TEST, "", "", 4.0)),
    )
    mutants = read_mutants(source.folder)
    assert len(mutants) == 2
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
