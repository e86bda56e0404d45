"""Attacks from inside a worker, as student's code: they reach nothing and do not affect other workers."""

from __future__ import annotations

import functools
import os
import py_compile
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlo_lib.grading.checks.outcome import Ended, Status
from dlo_lib.grading.judge.environment import environment
from dlo_lib.grading.sandbox.host import MEMORY, Zygote
from dlo_lib.grading.sandbox.isolation import find_isolation
from dlo_lib.grading.sandbox.limits import descendants, resident_bytes
from dlo_lib.grading.sandbox.remote_worker import Worker, deadline_after

ROOT = Path(__file__).parents[3]
TAUGHT = ["dlo_lib.optim.step", "torch.distributed.fsdp"]
HELPERS = """
import ctypes, errno, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action):
    try:
        return repr(action())
    except BaseException as error:
        return type(error).__name__
def syscall(*arguments):
    ctypes.set_errno(0)
    result = libc.syscall(*arguments)
    return 0 if result >= 0 else ctypes.get_errno()
"""


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A zygote in this host's sandbox, with one file of the lab's, started by a process that has a
    secret in its environment."""
    found = find_isolation()
    if found.isolation is None:
        pytest.skip(f"NOT TESTED HERE: the sandbox ({'; '.join(found.reasons)})")
    py_compile.compile(str(ROOT / "dlo_lib/optim/step.py"))  # a compiled form that the worker could find
    data = tmp_path_factory.mktemp("lab") / "data.txt"
    data.write_text("the lab's own")
    with (
        environment({"CLASS_SECRET": "keep this secret"}),
        Zygote(TAUGHT, files={"data/data.txt": data}, isolation=found.isolation) as zygote,
    ):
        yield zygote


@pytest.fixture
def inside(sandbox: Zygote) -> Iterator[Callable[..., Any]]:
    """Define ``attack`` in a new worker and return its result."""
    workers: list[Worker] = []

    def run(source: str, seconds: float = 20.0, memory: int = MEMORY) -> Any:
        workers.append(sandbox.worker(memory))
        cell = {"id": "a", "own": True, "source": HELPERS + source}
        loaded = workers[-1].ask(deadline_after(20), do="load", cells=[cell])
        assert loaded["value"][0]["fault"] is None, loaded
        answer = workers[-1].ask(deadline_after(seconds), do="call", name="attack", args=[], kwargs={})
        assert "value" in answer, answer
        return answer["value"]

    yield run
    for worker in workers:
        worker.close()


# -- reading


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "solutions", ROOT / "labs", ROOT / "tests", ROOT / "pyproject.toml", ROOT / ".git",
        Path.home() / ".bashrc", "/etc/passwd", "/etc/shadow", "/home", "/srv", "/var", "/usr/local/share",
        "/usr/share/doc", "/sys", "/run", "/boot", "/proc/2/environ", "/proc/kcore",
    ],
)  # fmt: skip
def test_the_path_does_not_exist(inside: Callable[..., Any], path: Path) -> None:
    assert inside(
        f"def attack(): return [attempt(lambda: open({str(path)!r}).read()), attempt(lambda: "
        f"os.listdir({str(path)!r}))]"
    ) in (
        ["FileNotFoundError", "FileNotFoundError"],
        ["PermissionError", "PermissionError"],
        ["PermissionError", "NotADirectoryError"],
    )


def test_a_folder_of_the_judge_does_not_exist(inside: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "gradebook.db").write_text("points")
    assert (
        inside(f"def attack(): return attempt(lambda: open({str(tmp_path / 'gradebook.db')!r}))")
        == "FileNotFoundError"
    )


def test_the_root_folder_has_a_short_list_of_entries(inside: Callable[..., Any]) -> None:
    expected = {"bin", "dev", "etc", "lab", "lib", "lib32", "lib64", "proc", "sbin", "tmp", "usr"}
    expected |= {Path(os.path.abspath(path)).parts[1] for path in (ROOT, sys.prefix, sys.base_prefix)}
    assert set(inside("def attack(): return os.listdir('/')")) <= expected


def test_the_environment_has_no_variable_of_the_judge(inside: Callable[..., Any]) -> None:
    seen = inside("def attack(): return [dict(os.environ), open('/proc/self/environ').read()]")
    assert "keep this secret" not in str(seen)
    assert not {name for name in seen[0] if name.startswith("DLO_")}
    assert seen[0]["CUDA_VISIBLE_DEVICES"] == ""


def test_no_inherited_descriptor_is_open(inside: Callable[..., Any]) -> None:
    seen = inside(
        "def attack():\n    links = []\n    for fd in os.listdir('/proc/self/fd'):\n"
        "        try: links.append(os.readlink(f'/proc/self/fd/{fd}'))\n        except OSError: pass\n"
        "    return links"
    )
    assert sum(link.startswith("socket:") for link in seen) == 1, seen
    assert {link for link in seen if not link.startswith(("socket:", "/proc/"))} <= {
        "/dev/null",
        "pipe:",
        "anon_inode:[eventpoll]",
    }, seen


def test_a_blocked_module_has_no_file_and_no_compiled_form(inside: Callable[..., Any]) -> None:
    step, fsdp = ROOT / "dlo_lib/optim/step.py", Path(torch.__file__).parent / "distributed/fsdp"
    assert step.is_file()
    assert list((step.parent / "__pycache__").glob("step.*.pyc"))
    source = f"""
