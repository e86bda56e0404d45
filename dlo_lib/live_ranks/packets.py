"""What the notebook's process and a node of a job say to each other, through srun's input and output.

The connections of all ranks of a node share one stream of packets (kind, rank, number of bytes, content).
SLURM passes on a task's output by lines, so each packet to the notebook ends with a newline. For each rank, a
node sends at most ``WINDOW`` bytes before the notebook has taken over what came before, as a pipe would: a
rank that prints without end waits, and holds up no other rank.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator

from dlo_lib.base.errors import UserError

HELLO = b"\x1b_dlo-node\x1b\\"
"""Begins the stream from a node, after what the start of a task may have printed."""
WINDOW = 4 << 20
CHUNK_BYTES = 1 << 16
_HEAD = struct.Struct("!BiQ")
COUNT = struct.Struct("!Q")
STATUS = struct.Struct("!i")


class Packet(enum.IntEnum):
    """Kinds of packets."""

    START = 1
    """To a node: fork the ranks. ``Start`` as JSON, a newline, and a pickled ``launch.rank.LaunchSpec``."""
    REJOIN = 2
    """To a node: fork the ranks that have ended, and let all of them join a new process group."""
    REQUEST = 3
    """To a node: bytes of a rank's channel."""
    KILL = 4
    STACKS = 5
    TAKEN = 6
    """To a node: the number of bytes of a rank that the notebook has taken over."""
    NODE = 16
    """From a node: what it has, as JSON."""
    LISTENS = 17
    """From the node of rank 0: the port at which the ranks meet the next time."""
    ANSWER = 18
    """From a node: bytes of a rank's channel."""
    OUTPUT = 19
    """From a node: bytes that a rank has printed."""
    ROW = 20
    """From a node: a change of a rank's row on the board, and the number of the board."""
    STACK = 21
    """From a node: the stack file of a rank."""
    EXIT = 22
    """From a node: the wait status of a rank."""
    FAILED = 23
    """From a node: why it cannot start ranks."""


_KINDS = frozenset(Packet)


def packed(kind: Packet, rank: int = 0, content: bytes | bytearray = b"") -> bytes:
    """Return a packet to a node."""
    return _HEAD.pack(kind, rank, len(content)) + content


class Unpacker:
    """Collects the bytes of a stream and returns its packets.

    Args:
        from_node: the packets end with a newline.
    """

    def __init__(self, from_node: bool) -> None:
        self._data = bytearray()
        self._end = int(from_node)

    def add(self, data: bytes) -> None:
        """Add bytes that have arrived."""
        self._data += data

    def skip_to(self, mark: bytes) -> bool:
        """Drop everything up to the end of ``mark``; return False if it has not arrived."""
        at = self._data.find(mark)
        if at >= 0:
            del self._data[: at + len(mark)]
        return at >= 0

    def packets(self) -> Iterator[tuple[Packet, int, bytes]]:
        """Yield the packets that are complete.

        Raises:
            UserError: this is not a stream of packets.
        """
        at = 0
        try:
            while len(self._data) - at >= _HEAD.size:
                kind, rank, size = _HEAD.unpack_from(self._data, at)
                end = at + _HEAD.size + size
                if len(self._data) < end + self._end:
                    return
                content = bytes(self._data[at + _HEAD.size : end])
                at = end + self._end
                if kind not in _KINDS:
                    raise UserError("the connection to the ranks carries something else: start them again")
                yield Packet(kind), rank, content
        finally:
            del self._data[:at]
