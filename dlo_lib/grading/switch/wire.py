"""Frames of the switch: a small JSON head and raw tensor bytes, read and written without a copy beyond the socket's own.

The framing is the codec's, so that both share one socket:

    frame = [u64 length of JSON] [u64 length of the bytes] JSON bytes

An ``Inbox`` reads what is there and never waits; memory for the bytes is touched only as they arrive, within the codec's limits. An
``Outbox`` keeps what the other end has not read yet: a send never blocks, for the rank may itself be blocked in sending.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.codec import HEAD, frame_length

PIECE = 1 << 16  # bytes read at once where it is not known what they are; small frames are sent in one piece
WINDOW = 4 << 20  # bytes handed to the kernel at once


@dataclass(frozen=True)
class Frame:
    """One frame as it came: nothing in it has been looked at."""

    tree: bytes
    blob: Tensor
    """uint8, 1-D."""

    def whole(self) -> bytes:
        """As the codec reads it."""
        return HEAD.pack(len(self.tree), self.blob.numel()) + self.tree + self.blob.numpy().tobytes()


def flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor as bytes, 1-D: a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def frame(head: dict[str, Any], tensors: Sequence[Tensor] = ()) -> list[memoryview]:
    """The pieces of a frame; large tensors are not copied, and must not change before they are sent."""
    tree = json.dumps(head).encode()
    blobs = [flat(tensor).numpy().data for tensor in tensors if tensor.numel()]
    size = sum(blob.nbytes for blob in blobs)
    start = HEAD.pack(len(tree), size) + tree
    if size <= PIECE:
        return [memoryview(b"".join([start, *blobs]))]
    return [memoryview(start), *blobs]


class Inbox:
    """Takes frames from a socket. ``begun``: what was read from it before."""

    def __init__(self, line: socket.socket, begun: bytes = b"") -> None:
        self._line = line
        self._begun = bytearray(begun)
        self._tree = b""
        self._blob: Tensor | None = None
        self._filled = 0

    def pump(self) -> bool:
        """Take in what is there, without waiting; False at the end of the stream."""
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
        self._begun += data
        return bool(data)

    def take(self) -> Frame | None:
        """A frame that has arrived whole.

        Raises:
            NotPlain: it is larger than what is accepted.
        """
        if self._blob is None and not self._open():
            return None
        assert self._blob is not None
        if self._filled < self._blob.numel():
            return None
        done, self._blob = Frame(self._tree, self._blob), None
        return done

    def _open(self) -> bool:
        """Begin a frame once its head is there."""
        if frame_length(self._begun) is None:
            return False
        tree, blob = HEAD.unpack_from(self._begun)
        if len(self._begun) < HEAD.size + tree:
            return False
        self._tree = bytes(self._begun[HEAD.size : HEAD.size + tree])
        del self._begun[: HEAD.size + tree]
        self._blob = torch.empty(blob, dtype=torch.uint8)
        self._filled = min(blob, len(self._begun))
        if self._filled:
            self._blob.numpy()[: self._filled] = self._begun[: self._filled]
            del self._begun[: self._filled]
        return True


class Outbox:
    """Sends frames in order, as fast as the other end reads."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._pieces: deque[memoryview] = deque()
        self.size = 0
        """Bytes not sent yet."""

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def put(self, pieces: Sequence[memoryview]) -> bool:
        """Add a frame and send what can be sent; False when the other end is gone."""
        self._pieces += pieces
        self.size += sum(piece.nbytes for piece in pieces)
        return self.flush()

    def flush(self) -> bool:
        """Send what can be sent without waiting; False when the other end is gone."""
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