import glob
def attack():
    files = [{str(step)!r}, *glob.glob({str(step.parent / "__pycache__" / "step.*")!r})]
    return [attempt(lambda: len(open(file, 'rb').read())) for file in files], os.listdir({str(fsdp)!r})
"""
    sizes, listed = inside(source)
    assert set(sizes) <= {"0", "PermissionError"}
    assert listed == []


def test_the_files_of_the_lab_exist_and_are_writable(inside: Callable[..., Any]) -> None:
    change = (
        "def attack():\n    with open('data/data.txt', 'a') as file: file.write('!')\n"
        "    return open('data/data.txt').read()"
    )
    assert inside(change) == "the lab's own!"
    assert inside(change) == "the lab's own!"


# -- writing


@pytest.mark.parametrize(
    "path",
    ["/x", "/usr/x", "/lab/x", "/dev/x", "/etc/x", str(ROOT / "dlo_lib/x.py"), "/proc/sys/kernel/hostname"],
)
def test_the_path_is_not_writable(inside: Callable[..., Any], path: str) -> None:
    assert inside(f"def attack(): return attempt(lambda: open({path!r}, 'w').write('x'))") in (
        "PermissionError",
        "OSError",
        "FileNotFoundError",
    )


def test_only_the_working_folder_is_writable(inside: Callable[..., Any]) -> None:
    """Masked folders are read-only too: the next worker would run a module that is compiled there."""
    walk = (
        "for at, folders, _ in os.walk('/'):\n        folders[:] = [] if at in ('/proc', '/sys') else folders"
    )
    found = inside(
        f"def attack():\n    found = []\n    {walk}\n        if os.access(at, os.W_OK): found.append(at)\n"
        "    return found",
        60,
    )
    assert "/tmp/work" in found
    assert [
        folder for folder in found if not folder.startswith(("/tmp", "/dev/shm", "/dev/pts", "/proc"))
    ] == []


def test_another_worker_sees_neither_files_nor_processes(inside: Callable[..., Any]) -> None:
    assert (
        inside(
            "def attack():\n"
            "    for folder in ('/tmp', '/dev/shm', '.'): open(f'{folder}/mine', 'w').write('x')\n"
            "    return 1"
        )
        == 1
    )
    seen = inside(
        "def attack(): return [os.listdir('/tmp'), "
        "os.listdir('/dev/shm'), [p for p in os.listdir('/proc') if p.isdigit()]]"
    )
    installed = {path.parts[2] for path in (ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")}  # visible
    assert [set(seen[0]), *seen[1:]] == [{"work"} | installed, [], ["1"]]


def test_a_terminal_has_both_its_ends_in_one_worker(inside: Callable[..., Any]) -> None:
    assert (
        inside(
            "def attack():\n    ours, theirs = os.openpty()\n    os.write(theirs, b'x')\n"
            "    return os.read(ours, 1).decode()"
        )
        == "x"
    )
    assert inside("def attack(): return os.listdir('/dev/pts')") == ["ptmx"]


@pytest.mark.parametrize(("folder", "most"), [("/tmp", 200 << 20), ("/dev/shm", 70 << 20)])
def test_a_full_disk_affects_only_its_worker(inside: Callable[..., Any], folder: str, most: int) -> None:
    source = f"""
