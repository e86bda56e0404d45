"""The virtual clusters of the tests work, and they end with the last process that uses them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.fixtures import ELSEWHERE

ROOT = Path(__file__).resolve().parents[2]
USER = """
import sys, time
from pathlib import Path
from tests.cluster.fixtures import ELSEWHERE
from tests.cluster.virtual_slurm import attached
with attached(ELSEWHERE, Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(600)
"""


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def is_the_job(process: psutil.Process) -> bool:
    try:
        return process.cmdline() == ["sleep", "600"]
    except psutil.Error:  # it has ended in the meantime
        return False


def test_ranks_of_two_nodes_see_their_host_names_and_their_gpus(elsewhere):
    said = run(
        "srun",
        "-N2",
        "--ntasks-per-node=2",
        "--gres=gpu:2",
        "sh",
        "-c",
        "echo $(hostname) $SLURM_LOCALID $CUDA_VISIBLE_DEVICES",
    )
    assert sorted(said.splitlines()) == ["big-1 0 0,1", "big-1 1 0,1", "big-2 0 0,1", "big-2 1 0,1"]


def test_no_daemon_and_no_job_outlives_a_test_process_that_is_killed(tmp_path):
    if missing := ELSEWHERE.missing():
        pytest.skip(f"NOT TESTED HERE: a real SLURM ({missing})")
    user = subprocess.Popen(
        [sys.executable, "-c", USER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert user.stdout.readline() == "up\n"
        conf = tmp_path / "cluster" / "etc" / "slurm.conf"
        folder = conf.parents[1].resolve()
        run("env", f"SLURM_CONF={conf}", "sbatch", "--output=/dev/null", "--wrap=sleep 600")
        supervisor = psutil.Process(int((tmp_path / "up").read_text()))
        begun = time.monotonic()
        while not any(map(is_the_job, supervisor.children(recursive=True))):
            assert time.monotonic() - begun < 120, (folder / "log" / "slurmctld").read_text()
            time.sleep(0.05)
        family = [supervisor, *supervisor.children(recursive=True)]
    finally:
        user.kill()
        user.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert not folder.exists()
