"""The page for check authors: its examples run, pass on a right answer, fail on its mutant, and pass the lint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlo_lib.grading.contract import Check
from dlo_lib.grading.lint import lint_lab
from dlo_lib.grading.modules import load_checks
from dlo_lib.grading.mutants import read_mutant
from dlo_lib.grading.outcome import Outcome, run_check
from dlo_lib.grading.student import LocalStudent

PAGE = Path(__file__).parents[2] / "solutions" / "CHECKS.md"
SHAPE, PROOFS, MUTANT = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
RIGHT = "def all_reduce_mean(x):\n    total = x.clone()\n    dist.all_reduce(total)\n    return total / dist.get_world_size()\n"


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "checks.py").write_text(SHAPE + PROOFS)
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
    (lab / "planted.py").write_text(MUTANT)
    mutant = read_mutant(lab / "planted.py")
    assert mutant.says in outcome(checks(lab)[mutant.fails], mutant.source).message


def test_the_examples_pass_the_lint(lab: Path) -> None:
    assert lint_lab(lab) == []
