"""`dlo jobs`: the jobs of a notebook, in the terminal."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlo_lib import cluster
from dlo_lib.cluster import Job, JobFailed, State
from tests.cli.in_process import Dlo, commands

Terminal = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dlo:
    """Run a command in this process; `dlo` runs one in another process, as a terminal does."""
    monkeypatch.setenv("COLUMNS", "200")
    return commands(monkeypatch, capsys)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Job]:
    """A sweep of two elements on this machine; the second runs until it is cancelled."""
    monkeypatch.setenv("DLO_SITE", "local")
    monkeypatch.setenv("DLO_POLL_S", "0.1")
    monkeypatch.chdir(tmp_path)
    command = ["bash", "-c", 'echo "element $1"; touch "begun$1"; [ "$1" = 0 ] || sleep 600']
    job = cluster.submit(command, sweep={"number": [0, 1]}, name="nightly")
    while not (tmp_path / "begun1").exists():
        assert not job.done, job
        time.sleep(0.05)
    yield job
    job.cancel()


def test_list_show_logs_cancel(submitted: Job, dlo: Terminal, here: Dlo) -> None:
    listed = dlo("jobs")
    assert listed.returncode == 0
    assert all(
        part in listed.stdout
        for part in (submitted.record.digest[:8], "nightly", "1 running, 1 completed", "number=0,1")
    )
    assert [row["state"] for row in json.loads(here("jobs", "list", "--json").out)] == [
        "1 running, 1 completed"
    ]

    shown = here("jobs", "show", "nightly").out
    assert "number=1" in shown
    assert str(submitted.folder) in shown
    assert "set -euo pipefail" in shown
    assert [row["state"] for row in json.loads(here("jobs", "show", "nightly", "--json").out)] == [
        "completed",
        "running",
    ]

    assert here("jobs", "logs", submitted.record.digest[:8]).out == "element 0\n"
    assert here("jobs", "logs", "nightly", "--element", "1", "-n", "5").out == "element 1\n"
    missing = here("jobs", "logs", "nightly", "-e", "2")
    assert (missing.status, missing.err) == (2, f"dlo: {submitted.name} has no element 2: use 0 to 1\n")

    assert dlo("jobs", "cancel", "nightly").stdout == f"{submitted.name} is cancelled\n"
    assert submitted.status()[1].state is State.CANCELLED
    assert dlo("jobs", "logs", "-f", "nightly", "-e", "1").stdout.startswith("element 1\n"), (
        "following ends with the job"
    )
    assert "has already ended" in here("jobs", "cancel", "nightly").out


def test_resubmit_and_forget(here: Dlo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DLO_SITE", "local")
    monkeypatch.setenv("DLO_POLL_S", "0.1")
    monkeypatch.chdir(tmp_path)
    job = cluster.submit(
        ["bash", "-c", 'echo "element $1"; test -e ready || [ "$1" = 0 ]'], sweep={"n": [0, 1]}, name="retry"
    )
    with pytest.raises(JobFailed):
        job.wait(timeout=60)

    failed = here("jobs", "resubmit", "retry")
    assert failed.status == 1
    assert f"{job.name} is submitted again, number" in failed.out
    assert failed.out.endswith("elements 1\n")
    assert "1 of 2 did not complete" in failed.err

    (tmp_path / "ready").touch()
    assert here("jobs", "resubmit", "retry").status == 0
    assert job.state == "2 completed"
    completed = here("jobs", "resubmit", "retry")
    assert (completed.status, completed.err) == (
        2,
        f"dlo: {job.name} has completed; nothing is resubmitted\n",
    )
    (listed,) = json.loads(here("jobs", "list", "--json").out)
    assert listed["numbers"] == [turn.number for turn in job.record.turns]
    assert len(listed["numbers"]) == 3

    assert f"{job.name} is forgotten" in here("jobs", "forget", "retry").out
    assert not job.folder.exists()
    assert here("jobs", "forget", "retry").status == 2


RECORD_A_FAILURE = """
mkdir -p "$DLO_RANKS/run"
cd "$DLO_RANKS/run"
echo '{"rank": 1, "headline": "raised ValueError: [a bad batch]", "at": 1.0}' > failure-1.json
exit 1
"""


def test_the_list_has_the_error_of_the_rank_that_failed_first(here, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("DLO_SITE", "local")
    monkeypatch.setenv("DLO_POLL_S", "0.1")
    monkeypatch.chdir(tmp_path)
    job = cluster.submit(["bash", "-c", RECORD_A_FAILURE], name="broken")
    with pytest.raises(JobFailed, match=r"status 1; .*\n\nrank 1 raised ValueError: \[a bad batch\]"):
        job.wait(timeout=120)
    reason = "rank 1 raised ValueError: [a bad batch]"
    assert here("jobs").out.splitlines()[-1] == f"{job.record.digest[:8]}: {reason}"
    assert [row["reason"] for row in json.loads(here("jobs", "list", "--json").out)] == [reason]
    assert reason in here("jobs", "show", "broken").out


def test_one_element_is_cancelled(submitted: Job, here: Dlo) -> None:
    refused = here("jobs", "forget", "nightly")
    assert (refused.status, refused.err) == (2, f"dlo: {submitted.name} is not over: cancel() it first\n")
    missing = here("jobs", "cancel", "nightly", "-e", "2")
    assert (missing.status, missing.err) == (2, f"dlo: {submitted.name} has no element 2: use 0 to 1\n")
    assert here("jobs", "cancel", "nightly", "-e", "0").status == 0
    assert submitted.status()[1].state is State.RUNNING
    assert here("jobs", "cancel", "nightly", "-e", "1").out == f"element 1 of {submitted.name} is cancelled\n"
    assert submitted.status()[1].state is State.CANCELLED


def test_without_jobs_the_list_shows_how_to_submit_one(here: Dlo) -> None:
    done = here("jobs")
    assert (done.status, done.out) == (
        0,
        "no jobs yet: submit one with dlo_lib.cluster.submit, see slurm/README.md\n",
    )


def test_a_job_that_does_not_exist_is_one_line(here: Dlo) -> None:
    done = here("jobs", "show", "nightly")
    assert (done.status, done.err) == (2, 'dlo: unknown job "nightly": Known: none\n')
