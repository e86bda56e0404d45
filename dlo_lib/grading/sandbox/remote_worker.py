"""The judge's handle on one process that runs a student's code.

Each question carries a random number. Only a message with the same number is its answer; all other messages
of the worker are noise. The judge kills the worker when its memory exceeds the limit, and when it has
finished.

A deadline counts CPU time: waiting for a processor on a loaded machine does not count (``limits.Usage``).
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.asked import Asked
from dlo_lib.grading.checks.codec import NotPlain
from dlo_lib.grading.checks.outcome import Ended, Status
from dlo_lib.grading.checks.stand_in import answer_to
from dlo_lib.grading.sandbox.cgroups import Group
from dlo_lib.grading.sandbox.channel import Channel, DeadlineExceeded
from dlo_lib.grading.sandbox.hidden_memory import (
    COPIED_BEFORE,
    GROWN_BEFORE,
    copied_bytes,
    excess,
    pipe_bytes,
    socket_bytes,
    stopped,
    terminal_bytes,
)
from dlo_lib.grading.sandbox.limits import (
    Usage,
    busy_seconds,
    descendants,
    memory_beyond,
    pid_of,
    ran_seconds,
    resident_bytes,
    scratch_bytes,
    task_state,
    usage,
)
from dlo_lib.grading.sandbox.lockdown import WORK
from dlo_lib.grading.sandbox.processor_share import MOST_RUNNING, share_processor
from dlo_lib.grading.switch.memory import exact_bytes, mapped_bytes

MAX_NOISE = 10_000
ANSWER = '{{"$dict": [["id", {}], '  # how the codec writes the beginning of an answer
CALL = '{{"$dict": [["asks", {}], '  # and that of a call of a function of the check
# A worker with one task has its time, whether it computes or sleeps. Of several tasks, the judge does not
# know which one the others wait for.
IDLE_FACTOR, IDLE_FACTOR_OF_SEVERAL = 1.0, 2.0
READY_SECONDS = 0.05  # the kernel counts a wait for a processor at its end; until then it looks like sleep
LOOK_SECONDS = 0.02  # between two measurements of its memory: one costs 0.5 ms, most answers come sooner
# No worker has more than this multiple of its time by the wall clock. Several tasks also wait for each other,
# and children that have ended are not counted in any figure.
WALL_FACTOR, WALL_FACTOR_OF_SEVERAL = 10.0, 4.0
# A worker with one task, whose time is known, has these seconds: a short limit is not for the load.
LEAST_WALL = 10.0


class Worker:
    """A process that runs a student's code. ``folder`` is its working directory, as the process sees it.

    Args:
        handle: pidfd of the worker.
        supervisor: pidfd of its supervisor; None in a sandbox, which needs none.
        line: the judge's end of the channel to the worker.
        status: the judge's end of the socket on which the end of the worker is reported.
        folder: the working directory of the worker.
        memory: bytes it may hold beyond what it shares with the zygote.
        group: the control group of all processes of the worker, if the host has control groups.
        single: the worker can start no process and create no socket, so that the judge looks for none.
    """

    def __init__(
        self,
        handle: int,
        supervisor: int | None,
        line: socket.socket,
        status: socket.socket,
        folder: Path,
        memory: int,
        group: Group | None = None,
        single: bool = False,
    ) -> None:
        self.folder = folder
        self.cell = ""  # the last cell whose start it reported
        self.channel = Channel(line, limited=True)
        self.group = group
        self._handle, self._status, self._memory = handle, status, memory
        self.pid = pid_of(handle)
        self._root, self._supervised, self._single = self.pid, supervisor is not None, single
        if supervisor is not None:
            self._root = pid_of(supervisor)
            os.close(supervisor)
        self.crowded = False
        """True if it ran out of time although it had neither computed nor slept for that time: it waited for
        a processor, so that the verdict may be another when it runs alone."""
        self._tasks, self._many, self._bomb = 1, False, False
        self._base = self._exact_base = resident_bytes(self.pid)
        self._files = self._in_files()
        self._copied, self._grown = COPIED_BEFORE, 0
        self._peak = 0
        self._over_limit = self._closed = False
        self._number = 0
        self._cells: set[str] = set()  # the cells of the last question
        self._noise = 0
        self.asked: list[Asked] = []
        """The functions of the check that the last question holds."""
        self.used = False
        """True once a question other than to load cells was asked."""
        self._given: float | None = None
        self._answered, self._looked = True, 0.0
        self.computed = 0.0
        """CPU time in seconds between questions and their answers, without the start of the worker."""
        self.outside = ran_seconds(self.pid)
        """CPU time in seconds outside of questions: its start."""
        self._asked = time.monotonic()
        self._before = self._after = self.usage()
        self._busy_judge = busy_seconds()

    def ask(self, deadline: float, claims: bool = False, **request: Any) -> dict[str, Any]:
        """Send a question and return its answer, a dict with ``value`` or ``fault``. ``claims``: a value in
        it may be claimed.

        Raises:
            Ended: the worker has ended, exceeded its memory limit, or not answered by ``deadline`` (in
                ``time.monotonic`` seconds).
            NotPlain: the answer is not plain data.
        """
        self.post(deadline, claims, **request)
        return self.collect(deadline)

    def post(self, deadline: float, claims: bool = False, **request: Any) -> None:
        """Send a question without waiting for its answer, in which values may be claimed if ``claims``."""
        self._number = secrets.randbits(62)  # an answer prepared in advance cannot contain it
        self.channel.expected = ANSWER.format(self._number).encode()
        self.channel.claims = claims
        self.asked, self.used = [], self.used or request["do"] != "load"
        self._asked, self._before, self._given = time.monotonic(), self.usage(), None
        self._busy_judge = busy_seconds()
        self._answered = False
        self._cells = {cell["id"] for cell in request.get("cells", ())}
        if "cells" in request:  # as one text, because the codec's tree of them would cost each worker 0.3 ms
            request["cells"] = json.dumps(request["cells"])
        try:
            self.channel.send({"id": self._number, **request}, deadline, self.asked)
        except DeadlineExceeded:
            raise Ended(Status.TIMEOUT, tr("your process does not read the judge's questions")) from None
        except OSError:
            raise self.ended() from None

    def collect(self, deadline: float) -> dict[str, Any]:
        """Wait for the answer to the last question."""
        while True:
            try:
                self.channel.call = CALL.format(self._number).encode() if self.asked else b""
                message = self.channel.receive(deadline, self.check_memory)
                if self._answer_call(message, deadline):
                    continue
                answer = self.match_answer(message)
            except DeadlineExceeded:
                if (more := self.more_time(deadline)) > 0:
                    deadline = deadline_after(more)
                    continue
                raise (
                    self.ended() if self._out_of_memory() else Ended(Status.TIMEOUT, self._no_answer())
                ) from None
            except (EOFError, OSError):
                raise self.ended() from None
            if answer is not None:
                return answer

    def _answer_call(self, message: Any, deadline: float) -> bool:
        """Answer ``message`` if it calls a function of the check; return whether it does.

        Raises:
            Ended: the worker calls again and again after a refusal.
            NotPlain: no stand-in makes this call.
            DeadlineExceeded: it does not read the answer.
        """
        if type(message) is not dict or message.get("asks") != self._number or not self.asked:
            return False
        index = message.get("function")
        if type(index) is not int or not 0 <= index < len(self.asked):
            return False
        asked = self.asked[index]
        answer = answer_to(asked, message.get("call"))
        if asked.overrun:
            raise Ended(Status.TIMEOUT, tr("your code calls `{name}` again and again", name=asked.name))
        self.channel.send_frame(answer, deadline)
        return True

    def match_answer(self, message: Any) -> dict[str, Any] | None:
        """Return ``message`` if it is the answer to the last question; otherwise count it as noise and return
        None.
        """
        if type(message) is dict and type(message.get("id")) is int and message["id"] == self._number:
            self._add_cpu_time()
            return message
        if type(message) is dict and type(message.get("cell")) is str and message["cell"] in self._cells:
            self.cell = message["cell"]
        self._noise += 1
        if self._noise > MAX_NOISE:
            raise NotPlain("endless messages")
        return None

    def usage(self) -> Usage:
        """Return the processor time that all processes of the worker have used so far."""
        return usage(self.processes(), self._root if self._supervised else None)

    def _memory_now(self) -> int:
        return memory_beyond(self.processes(), self._base)

    def held_bytes(self) -> int:
        """Return the bytes that the worker holds now: in its processes, in the files of a sandbox, which are
        in memory, and in every other place where a worker could hide a tensor.
        """
        with stopped(self._handle, self.pid):
            grown, copied = self._grown_and_copied()
            children = [pid for pid in self.processes() if pid != self.pid]
            memory = (
                max(0, grown - self._grown)
                + memory_beyond(children, self._base)
                + excess(copied, self._copied)
            )
            return memory + pipe_bytes(self.processes()) + max(0, self._in_files() - self._files)

    def count_pages(self) -> None:
        """Count the memory of a worker that has run no cell, page by page: marks count what comes later."""
        self._exact_base = exact_bytes(self.pid)

    def expect_marks(self) -> None:
        """Record what the worker has allocated so far, and how much inherited memory it has overwritten:
        cells do both honestly, up to a limit.
        """
        grown, self._copied = self._grown_and_copied()
        self._grown = min(max(0, grown), GROWN_BEFORE)

    def _grown_and_copied(self) -> tuple[int, int]:
        mapped = mapped_bytes(self.pid)
        grown = exact_bytes(self.pid, mapped) - self._exact_base
        return grown, copied_bytes(mapped, grown)

    def _in_files(self) -> int:
        return 0 if self._supervised else scratch_bytes(self._root) + terminal_bytes(self._root)

    def processes(self) -> list[int]:
        """Return the process ids of the worker's processes, as the judge's pid namespace numbers them."""
        if self._single:
            return [self._root]
        below = list(descendants(self._root))
        return below if self._supervised else [self._root, *below]

    def since_asked(self) -> Usage:
        """Return the processor time since the last question, up to its answer."""
        now = self._after if self._answered else self.usage()
        return Usage(max(0.0, now.cpu - self._before.cpu), max(0.0, now.starved - self._before.starved))

    def used_seconds(self, workers: Sequence[Worker] = ()) -> float:
        """Return the seconds since the last question in which the worker has computed or slept.

        It does not sleep while it waits for a processor, for the judge, or for another of ``workers``, the
        ranks of the same run, that computes or waits for a processor.
        """
        own = self.since_asked()
        others = [worker.since_asked() for worker in workers if worker is not self]
        busy = own.starved + sum(spent.cpu + spent.starved for spent in others)
        passed = time.monotonic() - self._asked
        return max(own.cpu, passed - busy - (busy_seconds() - self._busy_judge))

    def more_time(self, deadline: float, workers: Sequence[Worker] = ()) -> float:
        """Return the seconds that the worker has left at ``deadline`` for the last question, or 0.

        The time is over when the CPU time of all its processes reaches the time given, when the worker has
        used ``IDLE_FACTOR`` times that (``used_seconds``, which ``workers`` is for), or when ``WALL_FACTOR``
        times that has passed, at least ``LEAST_WALL``.
        """
        if self._over_limit:
            return 0.0
        given, passed = deadline - self._asked, time.monotonic() - self._asked
        if self._given is None:
            self._given = given
        one = self._tasks == 1
        factor = IDLE_FACTOR if one else IDLE_FACTOR_OF_SEVERAL
        idle_left = factor * self._given - self.used_seconds(workers)
        if idle_left <= 0 and any(worker.ready for worker in (self, *workers)):
            idle_left = READY_SECONDS
        own_left = min(self._given - self.since_asked().cpu, idle_left)
        most = max(LEAST_WALL, WALL_FACTOR * self._given) if one else WALL_FACTOR_OF_SEVERAL * self._given
        wall_left = most - passed
        self.crowded = self.crowded or wall_left <= 0 < own_left
        return max(0.0, min(own_left, wall_left))

    @property
    def ready(self) -> bool:
        """Whether the first thread of a process of the worker runs, or waits for a processor."""
        return any(task_state(pid, pid) == "R" for pid in self.processes())

    def check_memory(self) -> None:
        """Record the peak of the worker's memory; kill the worker above its limit, or with too many running
        tasks. Share the processors between its tasks.

        Calls within ``LOOK_SECONDS`` of the last measurement return at once.
        """
        if time.monotonic() - max(self._asked, self._looked) < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        tasks, running = share_processor(self.processes())
        self._tasks = max(self._tasks, tasks)
        if running > MOST_RUNNING and self._many:  # twice in succession
            self._bomb = True
            self._kill()
        self._many = running > MOST_RUNNING
        memory = self._memory_now() + (0 if self._supervised or self._single else socket_bytes(self._root))
        self._peak = max(self._peak, memory)
        # If the kernel kills the only process of a worker, the channel ends.
        if memory > self._memory or (not self._single and self._out_of_memory()):
            self._over_limit = True
            self._kill()

    def _out_of_memory(self) -> bool:
        """Return whether the worker has exceeded its limit, or the kernel has killed one of its processes
        because of it; the others may wait without an end.
        """
        return self._over_limit or (self.group is not None and self.group.oom_killed)

    def ended(self) -> Ended:
        """Return the reason for which the process ended."""
        if self._out_of_memory():
            limit, peak = self._memory >> 20, self._peak >> 20
            text = tr("more than {limit} MiB of memory used ({peak} MiB)", limit=limit, peak=peak)
            return Ended(Status.OOM, text, tr("more than {limit} MiB of memory used", limit=limit))
        if self._bomb:
            text = tr("more than {limit} processes and threads computed at once", limit=MOST_RUNNING)
            return Ended(Status.TIMEOUT, text)
        code = self._exit_code()
        how = signal.Signals(-code).name if code < 0 else tr("exit code {code}", code=code)
        where = tr(" in cell `{cell}`", cell=self.cell) if self.cell else ""
        words = tr("the process ended by itself{where}", where=where)
        return Ended(Status.KERNEL_DIED, f"{words} ({how})", words)

    def close(self) -> None:
        """Kill all processes of the worker and remove its folder."""
        if self._closed:
            return
        self._closed = True
        self._add_cpu_time()
        self._kill()
        if self.group is not None:
            self.group.finished = True
        self.channel.close()
        self._status.close()
        os.close(self._handle)
        if self.folder != WORK:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _add_cpu_time(self) -> None:
        if not self._answered:
            self._answered, self._after = True, self.usage()
            self.computed += max(0.0, self._after.cpu - self._before.cpu)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _exit_code(self) -> int:
        """Return the exit code that is reported, or 0 if none is."""
        message = self._status.recv(4096) if select.select([self._status], [], [], 2)[0] else b""
        return int(json.loads(message)["code"]) if message else 0

    def _no_answer(self) -> str:
        if self.cell:
            return tr("no answer in time, in cell `{cell}`", cell=self.cell)
        return tr("no answer in time")


def charged_seconds(workers: Sequence[Worker]) -> float:
    """Return the seconds that a question to ``workers`` has used: those of the one that used most."""
    return max(worker.used_seconds(workers) for worker in workers)


def deadline_after(seconds: float) -> float:
    """Return the deadline ``seconds`` from now, in ``time.monotonic`` seconds."""
    return time.monotonic() + seconds
