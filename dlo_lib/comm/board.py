"""A board in shared memory: one row per rank, written by that rank alone and read by everybody else.

A rank cannot be asked what it waits for while it waits, so it writes that down beforehand. A row holds
    a state       what the rank does now (computes, waits in a call, has finished, ...)
    a log         every call it issued, as a ring of variable-length records; the reader follows it and keeps what it needs
    signatures    for each channel and place in its order, a hash of what was called there, so that a rank can see *before* it enters
                  the backend that the others called something else

Nobody locks anybody out, and no order of writes is relied on, which processors do not all keep: whatever is read carries a check over all
its parts, so what is half written does not pass for anything. Writing costs microseconds and no system call, and what a rank wrote outlives
it. The memory has no name in any file system (memfd), so nothing is left behind when all processes are killed. No torch here.
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


_WORD = 8
_ONES = (1 << 64) - 1
_STATE_WORDS = 5  # bytes logged; state, company and number of the call waited in; since (monotonic ns); version; check
_COMPANY = 1 << 7
_RECORD = struct.Struct("<II")  # length, check
_CHANNELS, _PLACES = 1021, 16  # a row's memory is only taken where it is written
_SIGNATURES_AT = 64
_SIGNATURE_BYTES = 2 * _WORD  # the place; the place again by another hash, and the signature
_LOG_AT = _SIGNATURES_AT + _CHANNELS * _PLACES * _SIGNATURE_BYTES
_LOG_BYTES = 2 << 20
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
        self.words = memoryview(self.memory).cast("Q")
        """The same as words of 64 bits, each of which is written at once."""

    def close(self) -> None:
        self.words.release()
        self.memory.close()
        os.close(self.descriptor)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dlo-board", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Row:
    """The writer's side: the row of the rank that this process is. Any thread may write."""

    def __init__(self, board: Board, rank: int) -> None:
        self.memory, self.words, self.base, self.rank = board.memory, board.words, rank * _ROW_BYTES, rank
        self.world_size = board.world_size
        self.version = self.logged = self.waits_in = 0
        self.company = False
        self.state, self.since = State.STARTING, time.monotonic_ns()
        self._one_at_a_time = threading.RLock()  # reentrant for signal handlers
        self._write_state()

    def enter(self, state: State, call_number: int = 0, company: bool = False) -> None:
        """Say what this rank does from now on, and in which call; ``company`` says that other threads of it may communicate meanwhile."""
        with self._one_at_a_time:
            self.state, self.waits_in, self.company, self.since = state, call_number, company, time.monotonic_ns()
            self._write_state()

    def log(self, call: Call) -> None:
        """Add a call to the log, before it is made."""
        record = marshal.dumps(call.record())
        with self._one_at_a_time:
            self._put(_RECORD.pack(len(record), zlib.crc32(record)) + record)
            self._write_state()

    def publish(self, channel: str, sequence: int, signature: int) -> None:
        """Write down what this rank calls at that place of a channel's order; ``signature`` has 32 bits."""
        at, place, again = _signature_place(channel, sequence)
        at += self.base // _WORD
        with self._one_at_a_time:
            self.words[at], self.words[at + 1] = place, again << 32 | signature

    def differs(self, channel: str, sequence: int, signature: int, members: tuple[int, ...]) -> int | None:
        """A rank that published another signature for that place, or None when all that have come agree."""
        at, place, again = _signature_place(channel, sequence)
        for rank in members:
            theirs = rank * _ROW_BYTES // _WORD + at
            said = self.words[theirs + 1]
            if said >> 32 == again and self.words[theirs] == place and said & 0xFFFFFFFF != signature:
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
        self.version += 1
        does = self.waits_in << 8 | self.company * _COMPANY | self.state
        at = self.base // _WORD
        for index, word in enumerate(_checked(self.logged, does, self.since, self.version)):
            self.words[at + index] = word


class RowView:
    """The reader's side: follows one rank's row from another process."""

    def __init__(self, board: Board, rank: int) -> None:
        self.memory, self.words, self.base, self.rank = board.memory, board.words, rank * _ROW_BYTES, rank
        self.read = 0
        self.lost = False
        """The rank wrote more than the log holds since the last look: what is known of it is incomplete."""
        self.version, self.logged, self.state, self.company, self.waits_in, self.since = 0, 0, State.STARTING, False, 0, 0

    @property
    def incomplete(self) -> bool:
        """Not all that it logged has been read."""
        return self.lost or self.read < self.logged

    def look(self) -> bool:
        """Read the state; True when it is another than at the last look."""
        at = self.base // _WORD
        for _ in range(100):
            logged, does, since, version, check = (self.words[at + index] for index in range(_STATE_WORDS))
            if (logged, does, since, version, check) == _checked(logged, does, since, version):
                break
        else:
            return False  # killed in the middle of writing, or never begun: what was read before stands
        changed = version != self.version
        self.version, self.logged, self.waits_in, self.since = version, logged, does >> 8, since
        self.state, self.company = State(does & (_COMPANY - 1)), bool(does & _COMPANY)
        return changed

    def calls(self) -> Iterator[Call]:
        """The calls logged since the last time, up to the last ``look``."""
        if self.logged - self.read > _LOG_BYTES:
            self.lost, self.read = True, self.logged
        while self.read < self.logged:
            length, check = _RECORD.unpack(self._get(self.read, _RECORD.size))
            record = self._get(self.read + _RECORD.size, length) if length < _LOG_BYTES else b""
            if zlib.crc32(record) != check:
                return  # just being written over: the next look finds that it is lost
            self.read += _RECORD.size + length
            yield Call.from_record(marshal.loads(record))

    def _get(self, position: int, length: int) -> bytes:
        start = position % _LOG_BYTES
        first = min(length, _LOG_BYTES - start)
        at = self.base + _LOG_AT
        return self.memory[at + start : at + start + first] + self.memory[at : at + length - first]


def _checked(logged: int, does: int, since: int, version: int) -> tuple[int, int, int, int, int]:
    """The words of a state, the last being the check; a hash of numbers is the same in every process."""
    return logged, does, since, version, hash((logged, does, since, version)) & _ONES


def _signature_place(channel: str, sequence: int) -> tuple[int, int, int]:
    """The word at which that place of that channel is in every row, and two numbers that tell it from others which share the slot."""
    name = channel.encode()
    slot = zlib.crc32(name) % _CHANNELS * _PLACES + sequence % _PLACES
    digest = hashlib.blake2b(name + b" %d" % sequence, digest_size=12).digest()
    at = (_SIGNATURES_AT + slot * _SIGNATURE_BYTES) // _WORD
    return at, int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
