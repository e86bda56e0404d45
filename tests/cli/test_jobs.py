"""`dlo jobs`: what a notebook submitted, in the terminal."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlo_lib import cluster
from dlo_lib.cluster import Job, State

Dlo = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Job]:
    """A sweep of two on this machine, whose second element runs until it is cancelled."""
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


def test_list_show_logs_cancel(submitted: Job, dlo: Dlo) -> None:
    listed = dlo("jobs")
    assert listed.returncode == 0
    assert all(part in listed.stdout for part in (submitted.record.digest[:8], "nightly", "local", "1 running, 1 completed"))
    assert [row["state"] for row in json.loads(dlo("jobs", "list", "--json").stdout)] == ["1 running, 1 completed"]

    shown = dlo("jobs", "show", "nightly").stdout
    assert "number=1" in shown
    assert str(submitted.folder) in shown
    assert "set -euo pipefail" in shown
    assert [row["state"] for row in json.loads(dlo("jobs", "show", "nightly", "--json").stdout)] == ["completed", "running"]

    assert dlo("jobs", "logs", submitted.record.digest[:8]).stdout == "element 0\n"
    assert dlo("jobs", "logs", "nightly", "--element", "1", "-n", "5").stdout == "element 1\n"
    missing = dlo("jobs", "logs", "nightly", "-e", "2")
    assert (missing.returncode, missing.stderr) == (2, f"dlo: {submitted.name} has no element 2: use 0 to 1\n")

    assert dlo("jobs", "cancel", "nightly").stdout == f"{submitted.name} is cancelled\n"
    assert submitted.status()[1].state is State.CANCELLED
    assert dlo("jobs", "logs", "-f", "nightly", "-e", "1").stdout.startswith("element 1\n"), "following ends with the job"
    assert "was over already" in dlo("jobs", "cancel", "nightly").stdout


def test_without_jobs_it_says_how_to_submit_one(dlo: Dlo) -> None:
    done = dlo("jobs")
    assert (done.returncode, done.stdout) == (0, "no jobs yet: they are submitted with dlo_lib.cluster.submit, see slurm/README.md\n")


def test_a_job_that_does_not_exist_is_one_line(dlo: Dlo) -> None:
    done = dlo("jobs", "show", "nightly")
    assert (done.returncode, done.stderr) == (2, 'dlo: unknown job "nightly": Known: none\n')
