"""The judge's hold on the student's processes: one zygote for a lab, one worker for each attempt and each rank.

A worker is narrow on purpose: a question goes in with a number that nobody can guess, an answer with the same number comes out, in time or
not at all. Whatever else it sends is noise. It is killed when its memory grows beyond the limit, and when the judge is done with it.

Time is what it computes: a worker that waits for a processor on a loaded machine is not charged for it (``limits.Usage``).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dlo_lib.grading.channel import Channel, Late
from dlo_lib.grading.codec import NotPlain
from dlo_lib.grading.isolation import Isolation, best_isolation, files_of, system_view
from dlo_lib.grading.keeper import Job
from dlo_lib.grading.limits import Limits, Usage, descendants, resident_bytes, usage
from dlo_lib.grading.lockdown import WORK, Network
from dlo_lib.grading.outcome import Ended, Status
from dlo_lib.text import tr

MEMORY = 2 << 30  # bytes that a worker may hold beyond what it shares with the zygote
MAX_NOISE = 10_000
START_SECONDS = 120.0
IDLE = 2.0  # a worker that neither computes nor waits for a processor has this many times the time of one that computes
BACKSTOP = 10.0  # and none has more than this many times, by the clock on the wall
LAB, MEETING = Path("/lab"), Path("/meeting")  # in the sandbox: the lab's own files, and where ranks of a run meet
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
    """Starts workers for one lab. A context manager: at its end no process is left.

    Args:
        taught: modules withheld from workers; in a sandbox their files cannot be read either.
        warm: modules imported before the fork.
        environment: variables added to the few that workers have; nothing of the judge's own environment goes there.
        files: path in a worker's folder → file copied there.
        isolation: what keeps workers from the rest of the machine; by default what this host has.

    Raises:
        RuntimeError: it did not start.
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
        self._folder = Path(tempfile.mkdtemp(prefix="dlo-judge-"))
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = self._start(theirs, taught, warm, environment or {}, files or {})
        theirs.close()
        if not select.select([self._control], [], [], START_SECONDS)[0] or self._control.recv(16) != b"ready":
            self.close()
            raise RuntimeError("the judge's zygote did not start: see its message above")

    def _start(
        self, line: socket.socket, taught: Sequence[str], warm: Sequence[str], environment: Mapping[str, str], files: Mapping[str, Path]
    ) -> subprocess.Popen[bytes]:
        lab, meeting = self._folder / "lab", self._folder / "meeting"
        for name, file in files.items():
            (lab / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, lab / name)
        lab.mkdir(exist_ok=True)
        meeting.mkdir()
        meeting.chmod(0o777)
        confined = self.isolation.confines
        home = "/tmp" if confined else str(self._folder)
        variables = {**ENVIRONMENT, "HOME": home, "IPYTHONDIR": home, **environment}
        view = replace(system_view(), masked=files_of(taught), environment=variables, placed={LAB: lab}, shared={MEETING: meeting})
        room = {
            "files": str(LAB if confined else lab),
            "meeting": str(MEETING),
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

    def worker(self, memory: int = MEMORY, network: Network = Network.OWN) -> Worker:
        """A fresh process that has run nothing yet.

        Raises:
            RuntimeError: the zygote is gone, or the worker's room could not be made.
        """
        folder = WORK if self.isolation.confines else Path(tempfile.mkdtemp(dir=self._folder))
        limits = replace(Limits(), memory=memory)
        ours, theirs = socket.socketpair()
        keeper, their_keeper = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with contextlib.suppress(OSError):
                socket.send_fds(self._control, [Job(str(folder), limits, network).packed()], [theirs.fileno(), their_keeper.fileno()])
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
        worker = Worker(handles[0], handles[1], ours, keeper, folder, memory)
        self._workers.add(worker)
        return worker

    @contextlib.contextmanager
    def meeting(self) -> Iterator[str]:
        """A folder in which the workers of ``Network.ZYGOTE`` can meet; its path as they see it."""
        folder = Path(tempfile.mkdtemp(dir=self._folder / "meeting"))
        folder.chmod(0o777)
        try:
            yield str(MEETING / folder.name if self.isolation.confines else folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def alive(self) -> bool:
        """It can start workers. A fork of this process must start its own: answers on one socket would reach either."""
        return self._owner == os.getpid() and not self._closed and self._process.poll() is None

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
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Worker:
    """One process with the student's code. ``folder`` is its own, as it sees it.

    Args:
        handle: pidfd of the process whose end is the end of all: the worker's keeper in a sandbox, else the worker.
        keeper: pidfd of the keeper.
        line: the worker's channel.
        status: the keeper's line.
        memory: bytes it may hold beyond what it shares with the zygote.
    """

    def __init__(self, handle: int, keeper: int, line: socket.socket, status: socket.socket, folder: Path, memory: int) -> None:
        self.folder = folder
        self.cell = ""  # the cell it last said it was running
        self.channel = Channel(line, limited=True)
        self._handle, self._status, self._memory = handle, status, memory
        self._keeper = pid_of(keeper)
        os.close(keeper)
        self.pid = next(descendants(self._keeper), 0)
        self._base = resident_bytes(self.pid)
        self._peak = 0
        self._beyond = self._closed = False
        self._number = 0
        self._noise = 0
        self._given: float | None = None
        self._asked, self._before = time.monotonic(), self.usage()

    def ask(self, deadline: float, **request: Any) -> dict[str, Any]:
        """The answer to ``request``: a dict with ``value`` or ``fault``.

        Raises:
            Ended: it died, grew too large, or did not answer by ``deadline`` (on the clock of ``time.monotonic``).
            NotPlain: what it sent is no plain data.
        """
        self.post(deadline, **request)
        return self.collect(deadline)

    def post(self, deadline: float, **request: Any) -> None:
        """Send a question without waiting for its answer."""
        self._number = secrets.randbits(62)  # an answer made ahead cannot carry it
        self._asked, self._before, self._given = time.monotonic(), self.usage(), None
        try:
            self.channel.send({"id": self._number, **request}, deadline)
        except Late:
            raise Ended(Status.TIMEOUT, tr("your process does not read what it is asked")) from None
        except OSError:
            raise self.ended() from None

    def collect(self, deadline: float) -> dict[str, Any]:
        """Wait for the answer to the last question."""
        while True:
            try:
                answer = self.heard(self.channel.receive(deadline, self.look))
            except Late:
                if (more := self.more_time(deadline)) > 0:
                    deadline = after(more)
                    continue
                raise self.ended() if self._beyond else Ended(Status.TIMEOUT, self._no_answer()) from None
            except (EOFError, OSError):
                raise self.ended() from None
            if answer is not None:
                return answer

    def heard(self, message: Any) -> dict[str, Any] | None:
        """The answer, if ``message`` is it; anything else is noise."""
        if type(message) is dict and type(message.get("id")) is int and message["id"] == self._number:
            return message
        if type(message) is dict and type(message.get("cell")) is str:
            self.cell = message["cell"][:64]
        self._noise += 1
        if self._noise > MAX_NOISE:
            raise NotPlain("endless messages")
        return None

    def usage(self) -> Usage:
        """What it and all it started have used so far."""
        return usage(self._keeper, self._base)

    def processes(self) -> list[int]:
        """Its own number and those of all it started, as this process numbers them."""
        return list(descendants(self._keeper))

    def more_time(self, deadline: float) -> float:
        """Seconds that it is still owed at ``deadline`` for the question it was last asked; 0 when it has had its time.

        Its time is up when it has computed for as long as the deadline gave it, has been idle for twice that, or ten times that has passed.
        """
        if self._beyond:
            return 0.0
        given, passed = deadline - self._asked, time.monotonic() - self._asked
        if self._given is None:
            self._given = given
        now = self.usage()
        computed, starved = now.cpu - self._before.cpu, now.starved - self._before.starved
        left = min(self._given - computed, IDLE * self._given - (passed - starved), BACKSTOP * self._given - passed)
        return max(0.0, left)

    def look(self) -> None:
        """Note the memory it holds; kill it when that is too much."""
        held = self.usage().memory
        self._peak = max(self._peak, held)
        if held > self._memory:
            self._beyond = True
            self._kill()

    def ended(self) -> Ended:
        """Why the process ended."""
        if self._beyond:
            text = tr("more than {limit} MiB of memory used ({peak} MiB)", limit=self._memory >> 20, peak=self._peak >> 20)
            return Ended(Status.OOM, text)
        code = self._exit_code()
        how = signal.Signals(-code).name if code < 0 else tr("exit code {code}", code=code)
        where = tr(" in cell `{cell}`", cell=self.cell) if self.cell else ""
        return Ended(Status.KERNEL_DIED, tr("the process ended by itself{where} ({how})", where=where, how=how))

    def close(self) -> None:
        """Kill it and all it started, and remove its folder."""
        if self._closed:
            return
        self._closed = True
        self._kill()
        self.channel.close()
        self._status.close()
        os.close(self._handle)
        if self.folder != WORK:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _exit_code(self) -> int:
        """As the keeper tells it; 0 when it does not."""
        message = self._status.recv(4096) if select.select([self._status], [], [], 2)[0] else b""
        return int(json.loads(message)["code"]) if message else 0

    def _no_answer(self) -> str:
        return tr("no answer in time, in cell `{cell}`", cell=self.cell) if self.cell else tr("no answer in time")


def pid_of(handle: int) -> int:
    """The process of a pidfd, as this process numbers it; -1 when it is gone."""
    with open(f"/proc/self/fdinfo/{handle}", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


def after(seconds: float) -> float:
    """The deadline so many seconds from now."""
    return time.monotonic() + seconds
