"""Without SLURM the same call runs on this machine: one after another, with the same handle.

No process is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.cluster import JobFailed, State
from dlo_lib.cluster.slurm import commands

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is no cluster, even if SLURM's commands are installed."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "DLO_SITE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(commands, "is_available", lambda: False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DLO_POLL_S", "0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


def shell(text: str) -> list[str]:
    return ["bash", "-c", text]


def until(condition) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < 120
        time.sleep(0.05)


def test_the_same_call_runs_on_this_machine_with_a_notice(capsys):
    job = cluster.submit(
        shell('echo "$1"'), sweep={"n": [5, 6]}, gpus=16, nodes=4, site="jean-zay-v100", account="abc"
    )
    said = (
        "no SLURM here: this machine runs the job while this process lives, "
        "one job after another (4 of 16 ranks)\n"
        f"submitted job {job.name}\n"
    )
    assert capsys.readouterr().out == said
    job.wait(timeout=600)
    assert job.record.site == "local"
    assert [job.logs(element) for element in (0, 1)] == ["5\n", "6\n"]


def test_a_request_beyond_the_site_is_refused_on_this_machine_too():
    with pytest.raises(UserError, match="5 GPUs do not fill nodes of 4"):
        cluster.submit(shell("true"), gpus=5, site="jean-zay-v100")
    assert cluster.jobs() == []


def test_a_dry_run_shows_the_script_of_the_site_and_submits_nothing():
    script = cluster.submit(shell("true"), gpus=8, site="jean-zay-h100", account="abc", dry_run=True)
    assert "#SBATCH --account=abc@h100" in script
    assert repr(script) == str(script), "a notebook shows the text"
    assert cluster.jobs() == []


def test_a_training_writes_checkpoints_after_minutes_unless_the_user_chooses(monkeypatch):
    def script(given: dict[str, object], **more: object) -> str:
        return str(cluster.submit("dlo_lib.train", given, site="local", dry_run=True, **more))

    assert "--checkpoint-minutes 10)" in script({"steps": 3})
    assert "--checkpoint-minutes 10)" not in script({"checkpoint_every": 50})
    assert "--checkpoint-minutes 10)" not in script({}, sweep={"checkpoint_minutes": [1, 2]})


def test_elements_and_jobs_run_one_after_another(tmp_path):
    overlap = shell("mkdir alone && sleep 0.3 && rmdir alone")
    jobs = [cluster.submit(overlap, sweep=[{"a": 1}, {"a": 2}], name=name) for name in ("one", "two")]
    for job in jobs:
        job.wait(timeout=600)


def test_a_function_runs_on_as_many_ranks_as_it_asks_for():
    def ranks(value: int) -> tuple[int, int]:
        import torch
        import torch.distributed as dist

        total = torch.tensor(value + dist.get_rank())
        dist.all_reduce(total)
        return int(total), dist.get_world_size()

    assert cluster.submit(ranks, {"value": 10}, gpus=2).wait(timeout=600).result() == (21, 2)


def test_after_a_failure_the_rest_still_runs():
    job = cluster.submit(shell('echo "this is $1"; exit "$1"'), sweep={"code": [4, 0]})
    with pytest.raises(
        JobFailed, match=r"element 0 failed with status 4; 1 of 2 did not complete(?s:.)*this is 4"
    ):
        job.wait(timeout=600)
    assert [status.state for status in job.status()] == [State.FAILED, State.COMPLETED]


def test_cancel_ends_everything_that_a_job_started(tmp_path):
    job = cluster.submit(
        shell("echo $$ > pid; (setsid sleep 600 & echo $! > detached); sleep 600"), sweep=[{"a": 1}, {"a": 2}]
    )
    until(lambda: (tmp_path / "detached").exists() and (tmp_path / "detached").read_text().strip())
    pids = [int((tmp_path / name).read_text()) for name in ("pid", "detached")]
    job.cancel()
    assert [status.state for status in job.status()] == [State.CANCELLED, State.CANCELLED]
    assert not any(map(psutil.pid_exists, pids))


COMMAND = "echo $$ >> pids; [ -e go ] || { setsid sleep 600 & echo $! >> pids; sleep 600; }"
KERNEL = """
import sys, time
from dlo_lib import cluster
from dlo_lib.cluster.slurm import commands
commands.is_available = lambda: False
job = cluster.submit(["bash", "-c", sys.argv[1]], sweep=[{"a": 1}, {"a": 2}])
print(job.record.turns[0].number, flush=True)
time.sleep(600)
"""


def test_no_process_outlives_the_kernel_and_the_same_call_resumes(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL, COMMAND], env=environment, stdout=subprocess.PIPE, text=True
    )
    # After the notice.
    runner = psutil.Process(next(int(line) for line in kernel.stdout if line.strip().isdigit()))
    pids = tmp_path / "pids"
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    family = [
        runner,
        *runner.children(recursive=True),
        *(psutil.Process(int(pid)) for pid in pids.read_text().split()),
    ]
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    lost = cluster.jobs()[0]
    assert [status.state for status in lost.status()] == [State.LOST, State.LOST]
    (tmp_path / "go").touch()
    again = cluster.submit(shell(COMMAND), sweep=[{"a": 1}, {"a": 2}])
    assert again.folder == lost.folder
    again.wait(timeout=600)


def test_a_job_starts_after_another_has_completed(tmp_path):
    first = cluster.submit(shell("sleep 0.5; touch first"), name="first")
    second = cluster.submit(shell("test -e first"), name="second", after=first)
    failed = cluster.submit(shell("exit 3"), name="failed")
    never = cluster.submit(shell("touch never"), name="never", after=failed)
    second.wait(timeout=600)
    until(lambda: never.done)
    assert never.status()[0].state is State.CANCELLED
    assert not (tmp_path / "never").exists()


def test_an_unknown_job_offers_the_nearest():
    job = cluster.submit(shell("true"), name="nightly").wait(timeout=600)
    assert cluster.job("nightly").folder == job.folder
    with pytest.raises(UserError, match='unknown job "weekly"'):
        cluster.job("weekly")
