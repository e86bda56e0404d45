"""Under torchrun, and without a launcher, ranks that wait forever are explained and stopped."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.comm.deadlock.detail import Explain
from dlo_lib.comm.deadlock.node import EXIT_STUCK
from dlo_lib.launch import Place
from dlo_lib.launch.explainer import socket_name

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from dlo_lib.launch import Explain, explained, init_process_group, place

here, how = place(), sys.argv[1]
print("process", os.getpid(), flush=True)
if how == "never joins" and here.rank != 1:
    time.sleep(1)  # rank 1 has ended before the other ranks start
with explained(here, Explain.from_environment()):
    if how == "never joins" and here.rank == 1:
        sys.exit(0)
    if how == "computes" and here.rank == 1:
        time.sleep(1)
    with init_process_group(here):
        x = torch.ones(4)
        for step in range(3):
            if here.rank == 1 and step == 2:
                if how == "skips":
                    break
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGSEGV)
                if how == "raises":
                    raise ValueError("a bad batch")
                if how == "computes":
                    sum(range(30_000_000))  # much longer than the rows must rest for a verdict
            dist.all_reduce(x)
print("done")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    return file


@pytest.fixture(autouse=True)
def not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name
        for name in os.environ
        if name in ("RANK", "WORLD_SIZE", "MASTER_PORT") or name.startswith("SLURM_")
    ]:
        monkeypatch.delenv(name)


def torchrun(ranks: int, file: Path, how: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program; return its output and errors, and check that no process of it is left."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(file),
        how,
    ]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )
    pids = [int(pid) for pid in re.findall(r"process (\d+)", done.stdout)]
    assert pids, f"the ranks did not start (exit status {done.returncode}):\n{done.stdout}\n{done.stderr}"
    assert_gone(pids)
    assert watching_processes() == []
    return done


def watching_processes() -> list[str]:
    """Return the processes of this test's ranks, which have its state folder in their environment."""
    mine, found = os.environ["DLO_HOME"], []
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            try:
                if (
                    "dlo_lib.comm.deadlock.node" in " ".join(process.info["cmdline"] or [])
                    and process.environ().get("DLO_HOME") == mine
                ):
                    found.append(str(process))
            except psutil.Error:
                continue
        if not found:
            break
        time.sleep(0.05)
    return found


def assert_gone(pids: list[int]) -> None:
    assert pids
    deadline = time.monotonic() + 10
    while alive := [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.02)


def test_a_rank_that_skips_a_collective_is_named_and_all_are_stopped_with_their_stacks_on_request(program):
    """Other tests see the table without stacks."""
    done = torchrun(3, program, "skips", DLO_EXPLAIN="stacks")
    assert done.returncode != 0
    assert f"exitcode  : {EXIT_STUCK}" in done.stderr
    assert done.stderr.count("DEADLOCK") == 1
    assert (
        "rank 1 called destroy_process_group after 2 calls on it while the others are at call 3"
        in done.stderr
    )
    for waits in (0, 2):
        assert re.search(
            rf"  {waits} +waits in all_reduce of float32\[4\] +3 on world +[\d.]+ s\n +program.py, line \d+: "
            r"dist.all_reduce\(x\)",
            done.stderr,
        )
    assert "done" not in done.stdout
    for rank in range(3):
        assert f"rank {rank} is here (most recent call last):" in done.stderr
    assert re.search(r"line \d+, in <module>\n    dist.all_reduce\(x\)", done.stderr)
    assert "dlo_lib/comm/waits.py" not in done.stderr


def test_a_rank_that_never_joins_is_named(program):
    done = torchrun(3, program, "never joins")
    both_there = "ranks 0 and 2 called it, rank 1 did not"
    # One rank waits, the other may not have started.
    one_there = "rank [02] called it, ranks (0 and 1|1 and 2) did not"
    assert re.search(
        f"init_process_group returns when every rank has called it: ({both_there}|{one_there})", done.stderr
    ), done.stderr
    assert done.stderr.count("DEADLOCK") == 1
    assert "is here (most recent call last)" not in done.stderr  # stacks are shown on request
    assert re.search(r"\n  1 +has finished", done.stderr)
    assert f"exitcode  : {EXIT_STUCK}" in done.stderr


def test_a_rank_that_joins_late_and_computes_for_long_raises_no_alarm(program):
    done = torchrun(2, program, "computes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    assert "DEADLOCK" not in done.stderr


def test_a_rank_that_dies_is_named_with_its_signal_and_a_table_of_the_others(program):
    done = torchrun(2, program, "dies")
    assert done.returncode != 0
    assert re.search(r"RANK 1 (was killed by SIGSEGV|ended without an error message)\.", done.stderr)
    assert "DEADLOCK" not in done.stderr


def test_torchrun_shows_the_error_of_the_rank(program):
    done = torchrun(2, program, "raises")
    assert done.returncode != 0
    assert "ValueError: a bad batch" in done.stderr


def test_it_can_be_switched_off(program):
    done = torchrun(2, program, "skips", DLO_EXPLAIN="off")
    assert "DEADLOCK" not in done.stderr
    assert done.returncode != 0
    assert f"exitcode  : {EXIT_STUCK}" not in done.stderr


def test_an_unknown_setting_names_those_that_are_known(monkeypatch):
    monkeypatch.setenv("DLO_EXPLAIN", "stack")
    with pytest.raises(UserError, match='unknown DLO_EXPLAIN "stack": did you mean stacks'):
        Explain.from_environment()


def test_other_jobs_and_other_machines_use_another_socket():
    here = Place(0, 0, 2, 2, torch.device("cpu"), "gloo", "slurm")
    environment = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    name = socket_name(environment, here)
    assert name == socket_name(environment, Place(1, 1, 2, 2, torch.device("cpu"), "gloo", "slurm"))
    others = [{"SLURM_JOB_ID": "8"}, {"SLURM_STEP_ID": "1"}, {"SLURM_NODEID": "1"}]
    assert len({name, *(socket_name({**environment, **other}, here) for other in others)}) == 4


def test_a_killed_job_leaves_no_watching_process(program):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(program),
        "computes",
    ]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert job.stdout is not None
    pids = [int(job.stdout.readline().split()[1]) for _ in range(2)]
    for pid in (*pids, job.pid):
        os.kill(pid, signal.SIGKILL)
    job.wait(60)
    assert_gone(pids)
    assert watching_processes() == []
