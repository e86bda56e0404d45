"""A board in shared memory: one row per rank, written by that rank only and read by all other processes.

A rank that waits cannot answer questions, so it writes in advance what it waits for. A row holds
    a state       what the rank does now (computes, waits in a call, has finished, ...)
    a log         every call it issued, as a ring buffer of records of variable length; the reader follows it
    signatures    for each channel and position in its order, a hash of the call, so that a rank sees *before*
                  it enters the backend that another rank called something else

The board has no locks between processes and does not rely on an order of writes, which not all processors
keep. Instead, each value that is read has a checksum, so a reader rejects values that are only partly
written. A write takes microseconds and no system call, and it outlives the rank. The memory has no name in
any file system (memfd), so nothing is left when all processes are killed. This module does not import torch.
"""

from __future__ import annotations

import enum
import hashlib
import marshal
import mmap
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator

from dlo_lib.comm.calls import Call


class Activity(enum.IntEnum):
    """What a rank does."""

    STARTING = 0
    COMPUTING = 1
    WAITING = 2
    """Inside a call that needs other ranks."""
    HELD = 3
    """Stopped before a call that does not match the calls of the other ranks."""
    FINISHED = 4
    RAISED = 5
    LEFT = 6
    """Called ``destroy_process_group``, and waits until the other ranks need its connections no longer."""
    BROKEN = 7
    """A call that needs other ranks has failed because its connection broke."""


ENDED = (Activity.FINISHED, Activity.RAISED, Activity.LEFT)
"""The states in which a rank issues no more calls."""


