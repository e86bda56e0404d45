"""Messages between the parent and its ranks: a length, then pickled bytes. Both ends are this user's own processes."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


def send(line: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    line.sendall(_LENGTH.pack(len(data)))
    line.sendall(data)


def receive(line: socket.socket) -> Any:
    """Raises:
    EOFError: the other end is gone."""
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    return pickle.loads(_exactly(line, length))


def _exactly(line: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        got = line.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(data)
