"""The process that watches the ranks of one machine which no ``run_ranks`` has started: those of torchrun or srun.

It is a process of its own because no rank can be relied on: one may hold Python's lock for long, or die. It owns the board. Each rank
connects to a socket that has no name in any file system (an abstract Unix socket, called after the job), gets the board, and keeps the
connection for as long as it lives. When no progress is possible, the explanation goes to stderr and every rank is told to leave, with
``EXIT_STUCK``; one that does not is killed. The process ends with the last connection (or, when
ranks that were to come do not, with what started them), so nothing is left behind.

Of a job on several machines each has a watching process of its own, which knows the rows of its ranks. It explains what they did to each
other, and stops them; the others then lose their connections. When the missing rank is on another machine it concludes nothing: that
rank may be about to come.

It imports no torch: 10 MB of its own, 0.05 s of CPU to start, then 0.2 % of a core.
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

from dlo_lib.comm.board import Board, State
from dlo_lib.comm.detail import Explain
from dlo_lib.comm.endings import MemoryKills, describe_exit
from dlo_lib.comm.watcher import POLL_S, Watcher
from dlo_lib.text import tr

EXIT_STUCK = 3
"""The exit status of a rank that was stopped because no progress was possible."""
STACKS, LEAVE = b"stacks", b"leave"  # what a rank is told
LONGEST = 1 << 16  # bytes of a message
CREDENTIALS = struct.Struct("iII")  # process, user, group
_COME_S = 20.0  # for the next rank of this machine to connect, when none is left
_CAUSE_S = 1.0  # for a rank that failed to print why
_ANSWER_S = 0.5
_LEAVE_S = 2.0


@dataclass
class _Post:
    """A connected rank."""

    rank: int
    process: int
    connection: socket.socket
    handle: int
    """A file that becomes readable when the process is gone, whoever else holds its connection."""

    def close(self) -> None:
        self.connection.close()
        os.close(self.handle)


class NodeWatch:
    """Serves the ranks that connect to ``listener``: ``local_size`` of the ``world_size`` of the job, started by process ``launcher``."""

    def __init__(self, listener: socket.socket, world_size: int, local_size: int, launcher: int, explain: Explain) -> None:
        self._listener, self._local_size, self._explain = listener, local_size, explain
        self._came: set[int] = set()
        self._launcher_gone = False
        self._board = Board(world_size)
        self._watcher = Watcher(self._board, os.path.basename)
        self._kills = MemoryKills()
        self._posts: dict[int, _Post] = {}
        self._failed_at: float | None = None
        self._told_of_death = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        try:
            self._launcher = os.pidfd_open(launcher)
            self._selector.register(self._launcher, selectors.EVENT_READ, self._lose_launcher)
        except ProcessLookupError:
            self._launcher_gone = True

    def serve(self) -> None:
        """Until the last rank has left, and nobody else can come."""
        until = time.monotonic() + _COME_S
        while self._posts or (len(self._came) < self._local_size and not self._launcher_gone and time.monotonic() < until):
            for key, _ in self._selector.select(POLL_S):
                key.data()
            if self._posts:
                until = time.monotonic() + _COME_S
                if (explanation := self._verdict()) is not None:
                    self._end(explanation)
                    return

    def _lose_launcher(self) -> None:
        self._launcher_gone = True
        self._selector.unregister(self._launcher)

    def _verdict(self) -> str | None:
        explanation = self._watcher.look()
        if self._failed_at is None and any(view.state is State.RAISED for view in self._watcher.views.values()):
            self._failed_at = time.monotonic()
        if self._failed_at is not None and time.monotonic() - self._failed_at < _CAUSE_S:
            return None
        return "" if self._told_of_death else explanation

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            process, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
            connection.settimeout(_ANSWER_S)
            rank = int(connection.recv(LONGEST))
            if user != os.getuid() or not 0 <= rank < self._board.world_size or rank in self._posts:
                raise ValueError("not a rank of this job")
            handle = os.pidfd_open(process)
        except (OSError, ValueError):
            connection.close()
            return
        socket.send_fds(connection, [b"board"], [self._board.descriptor])
        self._came.add(rank)
        self._posts[rank] = post = _Post(rank, process, connection, handle)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(post))
        self._selector.register(handle, selectors.EVENT_READ, lambda: self._gone(post))

    def _hear(self, post: _Post) -> None:
        """A rank says nothing unless it is asked: this is the end of its stream. It leaves, or its process is gone."""
        with contextlib.suppress(OSError):
            if post.connection.recv(LONGEST, socket.MSG_DONTWAIT):
                return
        self._gone(post)

    def _gone(self, post: _Post) -> None:
        if self._posts.pop(post.rank, None) is None:
            return
        self._watcher.look()
        if not self._watcher.views[post.rank].ended:
            how = _how_it_ended(post, self._kills)
            self._watcher.died(post.rank, how)
            self._failed_at = self._failed_at or time.monotonic()
            if not self._told_of_death:
                self._told_of_death = True
                _say(tr("RANK {rank} {how}.", rank=post.rank, how=how) + "\n\n" + self._watcher.table())
        for source in (post.connection, post.handle):
            self._selector.unregister(source)
        post.close()

    def _end(self, explanation: str) -> None:
        """Say why, unless that has been said, and stop the ranks that are left."""
        stacks = self._stacks() if self._explain is Explain.STACKS else ""
        _say("\n\n".join(part for part in (explanation, stacks) if part))
        for post in self._posts.values():
            with contextlib.suppress(OSError):
                post.connection.send(LEAVE)
        until = time.monotonic() + _LEAVE_S
        for post in self._posts.values():
            with selectors.DefaultSelector() as gone:
                gone.register(post.handle, selectors.EVENT_READ)
                if not gone.select(max(0.0, until - time.monotonic())):
                    signal.pidfd_send_signal(post.handle, signal.SIGKILL)
            post.close()

    def _stacks(self) -> str:
        """Each rank's Python stack, as far as it answers in time."""
        for post in self._posts.values():
            with contextlib.suppress(OSError):
                post.connection.send(STACKS)
        until = time.monotonic() + _ANSWER_S
        said = []
        for rank, post in sorted(self._posts.items()):
            post.connection.settimeout(max(0.01, until - time.monotonic()))
            try:
                stack = post.connection.recv(LONGEST).decode(errors="replace")
            except OSError:
                stack = tr("  (it computes, and could not be asked)")
            said.append(tr("rank {rank} is here (most recent call last):", rank=rank) + f"\n{stack.rstrip()}")
        return "\n\n".join(said)


def _say(text: str) -> None:
    if text:
        print(f"\n{text}\n", file=sys.stderr, flush=True)


def _how_it_ended(post: _Post, kills: MemoryKills) -> str:
    """In words; the exit status of a process that is no child of ours can be read until its parent has asked for it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{post.process}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return describe_exit(int(fields[49]), kills)
    return tr("ended its process without a word")


def main(listener: int, world_size: int, local_size: int, launcher: int, explain: str) -> None:
    """The whole life of the process; ``listener`` is the file of the listening socket, ``launcher`` the process that started the ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the ranks
    NodeWatch(socket.socket(fileno=listener), world_size, local_size, launcher, Explain(explain)).serve()
