"""``timings.csv`` accounts for the CPU time of the command: its sum is what a control group counts."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.grading import DLO, counting_group, group_seconds, inside
from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.gradebook.timings import TIMINGS
from dlo_lib.grading.sandbox.isolation import find_isolation
from tests.grading.small_class import LAB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_isolation().isolation is None, reason=f"NOT TESTED HERE: the sandbox {find_isolation().reasons}"
    ),
]


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that counts CPU time: no process waits for the workers in a sandbox."""
    try:
        with counting_group() as made:
            yield made
    except UserError as error:
        pytest.skip(f"NOT TESTED HERE: {error}")


def test_the_times_add_up_to_those_of_all_processes_of_the_command(ungraded: Path, group: Path) -> None:
    subprocess.run(inside(group, [*DLO, "grade", LAB]), cwd=ungraded, check=True, stdout=subprocess.DEVNULL)
    with open(ungraded / "grades" / LAB / TIMINGS, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    times = [float(row[kind]) for row in rows for kind in row if kind.endswith("_cpu_seconds")]
    assert sum(times) == pytest.approx(group_seconds(group), rel=0.05), (sum(times), group_seconds(group))
