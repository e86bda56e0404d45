"""The process that watches the ranks of one machine that torchrun or srun started.

It is a separate process because a rank may hold Python's lock for a long time, or die. It owns the board.
Each rank connects to a socket that has no name in any file system (an abstract Unix socket, named after the
job), receives the board, and keeps the connection open until it ends. When no progress is possible, the
process prints the explanation to stderr and sends every rank a request to leave with ``EXIT_STUCK``. It kills
a rank that does not leave. It ends with the last connection, or with the launcher if some ranks never
connect, so no process is left.

In a job on several machines, each machine has one such process. They exchange the rows of their ranks through
files (``comm.deadlock.exchange``). One of them explains a deadlock, and all end their ranks.

When a rank has raised an error or died, the others can make no progress either. This is no deadlock: the
process gives the launcher time to end them, then prints that error and ends them.

It does not import torch: it takes 10 MB of memory, 0.05 s of CPU time to start, and then 0.2 % of a core.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.base import rank_failures
from dlo_lib.base.errors import UserError
from dlo_lib.base.rank_failures import FailureReport
from dlo_lib.base.text import tr
from dlo_lib.comm.deadlock.board import Activity, Board
from dlo_lib.comm.deadlock.detail import Explain
from dlo_lib.comm.deadlock.exchange import NodeExchange
from dlo_lib.comm.deadlock.exit_status import MemoryKills, describe_exit
from dlo_lib.comm.deadlock.watcher import POLL_S, Watcher

EXIT_STUCK = 3
"""The exit status of a rank that was stopped because no progress was possible."""
STACKS, LEAVE = b"stacks", b"leave"  # messages to a rank
LONGEST = 1 << 16  # bytes of a message
CREDENTIALS = struct.Struct("iII")  # process, user, group
_CONNECT_S = 120.0  # how long to wait for the next rank of this machine while none is connected
_CAUSE_S = 5.0  # how long a rank that failed may take to print the reason, and the launcher to end the others
_ANSWER_S = 0.5
_LEAVE_S = 5.0


@dataclass
class _ConnectedRank:
    """A connected rank."""

    rank: int
    process: int
    connection: socket.socket
    handle: int
    """A pidfd, which becomes readable when the process ends, even if another process holds the connection."""

    def close(self) -> None:
        self.connection.close()
        os.close(self.handle)


class NodeWatch:
    """Serves the ranks that connect to ``listener``.

    ``local_size`` of the ``world_size`` ranks of the job are on this machine, which has the number ``node``,
    started by process ``launcher``. ``folder`` is shared by all ranks of the job; None if there is none.
    """

    def __init__(
        self,
        listener: socket.socket,
        world_size: int,
        local_size: int,
        node: int,
        launcher: int,
        explain: Explain,
        folder: Path | None = None,
    ) -> None:
        self._listener, self._local_size, self._explain = listener, local_size, explain
        self._folder = folder
        self._known_ranks: set[int] = set()
        self._launcher_gone = False
        self._board = Board(world_size)
        self._watcher = Watcher(self._board, os.path.basename)
        self._exchange = (
            NodeExchange(folder, node, self._watcher)
            if folder is not None and local_size < world_size
            else None
        )
        self._kills = MemoryKills()
        self._members: dict[int, _ConnectedRank] = {}
        self._failed_at: float | None = None
        self._death_reported = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._on_connection)
        try:
            self._launcher = os.pidfd_open(launcher)
            self._selector.register(self._launcher, selectors.EVENT_READ, self._on_launcher_end)
        except ProcessLookupError:
            self._launcher_gone = True

    def serve(self) -> None:
        """Serve until the last rank has left and no other rank can connect."""
        until = time.monotonic() + _CONNECT_S
        while self._members or (
            len(self._known_ranks) < self._local_size and not self._launcher_gone and time.monotonic() < until
        ):
            for key, _ in self._selector.select(POLL_S):
                key.data()
            if self._members:
                until = time.monotonic() + _CONNECT_S
                explanation = self._explanation()
                if explanation is None and self._exchanged():
                    explanation = ""  # another machine has printed it
                if explanation is not None:
                    self._end(explanation)
                    break
        self._exchanged(over=True)

    def _exchanged(self, over: bool = False) -> bool:
        """Exchange rows with the other machines; return whether one of them has ended the job.

        ``over``: the ranks of this machine have ended.
        """
        if self._exchange is None:
            return False
        try:
            if over:
                self._exchange.write(self._known_ranks, over=True)
            else:
                self._exchange.exchange(self._known_ranks)
            return self._exchange.verdict()
        except (OSError, UserError) as error:
            self._exchange = None
            _print_error(tr("deadlocks across machines are not explained: {error}", error=error))
            return False

    def _on_launcher_end(self) -> None:
        self._launcher_gone = True
        self._selector.unregister(self._launcher)

    def _explanation(self) -> str | None:
        """Return the text to end the ranks with, "" if it is printed already; None if they make progress."""
        explanation = self._watcher.look()
        views = self._watcher.views.values()
        causes = self._causes() if explanation is not None else []
        if self._failed_at is None and (causes or any(view.state is Activity.RAISED for view in views)):
            self._failed_at = time.monotonic()
        if explanation is None or self._watcher.mismatched or self._failed_at is None:
            return self._decided(explanation)
        if time.monotonic() - self._failed_at < _CAUSE_S:
            return None
        if self._death_reported:
            return ""
        first = next((f"RANK {cause.rank} {cause.headline}." for cause in causes), "")
        raised = sorted(view.rank for view in views if view.state is Activity.RAISED)
        known = first or tr("RANK {rank} raised an error, shown above.", rank=raised[0] if raised else "?")
        return known + "\n\n" + self._watcher.table()

    def _causes(self) -> list[FailureReport]:
        """Return the recorded failures of ranks, the first one first, without consequences of other ones."""
        found = rank_failures.failures(self._folder) if self._folder is not None else []
        return [report for report in found if not report.is_consequence]

    def _decided(self, explanation: str | None) -> str | None:
        """Record an explanation for the job; return "" if another machine has just printed one."""
        if explanation is None or self._folder is None:
            return explanation
        try:
            return explanation if rank_failures.record_verdict(self._folder, explanation) else ""
        except OSError:
            return explanation

    def _on_connection(self) -> None:
        connection, _ = self._listener.accept()
        try:
            process, user, _ = CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            )
            connection.settimeout(_ANSWER_S)
            rank = int(connection.recv(LONGEST))
            if user != os.getuid() or not 0 <= rank < self._board.world_size or rank in self._members:
                raise ValueError("not a rank of this job")
            handle = os.pidfd_open(process)
        except (OSError, ValueError):
            connection.close()
            return
        socket.send_fds(connection, [b"board"], [self._board.descriptor])
        self._known_ranks.add(rank)
        self._members[rank] = member = _ConnectedRank(rank, process, connection, handle)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_message(member))
        self._selector.register(handle, selectors.EVENT_READ, lambda: self._on_end(member))

    def _on_message(self, member: _ConnectedRank) -> None:
        """Handle the end of a stream: the rank has left or ended, because ranks send nothing unless asked."""
        with contextlib.suppress(OSError):
            if member.connection.recv(LONGEST, socket.MSG_DONTWAIT):
                return
        self._on_end(member)

    def _on_end(self, member: _ConnectedRank) -> None:
        if self._members.pop(member.rank, None) is None:
            return
        self._watcher.look()
        view = self._watcher.views[member.rank]
        if not view.ended and view.state is not Activity.BROKEN:
            self._report_death(member)
        for source in (member.connection, member.handle):
            self._selector.unregister(source)
        member.close()

    def _report_death(self, member: _ConnectedRank) -> None:
        """Report a rank that has ended without an error, unless it was ended because of another failure."""
        how = _describe_end(member, self._kills)
        self._watcher.died(member.rank, how)
        self._failed_at = self._failed_at or time.monotonic()
        raised = any(view.state is Activity.RAISED for view in self._watcher.views.values())
        locked = self._folder is not None and rank_failures.verdict(self._folder) is not None
        if self._death_reported or raised or locked or self._causes():
            return
        self._death_reported = True
        if self._folder is not None:
            rank_failures.record_failure(self._folder, FailureReport(member.rank, how))
        _print_error(tr("RANK {rank} {how}.", rank=member.rank, how=how) + "\n\n" + self._watcher.table())

    def _end(self, explanation: str) -> None:
        """Print the explanation if there is one, and stop the remaining ranks."""
        stacks = self._stacks() if self._explain is Explain.STACKS else ""
        _print_error("\n\n".join(part for part in (explanation, stacks) if part))
        for member in self._members.values():
            with contextlib.suppress(OSError):
                member.connection.send(LEAVE)
        until = time.monotonic() + _LEAVE_S
        for member in self._members.values():
            with selectors.DefaultSelector() as gone:
                gone.register(member.handle, selectors.EVENT_READ)
                if not gone.select(max(0.0, until - time.monotonic())):
                    signal.pidfd_send_signal(member.handle, signal.SIGKILL)
            member.close()

    def _stacks(self) -> str:
        """Return the Python stack of each rank that answers in time."""
        for member in self._members.values():
            with contextlib.suppress(OSError):
                member.connection.send(STACKS)
        until = time.monotonic() + _ANSWER_S
        said = []
        for rank, member in sorted(self._members.items()):
            member.connection.settimeout(max(0.01, until - time.monotonic()))
            try:
                stack = member.connection.recv(LONGEST).decode(errors="replace")
            except OSError:
                stack = tr("  (it computes and did not answer)")
            said.append(tr("rank {rank} is here (most recent call last):", rank=rank) + f"\n{stack.rstrip()}")
        return "\n\n".join(said)


def _print_error(text: str) -> None:
    if text:
        print(f"\n{text}\n", file=sys.stderr, flush=True)


def _describe_end(member: _ConnectedRank, kills: MemoryKills) -> str:
    """Return the end of a process in words, from the exit status of the zombie until its parent reaps it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{member.process}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return describe_exit(int(fields[49]), kills)
    return tr("ended without an error message")


def main(
    listener: int, world_size: int, local_size: int, node: int, launcher: int, explain: str, folder: str
) -> None:
    """Run the process.

    ``listener`` is the file descriptor of the listening socket, ``launcher`` the process that started the
    ranks, ``folder`` the one that they share, or "".
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the ranks
    NodeWatch(
        socket.socket(fileno=listener),
        world_size,
        local_size,
        node,
        launcher,
        Explain(explain),
        Path(folder) if folder else None,
    ).serve()
