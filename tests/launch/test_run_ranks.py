"""run_ranks: results in order, readable output, failures that name their cause, and no process left."""

import errno
import importlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import nbclient
import nbformat
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from dlo_lib.base import temporary_folders
from dlo_lib.base.errors import UserError
from dlo_lib.launch import DeadLock, RankFailure, run_ranks
from dlo_lib.launch.meeting import LOOPBACK, MeetingFiles
from dlo_lib.live_ranks.transcript import Text


def rank_and_sum(offset: float = 0.0, *, scale: float = 1.0) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), scale * total.item() + offset


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_are_in_rank_order_and_ranks_communicate(world_size):
    total = world_size * (world_size + 1) / 2
    assert run_ranks(rank_and_sum, world_size, 1.0, scale=2.0) == [
        (rank, 2 * total + 1) for rank in range(world_size)
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED HERE: a store in a file (Linux only)")
def test_the_ranks_of_one_machine_meet_where_no_other_user_can_read_and_write():
    def meeting() -> tuple[str, int, int]:
        with socket.socket() as other_user:
            error = other_user.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        folder = os.path.dirname(store.path)
        return type(store).__name__, error, stat.S_IMODE(os.stat(folder).st_mode)

    left = {*Path(tempfile.gettempdir()).glob("dlo-meeting-*")}
    assert run_ranks(meeting, 2) == [("FileStore", errno.ECONNREFUSED, 0o700)] * 2
    mine = Path(tempfile.gettempdir()).glob(f"dlo-meeting-{os.getpid()}-*")
    assert left.issuperset(mine)


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED HERE: a store in a file (Linux only)")
def test_the_store_of_a_killed_launch_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temporary_folders, "NEW_SECONDS", -1)
    killed = tmp_path / "dlo-meeting-4194399-a"
    killed.mkdir()
    other = MeetingFiles(2, LOOPBACK)
    (kept,) = (folder for folder in tmp_path.iterdir() if folder != killed)
    files = MeetingFiles(2, LOOPBACK)
    files.remove()
    assert list(tmp_path.iterdir()) == [kept]
    other.remove()
    assert not any(tmp_path.iterdir())


def test_each_call_has_fresh_processes():
    def remember() -> tuple[int, bool]:
        seen = hasattr(torch, "left_over")
        torch.left_over = True
        return os.getpid(), seen

    first, second = run_ranks(remember, 2), run_ranks(remember, 2)
    assert len({pid for pid, _ in first + second}) == 4
    assert not any(seen for _, seen in first + second)


def test_what_ranks_imported_is_there_in_the_next_call(monkeypatch, tmp_path):
    """Of torch and of this library. A person's own module is imported anew, because it may have changed."""
    (tmp_path / "my_own.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    def found() -> list[bool]:
        names = ("dlo_lib.parallel.pipeline.draw", "torch.distributed.checkpoint", "my_own")
        there = [name in sys.modules for name in names]
        for name in names:
            importlib.import_module(name)
        return there

    run_ranks(found, 2)
    assert run_ranks(found, 2) == [[True, True, False]] * 2


def test_tensors_are_returned_by_value():
    def views() -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.arange(6.0, requires_grad=True)
        return (base * 2)[1:3].detach(), base.view(2, 3)

    for part, whole in run_ranks(views, 2):
        assert part.tolist() == [2.0, 4.0]
        assert whole.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_ranks_have_the_environment_of_the_call_not_of_the_first_start(monkeypatch, tmp_path):
    def look() -> tuple:
        return os.environ.get("LAB_SIZE"), os.getcwd(), sys.path[0]

    run_ranks(look, 1)
    monkeypatch.setenv("LAB_SIZE", "small")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/made/up")
    assert run_ranks(look, 2) == [("small", str(tmp_path), "/made/up")] * 2


def test_output_is_complete_lines_with_their_rank(capsys):
    def talk() -> None:
        for line in range(50):
            sys.stdout.write(f"line {line} ")
            sys.stdout.write("of rank\n")
        print("to stderr", file=sys.stderr)
        print("no end", end="")

    run_ranks(talk, 3)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] line {line} of rank" for line in range(50)] + [
            f"[rank {rank}] to stderr",
            f"[rank {rank}] no end",
        ]
    assert len(lines) == 3 * 52


