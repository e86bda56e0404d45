"""Jobs on a real SLURM: training on several nodes, sweeps, cancelling, resuming, and finding jobs again."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.cluster import Job, JobFailed, State
from dlo_lib.cluster.run import records
from dlo_lib.cluster.site.description import site
from dlo_lib.cluster.slurm import commands
from dlo_lib.launch import run_ranks
from dlo_lib.train import TrainConfig, newest, read_metrics, train

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"data": "arithmetic", "seq": 32, "steps": 6, "lr": 1e-2, "warmup": 2, "log_every": 1}
V100 = {"site": "jean-zay-v100", "account": "abc", "time": 5}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short waits, few threads, and a separate folder to submit from."""
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def shell(text: str) -> list[str]:
    return ["bash", "-c", text]


def until(condition: Callable[[], bool], job: Job) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < 120, f"{job}\n{job.logs()}"
        time.sleep(0.1)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SLURM know no job, as some minutes after their end."""
    for question in ("queue", "controller"):
        monkeypatch.setattr(commands, question, lambda number, mark: {})


def in_queue() -> str:
    return subprocess.run(["squeue", "-h", "-o", "%j"], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_two_nodes_of_two_ranks_learn_what_one_process_learns(jean_zay, warm_python, tmp_path):
    job = cluster.submit("dlo_lib.train", {**SMALL, "batch": 2, "parallel": "ddp"}, gpus=4, nodes=2, **V100)
    twin = train(TrainConfig(**SMALL, batch=8, out=tmp_path / "twin"))
    job.wait(timeout=300)
    assert "ddp on 4 x cpu" in job.logs()
    losses = [line.loss for line in job.metrics()]
    assert losses == pytest.approx([line.loss for line in read_metrics(twin.out)], abs=1e-5)
    assert len(losses) == 6


def of_square(n: int) -> tuple[int, str]:
    print(f"the square of {n}")
    return n * n, os.environ["SLURM_JOB_PARTITION"]


def test_a_sweep_over_a_function_is_one_array_with_a_result_for_each_element(jean_zay, warm_python):
    job = cluster.submit(of_square, sweep={"n": [2, 3]}, **V100)
    assert [status.element for status in job.status()] == [0, 1]
    assert job.wait(timeout=600).results() == [(4, "gpu_p13"), (9, "gpu_p13")]
    assert "the square of 3" in job.logs(1)
    assert len(job.record.turns) == 1


def test_ranks_of_a_function_are_one_process_group(jean_zay, warm_python):
    def ranks(value: float) -> tuple[float, str]:
        import socket

        import torch.distributed as dist

        total = torch.tensor(value + dist.get_rank())
        dist.all_reduce(total)
        return total.item(), socket.gethostname()

    job = cluster.submit(ranks, {"value": 1.0}, gpus=2, nodes=2, **V100)
    assert job.wait(timeout=600).result() == (3.0, "v1")


def test_the_traceback_of_a_function_starts_in_its_code(jean_zay):
    def broken() -> None:
        raise ValueError("no such batch")

    job = cluster.submit(broken, **V100)
    with pytest.raises(
        JobFailed,
        match=(
            r"broken-\w+: element 0 failed with status 1; 1 of 1 did not complete.*(?s:.)*ValueError: no such"
        ),
    ):
        job.wait(timeout=600)
    assert "dlo_lib" not in job.logs().partition("Traceback")[2]
    with pytest.raises(JobFailed, match="rank 0 raised ValueError: no such batch"):
        job.result()


def test_the_same_call_finds_the_same_job(jean_zay, tmp_path):
    (tmp_path / "work.sh").write_text("echo done >> runs.txt")
    first = cluster.submit("work.sh", **V100).wait(timeout=600)
    again = cluster.submit("work.sh", **V100)
    assert again.folder == first.folder
    assert again.done
    (tmp_path / "work.sh").write_text("echo done  >> runs.txt")
    assert cluster.submit("work.sh", **V100).folder != first.folder, "another script is another job"
    assert cluster.submit("work.sh", ["more"], **V100).folder != first.folder


KERNEL = """
import os, signal
from dlo_lib import cluster
job = cluster.submit(["bash", "-c", "sleep 3; echo $SLURM_JOB_ID"], \
site="jean-zay-v100", account="abc", time=5)
print(job.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_outlives_its_kernel_and_is_found_by_the_next(jean_zay):
    said = subprocess.run(
        [sys.executable, "-c", KERNEL],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert said.returncode == -9, said.stderr
    job = cluster.submit(["bash", "-c", "sleep 3; echo $SLURM_JOB_ID"], **V100)
    assert str(job.folder) in said.stdout
    assert not job.done
    assert job.wait(timeout=600).logs().split() == [str(job.record.turns[0].number)]
    assert cluster.job(str(job.record.turns[0].number)).folder == cluster.job(job.name).folder == job.folder


def _submit(gate) -> str:
    gate.wait()
    return str(cluster.submit(["bash", "-c", "exit 0"], name="together", **V100).record.turns)


def test_two_processes_at_once_submit_one_job(jean_zay):
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager, context.Pool(2) as pool:
        gate = manager.Barrier(2)
        turns = pool.map(_submit, [gate, gate])
    assert turns[0] == turns[1]
    assert len(cluster.jobs()) == 1


def test_a_submission_whose_number_was_lost_is_found_in_the_queue(jean_zay, monkeypatch):
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(records, "replace_turn", killed)
        with pytest.raises(KeyboardInterrupt):
            cluster.submit(shell("sleep 4"), **V100)
    job = cluster.submit(shell("sleep 4"), **V100)
    assert in_queue().split().count(job.name) == 1
    job.cancel()


def test_a_wrong_account_is_refused_before_the_job_is_queued(jean_zay):
    with pytest.raises(UserError, match=r'account "xyz@v100" is not one of yours: use .*abc@v100'):
        cluster.submit(shell("true"), name="refused", **(V100 | {"account": "xyz"}))
    with pytest.raises(UserError, match='account "abc@a100" is not valid on jean-zay-v100: use "abc@v100"'):
        cluster.submit(shell("true"), name="refused", **(V100 | {"account": "abc@a100"}))
    assert "refused" not in in_queue()
    assert cluster.jobs() == []


def test_a_job_that_slurm_refuses_leaves_no_record(jean_zay):
    with pytest.raises(UserError, match="SLURM refuses the job: .*reservation"):
        cluster.submit(shell("true"), reservation="does-not-exist", **V100)
    assert cluster.jobs() == []


def test_cancelled_elements_run_again_and_completed_ones_do_not(jean_zay, tmp_path):
    (tmp_path / "part.sh").write_text('echo "turn of $2" >> log; [ "$2" = 0 ] || [ -e go ] || sleep 100')
    job = cluster.submit("part.sh", sweep={"n": [0, 1]}, **V100)
    until(lambda: [status.state for status in job.status()] == [State.COMPLETED, State.RUNNING], job)
    with pytest.raises(UserError, match="is not over: cancel.. it first"):
        job.forget()
    job.cancel()
    until(lambda: job.done, job)
    assert [status.state for status in job.status()] == [State.COMPLETED, State.CANCELLED]
    with pytest.raises(JobFailed, match="element 1 cancelled"):
        job.wait()
    (tmp_path / "go").touch()
    job.resubmit().wait(timeout=600)
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["turn of 0", "turn of 1", "turn of 1"]
    with pytest.raises(UserError, match="has completed; nothing is resubmitted"):
        job.resubmit()
    job.forget()
    assert cluster.jobs() == []


def test_a_lost_element_can_be_requeued(jean_zay, tmp_path):
    (tmp_path / "flaky.sh").write_text(
        'echo x >> "n$DLO_ELEMENT"; [ "$DLO_ELEMENT" = 0 ] || [ -e "again" ] || sleep 100'
    )
    job = cluster.submit("flaky.sh", sweep=[{}, {"n": 1}], **V100)
    until(lambda: (tmp_path / "n1").exists(), job)
    (tmp_path / "again").touch()
    job.requeue(1)
    job.wait(timeout=600)
    assert [(tmp_path / name).read_text() for name in ("n0", "n1")] == ["x\n", "x\nx\n"]
    assert len(job.record.turns) == 1


def test_a_job_starts_after_another_has_completed_and_not_after_one_that_failed(jean_zay):
    first = cluster.submit(shell("sleep 2; touch first"), name="first", **V100)
    second = cluster.submit(shell("test -e first"), name="second", after=first, **V100)
    broken = cluster.submit(shell("exit 3"), name="broken", **V100)
    never = cluster.submit(shell("touch never"), name="never", after=broken, **V100)
    second.wait(timeout=600)
    until(lambda: never.done, never)
    assert never.status()[0].state is State.CANCELLED
    assert not Path("never").exists()


def test_awaiting_a_job_leaves_the_kernel_free(jean_zay):
    job = cluster.submit(shell("sleep 2; echo over"), **V100)

    async def kernel() -> int:
        waiting = asyncio.ensure_future(_awaited(job))
        ticks = 0
        while not waiting.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert (await waiting).done
        return ticks

    async def _awaited(job: Job) -> Job:
        return await job

    assert asyncio.run(kernel()) > 20
    assert list(job.follow()) == ["over\n"]


def test_a_wait_continues_while_the_controller_does_not_answer(jean_zay, monkeypatch):
    job = cluster.submit(shell("true"), name="patience", **V100)
    real, asked = commands.queue, []

    def queue(number: int, mark: commands.JobMark) -> dict:
        asked.append(number)
        if len(asked) < 3:
            raise commands.NoAnswer("squeue does not answer")
        return real(number, mark)

    monkeypatch.setattr(commands, "queue", queue)
    job.wait(timeout=600)
    assert len(asked) >= 3


WAITS_FOR_ITS_SIGNAL = """
import os, sys, threading
from dlo_lib.base import stop
from dlo_lib.train import loop
from dlo_lib.train.__main__ import main

HANDLES_STOP = True

told, steps, real_note, real_step = threading.Event(), 0, stop.StopRequests._note, loop.train_step

def note(self, number, frame):
    real_note(self, number, frame)
    told.set()

def step(*arguments, **keywords):
    global steps
    steps += 1
    if steps == 4 and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        while not told.wait(0.1):
            pass
    return real_step(*arguments, **keywords)

stop.StopRequests._note, loop.train_step = note, step
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_stopped_by_the_time_limit_resumes_and_reaches_the_same_weights(
    jean_zay, warm_python, tmp_path, monkeypatch
):
    monkeypatch.setenv("DLO_POLL_S", "3")  # the job needs minutes, and each poll 30 ms of CPU time
    (tmp_path / "program.py").write_text(WAITS_FOR_ITS_SIGNAL)
    given = {**SMALL, "steps": 9, "batch": 2, "parallel": "ddp", "resume": True, "out": tmp_path / "run"}
    job = cluster.submit(
        "program.py", given, gpus=2, nodes=2, requeue=True, warning=40, **(V100 | {"time": 2})
    )
    undisturbed = TrainConfig(**(given | {"out": tmp_path / "undisturbed", "resume": False}))
    run_ranks(train, 2, undisturbed)
    job.wait(timeout=400)
    said = [line for line in job.logs().splitlines() if re.search(r"\bstop|error|signal|Traceback", line)]
    assert [line for line in said if "DUE TO JOB REQUEUE" not in line] == said[:1], "a stop is one line"
    assert "stopped by SIGUSR1 after step 5" in said[0]
    assert "finished at step 9" in job.logs()
    assert len(job.record.turns) == 1, "the same job was requeued"
    weights = [load_file(newest(out).folder / "model.safetensors") for out in (job.out(), undisturbed.out)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert [line.step for line in job.metrics()] == list(range(1, 10))


def test_a_run_that_stopped_before_its_limit_has_not_completed(jean_zay, tmp_path):
    job = cluster.submit(["bash", "-c", "[ -e again ] || exit 75"], **V100)
    until(lambda: job.done, job)
    assert job.state == "stopped"
    assert [(status.state, status.reason) for status in job.status()] == [(State.STOPPED, "")]
    (tmp_path / "again").touch()
    job.resubmit().wait(timeout=600)


def test_elements_of_a_sweep_do_not_share_a_folder(jean_zay):
    with pytest.raises(UserError, match="the elements of a sweep cannot share one --out: leave it out"):
        cluster.submit("dlo_lib.train", {"out": "runs/one"}, sweep={"lr": [1, 2]}, **V100)
    job = cluster.submit(shell("true"), sweep={"out": ["here", "there"]}, **V100)
    assert [job.out(element) for element in (0, 1)] == [Path.cwd() / "here", Path.cwd() / "there"]


def test_another_cluster_needs_a_file_and_no_accounting(elsewhere, other_site, tmp_path):
    with pytest.raises(UserError, match="3 GPUs do not fill nodes of 2 on other: use 2"):
        cluster.submit(shell("true"), gpus=3, site=other_site)
    (tmp_path / "where.sh").write_text(
        'hostname; echo "$SLURM_JOB_PARTITION $SLURM_JOB_NUM_NODES"; exit "$2"'
    )
    job = cluster.submit("where.sh", gpus=4, sweep={"code": [0, 5]}, site=other_site, time=5)
    until(lambda: job.done, job)
    assert [(status.state, status.exit_code) for status in job.status()] == [
        (State.COMPLETED, 0),
        (State.FAILED, 5),
    ]
    assert job.logs(0).splitlines() == ["big-1", "training 2"]
    assert commands.history(job.record.turns[0].number) == {}


def test_the_end_of_a_job_is_known_when_the_queue_no_longer_lists_it(elsewhere, other_site, monkeypatch):
    job = cluster.submit(shell("exit 4"), site=other_site, time=5)
    until(lambda: commands.queue(job.record.turns[0].number)[0].state.over, job)
    forget(monkeypatch)
    assert [(status.state, status.exit_code) for status in job.status()] == [(State.FAILED, 4)]
    assert site(other_site).name == job.record.site == "other"


def test_the_accounting_is_asked_about_elements_without_an_exit_status(jean_zay, monkeypatch):
    job = cluster.submit(shell("kill -9 $PPID"), **V100)
    until(lambda: commands.queue(job.record.turns[0].number)[0].state.over, job)
    forget(monkeypatch)
    until(lambda: bool(commands.history(job.record.turns[0].number)), job)
    assert job.status()[0].state is State.FAILED


def test_a_home_with_little_room_gives_a_warning(jean_zay, tmp_path, monkeypatch, capsys):
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("WORK", str(tmp_path / "work"))
    cluster.submit(shell("true"), name="elsewhere", **V100)
    assert "where jean-zay-v100 may have little room: set DLO_HOME=$WORK/dlo" in capsys.readouterr().out
    monkeypatch.setenv("DLO_HOME", str(tmp_path / "work" / "dlo"))
    cluster.submit(shell("true"), name="there", **V100)
    assert "little room" not in capsys.readouterr().out
