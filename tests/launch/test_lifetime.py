"""A rank is a new process with the caller's state, and none outlives its call, its caller or its server."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jupyter_client
import psutil
import pytest
import torch
import torch.distributed as dist

from dlo_lib.launch import RankFailure, run_ranks
from tests.base.test_huge_pages import allowed


def rank_pids() -> tuple[int, int]:
    return os.getpid(), os.getppid()


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while alive := [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.02)


def test_random_states_are_equal_at_the_start_of_all_ranks_and_calls():
    def draw() -> tuple:
        import numpy

        return torch.rand(1).item(), random.random(), numpy.random.rand()

    assert len(set(run_ranks(draw, 2) + run_ranks(draw, 2))) == 1


def test_a_rank_has_its_share_of_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert run_ranks(torch.get_num_threads, 1) == [cores]
    assert run_ranks(torch.get_num_threads, 4) == [max(1, cores // 4)] * 4


def test_the_first_optimizer_of_a_rank_imports_nothing():
    def modules_imported() -> int:
        before = set(sys.modules)
        torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=True)
        return len(set(sys.modules) - before)

    assert run_ranks(modules_imported, 1) == [0]


def huge_pages_of_the_server() -> int:
    with open(f"/proc/{os.getppid()}/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("AnonHugePages"))


def test_a_server_that_waits_collapses_its_memory_into_huge_pages():
    if not allowed():
        pytest.skip(
            "NOT TESTED HERE: this kernel collapses no pages on request (it is older than 6.1, or set so)"
        )
    for _ in range(500):  # one page of 2 MiB at least between two launches
        if run_ranks(huge_pages_of_the_server, 1)[0] > 40 << 20:
            return
        time.sleep(0.01)
    pytest.fail("a fork copies one entry of the page table for each page of 4 KiB")


def test_exit_functions_of_a_rank_run(tmp_path, capsys):
    def register() -> None:
        import atexit
        import tempfile

        global kept
        kept = tempfile.TemporaryDirectory(dir=tmp_path)
        atexit.register(print, "good-bye")

    run_ranks(register, 1)
    assert capsys.readouterr().out == "[rank 0] good-bye\n"
    assert list(tmp_path.iterdir()) == []


def test_a_progress_bar_is_shown_in_its_last_state(capsys):
    def bar() -> None:
        for percent in (10, 50, 100):
            print(f"\r{percent} %", end="")
        print()

    run_ranks(bar, 1)
    assert capsys.readouterr().out == "[rank 0] 100 %\n"


def test_a_crash_shows_its_stack():
    def crash() -> None:
        import ctypes

        if dist.get_rank() == 1:
            ctypes.string_at(0)
        dist.barrier()

    with pytest.raises(RankFailure) as caught:
        run_ranks(crash, 2)
    assert str(caught.value).startswith(
        "rank 1 was killed by SIGSEGV\n\nIt was here (most recent call last):\n"
    )
    assert "in crash\n    ctypes.string_at(0)" in str(caught.value)
    assert "dlo_lib/launch" not in str(caught.value)


def test_ranks_that_fail_because_of_an_error_in_backward_are_not_named():
    def backward() -> None:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        if dist.get_rank() == 2:
            os._exit(7)
        model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(RankFailure, match="^rank 2 ended its process with status 7") as caught:
        run_ranks(backward, 3)
    assert caught.value.rank == 2


def test_a_broken_argument_list_names_the_function():
    def two(a: int, b: int) -> None:
        pass

    with pytest.raises(
        RankFailure, match=r"^rank 0 raised TypeError: .*two\(\) missing 1 required positional argument: 'b'"
    ):
        run_ranks(two, 2, 1)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_stops_the_ranks_and_the_next_call_works(tmp_path):
    main = threading.get_ident()

    def wait_for_ever() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(1000)

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(wait_for_ever, 2)
    thread.join()
    assert_gone([int(file.name) for file in tmp_path.iterdir()])
    assert run_ranks(dist.get_rank, 2) == [0, 1]


def test_no_process_no_file_and_no_descriptor_is_left_by_calls_that_end_or_fail():
    def fail() -> None:
        raise ValueError("enough")

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    ((rank, server),) = run_ranks(rank_pids, 1)
    before = descriptors()
    for _ in range(3):
        run_ranks(rank_pids, 2)
        with pytest.raises(RankFailure):
            run_ranks(fail, 2)
    assert descriptors() == before
    assert psutil.Process(server).children() == []
    assert_gone([rank])


def test_ranks_end_with_a_killed_server_which_is_replaced(tmp_path):
    def kill_the_server() -> None:
        (tmp_path / str(os.getpid())).touch()
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises(RankFailure, match="the process that forks the ranks was killed"):
        run_ranks(kill_the_server, 2)
    assert_gone([int(file.name) for file in tmp_path.iterdir()])
    assert run_ranks(dist.get_rank, 2) == [0, 1]


def test_ranks_end_with_a_killed_parent_even_if_a_fork_of_it_lives(tmp_path):
    """A worker of a data loader, forked from the notebook's kernel, holds a copy of
    every socket of its parent."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            from pathlib import Path
            from dlo_lib.launch import run_ranks

            folder = Path(sys.argv[1])
            run_ranks(os.getpid, 1)
            if (fork := os.fork()) == 0:
                time.sleep(1000)
            (folder / "fork").write_text(str(fork))

            def work():
                (folder / f"{os.getpid()}-{os.getppid()}").touch()
                time.sleep(1000)

            run_ranks(work, 1)
            """
        )
    )
    folder = tmp_path / "pids"
    folder.mkdir()
    parent = subprocess.Popen([sys.executable, str(script), str(folder)])
    pids = pids_in(folder, 1)
    parent.kill()
    parent.wait()
    fork = int((folder / "fork").read_text())
    try:
        assert_gone(pids)
        assert psutil.pid_exists(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_a_forked_process_starts_a_separate_server():
    ((_, server),) = run_ranks(rank_pids, 1)
    read, write = os.pipe()
    if (fork := os.fork()) == 0:
        try:
            ((_, other),) = run_ranks(rank_pids, 1)
            os.write(write, str(other).encode())
        finally:
            os._exit(0)
    os.waitpid(fork, 0)
    assert int(os.read(read, 32)) != server
    assert run_ranks(rank_pids, 1)[0][1] == server


def test_ranks_and_server_end_with_a_restarted_kernel(tmp_path):
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel()
    try:
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=600)
        client.execute(
            textwrap.dedent(
                f"""
                import os, time
                from pathlib import Path
                from dlo_lib.launch import run_ranks

                def work():
                    Path({str(tmp_path)!r}, f"{{os.getpid()}}-{{os.getppid()}}").touch()
                    time.sleep(1000)

                run_ranks(work, 2)
                """
            )
        )
        pids = pids_in(tmp_path, 2)
        manager.restart_kernel(now=True)
        assert_gone(pids)
        client.stop_channels()
    finally:
        manager.shutdown_kernel(now=True)


def pids_in(folder: Path, ranks: int) -> list[int]:
    """Return the processes of the ranks that left a file in the folder, and of their server."""
    deadline = time.monotonic() + 300
    while len(names := [file.name for file in folder.iterdir() if "-" in file.name]) < ranks:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return sorted({int(pid) for name in names for pid in name.split("-")})