def test_output_appears_while_the_ranks_still_run(tmp_path):
    flag = tmp_path / "seen"

    def wait_until_seen() -> None:
        print("are you there?")
        while not flag.exists():
            time.sleep(0.01)

    class Answering:
        def write(self, text: str) -> None:
            if "are you there?" in text:
                flag.touch()

        def flush(self) -> None:
            pass

    real, sys.stdout = sys.stdout, Answering()
    try:
        run_ranks(wait_until_seen, 2, timeout=30)
    finally:
        sys.stdout = real
    assert flag.exists()


OF_GLOO = "[Gloo] Rank {rank} is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"


def test_lines_of_gloo_about_its_connections_are_left_out(capsys):
    """PyTorch 2.8 and 2.9 print one for each process group."""

    def talk() -> None:
        print(OF_GLOO.format(rank=dist.get_rank()))
        print("[Gloo] is not left out")

    run_ranks(talk, 2)
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"[rank {rank}] [Gloo] is not left out" for rank in range(2)]
    text = Text()
    text.add(f"{OF_GLOO.format(rank=0)}\nloss 3\n")
    assert str(text) == "loss 3\n"


def test_megabytes_of_output_and_results_do_not_block(capsys):
    def much() -> torch.Tensor:
        for _ in range(200):
            print("x" * 5000)
        return torch.zeros(1_000_000)

    results = run_ranks(much, 2, timeout=60)
    assert [result.numel() for result in results] == [1_000_000] * 2
    assert capsys.readouterr().out.count("x" * 5000) == 400


