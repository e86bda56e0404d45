"""Without accounting and after SLURM has forgotten a job, its status has the right words."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dlo_lib import cluster
from dlo_lib.cluster import State
from dlo_lib.cluster.run import endings
from dlo_lib.cluster.run.records import Turn
from dlo_lib.cluster.slurm import commands


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def until(condition: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < 120
        time.sleep(0.1)


def test_a_job_that_scancel_ended_outside_is_cancelled(elsewhere, other_site, monkeypatch):
    running = cluster.submit(["bash", "-c", "touch begun; sleep 300"], site=other_site, time=5, name="runs")
    waits = cluster.submit(["true"], site=other_site, time=5, name="waits", options={"hold": True})
    until(lambda: Path("begun").exists())
    names = [str(job.record.turns[0].number) for job in (running, waits)]
    subprocess.run(["scancel", *names], check=True)  # in a terminal
    until(lambda: all(commands.queue(int(name))[0].state.over for name in names))
    until(lambda: "CANCELLED AT" in running.logs())
    for question in ("queue", "controller"):  # SLURM forgets jobs some time after their end
        monkeypatch.setattr(commands, question, lambda number, mark: {})
    assert commands.history(int(names[0])) == {}
    (ended,), (never,) = running.status(), waits.status()
    assert (ended.state, ended.reason) == (State.CANCELLED, "scancel ended it, here or in a terminal")
    assert never.state is State.CANCELLED
    assert never.reason.startswith("it never began, and SLURM no longer knows it: it was cancelled while it")


@pytest.mark.parametrize(
    ("line", "code", "state"),
    [
        ("slurmstepd: error: *** JOB 7 ON v1 CANCELLED AT 2026-11-25T01:37:20 ***", 143, State.CANCELLED),
        ("*** JOB 7 ON v1 CANCELLED AT 2026-11-25T01:37:20 DUE TO TIME LIMIT ***", None, State.TIMEOUT),
        ("*** JOB 7 ON v1 CANCELLED AT 2026-11-25T01:37:20 DUE TO NODE FAILURE ***", None, State.LOST),
        ("*** JOB 7 ON v1 CANCELLED AT 2026-11-25T01:37:20 DUE TO PREEMPTION ***", 143, State.LOST),
        ("0: slurmstepd: error: *** STEP 7.0 ON v1 CANCELLED AT 2026-11-25T01:37:20 ***", 143, None),
        ("*** JOB 7 ON v1 CANCELLED AT 2026-11-25T01:37:20 ***", 1, None),
        ("*** JOB 6 ON v1 CANCELLED AT 2026-11-25T01:37:20 ***", None, None),  # of an earlier turn
        ("nothing", None, None),
    ],
)
def test_the_line_that_slurm_writes_tells_how_it_ended_a_job(line, code, state, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "0.out").write_text(f"step 3\n{line}\nlast words\n")
    told = endings.of_output(tmp_path, Turn(7, (0,)), 0, code)
    assert (told and told.state) == state
