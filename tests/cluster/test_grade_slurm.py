"""`dlo grade --slurm` on a real SLURM gives the rows of one machine, also when elements are requeued."""

from __future__ import annotations

import subprocess
import sys
import time
import unittest.mock
from pathlib import Path

import pytest

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.cli.grade_slurm import SlurmElements, Wanted, array_of_judges
from dlo_lib.cluster.run import turns
from dlo_lib.cluster.slurm import commands
from dlo_lib.grading.lab.course import find_lab, source_labs
from tests.grading.small_class import results

GRADE = [sys.executable, "-c", "from dlo_lib.cli import main; main()", "grade", "91"]
SLURM = [
    "--slurm",
    "--array",
    "2",
    "--cores",
    "1",
    "--time",
    "10",
    "--site",
    "jean-zay-v100",
    "--account",
    "abc",
]


@pytest.fixture
def course(ungraded: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return ungraded


@pytest.mark.slow
def test_an_array_gives_the_rows_of_one_machine_even_if_an_element_is_requeued(
    jean_zay, course, graded_class
):
    grading = subprocess.Popen(
        [*GRADE, *SLURM], cwd=course, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        reports = course / "grades" / "91_small" / "reports"
        while not list(reports.glob("*.json")) and grading.poll() is None:
            time.sleep(0.05)
        (job,) = cluster.jobs()
        running = [status.element for status in job.status() if status.state is cluster.State.RUNNING]
        if running:  # all may have ended on a fast machine: the rows are compared in any case
            commands.requeue(job.record.turns[-1].number, running[0])  # as a preemption does
        said, errors = grading.communicate(timeout=300)
    finally:
        grading.kill()
        grading.wait()
    assert grading.returncode == 0, errors
    assert f"export DLO_LIBRARY={job.folder / 'library'}" in job.script
    assert "environ.get('DLO_LIBRARY')" in job.script.replace("'\"'\"'", "'"), "elements import the copy"
    assert said.count(" s  ada  12/12  GRADED") == 1
    assert results(course) == [table.replace(b" (UNSANDBOXED)", b"") for table in results(graded_class)]


def test_an_element_that_slurm_does_not_requeue_is_submitted_again(tmp_path, monkeypatch):
    """Some sites forbid to requeue jobs, and a controller forgets jobs that ended some minutes ago."""
    started, job = [], unittest.mock.Mock(folder=tmp_path)
    monkeypatch.setattr(turns, "start", lambda folder, elements: started.append((folder, elements)))
    job.requeue.side_effect = UserError("SLURM does not requeue the job: Job is not requeueable")
    SlurmElements(job).requeue(3)
    assert started == [(tmp_path, (3,))]
    job.requeue.side_effect = commands.NoAnswer("scontrol has not answered for 60 s")
    with pytest.raises(commands.NoAnswer):
        SlurmElements(job).requeue(3)
    assert len(started) == 1, "it may have been requeued"


def test_without_slurm_the_cure_is_named(course, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match="omit --slurm"):
        array_of_judges(find_lab("91", source_labs()), course, Wanted(2), unsafe=True)
