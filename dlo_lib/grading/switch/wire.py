"""Frames of the switch: a small JSON head and raw tensor bytes, without copies beyond those of the socket.

The framing is the codec's, so that both can use one socket:

    frame = [u64 length of JSON] [u64 length of the bytes] JSON bytes

An ``Inbox`` reads the available bytes and never waits; it touches memory only as bytes arrive, within the
codec's limits. An ``Outbox`` stores what the other end has not read. A send never blocks, because the rank
may itself be blocked in a send.
"""

from __future__ import annotations

import ctypes
import json
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.codec import HEAD, frame_length

PIECE = 1 << 16  # bytes per read of a head; smaller frames are sent in one piece
WINDOW = 4 << 20  # bytes passed to the kernel at once


@dataclass(frozen=True)
class Frame:
    """One received frame, not checked yet."""

    tree: bytes
    blob: Tensor
    """uint8, 1-D."""

    def to_bytes(self) -> bytes:
        """Return the frame as bytes for the codec."""
        return HEAD.pack(len(self.tree), self.blob.numel()) + self.tree + self.blob.numpy().tobytes()


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as bytes, 1-D; a view of a contiguous tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor; the view keeps the tensor alive.

    ``tensor.numpy()`` would forbid the student's code to resize the storage.
    """
    tensor = flat(tensor)
    memory = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory)


def frame(head: dict[str, Any], tensors: Sequence[Tensor] = ()) -> list[memoryview]:
    """Return the pieces of a frame; large tensors are not copied and must not change before they are sent."""
    tree = json.dumps(head).encode()
    blobs = [memory_of(tensor) for tensor in tensors if tensor.numel()]
    size = sum(blob.nbytes for blob in blobs)
    start = HEAD.pack(len(tree), size) + tree
    if size <= PIECE:
        return [memoryview(b"".join([start, *blobs]))]
    return [memoryview(start), *blobs]


class Inbox:
    """Reads frames from a socket. ``received``: bytes already read from it."""

    def __init__(self, line: socket.socket, received: bytes = b"") -> None:
        self._line = line
        self._received = bytearray(received)
        self._tree = b""
        self._blob: Tensor | None = None
        self._filled = 0

    def pump(self) -> bool:
        """Read the available bytes without waiting; return False at the end of the stream."""
        try:
            if self._blob is not None:
                rest = self._blob.numpy().data[self._filled :]
                count = self._line.recv_into(rest[:WINDOW], 0, socket.MSG_DONTWAIT)
                self._filled += count
                return count > 0
            data = self._line.recv(PIECE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._received += data
        return bool(data)

    def take(self) -> Frame | None:
        """Return a frame that has arrived completely, or None.

        Raises:
            NotPlain: the frame exceeds the codec's limits.
        """
        if self._blob is None and not self._open():
            return None
        assert self._blob is not None
        if self._filled < self._blob.numel():
            return None
        done, self._blob = Frame(self._tree, self._blob), None
        return done

    def _open(self) -> bool:
        """Start a frame if its head has arrived; return False otherwise."""
        if frame_length(self._received) is None:
            return False
        tree, blob = HEAD.unpack_from(self._received)
        if len(self._received) < HEAD.size + tree:
            return False
        self._tree = bytes(self._received[HEAD.size : HEAD.size + tree])
        del self._received[: HEAD.size + tree]
        self._blob = torch.empty(blob, dtype=torch.uint8)
        self._filled = min(blob, len(self._received))
        if self._filled:
            self._blob.numpy()[: self._filled] = self._received[: self._filled]
            del self._received[: self._filled]
        return True


class Outbox:
    """Sends frames in order, as fast as the other end reads."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._pieces: deque[memoryview] = deque()
        self.size = 0
        """The number of bytes not sent yet."""

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def put(self, pieces: Sequence[memoryview]) -> bool:
        """Add a frame and send what is possible; return False if the other end is closed."""
        self._pieces += pieces
        self.size += sum(piece.nbytes for piece in pieces)
        return self.flush()

    def flush(self) -> bool:
        """Send what is possible without waiting; return False if the other end is closed."""
        while self._pieces:
            head = self._pieces.popleft()
            try:
                sent = self._line.send(head[:WINDOW], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            except OSError:
                return False
            self.size -= sent
            if sent < head.nbytes:
                self._pieces.appendleft(head[sent:])
                if sent < min(WINDOW, head.nbytes):
                    return True
        return True
