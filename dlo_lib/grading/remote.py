"""The judge's hold on one process with the student's code.

It is narrow on purpose: a question goes in with a number that nobody can guess, an answer with the same number comes out, in time or not at
all. Whatever else it sends is noise. It is killed when its memory grows beyond the limit, and when the judge is done with it.

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
import time
from pathlib import Path
from typing import Any

from dlo_lib.grading.cgroups import Group
from dlo_lib.grading.channel import Channel, Late
from dlo_lib.grading.codec import NotPlain
from dlo_lib.grading.limits import Usage, descendants, resident_bytes, scratch_bytes, usage
from dlo_lib.grading.lockdown import WORK
from dlo_lib.grading.outcome import Ended, Status
from dlo_lib.text import tr

MAX_NOISE = 10_000
IDLE = 2.0  # a worker that neither computes nor waits for a processor has this many times the time of one that computes
LOOK_SECONDS = 0.02  # most answers come sooner; a look costs half a millisecond, the limits in the kernel nothing
BACKSTOP = 10.0  # and none has more than this many times, by the clock on the wall


class Worker:
    """One process with the student's code. ``folder`` is its own, as it sees it.

    Args:
        handle: pidfd of the process whose end is the end of all: the worker's keeper in a sandbox, else the worker.
        keeper: pidfd of the keeper.
        line: the worker's channel.
        status: the keeper's line.
        memory: bytes it may hold beyond what it shares with the zygote.
        group: the control group that all of it is in, where there is one.
    """

    def __init__(
        self, handle: int, keeper: int, line: socket.socket, status: socket.socket, folder: Path, memory: int, group: Group | None = None
    ) -> None:
        self.folder = folder
        self.cell = ""  # the cell it last said it was running
        self.channel = Channel(line, limited=True)
        self.group = group
        self._handle, self._status, self._memory = handle, status, memory
        self._keeper = pid_of(keeper)
        os.close(keeper)
        self.pid = next(descendants(self._keeper), 0)
        self._base = resident_bytes(self.pid)
        self._files = self._in_files()
        self._peak = 0
        self._beyond = self._closed = False
        self._number = 0
        self._cells: set[str] = set()  # that it was asked to run
        self._noise = 0
        self._given: float | None = None
        self._answered, self._looked = True, 0.0
        self.computed = 0.0
        """Seconds of CPU time between being asked and the answer: what the cells and the checks' calls cost, not the worker's start."""
        self._asked = time.monotonic()
        self._before = self._after = self.usage()

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
        self._answered = False
        self._cells = {cell["id"] for cell in request.get("cells", ())}
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
            self._bill()
            return message
        if type(message) is dict and type(message.get("cell")) is str and message["cell"] in self._cells:
            self.cell = message["cell"]
        self._noise += 1
        if self._noise > MAX_NOISE:
            raise NotPlain("endless messages")
        return None

    def usage(self) -> Usage:
        """What it and all it started have used so far."""
        return usage(self._keeper, self._base)

    def held(self) -> int:
        """Bytes that it holds now, in its processes and in files: in a sandbox these are memory too, and a tensor can be put there."""
        return self.usage().memory + max(0, self._in_files() - self._files)

    def _in_files(self) -> int:
        return scratch_bytes(self._keeper) if self.folder == WORK else 0

    def processes(self) -> list[int]:
        """Its own number and those of all it started, as this process numbers them."""
        return list(descendants(self._keeper))

    def charged(self) -> float:
        """Seconds that the last question has taken so far, without those in which it waited for a processor."""
        now = self._after if self._answered else self.usage()  # it waits for nothing since it has answered
        passed, starved = time.monotonic() - self._asked, now.starved - self._before.starved
        return passed - min(passed, max(0.0, starved))

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
        """Note the memory it holds; kill it when that is too much. What is asked twice within a moment is looked at once."""
        if time.monotonic() - max(self._asked, self._looked) < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        held = self.usage().memory
        self._peak = max(self._peak, held)
        if held > self._memory:
            self._beyond = True
            self._kill()

    def ended(self) -> Ended:
        """Why the process ended."""
        if self._beyond or (self.group is not None and self.group.killed):
            text = tr("more than {limit} MiB of memory used ({peak} MiB)", limit=self._memory >> 20, peak=self._peak >> 20)
            return Ended(Status.OOM, text, tr("more than {limit} MiB of memory used", limit=self._memory >> 20))
        code = self._exit_code()
        how = signal.Signals(-code).name if code < 0 else tr("exit code {code}", code=code)
        where = tr(" in cell `{cell}`", cell=self.cell) if self.cell else ""
        words = tr("the process ended by itself{where}", where=where)
        return Ended(Status.KERNEL_DIED, f"{words} ({how})", words)

    def close(self) -> None:
        """Kill it and all it started, and remove its folder."""
        if self._closed:
            return
        self._closed = True
        self._bill()
        self._kill()
        if self.group is not None:
            self.group.over = True
        self.channel.close()
        self._status.close()
        os.close(self._handle)
        if self.folder != WORK:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _bill(self) -> None:
        if not self._answered:
            self._answered, self._after = True, self.usage()
            self.computed += max(0.0, self._after.cpu - self._before.cpu)

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