def attack():
    written, block = 0, b'x' * 2**20
    try:
        for number in range(2000):
            with open(f'{folder}/{{number}}', 'wb') as file:
                for _ in range(10): written += file.write(block)
    except OSError as error:
        return [written, error.errno]
"""
    written, error = inside(source)
    assert error == 28  # ENOSPC
    assert written < most


def test_files_run_out(inside: Callable[..., Any]) -> None:
    source = (
        "def attack():\n    made = 0\n    try:\n"
        "        while True: open(f'/tmp/{made}', 'w').close(); made += 1\n"
    )
    assert inside(source + "    except OSError as error: return [made < 10_000, error.errno]") == [True, 28]


# -- system calls and processes


def test_a_worker_has_no_capability_and_cannot_gain_one(inside: Callable[..., Any]) -> None:
    status = dict(
        line.split(":\t")
        for line in inside("def attack(): return open('/proc/self/status').read()").splitlines()
        if ":\t" in line
    )
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert status["Uid"].split()[0] != "0"


CALLS = {
    "ptrace": "syscall(101, 0, 0, 0, 0)",
    "mount": "syscall(165, b'none', b'/tmp', b'tmpfs', 0, None)",
    "umount": "syscall(166, b'/proc', 2)",
    "unshare a user namespace": "syscall(272, 0x10000000)",
    "unshare mounts": "syscall(272, 0x20000)",
    "clone a user namespace": "syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "setns": "syscall(308, 0, 0)",
    "chroot": "syscall(161, b'/tmp')",
    "keyctl": "syscall(250, 0, 0, 0, 0, 0)",
    "bpf": "syscall(321, 0, 0, 0)",
    "perf events": "syscall(298, 0, 0, -1, -1, 0)",
    "read another's memory": "syscall(310, 1, 0, 0, 0, 0, 0)",
    "io_uring": "syscall(425, 8, 0)",
    "userfaultfd": "syscall(323, 0)",
    "kexec": "syscall(246, 0, 0, 0, 0)",
    "shared memory of no process": "syscall(29, 0, 1 << 20, 0o1600)",
    "notification of files": "syscall(294, 0)",
    "pages of files that are in memory": "syscall(27, 0, 0, 0)",
    "dropping the pages of a file": "syscall(221, 0, 0, 0, 4)",
    "a lease on a file": "syscall(72, 0, 1024, 0)",
    "who holds a lock": "syscall(72, 0, 5, 0)",
    "a pipe that holds a tensor": "syscall(72, 1, 1031, 1 << 20)",
    "32-bit numbering": "syscall(0x40000000 | 39)",
    "how many processes the machine has": "syscall(99, ctypes.create_string_buffer(256))",
    "requests counted for the machine": "syscall(206, 1, ctypes.byref(ctypes.c_ulong()))",
    "the number of a process ever started": "syscall(434, os.getpid(), 0)",
    "a process with such a number": "syscall(56, 0x1000 | 17, 0, 0, 0, 0)",
    "waiting for the machine's files": "syscall(162)",
    "waiting for a file system": "syscall(306, 1)",
    "locked memory, counted for a user": "syscall(149, id(0), 1)",
}


@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="NOT TESTED HERE: numbers of x86-64's system calls"
)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_call_is_refused(inside: Callable[..., Any], call: str) -> None:
    assert inside(f"def attack(): return {call}") == 1  # EPERM


@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="NOT TESTED HERE: numbers of x86-64's system calls"
)
@pytest.mark.parametrize(
    "call",
    ["syscall(435, 0, 0)", "syscall(319, b'x', 0)", "syscall(327, 0, 0, 0, 0, 0, 8)"],
    ids=["clone3", "memfd_create", "reading only what is in memory"],
)
def test_the_call_does_not_exist(inside: Callable[..., Any], call: str) -> None:
    assert inside(f"def attack(): return {call}") == 38  # ENOSYS


SIGNALS = """
def attack():
    import fcntl, torch
    file = open(torch.__file__)
    return [
        attempt(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)),
        attempt(lambda: fcntl.lockf(os.open(torch.__file__, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)),
    ]
