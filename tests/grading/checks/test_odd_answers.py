"""For any value that a student's code returns, a check reports a wrong answer; the check itself never
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dlo_lib.grading.checks.codec import round_trip
from dlo_lib.grading.checks.contract import Nudge, Run, Scenario, Wrong
from dlo_lib.grading.checks.outcome import Status, run_check, seed_for
from dlo_lib.grading.lab.course import given_folder
from dlo_lib.grading.lab.modules import load_checks

ROOT = Path(__file__).parents[3]
LABS = [
    path.parent  # solutions/NN_name
    for root in (ROOT / "solutions", Path(__file__).parents[1])
    for path in sorted(root.rglob("hidden.py"))
]
ODD = [
    None, "b", -1, 2**70, float("nan"), [1, 2], [[]], (None, None), {"q1": torch.ones(2)}, torch.float32,
    torch.zeros(()), torch.zeros(0), torch.ones(2, 3), torch.zeros(3, dtype=torch.bool),
    (torch.zeros(2), None),
]  # fmt: skip


class Student:
    """Answers every call with one value. There are no ranks, because a scenario determines the form of their
    results.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self.asked = False
        """Whether a check has received the value."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self.get(name)

    def get(self, name: str) -> Any:
        self.asked = True
        return round_trip(self._value)

    def is_own(self, name: str) -> bool:
        return True

    def ranks(
        self, scenario: Scenario, inputs_per_rank: Sequence[Mapping[str, Any]], nudge: Nudge | None = None
    ) -> Run:
        raise Wrong("no ranks here")


@pytest.mark.parametrize("lab", LABS, ids=lambda folder: folder.name)
def test_no_answer_makes_a_check_itself_fail(lab: Path) -> None:
    checks = load_checks(given_folder(lab), lab)
    failed = []
    for check in (*checks.visible, *checks.hidden):
        for value in ODD:
            student = Student(value)
            outcome = run_check(check, student, seed_for("odd", lab.name, check))
            if outcome.status is Status.GRADER_ERROR:
                failed.append(f"{check.name} given {value!r}: {outcome.message}")
            if not student.asked:  # a check of ranks alone does the same for every value
                break
    assert not failed, "\n".join(failed)
