"""Send and receive plain values over a socket, in frames, with a deadline and a limit on the size."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import Any

from dlo_lib.grading.checks.asked import MOST_BYTES, Asked
from dlo_lib.grading.checks.codec import HEAD, NotPlain, StandIn, frame_length, pack, unpack

PIECE = 1 << 20
LONG = 4096  # bytes of a frame that is decoded only if it is expected
POLL = 0.05  # seconds between two calls of ``watch``


class DeadlineExceeded(Exception):
    """The deadline has passed."""


class Channel:
    """One end of the connection between the judge and a worker.

    Args:
        line: the connected socket.
        limited: refuse frames that are larger than the codec's limits. The judge sets it; a worker trusts the
            judge.
    """

    def __init__(self, line: socket.socket, limited: bool) -> None:
        self.line = line
        self._limited = limited
        self._buffer = bytearray()
        self.expected = b""
        """How the content of a long frame must begin; empty: in any way."""
        self.call = b""
        """How the content of a longer call of a function of the check begins; empty: there are none."""
        self.claims = False
        """Whether the other end may mark values as ``Claimed``."""
        self.stand_in: StandIn | None = None
        """Makes what a function of a check becomes at this end."""

    def fileno(self) -> int:
        """Return the descriptor, for ``select``."""
        return self.line.fileno()

    def send(self, value: Any, deadline: float | None = None, asked: list[Asked] | None = None) -> None:
        """Send one value. The functions of the check in it are added to ``asked``.

        Raises:
            NotPlain: ``value`` is not plain data.
            DeadlineExceeded: the other end has not read the value by ``deadline`` (in ``time.monotonic``
                seconds).
            OSError: the other end is closed.
        """
        self.send_frame(pack(value, asked), deadline)

    def send_frame(self, frame: bytes, deadline: float | None = None) -> None:
        """Send a value that is packed already; otherwise as :meth:`send`."""
        data = memoryview(frame)
        if deadline is None:
            self.line.sendall(data)
            return
        while data:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([], [self.line], [], left)[1]:
                raise DeadlineExceeded
            data = data[self.line.send(data[:PIECE], socket.MSG_DONTWAIT) :]

    def receive(self, deadline: float | None = None, watch: Callable[[], None] | None = None) -> Any:
        """Wait for the next value and return it. Meanwhile, call ``watch`` about every 50 ms.

        Raises:
            NotPlain: the received bytes are not plain data, or too large.
            DeadlineExceeded: no value has arrived by ``deadline`` (in ``time.monotonic`` seconds).
            EOFError: the other end is closed.
        """
        while (value := self.take()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise DeadlineExceeded
            wait = left if watch is None else min(POLL, left or POLL)
            if watch is not None:
                watch()
            if select.select([self.line], [], [], wait)[0] and not self.pump():
                raise EOFError
        return value[0]

    def take(self) -> tuple[Any] | None:
        """Return a value that has arrived completely, in a tuple; None if there is none.

        Raises:
            NotPlain: the bytes are not plain data, or a long frame that is not expected; that is not decoded.
        """
        length = frame_length(self._buffer, self._limited)
        if length is None:
            return None
        self.require_expected(self._buffer, length)
        if len(self._buffer) < length:
            return None
        frame, self._buffer = self._buffer, self._buffer[length:]  # usually all of it: no copy
        return (self.decoded(memoryview(frame)[:length]),)

    def decoded(self, frame: bytes | memoryview) -> Any:
        """Return the value of a complete frame from the other end.

        Raises:
            NotPlain: it is not plain data.
        """
        return unpack(frame, self.stand_in, self.claims)

    def require_expected(self, frame: bytes | bytearray, length: int) -> None:
        """Check the beginning of a frame of ``length`` bytes, of which the first ones are in ``frame``.

        Raises:
            NotPlain: it is long, and its content does not begin with ``expected``.
        """
        if length <= LONG or self.expected.startswith(
            bytes(frame[HEAD.size : HEAD.size + len(self.expected)])
        ):
            return
        begins = bytes(frame[HEAD.size : HEAD.size + len(self.call)])
        if not self.call or length > MOST_BYTES + LONG or not self.call.startswith(begins):
            raise NotPlain("a long message that is no answer")

    def pump(self) -> bool:
        """Read the available bytes (call it when the socket is readable); return False at the end of the
        stream.
        """
        try:
            data = self.line.recv(PIECE)
        except ConnectionError:
            return False
        self._buffer += data
        return bool(data)

    def leftover(self) -> bytes:
        """Return the bytes of an incomplete frame and forget them: another reader of the same socket
        continues.
        """
        data = bytes(self._buffer)
        self._buffer.clear()
        return data

    def close(self) -> None:
        """Close the socket."""
        self.line.close()
