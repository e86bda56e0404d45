"""A job belongs to one cluster and one state folder, a rank's environment does not leak into it, and many
handles ask the controller once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.cluster import State
from dlo_lib.cluster.run import records, submissions
from dlo_lib.cluster.site.description import site
from dlo_lib.cluster.site.request import allocate, make_request
from dlo_lib.cluster.slurm import commands, invocation
from dlo_lib.cluster.slurm.snapshot import Snapshot

ROOT = Path(__file__).resolve().parents[3]
V100 = {"site": "jean-zay-v100", "account": "abc", "time": 5}
LEAKS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("DLO_PROGRESS", "DLO_LAUNCHER", "TMPDIR"),
)


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


def waiting(**options: object) -> cluster.Job:
    """Submit a job that waits until the file ``go`` exists."""
    text = "while [ ! -e go ]; do sleep 0.1; done"
    return cluster.submit(["bash", "-c", text], **(V100 | options))


def test_a_job_of_another_cluster_is_neither_asked_about_nor_cancelled(
    jean_zay, jean_zay_conf, elsewhere_conf, other_site, log_in, tmp_path
):
    mine = waiting()
    number = mine.record.turns[0].number
    log_in(elsewhere_conf)  # the folder of jobs is shared between both clusters
    last = subprocess.run(
        ["sbatch", "--parsable", "-t", "5", "--output=/dev/null", "--wrap", "sleep 300"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    stranger = int(last)
    record = mine.record
    records.write(  # both clusters have given the same number
        mine.folder,
        records.Record(**{**vars(record), "turns": (records.Turn(stranger, (0,), cluster="jean-zay"),)}),
    )
    (status,) = mine.status()
    assert (status.state, status.reason) == (
        State.UNKNOWN, "it is a job of the cluster jean-zay: ask there"
    )  # fmt: skip
    assert not mine.done
    with pytest.raises(UserError, match="runs on the cluster jean-zay: use the commands there"):
        mine.cancel()
    with pytest.raises(UserError, match="runs on the cluster jean-zay: use the commands there"):
        mine.requeue(0)
    with pytest.raises(UserError, match="jobs of this one cannot wait for it"):
        cluster.submit(["true"], after=mine, site=other_site, time=5)
    records.write(mine.folder, records.Record(**{**vars(record), "turns": (records.Turn(stranger, (0,)),)}))
    assert mine.status()[0].state is not State.RUNNING  # the number alone does not make it this job
    with pytest.raises(UserError, match="SLURM no longer knows element 0 of"):
        mine.requeue(0)
    commands.cancel(stranger, None, submissions.mark_of(mine.folder, mine.record))
    assert commands.queue(stranger)[0].state in (State.PENDING, State.RUNNING)
    commands.cancel(stranger)
    until(lambda: commands.queue(stranger)[0].state.over)
    log_in(jean_zay_conf)
    commands.cancel(number)
    until(lambda: bool(commands.history(number, commands.JobMark(mine.name))))
    until(lambda: not commands.history(number, commands.JobMark("another-job")))


def test_a_job_of_another_state_folder_is_not_adopted(jean_zay, tmp_path, monkeypatch):
    first = waiting(name="same")
    folder = first.folder
    (turn,) = first.record.turns
    records.write(folder, records.Record(**{**vars(first.record), "turns": (replace(turn, number=0),)}))
    assert waiting(name="same").record.turns[0].number == turn.number
    monkeypatch.setenv("DLO_HOME", str(tmp_path / "home"))
    other = waiting(name="same")
    assert other.name == first.name
    assert other.record.turns[0].number != records.read(folder).turns[0].number
    Path("go").touch()
    other.wait(timeout=600)


def test_the_environment_of_a_rank_does_not_leak_into_a_job(jean_zay, monkeypatch):
    for name in LEAKS:
        monkeypatch.setenv(name, "7" if name != "TMPDIR" else os.getcwd())
    monkeypatch.setenv("OMP_NUM_THREADS", "13")
    monkeypatch.setenv("SBATCH_COMMENT", "kept")
    monkeypatch.setenv("MINE", "kept")
    names = (*LEAKS, "OMP_NUM_THREADS", "MINE")
    Path("program.py").write_text(
        f"import json, os; print(json.dumps({{name: os.environ.get(name) for name in {names!r}}}))"
    )
    job = cluster.submit(["python", "program.py"], **V100).wait(timeout=600)
    seen = json.loads(job.logs())
    assert seen.pop("TMPDIR") != os.getcwd()  # SLURM gives the job one
    assert [seen[name] for name in LEAKS[:-1]] == [None] * (len(LEAKS) - 1)
    assert (seen["OMP_NUM_THREADS"], seen["MINE"]) == ("1", "kept")  # 1 is the site's
    assert "SBATCH_COMMENT" in commands.submission_environment()


def test_many_handles_cost_one_query(jean_zay, monkeypatch):
    monkeypatch.setenv("DLO_POLL_S", "60")
    jobs = [waiting(name=f"many-{number}") for number in range(3)]
    real, asked = invocation.call, []

    def call(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[0])
        return real(*command, **options)

    monkeypatch.setattr(invocation, "call", call)
    for _ in range(5):
        assert all(job.status()[0].state in (State.PENDING, State.RUNNING) for job in jobs)
    assert asked == ["squeue"]
    jobs[0].cancel()
    assert asked == ["squeue", "scontrol", "scancel", "scontrol"], "the controller confirms it"
    until(lambda: jobs[0].done or bool(commands._queue().invalidate()))
    Path("go").touch()


WATCHERS = """
import contextlib, sys, threading
from dlo_lib import cluster
def watch():
    for job in cluster.jobs():
        with contextlib.suppress(cluster.JobFailed):
            job.wait(timeout=0.5, poll=0.05)
