"""The process that watches the ranks of one machine that torchrun or srun started.

It is a separate process because a rank may hold Python's lock for a long time, or die. It owns the board.
Each rank connects to a socket that has no name in any file system (an abstract Unix socket, named after the
job), receives the board, and keeps the connection open until it ends. When no progress is possible, the
process prints the explanation to stderr and sends every rank a request to leave with ``EXIT_STUCK``. It kills
a rank that does not leave. It ends with the last connection, or with the launcher if some ranks never
connect, so no process is left.

In a job on several machines, each machine has one such process, which knows the rows of its ranks only. It
explains dead-locks among these ranks and stops them; the ranks on other machines then lose their connections.
When a missing rank is on another machine it concludes nothing, because that rank may still arrive.

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

from dlo_lib.comm.deadlock.board import Activity, Board
from dlo_lib.comm.deadlock.detail import Explain
from dlo_lib.comm.deadlock.exit_status import MemoryKills, describe_exit
from dlo_lib.comm.deadlock.watcher import POLL_S, Watcher
from dlo_lib.text import tr

EXIT_STUCK = 3
"""The exit status of a rank that was stopped because no progress was possible."""
STACKS, LEAVE = b"stacks", b"leave"  # messages to a rank
LONGEST = 1 << 16  # bytes of a message
CREDENTIALS = struct.Struct("iII")  # process, user, group
_CONNECT_S = 20.0  # how long to wait for the next rank of this machine while none is connected
_CAUSE_S = 1.0  # how long a rank that failed may take to print the reason
_ANSWER_S = 0.5
_LEAVE_S = 2.0


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

    ``local_size`` of the ``world_size`` ranks of the job are on this machine, started by process
    ``launcher``.
    """

    def __init__(
        self, listener: socket.socket, world_size: int, local_size: int, launcher: int, explain: Explain
    ) -> None:
        self._listener, self._local_size, self._explain = listener, local_size, explain
        self._known_ranks: set[int] = set()
        self._launcher_gone = False
        self._board = Board(world_size)
        self._watcher = Watcher(self._board, os.path.basename)
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
                if (explanation := self._explanation()) is not None:
                    self._end(explanation)
                    return

    def _on_launcher_end(self) -> None:
        self._launcher_gone = True
        self._selector.unregister(self._launcher)

    def _explanation(self) -> str | None:
        explanation = self._watcher.look()
        if self._failed_at is None and any(
            view.state is Activity.RAISED for view in self._watcher.views.values()
        ):
            self._failed_at = time.monotonic()
        if self._failed_at is not None and time.monotonic() - self._failed_at < _CAUSE_S:
            return None
        return "" if self._death_reported else explanation

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
        if not self._watcher.views[member.rank].ended:
            how = _describe_end(member, self._kills)
            self._watcher.died(member.rank, how)
            self._failed_at = self._failed_at or time.monotonic()
            if not self._death_reported:
                self._death_reported = True
                _print_error(
                    tr("RANK {rank} {how}.", rank=member.rank, how=how) + "\n\n" + self._watcher.table()
                )
        for source in (member.connection, member.handle):
            self._selector.unregister(source)
        member.close()

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


def main(listener: int, world_size: int, local_size: int, launcher: int, explain: str) -> None:
    """Run the process.

    ``listener`` is the file descriptor of the listening socket, ``launcher`` the process that started the
    ranks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the ranks
    NodeWatch(socket.socket(fileno=listener), world_size, local_size, launcher, Explain(explain)).serve()