def fail_on_rank_1(how: str) -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("a bad batch")
        if how == "sys.exit":
            sys.exit(3)
        if how == "os._exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "rank 1 raised ValueError: a bad batch"),
        ("sys.exit", "rank 1 called sys.exit(3)"),
        ("os._exit", "rank 1 ended its process with status 3 before the function returned"),
        ("SIGSEGV", "rank 1 was killed by SIGSEGV"),
        ("SIGKILL", "rank 1 was killed by SIGKILL, but memory did not run out"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_rank_that_caused_the_failure_is_named_first(how, said, world_size):
    with pytest.raises(RankFailure) as caught:
        run_ranks(fail_on_rank_1, world_size, how, timeout=60)
    assert str(caught.value).startswith(said)
    assert run_ranks(rank_and_sum, 2)[0][1] == 3, "the next call works"


class Killed(Dataset):
    """A data set whose sixth sample ends the worker process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3)


def loses_a_worker_of_its_loader() -> None:
    loader = DataLoader(Killed(), num_workers=1) if dist.get_rank() == 0 else torch.zeros(8, 1, 3)
    for x in loader:
        dist.all_reduce(x.clone())


@pytest.mark.parametrize("attempt", range(6))  # the end of the worker shows in three ways, at random
def test_the_end_of_a_worker_of_a_data_loader_is_the_cause(attempt):
    with pytest.raises(RankFailure, match=r"^rank 0 raised RuntimeError: .*DataLoader worker") as caught:
        run_ranks(loses_a_worker_of_its_loader, 2, timeout=60)
    assert not isinstance(caught.value, DeadLock)


def test_threads_that_communicate_while_the_main_thread_waits_raise_no_alarm():
    def helpers() -> list[float]:
        rank, got = dist.get_rank(), []
        other = dist.new_group([0, 1])

        def reduce(group: dist.ProcessGroup | None) -> None:
            x = torch.ones(2)
            dist.all_reduce(x, group=group)
            got.append(x.sum().item())

        for group in (None, other):
            helper = threading.Thread(target=reduce, args=[group])
            if rank == 1:  # late, while rank 0 has long been waiting for its helper
                threading.Event().wait(1.5)
            helper.start()
            helper.join()
        late = threading.Thread(target=reduce, args=[None])
        if rank == 1:  # waits with a limit, and then makes the call itself
            threading.Event().wait(1.5)
            reduce(None)
        else:
            late.start()
            late.join()
        return got

    assert run_ranks(helpers, 2, timeout=60) == [[4.0] * 3] * 2


def test_the_traceback_starts_at_the_users_function():
    with pytest.raises(RankFailure) as caught:
        run_ranks(fail_on_rank_1, 2, "raise")
    assert 'in fail_on_rank_1\n    raise ValueError("a bad batch")' in str(caught.value)
    assert "dlo_lib/launch" not in str(caught.value)


def test_after_a_time_out_the_stack_of_a_late_rank_is_shown():
    def sleep_on_rank_0() -> None:
        if dist.get_rank() == 0:
            time.sleep(1000)

    with pytest.raises(
        RankFailure, match="timeout: rank 0 had not finished after 2.5 s; rank 1 had"
    ) as caught:
        run_ranks(sleep_on_rank_0, 2, timeout=2.5)
    assert "in sleep_on_rank_0" in str(caught.value)


def test_a_value_that_cannot_be_sent_is_named():
    with pytest.raises(
        UserError,
        match=r"args\[1\] of print cannot be sent to the ranks \(TypeError: cannot pickle '_thread.lock'",
    ):
        run_ranks(print, 2, "one", threading.Lock())
    with pytest.raises(RankFailure, match="rank 0 returned a lock that cannot be sent back"):
        run_ranks(lambda: threading.Lock(), 2)


def test_fewer_than_one_rank_is_refused():
    with pytest.raises(UserError, match="world_size is 0: use a whole number of ranks, at least 1"):
        run_ranks(rank_and_sum, 0)


def test_it_works_from_another_thread_and_from_a_rank():
    results = []
    thread = threading.Thread(target=lambda: results.append(run_ranks(rank_and_sum, 2)))
    thread.start()
    thread.join(60)
    assert results == [[(0, 3.0), (1, 3.0)]]

    def nested() -> list:
        return run_ranks(rank_and_sum, 2, timeout=60)

    assert run_ranks(nested, 2, timeout=60) == [[(0, 3.0), (1, 3.0)]] * 2


def test_no_rank_and_no_process_of_it_is_left_after_a_failure(tmp_path):
    def start_a_child_and_fail() -> None:
        child = subprocess.Popen(["sleep", "1000"])
        (tmp_path / str(dist.get_rank())).write_text(f"{os.getpid()} {child.pid}")
        dist.barrier()
        raise ValueError("enough")

    with pytest.raises(RankFailure):
        run_ranks(start_a_child_and_fail, 2)
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    assert_gone(pids)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while alive := [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.02)


# A script without `if __name__ == "__main__"`, whose ranks write their pid and then wait.
SCRIPT = """
    import os, sys, time
    from pathlib import Path
    from dlo_lib.launch import run_ranks

    print("main runs")

    folder, seconds = sys.argv[1:]

    def work():
        Path(folder, f"{os.getpid()}-{os.getppid()}").touch()
        time.sleep(float(seconds))

    run_ranks(work, 2)
    print("done")
    """


def start_script(tmp_path, seconds: float) -> subprocess.Popen:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "pids").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "pids"), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids_of(tmp_path, ranks: int = 2) -> list[int]:
    deadline = time.monotonic() + 300
    while len(names := [file.name for file in (tmp_path / "pids").iterdir()]) < ranks:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return sorted({int(pid) for name in names for pid in name.split("-")})


def test_a_script_without_a_guard_runs_once(tmp_path):
    output, errors = start_script(tmp_path, 0).communicate(timeout=300)
    assert output == "main runs\ndone\n", errors


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_and_server_end_with_their_parent(tmp_path, number):
    process = start_script(tmp_path, 1000)
    pids = pids_of(tmp_path)
    assert len(pids) == 3, "two ranks and their server"
    process.send_signal(number)
    process.communicate(timeout=300)
    assert_gone(pids)


def test_two_parents_at_once_do_not_interfere(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    processes = [start_script(folder, 0.2) for folder in (first, second)]
    assert [process.communicate(timeout=300)[0] for process in processes] == ["main runs\ndone\n"] * 2


def test_a_function_of_a_notebook_cell_fails_at_the_cells_line():
    define = (
        "import torch.distributed as dist\nfrom dlo_lib.launch import run_ranks\ndef part(x):\n"
        "    return x / dist.get_rank()"
    )
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(define), nbformat.v4.new_code_cell("run_ranks(part, 2, 1.0)")]
    )
    with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
        nbclient.NotebookClient(book, timeout=600, startup_timeout=600, kernel_name="python3").execute()
    assert "RankFailure" in str(caught.value)
    assert "rank 0 raised ZeroDivisionError" in str(caught.value)
    assert "Cell In[1], line 4, in part\n    return x / dist.get_rank()" in str(caught.value)