threads = [threading.Thread(target=watch) for _ in range(10)]
for one in threads: one.start()
for one in threads: one.join()
print(len(repr(cluster.jobs()[0]).splitlines()))
"""


def test_waits_views_and_commands_of_several_processes_cost_one_query(jean_zay, monkeypatch, tmp_path):
    monkeypatch.setenv("DLO_POLL_S", "600")
    jobs = [waiting(name=f"watched-{number}") for number in range(2)]
    real = subprocess.run(["which", "squeue"], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "bin").mkdir()
    counting = tmp_path / "bin" / "squeue"
    counting.write_text(f'#!/bin/sh\necho asked >> "{tmp_path}/asked"\nexec {real} "$@"\n')
    counting.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    dlo = [sys.executable, "-c", "from dlo_lib.cli import main; main()"]
    watchers = [[sys.executable, "-c", WATCHERS]] * 2 + [[*dlo, "jobs"], [*dlo, "jobs", "show", jobs[0].name]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in watchers
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert outputs[0].strip() in ("3", "4"), "the job, its table, and the reason if it waits"
    jobs[0].watch()
    assert (tmp_path / "asked").read_text() == "asked\n"
    Path("go").touch()


def test_a_job_that_is_gone_costs_no_separate_query_a_minute_after_the_last_change(tmp_path, monkeypatch):
    answers = iter("abc")
    shared = Snapshot("settled", lambda: 600)
    shared.invalidate()
    now = time.time()
    assert [shared.read(lambda: next(answers), fresh=True) for _ in range(2)] == ["a", "b"]
    monkeypatch.setattr(time, "time", lambda: now + 61)
    shared.invalidate()
    monkeypatch.setattr(time, "time", lambda: now + 200)
    assert [shared.read(lambda: next(answers), fresh=True) for _ in range(3)] == ["c"] * 3


def test_an_answer_is_shared_until_it_is_old_or_the_queue_has_changed(tmp_path):
    answers = iter("abcde")
    long, none = Snapshot("test", lambda: 600), Snapshot("test", lambda: 0)
    assert [long.read(lambda: next(answers)) for _ in range(3)] == ["a", "a", "a"]
    long.invalidate()
    assert [long.read(lambda: next(answers)) for _ in range(2)] == ["b", "b"]
    assert long.read(lambda: next(answers), fresh=True) == "c"
    assert none.read(lambda: next(answers)) == "d"
    assert long.read(lambda: next(answers)) == "d"


@pytest.mark.parametrize("name", ["local", "jean-zay-v100"])
def test_several_nodes_without_gpus_are_refused(name, monkeypatch):
    with pytest.raises(UserError, match="nodes=2 with gpus=0: a job without GPUs is one process on one node"):
        allocate(site(name), make_request(5, gpus=0, nodes=2, account="abc"))


def test_a_launcher_as_text_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"launcher='torchrun': use one of Launcher\.SRUN, Launcher\.TORCHRUN"
    ):
        cluster.submit(["true"], site="local", launcher="torchrun")
