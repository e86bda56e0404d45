"""The judge's hold on the student's processes: one zygote for a lab, one worker for each attempt and each rank.

The zygote is started inside the sandbox that this host has, with a view of nothing but the interpreter, the library and the lab's files;
each worker is handed over as a pidfd, a channel, and a line to its keeper. No process outlives the judge.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from dlo_lib.grading.cgroups import Group, find_hierarchy, remove_all
from dlo_lib.grading.isolation import Isolation, best_isolation, files_of, system_view
from dlo_lib.grading.keeper import Job
from dlo_lib.grading.limits import Limits, descendants
from dlo_lib.grading.lockdown import WORK
from dlo_lib.grading.stale import locked_folder, remove_stale

if TYPE_CHECKING:
    from dlo_lib.grading.remote import Worker

MEMORY = 2 << 30  # bytes that a worker may hold beyond what it shares with the zygote
START_SECONDS = 120.0
FOLDER = "dlo-judge-"  # how its folder's name begins, among temporary files
LAB = Path("/lab")  # the lab's own files, in the sandbox
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "USER": "student",
    "MPLBACKEND": "agg",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "MALLOC_MMAP_THRESHOLD_": "131072",  # freed memory goes back, so that what is held is what is used
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",  # a CUDA context does not survive the fork: checks run on the CPU
}


class Zygote:
    """Starts workers for one lab; it takes seconds to start itself, and whoever makes one need not wait for that before it wants a worker.

    A context manager: at its end no process is left.

    Args:
        taught: modules withheld from workers; in a sandbox their files cannot be read either.
        warm: modules imported before the fork.
        environment: variables added to the few that workers have; nothing of the judge's own environment goes there.
        files: path in a worker's folder → file copied there.
        isolation: what keeps workers from the rest of the machine; by default what this host has.
    """

    def __init__(
        self,
        taught: Sequence[str] = (),
        warm: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        files: Mapping[str, Path] | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        self.isolation = best_isolation() if isolation is None else isolation
        self._owner, self._closed = os.getpid(), False
        remove_stale(FOLDER)
        self._folder, self._lock = locked_folder(FOLDER)
        self._ready = False
        self._groups: list[Group] = []
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = self._start(theirs, taught, warm, environment or {}, files or {})
        theirs.close()

    def wait(self) -> Zygote:
        """Until it can start workers; returns itself.

        Raises:
            RuntimeError: it did not start.
        """
        if not self._ready:
            if not select.select([self._control], [], [], START_SECONDS)[0] or self._control.recv(16) != b"ready":
                self.close()
                raise RuntimeError("the judge's zygote did not start: see its message above")
            self._ready = True
        return self

    def _start(
        self, line: socket.socket, taught: Sequence[str], warm: Sequence[str], environment: Mapping[str, str], files: Mapping[str, Path]
    ) -> subprocess.Popen[bytes]:
        lab = self._folder / "lab"
        for name, file in files.items():
            (lab / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, lab / name)
        lab.mkdir(exist_ok=True)
        confined = self.isolation.confines
        home = "/tmp" if confined else str(self._folder)
        variables = {**ENVIRONMENT, "HOME": home, "IPYTHONDIR": home, **environment}
        view = replace(system_view(), masked=files_of(taught), environment=variables, placed={LAB: lab})
        room = {
            "files": str(LAB if confined else lab),
            "keep": [str(path) for path in view.shown if path.is_relative_to("/tmp")],
        }
        settings = json.dumps({"taught": list(taught), "warm": list(warm), "confined": confined, "room": room})
        root = str(Path(__file__).resolve().parents[2])
        begin = f"import json, sys; sys.path.insert(0, {root!r}); from dlo_lib.grading.zygote import serve"
        python = [sys.executable, "-I", "-c", f"{begin}; serve({line.fileno()}, json.loads({settings!r}))"]
        return subprocess.Popen(
            self.isolation.command(python, view),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=variables,
            cwd=self._folder,
            pass_fds=[line.fileno()],
            start_new_session=True,
        )

    def worker(self, memory: int = MEMORY) -> Worker:
        """A fresh process that has run nothing yet.

        Raises:
            RuntimeError: the zygote did not start or is gone, or the worker's room could not be made.
        """
        from dlo_lib.grading.remote import Worker  # here: a zygote is started while its owner still imports torch

        self.wait()
        folder = WORK if self.isolation.confines else Path(tempfile.mkdtemp(dir=self._folder))
        limits = replace(Limits(), memory=memory)
        ours, theirs = socket.socketpair()
        keeper, their_keeper = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with contextlib.suppress(OSError):
                socket.send_fds(self._control, [Job(str(folder), limits).packed()], [theirs.fileno(), their_keeper.fileno()])
        finally:
            theirs.close()
            their_keeper.close()
        message = b""
        handles: list[int] = []
        if select.select([keeper], [], [], START_SECONDS)[0]:
            message, handles, *_ = socket.recv_fds(keeper, 4096, 2)
        if len(handles) != 2:
            reason = message.decode(errors="replace").removeprefix("no ") or "the zygote is gone"
            raise RuntimeError(f"the judge could not start a process: {reason}")
        worker = Worker(handles[0], handles[1], ours, keeper, folder, memory, self._group(limits, handles[1]))
        self._workers.add(worker)
        return worker

    def _group(self, limits: Limits, keeper: int) -> Group | None:
        """A control group for a worker that has run nothing yet, and its keeper."""
        hierarchy = find_hierarchy() if self.isolation.confines else None
        if hierarchy is None:
            return None
        self._groups = [group for group in self._groups if not (group.over and group.remove())]
        from dlo_lib.grading.remote import pid_of

        pid = pid_of(keeper)
        group = Group(hierarchy, limits.memory + limits.scratch + limits.shared_memory, limits.tasks, [pid, *descendants(pid)])
        self._groups.append(group)
        return group

    @property
    def alive(self) -> bool:
        """It can start workers. A fork of this process must start its own: answers on one socket would reach either."""
        return self._owner == os.getpid() and not self._closed and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process whose end is the end of all: the sandbox, or the zygote itself where there is none."""
        return self._process.pid

    @property
    def serving(self) -> bool:
        """Its process lives, as seen from any fork of the one that started it."""
        line = select.poll()
        line.register(self._control, 0)
        return not line.poll(0)

    def close(self) -> None:
        """End it with all its workers."""
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
