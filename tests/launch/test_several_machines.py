"""Ranks on several machines, each with a separate watcher: the first error is named, and a deadlock ends.

Both machines are this one. No launcher ends the ranks, so the watchers have to.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from dlo_lib.base import rank_failures
from dlo_lib.comm.deadlock.node import EXIT_STUCK
from dlo_lib.launch import Place
from dlo_lib.launch.explainer import shared_folder

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900
PROGRAM = """
import sys, torch, torch.distributed as dist
from dlo_lib.launch import explained, init_process_group, place

here, how = place(), sys.argv[1]
with explained(here), init_process_group(here):
    x = torch.ones(4)
    dist.all_reduce(x)
    if here.rank == 1 and how == "raises":
        raise ValueError("a bad batch")
    if here.rank == 0:
        dist.all_reduce(x)
"""


def run(folder: Path, how: str) -> list[tuple[int, str]]:
    """Return the exit status and the output of each rank."""
    (folder / "program.py").write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "DLO_RANKS"))}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    own |= {"PYTHONPATH": str(ROOT), "LOCAL_RANK": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(folder / "program.py"), how],
            env={**own, "RANK": str(rank), "GROUP_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    return [(process.returncode, output) for process, output in zip(ranks, outputs)]


def recorded() -> Path:
    """Return the folder of the only run of this test."""
    (folder,) = rank_failures.runs(Path(os.environ["DLO_HOME"]) / "ranks")
    return folder


def test_an_error_on_one_machine_is_named_and_is_no_dead_lock_of_the_others(tmp_path):
    (_, first), (status, second) = run(tmp_path, "raises")
    assert status == 1
    assert "ValueError: a bad batch" in second
    assert "RANK 1 raised ValueError: a bad batch." in first
    assert "raised an error" in first, "the table has the rank of the other machine"
    assert "DEADLOCK" not in first + second
    cause, *rest = rank_failures.failures(recorded())
    assert (cause.rank, cause.headline) == (1, "raised ValueError: a bad batch")
    assert cause.traceback.startswith("Traceback (most recent call last):\n  File")
    assert "dlo_lib" not in cause.traceback
    assert [(report.rank, report.is_consequence) for report in rest] == [(0, True)]


def test_a_dead_lock_ends_with_one_table_of_both_machines(tmp_path):
    """Waits on both machines are in ``tests/cluster/run/test_first_failure.py``."""
    (status, first), (_, second) = run(tmp_path, "leaves")
    assert status == EXIT_STUCK, first + second
    assert (first + second).count("DEADLOCK") == 1
    assert first.count("program.py, line ") == 2, "one line for each rank"
    early = "rank 1 (called destroy_process_group|returned) after 1 call on it while the others are at call 2"
    assert re.search(early, first)
    assert rank_failures.verdict(recorded()).startswith("DEADLOCK")


def test_runs_outside_jobs_are_forgotten_after_a_month(tmp_path):
    for name, days in (("old", 31), ("new", 29)):
        (tmp_path / name).mkdir()
        rank_failures.record_verdict(tmp_path / name, "DEADLOCK: ...")
        then = time.time() - days * 24 * 3600
        os.utime(tmp_path / name, (then, then))
    rank_failures.forget_old_runs(tmp_path)
    assert [run.name for run in rank_failures.runs(tmp_path)] == ["new"]
    rank_failures.forget_old_runs(tmp_path / "none")


def test_runs_share_a_folder_only_with_their_ranks(tmp_path):
    alone, split = (Place(0, 0, 2, local, torch.device("cpu"), "gloo", "slurm") for local in (2, 1))
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert shared_folder(job, alone) is None
    folder = shared_folder({**job, "DLO_RANKS": str(tmp_path)}, alone)
    assert folder.parent == tmp_path
    assert shared_folder(job, split).parent == Path(os.environ["DLO_HOME"]) / "ranks"
    assert shared_folder({**job, "SLURM_NODEID": "1"}, split) == shared_folder(job, split)
    others = [{"SLURM_JOB_ID": "8"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}]
    assert len({shared_folder({**job, **other}, split) for other in ({}, *others)}) == 4