_WORD = 8
_ONES = (1 << 64) - 1
# Bytes logged; state, flag and number of the call waited in; since (monotonic ns); version; check.
_STATE_WORDS, _VERSION_AT = 5, 3
_OTHER_THREADS = 1 << 7
_RECORD = struct.Struct("<II")  # length, check
_CHANGE = struct.Struct(
    "<IQQQQQ"
)  # rank, bytes logged, state, age (ns), version, where the log's new bytes begin
_CHANNELS, _PLACES = 1021, 16  # pages of a row take memory only once they are written
_SIGNATURES_AT = 64
_SIGNATURE_BYTES = 2 * _WORD  # hash of the position; a second hash of the position, and the signature
_LOG_AT = _SIGNATURES_AT + _CHANNELS * _PLACES * _SIGNATURE_BYTES
_LOG_BYTES = 2 << 20
_ROW_BYTES = -(-(_LOG_AT + _LOG_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


class Board:
    """The memory of ``world_size`` rows.

    The parent creates it; the ranks get its file descriptor and map it.
    """

    def __init__(self, world_size: int, descriptor: int | None = None) -> None:
        self.world_size = world_size
        size = world_size * _ROW_BYTES
        if descriptor is None:
            descriptor = _nameless_file()
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, size)
        self.words = memoryview(self.memory).cast("Q")
        """The memory as 64-bit words; a processor writes each word at once."""

    def apply(self, change: bytes | bytearray) -> None:
        """Take over a change of a row on another machine, from :meth:`RowView.changes`."""
        rank, logged, does, age, version, begin = _CHANGE.unpack_from(change)
        self._write_log(rank, begin, change[_CHANGE.size :])
        at = rank * _ROW_BYTES // _WORD
        for index, word in enumerate(_checked(logged, does, time.monotonic_ns() - age, version)):
            self.words[at + index] = word

    def _write_log(self, rank: int, position: int, data: bytes | bytearray) -> None:
        start = position % _LOG_BYTES
        first = min(len(data), _LOG_BYTES - start)
        at = rank * _ROW_BYTES + _LOG_AT
        self.memory[at + start : at + start + first] = data[:first]
        self.memory[at : at + len(data) - first] = data[first:]

    def close(self) -> None:
        """Unmap the memory and close the file descriptor."""
        self.words.release()
        self.memory.close()
        os.close(self.descriptor)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dlo-board", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class RankRow:
    """The writer's side: the row of this process's rank. Any thread may write."""

    def __init__(self, board: Board, rank: int) -> None:
        self.memory, self.words, self.base, self.rank = board.memory, board.words, rank * _ROW_BYTES, rank
        self.world_size, self._write_log = board.world_size, board._write_log
        self.version = self.logged = self.waits_in = 0
        self.other_threads = False
        self.state, self.since = Activity.STARTING, time.monotonic_ns()
        self._one_at_a_time = threading.RLock()  # reentrant, because a signal handler may write too
        self._write_state()

    def enter(self, state: Activity, call_number: int = 0, other_threads: bool = False) -> None:
        """Write the state of this rank, and the number of the call that it waits in.

        ``other_threads`` says that other threads of this process may communicate in the meantime.
        """
        with self._one_at_a_time:
            self.state, self.waits_in, self.other_threads, self.since = (
                state,
                call_number,
                other_threads,
                time.monotonic_ns(),
            )
            self._write_state()

    def log(self, call: Call) -> None:
        """Add a call to the log, before it reaches the backend."""
        record = marshal.dumps(call.record())
        with self._one_at_a_time:
            self._put(_RECORD.pack(len(record), zlib.crc32(record)) + record)
            self._write_state()

    def publish(self, channel: str, sequence: int, signature: int) -> None:
        """Write the signature (32 bits) of this rank's call at position ``sequence`` of a channel."""
        at, place, again = _signature_place(channel, sequence)
        at += self.base // _WORD
        with self._one_at_a_time:
            self.words[at], self.words[at + 1] = place, again << 32 | signature

    def differs(self, channel: str, sequence: int, signature: int, members: tuple[int, ...]) -> int | None:
        """Return a rank that published another signature for this position, or None if there is none."""
        at, place, again = _signature_place(channel, sequence)
        for rank in members:
            theirs = rank * _ROW_BYTES // _WORD + at
            said = self.words[theirs + 1]
            if said >> 32 == again and self.words[theirs] == place and said & 0xFFFFFFFF != signature:
                return rank
        return None

    def _put(self, data: bytes) -> None:
        self._write_log(self.rank, self.logged, data)
        self.logged += len(data)

    def _write_state(self) -> None:
        self.version += 1
        does = self.waits_in << 8 | self.other_threads * _OTHER_THREADS | self.state
        at = self.base // _WORD
        for index, word in enumerate(_checked(self.logged, does, self.since, self.version)):
            self.words[at + index] = word


class RowView:
    """The reader's side: follows the row of one rank from another process."""

    def __init__(self, board: Board, rank: int) -> None:
        self.memory, self.words, self.base, self.rank = board.memory, board.words, rank * _ROW_BYTES, rank
        self.read = 0
        self.lost = False
        """The rank wrote more than the log holds since the last ``look``: some of its calls are unknown."""
        self.version, self.logged, self.state, self.other_threads, self.waits_in, self.since = (
            0,
            0,
            Activity.STARTING,
            False,
            0,
            0,
        )

    @property
    def incomplete(self) -> bool:
        """Whether some logged calls have not been read."""
        return self.lost or self.read < self.logged

    def look(self) -> bool:
        """Read the state; return True if it changed since the last ``look``."""
        at = self.base // _WORD
        if not self.words[at + _VERSION_AT]:
            return False  # not started yet, or on another machine
        for _ in range(100):
            logged, does, since, version, check = (self.words[at + index] for index in range(_STATE_WORDS))
            if (logged, does, since, version, check) == _checked(logged, does, since, version):
                break
        else:
            return False  # killed during a write: keep the previous values
        changed = version != self.version
        self.version, self.logged, self.waits_in, self.since = version, logged, does >> 8, since
        self.state, self.other_threads = Activity(does & (_OTHER_THREADS - 1)), bool(does & _OTHER_THREADS)
        return changed

    def changes(self) -> bytes:
        """Return what has changed since the last call, for :meth:`Board.apply` on another machine; empty if
        nothing has. A view is used either for this or for ``calls``."""
        if not self.look() and self.read == self.logged:
            return b""
        if self.logged - self.read > _LOG_BYTES:
            self.read = self.logged  # the reader there finds that calls are lost
        does = self.waits_in << 8 | self.other_threads * _OTHER_THREADS | self.state
        age = max(0, time.monotonic_ns() - self.since)
        head = _CHANGE.pack(self.rank, self.logged, does, age, self.version, self.read)
        new, self.read = self._get(self.read, self.logged - self.read), self.logged
        return head + new

    def calls(self) -> Iterator[Call]:
        """Yield the calls logged since the last call of this method, up to the last ``look``."""
        if self.logged - self.read > _LOG_BYTES:
            self.lost, self.read = True, self.logged
        while self.read < self.logged:
            length, check = _RECORD.unpack(self._get(self.read, _RECORD.size))
            record = self._get(self.read + _RECORD.size, length) if length < _LOG_BYTES else b""
            if zlib.crc32(record) != check:
                return  # being overwritten: the next look finds that it is lost
            self.read += _RECORD.size + length
            yield Call.from_record(marshal.loads(record))

    def _get(self, position: int, length: int) -> bytes:
        start = position % _LOG_BYTES
        first = min(length, _LOG_BYTES - start)
        at = self.base + _LOG_AT
        return self.memory[at + start : at + start + first] + self.memory[at : at + length - first]


def _checked(logged: int, does: int, since: int, version: int) -> tuple[int, int, int, int, int]:
    """Return the words of a state and their check; a hash of integers is the same in every process."""
    return logged, does, since, version, hash((logged, does, since, version)) & _ONES


def _signature_place(channel: str, sequence: int) -> tuple[int, int, int]:
    """Return the index of a position's word in every row, and two hashes of the position.

    The hashes distinguish it from other positions that share the slot.
    """
    name = channel.encode()
    slot = zlib.crc32(name) % _CHANNELS * _PLACES + sequence % _PLACES
    digest = hashlib.blake2b(name + b" %d" % sequence, digest_size=12).digest()
    at = (_SIGNATURES_AT + slot * _SIGNATURE_BYTES) // _WORD
    return at, int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
