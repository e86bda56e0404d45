"""`dlo grade --slurm` on a real SLURM: the rows of one machine, also when elements are put back into the queue meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlo_lib import cluster
from dlo_lib.cli.grade_slurm import Wanted, array_of_judges
from dlo_lib.cluster import slurm
from dlo_lib.errors import UserError
from dlo_lib.grading.batch import Options, grade_lab
from dlo_lib.grading.course import find_lab, source_labs
from tests.grading.small_class import results

GRADE = [sys.executable, "-c", "from dlo_lib.cli import main; main()", "grade", "91"]
SLURM = ["--slurm", "--array", "2", "--cores", "1", "--time", "10", "--site", "jean-zay-v100", "--account", "abc"]


@pytest.fixture
def course(ungraded: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return ungraded


@pytest.mark.slow
def test_an_array_gives_the_rows_of_one_machine_also_when_an_element_is_requeued(jean_zay, course):
    grading = subprocess.Popen([*GRADE, *SLURM], cwd=course, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        reports = course / "grades" / "91_small" / "reports"
        while not list(reports.glob("*.json")) and grading.poll() is None:
            time.sleep(0.05)
        (job,) = cluster.jobs()
        running = [status.element for status in job.status() if status.state is cluster.State.RUNNING]
        if running:  # else a machine faster than this test: the rows are compared all the same
            slurm.requeue(job.record.turns[-1].number, running[0])  # as a preemption does
        said, errors = grading.communicate(timeout=300)
    finally:
        grading.kill()
        grading.wait()
    assert grading.returncode == 0, errors
    assert said.count(" s  ada  12/12  GRADED") == 1
    by_array = results(course)
    grade_lab(find_lab("91", source_labs()), course, options=Options(jobs=2))
    assert results(course) == by_array


def test_without_slurm_the_cure_is_named(course, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match="leave --slurm out"):
        array_of_judges(find_lab("91", source_labs()), course, Wanted(2), unsafe=True)
