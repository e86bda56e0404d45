"""The end of a rank's process: the kernel's count of kills shows whether memory ran out."""

import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlo_lib.comm.deadlock.exit_status import MemoryKills, describe_exit
from dlo_lib.launch import RankFailure, run_ranks


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """A folder like a kernel's: one kill so far, a version 2 control group with a limit of 4 GiB."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1000\noom_kill 1\ndrop_pagecache 0\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job_7\n")
    (tmp_path / "sys/fs/cgroup/job_7").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/job_7/memory.max").write_text(f"{4 << 30}\n")
    return tmp_path


def test_a_kill_that_the_kernel_counted_means_out_of_memory(kernel):
    kills = MemoryKills(kernel)
    (kernel / "proc/vmstat").write_text("oom_kill 2\n")
    assert describe_exit(signal.SIGKILL, kills).startswith(
        "was killed by SIGKILL: out of memory (this job may use 4.0 GiB). Use smaller"
    )


def test_a_kill_that_the_kernel_did_not_count_means_another_cause(kernel):
    assert describe_exit(signal.SIGKILL, MemoryKills(kernel)).startswith(
        "was killed by SIGKILL, but memory did not run out"
    )


def test_without_a_count_the_message_asks_whether_memory_ran_out(tmp_path):
    kills = MemoryKills(tmp_path)
    assert kills.any() is None
    assert (
        describe_exit(signal.SIGKILL, kills)
        == describe_exit(signal.SIGKILL)
        == "was killed by SIGKILL (out of memory?)"
    )


def test_other_signals_do_not_mention_memory(kernel):
    kills = MemoryKills(kernel)
    (kernel / "proc/vmstat").write_text("oom_kill 2\n")
    assert describe_exit(signal.SIGSEGV, kills) == "was killed by SIGSEGV"


def test_limits_of_both_versions_of_control_groups_are_found(kernel):
    assert MemoryKills(kernel).limit() == 4 << 30
    (kernel / "sys/fs/cgroup/job_7/memory.max").write_text("max\n")
    assert MemoryKills(kernel).limit() is None
    (kernel / "proc/self/cgroup").write_text("5:memory,hugetlb:/slurm/job_8\n0::/\n")
    (kernel / "sys/fs/cgroup/memory/slurm/job_8").mkdir(parents=True)
    (kernel / "sys/fs/cgroup/memory/slurm/job_8/memory.limit_in_bytes").write_text(f"{1 << 30}\n")
    assert MemoryKills(kernel).limit() == 1 << 30


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group that may use 64 MiB."""
    versions = [
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ]
    for root, name in versions:
        group = root / f"dlo-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(64 << 20))
        except OSError:
            group.rmdir()
            continue
        yield group
        deadline = time.monotonic() + 10
        while group.exists() and time.monotonic() < deadline:
            try:
                group.rmdir()
            except OSError:  # the kernel still removes the killed process
                time.sleep(0.05)
        return
    pytest.skip("NOT TESTED HERE: a process that runs out of memory (making a control group needs root)")


def fills_its_memory(group: str) -> None:
    x = torch.ones(1)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
        kept = []
        while True:
            kept.append(bytearray(b"x" * (1 << 20)))
    dist.all_reduce(x)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_that_runs_out_of_memory_is_named_with_a_table_of_the_others(small_group, ranks):
    with pytest.raises(RankFailure) as caught:
        run_ranks(fills_its_memory, ranks, str(small_group), timeout=60)
    message = str(caught.value)
    assert message.startswith("rank 1 was killed by SIGKILL: out of memory")
    assert "  1     has died" in message
    assert "test_exit_status.py, line" in message


def asks_for_too_much() -> None:
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 34, resource.RLIM_INFINITY))
        bytearray(1 << 36)
    dist.barrier()


def test_a_refused_allocation_is_an_ordinary_error():
    with pytest.raises(RankFailure, match=r"^rank 1 raised MemoryError"):
        run_ranks(asks_for_too_much, 2, timeout=60)