"""


def test_a_lock_of_one_worker_is_no_signal_for_another(inside: Callable[..., Any], sandbox: Zygote) -> None:
    """All workers see the same files of torch: with a lock on one of them a worker could send bits to
    another.
    """
    holder = sandbox.worker()
    source = (
        "import fcntl, os, torch\n"
        "def hold():\n"
        "    global file\n"
        "    file = open(torch.__file__)\n"
        "    fcntl.flock(file, fcntl.LOCK_EX)\n"
        "    return fcntl.fcntl(file, fcntl.F_GETFD)\n"
    )
    cell = {"id": "a", "own": True, "source": source}
    holder.ask(deadline_after(20), do="load", cells=[cell])
    assert "value" in holder.ask(deadline_after(20), do="call", name="hold", args=[], kwargs={})
    assert inside(SIGNALS) == ["None", "None"]
    holder.close()


@pytest.mark.parametrize(
    "file", ["locks", "meminfo", "stat", "loadavg", "vmstat", "pressure/cpu", "sys/fs/file-nr", "interrupts"]
)
def test_what_other_workers_do_cannot_be_read(inside: Callable[..., Any], file: str) -> None:
    assert inside(f"def attack(): return attempt(lambda: open('/proc/{file}').read())") == "FileNotFoundError"


OF_OTHERS = {  # what a worker reads about processes, while a child of another worker computes
    "whose processors": "os.sched_getaffinity(busy)",
    "whose priority": "os.getpriority(os.PRIO_PROCESS, busy)",
    "the priority of all of a user": "os.getpriority(os.PRIO_USER, os.getuid())",
    "the time of children": "resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime",
    "the processes": "[name for name in os.listdir('/proc') if name.isdigit()]",
    "the limit of another": "resource.prlimit(busy, resource.RLIMIT_NOFILE)",
    "the clock of another": "time.clock_gettime((~busy << 3) | 2)",
}
BUSY = """
import os, signal, threading
def start():
    child = os.fork()
    if child == 0:
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        while True: pass
    return child
"""


def test_a_worker_reads_the_same_whether_another_one_computes(
    inside: Callable[..., Any], sandbox: Zygote
) -> None:
    """Calls that name another process or count those of a user end at the pid namespace."""
    read = ", ".join(f"attempt(lambda: {text})" for text in OF_OTHERS.values())
    source = f"import resource\nbusy = 2\ndef attack(): return [{read}]"
    before = inside(source)
    other = sandbox.worker()
    other.ask(deadline_after(20), do="load", cells=[{"id": "a", "own": True, "source": BUSY}])
    assert other.ask(deadline_after(20), do="call", name="start", args=[], kwargs={})["value"] == 2
    assert inside(source) == before
    other.close()
    assert before[0] == "ProcessLookupError"
    assert before[4] == "['1']"


def test_reading_a_file_leaves_no_trace_in_its_times(inside: Callable[..., Any]) -> None:
    """Workers see the same files, so the time of the last access would be a signal."""
    attack = """
def attack():
    import statistics
    before = os.stat(statistics.__file__).st_atime_ns
    open(statistics.__file__).read()
    return os.stat(statistics.__file__).st_atime_ns - before
"""
    before = time.time_ns()
    file = Path(functools.__file__).with_name("statistics.py")
    assert inside(attack) == 0
    assert file.stat().st_atime_ns < before


def test_the_free_space_of_a_shared_folder_is_not_what_a_worker_fills(
    inside: Callable[..., Any], sandbox: Zygote
) -> None:
    source = """
def attack():
    places = ["/tmp", "/dev/shm", "/dev", "/"]
    return [(os.statvfs(place).f_bfree, os.statvfs(place).f_ffree) for place in places]
