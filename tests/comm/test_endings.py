"""How a rank's process ended: a kill for lack of memory is told from any other, by the kernel's own count."""

import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlo_lib.comm.endings import MemoryKills, describe_exit
from dlo_lib.launch import RankFailure, run_ranks


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """Where this kernel's files are: one kill so far, in a control group of version 2 with a limit of 4 GiB."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1000\noom_kill 1\ndrop_pagecache 0\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job_7\n")
    (tmp_path / "sys/fs/cgroup/job_7").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/job_7/memory.max").write_text(f"{4 << 30}\n")
    return tmp_path


def test_a_kill_that_the_kernel_counted_was_for_lack_of_memory(kernel):
    kills = MemoryKills(kernel)
    (kernel / "proc/vmstat").write_text("oom_kill 2\n")
    assert describe_exit(signal.SIGKILL, kills).startswith("was killed by SIGKILL: out of memory (this job may use 4.0 GiB). Use smaller")


def test_a_kill_that_it_did_not_count_was_not(kernel):
    assert describe_exit(signal.SIGKILL, MemoryKills(kernel)).startswith("was killed by SIGKILL, not for lack of memory")


def test_where_the_kernel_does_not_count_it_is_a_question(tmp_path):
    kills = MemoryKills(tmp_path)
    assert kills.any() is None
    assert describe_exit(signal.SIGKILL, kills) == describe_exit(signal.SIGKILL) == "was killed by SIGKILL (out of memory?)"


def test_other_signals_have_nothing_to_do_with_memory(kernel):
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
    versions = [(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")]
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
            except OSError:  # the killed one is still being taken down
                time.sleep(0.05)
        return
    pytest.skip("NOT TESTED HERE: a real lack of memory (making a control group needs root)")


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
def test_a_rank_that_fills_its_memory_is_named_with_what_the_others_did(small_group, ranks):
    with pytest.raises(RankFailure) as caught:
        run_ranks(fills_its_memory, ranks, str(small_group), timeout=60)
    message = str(caught.value)
    assert message.startswith("rank 1 was killed by SIGKILL: out of memory")
    assert "  1     has died" in message
    assert "test_endings.py, line" in message


def asks_for_too_much() -> None:
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 34, resource.RLIM_INFINITY))
        bytearray(1 << 36)
    dist.barrier()


def test_a_request_that_is_refused_is_an_error_of_its_own():
    with pytest.raises(RankFailure, match=r"^rank 1 raised MemoryError"):
        run_ranks(asks_for_too_much, 2, timeout=60)
