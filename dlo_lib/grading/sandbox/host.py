"""The judge's handle on the processes that run a student's code: one zygote per lab, one worker for each
attempt and each rank.

The zygote starts inside the sandbox of this host, which shows it only the interpreter, the library and the
lab's files. The judge receives a pidfd of each worker, a channel to it, and a socket on which it learns how
the worker ended. All these processes end with the judge.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from dlo_lib.base.interpreter import trusted_python
from dlo_lib.base.temporary_folders import locked_folder, remove_stale
from dlo_lib.grading.sandbox.cgroups import Group, find_hierarchy, group_for, remove_all
from dlo_lib.grading.sandbox.compiled import compile_library, compile_modules
from dlo_lib.grading.sandbox.isolation import Isolation, best_isolation, files_of, system_view
from dlo_lib.grading.sandbox.limits import Limits, pid_of
from dlo_lib.grading.sandbox.lockdown import WORK
from dlo_lib.grading.sandbox.start import WorkerRequest

if TYPE_CHECKING:
    from dlo_lib.grading.sandbox.remote_worker import Worker

MEMORY = 2 << 30  # bytes that a worker may hold beyond what it shares with the zygote
START_SECONDS = 120.0
FOLDER = "dlo-judge-"  # prefix of the zygote's folder among the temporary files
LAB = Path("/lab")  # the lab's files, as the sandbox shows them
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "USER": "student",
    "MPLBACKEND": "agg",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "MALLOC_MMAP_THRESHOLD_": "131072",  # freed memory returns to the kernel at once
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",  # a CUDA context does not survive the fork: checks run on the CPU
}


class Zygote:
    """Starts workers for one lab.

    The zygote needs seconds to start. The constructor does not wait for that; :meth:`wait` and :meth:`worker`
    do. A context manager: at its end all processes have ended.

    Args:
        taught: modules blocked in workers; in a sandbox, workers cannot read their files either.
        warm: modules imported before the fork.
        dynamo: whether workers build optimizers or compile; then the zygote imports before the fork
            what torch imports for that. Without, the zygote starts in half the CPU time, and such a
            worker imports it itself.
        environment: variables added to ``ENVIRONMENT``; no other variable of the judge reaches workers.
        files: path in a worker's folder → file copied there.
        isolation: isolates workers from the rest of the machine; by default the best one of this host.
    """

    def __init__(
        self,
        taught: Sequence[str] = (),
        warm: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        files: Mapping[str, Path] | None = None,
        isolation: Isolation | None = None,
        dynamo: bool = False,
    ) -> None:
        self.isolation = best_isolation() if isolation is None else isolation
        self._owner, self._closed = os.getpid(), False
        compile_library()
        remove_stale(FOLDER)
        self._folder, self._lock = locked_folder(FOLDER)
        self._ready = False
        self._groups: list[Group] = []
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = self._start(theirs, taught, warm, environment or {}, files or {}, dynamo)
        theirs.close()

    def wait(self) -> Zygote:
        """Wait until the zygote can start workers; return the zygote.

        Raises:
            RuntimeError: the zygote did not start.
        """
        if not self._ready:
            if (
                not select.select([self._control], [], [], START_SECONDS)[0]
                or self._control.recv(16) != b"ready"
            ):
                self.close()
                raise RuntimeError("the judge's zygote did not start: see its message above")
            self._ready = True
        return self

    def _start(
        self,
        line: socket.socket,
        taught: Sequence[str],
        warm: Sequence[str],
        environment: Mapping[str, str],
        files: Mapping[str, Path],
        dynamo: bool,
    ) -> subprocess.Popen[bytes]:
        lab = self._folder / "lab"
        for name, file in files.items():
            (lab / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, lab / name)
        lab.mkdir(exist_ok=True)
        compile_modules(lab, warm)
        confined = self.isolation.confines
        home = "/tmp" if confined else str(self._folder)
        variables = {**ENVIRONMENT, "HOME": home, "IPYTHONDIR": home, **environment}
        view = replace(system_view(), masked=files_of(taught), environment=variables, placed={LAB: lab})
        workspace = {
            "files": str(LAB if confined else lab),
            "keep": [str(path) for path in view.shown if path.is_relative_to("/tmp")],
        }
        lists = {"taught": list(taught), "warm": list(warm)}
        settings = json.dumps({**lists, "dynamo": dynamo, "confined": confined, "workspace": workspace})
        code = (
            "import json; from dlo_lib.grading.sandbox.zygote import serve; "
            f"serve({line.fileno()}, json.loads({settings!r}))"
        )
        python = trusted_python(code)
        return subprocess.Popen(
            self.isolation.command(python, view),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=variables,
            cwd=self._folder,
            pass_fds=[line.fileno()],
            start_new_session=True,
        )

    def worker(self, memory: int = MEMORY, imports: Sequence[str] = ()) -> Worker:
        """Start a process that has run no cell yet; it may hold ``memory`` bytes beyond what it shares with
        the zygote. ``imports``: modules that its cells import; the zygote imports the common ones.

        Raises:
            RuntimeError: the zygote did not start or has ended, or the worker's file systems could not be
                created.
        """
        return self.workers(1, memory, imports=imports)[0]

    def ranks(self, world: int, imports: Sequence[str] = ()) -> list[Worker]:
        """Start the processes of ``world`` ranks at once."""
        return self.workers(world, rank=True, imports=imports)

    def workers(
        self, number: int, memory: int = MEMORY, rank: bool = False, imports: Sequence[str] = ()
    ) -> list[Worker]:
        """Start ``number`` processes at once, as :meth:`worker` starts one. ``rank``: they are ranks."""
        self.wait()
        limits = replace(Limits(), memory=memory, rank=rank)
        requested = [self._request(limits, imports) for _ in range(number)]
        started: list[Worker] = []
        try:
            while requested:
                started.append(self._started(*requested.pop(0), limits))
        except BaseException:
            for worker in started:
                worker.close()
            for _, line, status in requested:
                line.close()
                status.close()  # the zygote ends the worker
            raise
        return started

    def _request(self, limits: Limits, imports: Sequence[str]) -> tuple[Path, socket.socket, socket.socket]:
        """Ask the zygote for a worker; return its folder, and the judge's ends of its two sockets."""
        folder = WORK if self.isolation.confines else Path(tempfile.mkdtemp(dir=self._folder))
        line, its_line = socket.socketpair()
        status, its_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_line, its_status, contextlib.suppress(OSError):  # the zygote has ended: status reports it
            request = WorkerRequest(str(folder), limits, imports).to_json()
            socket.send_fds(self._control, [request], [its_line.fileno(), its_status.fileno()])
        return folder, line, status

    def _started(self, folder: Path, line: socket.socket, status: socket.socket, limits: Limits) -> Worker:
        from dlo_lib.grading.sandbox.remote_worker import Worker  # slow: it imports torch

        message = b""
        handles: list[int] = []
        if select.select([status], [], [], START_SECONDS)[0]:
            message, handles, *_ = socket.recv_fds(status, 4096, 2)
        if not handles:
            reason = message.decode(errors="replace").removeprefix("no ") or "the zygote has ended"
            raise RuntimeError(f"the judge could not start a process: {reason}")
        handle, supervisor = handles if len(handles) == 2 else (handles[0], None)
        group = self._group(limits, handle)
        single = limits.rank and self.isolation.confines
        worker = Worker(handle, supervisor, line, status, folder, limits.memory, group, single)
        self._workers.add(worker)
        return worker

    def _group(self, limits: Limits, handle: int) -> Group | None:
        """Return a control group that holds only a worker that has run no cell yet."""
        hierarchy = find_hierarchy() if self.isolation.confines else None
        if hierarchy is None:
            return None
        memory = limits.memory + limits.scratch + limits.shared_memory
        return group_for(self._groups, hierarchy, memory, limits.tasks, pid_of(handle))

    @property
    def alive(self) -> bool:
        """True if the zygote can start workers for this process.

        A fork of this process must start its own zygote: on a shared socket, either could receive the other's
        answers.
        """
        return self._owner == os.getpid() and not self._closed and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the sandbox, or of the zygote without one. All workers end with this process."""
        return self._process.pid

    @property
    def serving(self) -> bool:
        """True if the zygote's process is alive; valid also in forks of the process that started it."""
        line = select.poll()
        line.register(self._control, 0)
        return not line.poll(0)

    def close(self) -> None:
        """End the zygote and all its workers."""
        if self._owner != os.getpid() or self._closed:
            return
        self._closed = True
        for worker in list(self._workers):
            worker.close()
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        remove_all(self._groups)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