"""
    before = inside(source)
    other = sandbox.worker()
    fill = "import os\ndef fill(): return [open(f'{place}/x', 'wb').write(bytes(1 << 22)) for place in "
    fill += "('/tmp/work', '/dev/shm')]"
    other.ask(deadline_after(20), do="load", cells=[{"id": "a", "own": True, "source": fill}])
    assert "value" in other.ask(deadline_after(20), do="call", name="fill", args=[], kwargs={})
    assert inside(source) == before
    other.close()


@pytest.mark.parametrize("target", ["1", "os.getppid()", "-1", "0 * 1 + 3"])
def test_other_workers_cannot_be_killed(inside: Callable[..., Any], sandbox: Zygote, target: str) -> None:
    bystander = sandbox.worker()
    cell = {"id": "a", "own": True, "source": "def here(): return 1"}
    bystander.ask(deadline_after(20), do="load", cells=[cell])
    assert inside(f"def attack():\n    attempt(lambda: os.kill({target}, 9))\n    return 'alive'") == "alive"
    assert bystander.ask(deadline_after(5), do="call", name="here", args=[], kwargs={})["value"] == 1
    bystander.close()
    assert sandbox.alive


@pytest.mark.parametrize("address", ["('127.0.0.1', 22)", "('192.0.2.1', 80)", "('8.8.8.8', 53)"])
def test_there_is_no_network(inside: Callable[..., Any], address: str) -> None:
    assert inside(
        "def attack():\n    s = socket.socket(); s.settimeout(2)\n"
        f"    return attempt(lambda: s.connect({address}))"
    ) in (
        "ConnectionRefusedError",
        "OSError",
    )


def test_there_is_no_name_service_and_no_other_socket_family(inside: Callable[..., Any]) -> None:
    assert inside("def attack(): return attempt(lambda: socket.getaddrinfo('example.org', 80))") == "gaierror"
    assert (
        inside("def attack(): return attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))")
        == "OSError"
    )
    assert (
        inside("def attack(): return attempt(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))")
        == "OSError"
    )


def test_abstract_sockets_of_the_machine_are_out_of_reach(inside: Callable[..., Any]) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0dlo-test-of-the-sandbox")
        server.listen()
        attack = (
            "def attack(): return attempt(lambda: "
            "socket.socket(socket.AF_UNIX).connect('\\0dlo-test-of-the-sandbox'))"
        )
        assert inside(attack) == "ConnectionRefusedError"


# -- resources


def test_a_fork_bomb_ends_with_its_worker(inside: Callable[..., Any], sandbox: Zygote) -> None:
    bomb = """
def attack():
    made = 0
    try:
        while True:
            if os.fork() == 0:
                while True: time.sleep(60)
            made += 1
    except OSError as error:
        return [made, error.errno]
"""
    made, error = inside(bomb)
    assert error == 11  # EAGAIN
    assert made < 100


def test_too_much_memory_is_reported_with_the_peak(inside: Callable[..., Any]) -> None:
    with pytest.raises(Ended, match=r"more than 64 MiB of memory used \(\d+ MiB\)") as ended:
        inside(
            "def attack():\n    held = []\n    while True: held.append(bytearray(2**20)); time.sleep(0.002)",
            memory=64 << 20,
        )
    assert ended.value.status is Status.OOM


def test_the_memory_of_children_counts(inside: Callable[..., Any]) -> None:
    children = """
def attack():
    for _ in range(4):
        if os.fork() == 0:
            held = bytearray(40 << 20)
            for place in range(0, len(held), 4096): held[place] = 1
            while True: time.sleep(60)
    while True: time.sleep(60)
