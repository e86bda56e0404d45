"""A board in shared memory: one row per rank, written by that rank alone and read by everybody else.

A rank cannot be asked what it waits for while it waits, so it writes that down beforehand. A row holds
    a state       what the rank does now (computes, waits in a call, has finished, ...), with a version that is odd while written
    a log         every call it issued, as a ring of variable-length records; the reader follows it and keeps what it needs
    signatures    for each channel and place in its order, a hash of what was called there, so that a rank can see *before* it enters
                  the backend that the others called something else
Writing costs microseconds and no system call, and what a rank wrote outlives it. The memory has no name in any file system (memfd), so
nothing is left behind when all processes are killed. No torch here.
"""

from __future__ import annotations

import enum
import hashlib
import marshal
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator

from dlo_lib.comm.calls import Call


class State(enum.IntEnum):
    """What a rank does."""

    STARTING = 0
    COMPUTING = 1
    WAITING = 2
    """Inside a call that needs other ranks."""
    HELD = 3
    """In front of a call that does not fit what the others called."""
    FINISHED = 4
    RAISED = 5


_STATE = struct.Struct("<QQIIQq")  # version, bytes logged, state, process id, number of the call waited in, since (monotonic ns)
_LENGTH = struct.Struct("<I")
_SIGNATURE = struct.Struct("<QQ")  # which place of which channel, signature
_WORD = struct.Struct("<Q")
_CHANNELS, _PLACES = 1021, 16  # a row's memory is only taken where it is written
_SIGNATURES_AT = 64
_LOG_AT = _SIGNATURES_AT + _CHANNELS * _PLACES * _SIGNATURE.size
_LOG_BYTES = 1 << 20
_ROW_BYTES = -(-(_LOG_AT + _LOG_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


class Board:
    """The memory of ``world_size`` rows. Made by the parent; ranks get the file descriptor and map it too."""

    def __init__(self, world_size: int, descriptor: int | None = None) -> None:
        self.world_size = world_size
        size = world_size * _ROW_BYTES
        if descriptor is None:
            descriptor = _nameless_file()
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, size)

    def close(self) -> None:
        self.memory.close()
        os.close(self.descriptor)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dlo-board", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Row:
    """The writer's side: the row of the rank that this process is."""

    def __init__(self, board: Board, rank: int) -> None:
        self.memory, self.base, self.rank = board.memory, rank * _ROW_BYTES, rank
        self.version = self.logged = self.waits_in = 0
        self.state, self.since = State.STARTING, time.monotonic_ns()
        self._write_state()

    def enter(self, state: State, call_number: int = 0) -> None:
        """Say what this rank does from now on, and in which call."""
        self.state, self.waits_in, self.since = state, call_number, time.monotonic_ns()
        self._write_state()

    def log(self, call: Call) -> None:
        """Add a call to the log, before it is made."""
        record = marshal.dumps(call.record())
        self._put(_LENGTH.pack(len(record)) + record)
        self._write_state()

    def publish(self, channel: str, sequence: int, signature: int) -> None:
        """Write down what this rank calls at that place of a channel's order."""
        at, place = _signature_place(channel, sequence)
        at += self.base
        # Another rank may read at any moment: the place is named last, and until then nothing stands there.
        _WORD.pack_into(self.memory, at, 0)
        _WORD.pack_into(self.memory, at + _WORD.size, signature)
        _WORD.pack_into(self.memory, at, place)

    def differs(self, channel: str, sequence: int, signature: int, members: tuple[int, ...]) -> int | None:
        """A rank that published another signature for that place, or None when all that have come agree."""
        at, place = _signature_place(channel, sequence)
        for rank in members:
            theirs = rank * _ROW_BYTES + at
            before, said = _SIGNATURE.unpack_from(self.memory, theirs)
            if before == place and said != signature and _WORD.unpack_from(self.memory, theirs)[0] == place:
                return rank
        return None

    def _put(self, data: bytes) -> None:
        start = self.logged % _LOG_BYTES
        first = min(len(data), _LOG_BYTES - start)
        at = self.base + _LOG_AT
        self.memory[at + start : at + start + first] = data[:first]
        self.memory[at : at + len(data) - first] = data[first:]
        self.logged += len(data)

    def _write_state(self) -> None:
        self.version += 2
        struct.pack_into("<Q", self.memory, self.base, self.version - 1)
        _STATE.pack_into(self.memory, self.base, self.version - 1, self.logged, self.state, os.getpid(), self.waits_in, self.since)
        struct.pack_into("<Q", self.memory, self.base, self.version)


class RowView:
    """The reader's side: follows one rank's row from another process."""

    def __init__(self, board: Board, rank: int) -> None:
        self.memory, self.base, self.rank = board.memory, rank * _ROW_BYTES, rank
        self.read = 0
        self.lost = False
        """The rank wrote more than the log holds since the last look: what is known of it is incomplete."""
        self.version, self.logged, self.state, self.pid, self.waits_in, self.since = 0, 0, State.STARTING, 0, 0, 0

    def look(self) -> bool:
        """Read the state; True when it is another than at the last look."""
        for _ in range(1000):
            version, *values = _STATE.unpack_from(self.memory, self.base)
            if version % 2 == 0 and struct.unpack_from("<Q", self.memory, self.base)[0] == version:
                break
        else:  # killed in the middle of writing: what stands there is of the last write or of the one before
            version += 1
        changed = version != self.version
        self.version, self.logged, state, self.pid, self.waits_in, self.since = version, *values
        self.state = State(state)
        return changed

    def calls(self) -> Iterator[Call]:
        """The calls logged since the last time, up to the last ``look``."""
        if self.logged - self.read > _LOG_BYTES:
            self.lost, self.read = True, self.logged
        while self.read < self.logged:
            (length,) = _LENGTH.unpack(self._get(self.read, _LENGTH.size))
            record = self._get(self.read + _LENGTH.size, length)
            self.read += _LENGTH.size + length
            yield Call.from_record(marshal.loads(record))

    def _get(self, position: int, length: int) -> bytes:
        start = position % _LOG_BYTES
        first = min(length, _LOG_BYTES - start)
        at = self.base + _LOG_AT
        return self.memory[at + start : at + start + first] + self.memory[at : at + length - first]


def _signature_place(channel: str, sequence: int) -> tuple[int, int]:
    """Where that place of that channel is in every row, and a number for it that tells it from others which share the slot."""
    name = channel.encode()
    slot = zlib.crc32(name) % _CHANNELS * _PLACES + sequence % _PLACES
    place = int.from_bytes(hashlib.blake2b(name + b" %d" % sequence, digest_size=8).digest(), "little")
    return _SIGNATURES_AT + slot * _SIGNATURE.size, place
