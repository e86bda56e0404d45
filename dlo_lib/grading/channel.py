"""One socket, framed: plain data goes in and comes out whole, within a deadline and within limits."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import Any

from dlo_lib.grading.codec import frame_length, pack, unpack

PIECE = 1 << 20
POLL = 0.05  # seconds between two looks of ``watch``


class Late(Exception):
    """The deadline has passed."""


class Channel:
    """One end. ``limited``: frames beyond the codec's limits are refused, as the judge must; a worker trusts the judge."""

    def __init__(self, line: socket.socket, limited: bool) -> None:
        self.line = line
        self._limited = limited
        self._buffer = bytearray()

    def fileno(self) -> int:
        """For select."""
        return self.line.fileno()

    def send(self, value: Any, deadline: float | None = None) -> None:
        """Send one value.

        Raises:
            NotPlain: it is no plain data. Late: the other end did not read in time. OSError: there is none any more.
        """
        data = memoryview(pack(value))
        if deadline is None:
            self.line.sendall(data)
            return
        while data:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([], [self.line], [], left)[1]:
                raise Late
            data = data[self.line.send(data[:PIECE], socket.MSG_DONTWAIT) :]

    def receive(self, deadline: float | None = None, watch: Callable[[], None] | None = None) -> Any:
        """The next value. While waiting, ``watch`` is called about every 50 ms.

        Raises:
            NotPlain: what came is no plain data, or too large. Late: it did not come in time. EOFError: the other end is gone.
        """
        while (value := self.take()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise Late
            wait = left if watch is None else min(POLL, left or POLL)
            if watch is not None:
                watch()
            if select.select([self.line], [], [], wait)[0] and not self.pump():
                raise EOFError
        return value[0]

    def take(self) -> tuple[Any] | None:
        """A value that has arrived whole, in a tuple, or None."""
        length = frame_length(self._buffer, self._limited)
        if length is None or len(self._buffer) < length:
            return None
        frame = bytes(self._buffer[:length])
        del self._buffer[:length]
        return (unpack(frame),)

    def pump(self) -> bool:
        """Take in what is there (call when readable); False at the end."""
        try:
            data = self.line.recv(PIECE)
        except ConnectionError:
            return False
        self._buffer += data
        return bool(data)

    def leftover(self) -> bytes:
        """What has been taken in and is no whole frame yet, for another reader of the same line."""
        data = bytes(self._buffer)
        self._buffer.clear()
        return data

    def close(self) -> None:
        """Close the socket."""
        self.line.close()