"""
    with pytest.raises(Ended) as ended:
        inside(children, memory=100 << 20)
    assert ended.value.status is Status.OOM


@pytest.mark.parametrize(
    "end",
    ["os.closerange(0, 1000)", "os._exit(3)", "ctypes.string_at(0)", "os.abort()"],
)
def test_a_process_that_ends_itself_is_reported(inside: Callable[..., Any], end: str) -> None:
    with pytest.raises(Ended, match="the process ended by itself") as ended:
        inside(f"def attack(): {end}")
    assert ended.value.status is Status.KERNEL_DIED


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGSTOP"])
def test_a_worker_cannot_end_or_stop_itself_by_a_signal(inside: Callable[..., Any], number: str) -> None:
    attack = f"def attack():\n    import signal\n    os.kill(os.getpid(), signal.{number})\n    return 'on'"
    assert inside(attack) == "on"


def test_large_output_is_discarded(inside: Callable[..., Any]) -> None:
    loud = (
        "def attack():\n    for _ in range(200):\n        print('x' * 2**20)\n"
        "        os.write(1, b'x' * 2**20)\n    return 'done'"
    )
    assert inside(loud) == "done"


def test_an_executed_program_has_the_same_limits(inside: Callable[..., Any]) -> None:
    child = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.syscall(272, 0x10000000)\n"
    child += "print(ctypes.get_errno(), os.path.exists('/etc/passwd'))"
    source = (
        "import subprocess\n"
        "def attack(): return subprocess.run([sys.executable, "
        f"'-c', {child!r}], capture_output=True, text=True).stdout"
    )
    assert inside(source) == "1 False\n"


# -- time


def test_a_computing_worker_has_its_time_and_no_more(inside: Callable[..., Any]) -> None:
    began = time.monotonic()
    with pytest.raises(Ended) as ended:
        inside("def attack():\n    while True: pass", seconds=0.5)
    assert ended.value.status is Status.TIMEOUT
    assert time.monotonic() - began >= 0.5


def test_waiting_for_a_processor_is_not_charged(inside: Callable[..., Any]) -> None:
    """With four other busy processes on its processor, work of 0.5 s takes longer by the clock than its limit
    of 1 s, and still gets its answer.
    """
    source = """
def attack():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    began, end = time.monotonic(), time.process_time() + 0.5
    while time.process_time() < end: pass
    return time.monotonic() - began
"""
    processor = min(os.sched_getaffinity(0))
    busy = f"import os\nos.sched_setaffinity(0, {{{processor}}})\nprint(flush=True)\nwhile True: pass"
    # Separate sessions, because the kernel shares a processor between sessions first
    start = functools.partial(subprocess.Popen, stdout=subprocess.PIPE, start_new_session=True)
    others = [start([sys.executable, "-c", busy]) for _ in range(4)]
    try:
        for other in others:
            assert other.stdout is not None
            assert other.stdout.readline() == b"\n"
        assert inside(source, seconds=1.0) > 1.0
    finally:
        for other in others:
            other.kill()
            other.communicate()


# -- many


@pytest.mark.slow
def test_the_zygotes_memory_stays_flat(sandbox: Zygote) -> None:
    def once() -> int:
        sandbox.worker().close()
        return max(map(resident_bytes, descendants(sandbox.pid)))

    before = [once() for _ in range(10)][-1]
    after_all = [once() for _ in range(300)][-1]
    assert after_all - before < 1 << 20


MAGICS = """%%time
%matplotlib inline
dist.isend?

?torch.ones
%timeit -n 1 -r 1 undefined_name
import torch

def attack():
    from dlo_lib.launch import run_ranks
    try:
        run_ranks(print, 2)
    except PermissionError as error:
        return str(error), error.__traceback__.tb_lineno
%config InlineBackend.figure_format = "svg"
"""


def test_magics_without_effect_are_left_out_and_no_ranks_are_started(sandbox: Zygote) -> None:
    """IPython overwrites 3 to 4 MiB of inherited memory for each of them, trying to start ranks 13 MiB."""
    worker = sandbox.worker()
    try:
        loaded = worker.ask(deadline_after(20), do="load", cells=[{"id": "a", "own": True, "source": MAGICS}])
        assert loaded["value"][0]["fault"] is None
        live = {"id": "b", "own": True, "source": "%%ranks 4\nx = rank\nattack = 1"}
        assert worker.ask(deadline_after(20), do="load", cells=[live])["value"][0]["fault"] is None
        answer = worker.ask(deadline_after(20), do="call", name="attack", args=[], kwargs={})
    finally:
        worker.close()
    assert answer["value"] == ("run_ranks starts no ranks while a lab is graded", 12)
