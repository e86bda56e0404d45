"""What the notebook's process and a rank say to each other over the rank's channel.

A message is a header (kind, number of bytes) and its content. The rank answers each request with
``launch.rank.RETURNED`` or ``launch.rank.RAISED``, except an interrupt. While it works it may send outputs.

The order of what a rank prints and what it displays is kept by a mark in its output pipe: the rank sends the
content of an output over the channel, then writes ``mark(number)`` into the pipe.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from dlo_lib.launch.rank import HEADER

RUN, EVALUATE, ASSIGN, COMPLETE, JOIN, INTERRUPT = b"R", b"G", b"S", b"C", b"J", b"I"
"""Requests: run a cell, evaluate an expression, set variables, complete a name, join a new process group,
stop the cell that runs. A new group comes as host and port of its store in JSON, with the files of its board
and, at least for rank 0, those of ``launch.meeting.Meeting.of``."""
OUTPUT = b"D"
"""From a rank: an output of a cell, as JSON."""
SIGNAL, BREAK = b"S", b"B"
"""The content of an interrupt: raise ``KeyboardInterrupt``, break the connections to other ranks, or both."""
_FILES = 3

MARK = re.compile(rb"\x1b_dlo-output (\d+)\x1b\\")
LONGEST_MARK = 40


def mark(number: int) -> bytes:
    """Return the mark of an output in the pipe: a control string, which a terminal would not show."""
    return b"\x1b_dlo-output %d\x1b\\" % number


@dataclass(frozen=True)
class RankRequest:
    """A request as a rank receives it, with the file descriptors that came with it."""

    kind: bytes
    content: bytes
    files: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankCell:
    """A cell that ranks run.

    Attributes:
        code: as it is run; its lines have the numbers of ``source``.
        source: as it is in the notebook, with the line of the magic.
        file: the name by which the notebook's shell knows the cell.
    """

    code: str
    source: str
    file: str


def send_request(
    channel: socket.socket, kind: bytes, content: bytes = b"", files: tuple[int, ...] = ()
) -> None:
    """Send a request to a rank, which reads at any time. A rank that has ended receives nothing: the server
    reports its end to the supervisor."""
    channel.setblocking(True)
    try:
        socket.send_fds(channel, [HEADER.pack(kind, len(content))], files)
        channel.sendall(content)
    except (BrokenPipeError, ConnectionResetError):
        return
    finally:
        channel.setblocking(False)


def receive_request(channel: socket.socket) -> RankRequest | None:
    """Wait for the next request; None if there will be none."""
    header, files, _, _ = socket.recv_fds(channel, HEADER.size, _FILES)
    header += _read(channel, HEADER.size - len(header)) if header else b""
    if len(header) < HEADER.size:
        return None
    kind, size = HEADER.unpack(header)
    content = _read(channel, size)
    return RankRequest(kind, content, tuple(files)) if len(content) == size else None


def _read(channel: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = channel.recv_into(view[filled:])
        if not count:
            break
        filled += count
    return bytes(data[:filled])
