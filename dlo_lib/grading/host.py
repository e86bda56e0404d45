"""The judge's hold on the student's processes: one zygote for a lab, one worker for each attempt and each rank.

A worker is narrow on purpose: a question goes in with a number that nobody can guess, an answer with the same number comes out, in time or
not at all. Whatever else it sends is noise. It is killed when its memory grows beyond the limit, and when the judge is done with it.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dlo_lib.grading.channel import Channel, Late
from dlo_lib.grading.codec import NotPlain
from dlo_lib.grading.outcome import Ended, Status
from dlo_lib.grading.zygote import STATUS
from dlo_lib.text import tr

MEMORY = 2 << 30  # bytes that a worker may hold beyond what it shares with the zygote
MAX_NOISE = 10_000
START_SECONDS = 120.0
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "MPLBACKEND": "agg",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "MALLOC_MMAP_THRESHOLD_": "131072",  # freed memory goes back, so that what is held is what is used
    "GLOO_SOCKET_IFNAME": "lo",
}


class Zygote:
    """Starts workers for one lab. A context manager: at its end no process is left.

    Args:
        taught: modules withheld from workers.
        warm: modules imported before the fork.
        environment: variables added to the few that workers have; nothing of the judge's own environment goes there.
        files: path in a worker's folder → file copied there.
    """

    def __init__(
        self,
        taught: Sequence[str] = (),
        warm: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        files: Mapping[str, Path] | None = None,
    ) -> None:
        self._files = dict(files or {})
        self._owner, self._closed = os.getpid(), False
        self._folder = Path(tempfile.mkdtemp(prefix="dlo-judge-"))
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).resolve().parents[2])
        settings = json.dumps({"taught": list(taught), "warm": list(warm)})
        begin = f"import json, sys; sys.path.insert(0, {root!r}); from dlo_lib.grading.zygote import serve"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", f"{begin}; serve({theirs.fileno()}, json.loads({settings!r}))"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**ENVIRONMENT, "HOME": str(self._folder), "IPYTHONDIR": str(self._folder), **(environment or {})},
            cwd=self._folder,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        if not select.select([self._control], [], [], START_SECONDS)[0] or self._control.recv(16) != b"ready":
            self.close()
            raise RuntimeError("the judge's zygote did not start: see its message above")

    def worker(self, memory: int = MEMORY) -> Worker:
        """A fresh process that has run nothing yet."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        for name, file in self._files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)
        ours, theirs = socket.socketpair()
        status, their_status = os.pipe()
        try:
            job = json.dumps({"folder": str(folder), "memory": memory}).encode()
            socket.send_fds(self._control, [job], [theirs.fileno(), their_status])
            message, handles, *_ = socket.recv_fds(self._control, 64, 1)
        finally:
            theirs.close()
            os.close(their_status)
        if not handles:
            raise RuntimeError("the judge's zygote is gone")
        return Worker(int(message), handles[0], ours, status, folder, memory)

    @property
    def alive(self) -> bool:
        """It can start workers. A fork of this process must start its own: answers on one socket would reach either."""
        return self._owner == os.getpid() and not self._closed and self._process.poll() is None

    def close(self) -> None:
        """End it with all its workers."""
        if self._owner != os.getpid() or self._closed:
            return
        self._closed = True
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
    """One process with the student's code. ``folder`` is its own."""

    def __init__(self, pid: int, handle: int, line: socket.socket, status: int, folder: Path, memory: int) -> None:
        self.pid, self.folder = pid, folder
        self.cell = ""  # the cell it last said it was running
        self.channel = Channel(line, limited=True)
        self._handle, self._status, self._memory = handle, status, memory
        self._base = resident_bytes(pid)
        self._peak = 0
        self._beyond = False
        self._number = 0
        self._noise = 0

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

    def look(self) -> None:
        """Note the memory it holds; kill it when that is too much."""
        grown = resident_bytes(self.pid) - self._base
        self._peak = max(self._peak, grown)
        if grown > self._memory:
            self._beyond = True
            self._kill()

    def ended(self) -> Ended:
        """Why the process ended."""
        if self._beyond:
            text = tr("more than {limit} MiB of memory used ({peak} MiB)", limit=self._memory >> 20, peak=self._peak >> 20)
            return Ended(Status.OOM, text)
        code = STATUS.unpack(os.read(self._status, STATUS.size))[0] if select.select([self._status], [], [], 2)[0] else 0
        how = signal.Signals(-code).name if code < 0 else tr("exit code {code}", code=code)
        where = tr(" in cell `{cell}`", cell=self.cell) if self.cell else ""
        return Ended(Status.KERNEL_DIED, tr("the process ended by itself{where} ({how})", where=where, how=how))

    def close(self) -> None:
        """Kill it and remove its folder."""
        self._kill()
        self.channel.close()
        os.close(self._handle)
        os.close(self._status)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _no_answer(self) -> str:
        return tr("no answer in time, in cell `{cell}`", cell=self.cell) if self.cell else tr("no answer in time")


def resident_bytes(pid: int) -> int:
    """Memory of a process that is its own; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as lines:
            return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))
    except OSError:
        return 0


def after(seconds: float) -> float:
    """The deadline so many seconds from now."""
    return time.monotonic() + seconds
