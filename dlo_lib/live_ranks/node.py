"""The process on a node of a job that forks the node's ranks, and connects them with the notebook.

srun starts it as the one task of a step, as the user who owns the job: SLURM refuses everybody else. Its
standard input and output are the only connection (``packets``); no port is open for cells. It forks and ends
ranks as on the notebook's machine (``launch.client``). It ends, with its ranks, at the end of its input: when
the notebook's process ends, or srun.

It imports torch once for itself and for the server that forks the ranks (``launch.seed``), because imports
from a slow file system are most of the time of a start.

The ranks themselves meet at a port of the first node, as those of every job with PyTorch do.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import pickle
import re
import select
import sys
import termios
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from dlo_lib.comm.deadlock.board import Board, RowView
from dlo_lib.launch import client, seed
from dlo_lib.launch.client import Launch
from dlo_lib.launch.meeting import LOOPBACK, MeetingFiles
from dlo_lib.launch.rank import LaunchSpec
from dlo_lib.launch.server import PRELOAD
from dlo_lib.live_ranks.messages import JOIN, send_request
from dlo_lib.live_ranks.packets import CHUNK_BYTES, COUNT, HELLO, STATUS, WINDOW, Packet, Unpacker, packed

_LOOK_MS = 50
"""How often the rows of the ranks are read."""
_OF_THE_TASK = re.compile(
    r"SLURM_(STEP|PROCID|LOCALID|NODEID|NTASKS|NPROCS|TASK|GTIDS|SRUN|LAUNCH|CPU_BIND|DISTRIBUTION)\w*"
)
"""Variables that describe this process, which is the only task of its step, and would mislead a rank."""


@dataclass(frozen=True)
class NodeReport:
    """What a node has."""

    gpus: int
    nccl: bool


@dataclass(frozen=True)
class Start:
    """How a node begins.

    Attributes:
        store: host and port at which the ranks meet.
        first_rank: the first rank of this node.
        ranks_here: their number.
        nccl: each rank has a GPU.
        modules: what the server imports before it forks.
    """

    store: tuple[str, int]
    first_rank: int
    ranks_here: int
    nccl: bool
    modules: tuple[str, ...]

    def packet(self, job: bytes) -> bytes:
        """Return the packet that starts ranks with a pickled ``LaunchSpec``."""
        return packed(Packet.START, 0, json.dumps(asdict(self)).encode() + b"\n" + job)

    @classmethod
    def read(cls, content: bytes) -> tuple[Start, LaunchSpec]:
        """Return what a packet holds."""
        head, _, job = content.partition(b"\n")
        fields = json.loads(head)
        fields["store"], fields["modules"] = tuple(fields["store"]), tuple(fields["modules"])
        return cls(**fields), pickle.loads(job)


@dataclass
class _Rank:
    """What has been sent for one rank, and what has not."""

    window: int = WINDOW
    answer: bytes = b""
    """Bytes of its channel, to be sent after what it printed before: ``printed`` bytes of its output."""
    printed: int = 0
    channel_open: bool = True
    output_open: bool = True


@dataclass
class _Running:
    """The ranks of this node."""

    start: Start
    spec: LaunchSpec
    launch: Launch
    ranks: dict[int, _Rank] = field(default_factory=dict)
    views: dict[int, RowView] = field(default_factory=dict)
    board_number: int = 0


class Node:
    """Serves the notebook's process at the file ``output``, with requests from standard input.

    Args:
        host: the name of this node for the others, if it has rank 0.
    """

    def __init__(self, output: int, host: str, world_size: int) -> None:
        self._output = output
        self._host = host
        self._world_size = world_size
        self._unpacker = Unpacker(from_node=False)
        self._meeting: MeetingFiles | None = None
        self._running: _Running | None = None

    def serve(self) -> None:
        """Serve until the end of the input."""
        self._write(HELLO + b"\n")
        report = NodeReport(torch.cuda.device_count(), dist.is_nccl_available())
        self._send(Packet.NODE, 0, json.dumps(asdict(report)).encode())
        self._listen()
        try:
            while self._handle_events():
                pass
        finally:
            if self._running is not None:
                self._running.launch.close()
            if self._meeting is not None:
                self._meeting.remove()

    def _listen(self) -> None:
        """Open the port at which the ranks meet the next time, on the node of rank 0."""
        if self._host:
            self._meeting = MeetingFiles(self._world_size, LOOPBACK if self._host == LOOPBACK else "")
            self._send(Packet.LISTENS, 0, COUNT.pack(self._meeting.port))

    def _handle_events(self) -> bool:
        """Wait for the next events and handle them; return False at the end of the input."""
        poll, calls = select.poll(), self._sources()
        for source in calls:
            poll.register(source, select.POLLIN)
        for source, _ in poll.poll(_LOOK_MS if self._running is not None else None):
            if not calls[source]():
                return False
        for rank in self._running.ranks if self._running is not None else ():
            self._send_row(rank)
        return True

    def _sources(self) -> dict[int, Callable[[], bool]]:
        calls: dict[int, Callable[[], bool]] = {0: self._read_input}
        if self._running is None:
            return calls
        launch = self._running.launch
        calls[launch.control.fileno()] = self._read_exit
        for number, files in zip(launch.ranks, launch.files):
            rank = self._running.ranks[number]
            if rank.window > 0 and rank.output_open:
                calls[files.output] = functools.partial(self._read_output, number)
            if rank.window > 0 and rank.channel_open and not rank.answer:
                calls[files.channel.fileno()] = functools.partial(self._read_answer, number)
        return calls

    def _read_input(self) -> bool:
        data = os.read(0, CHUNK_BYTES)
        if not data:
            return False
        self._unpacker.add(data)
        for kind, rank, content in self._unpacker.packets():
            if kind is Packet.START:
                self._start(content)
            elif self._running is not None:
                self._handle(self._running, kind, rank, content)
        return True

    def _start(self, content: bytes) -> None:
        start, spec = Start.read(content)
        spec = replace(
            spec,
            environment={k: v for k, v in os.environ.items() if not _OF_THE_TASK.fullmatch(k)},
            nccl=start.nccl,
            store=start.store,
            first_rank=start.first_rank,
            local_world_size=start.ranks_here,
        )
        here = range(start.first_rank, start.first_rank + start.ranks_here)
        try:
            launch = Launch(self._world_size, pickle.dumps(spec), start.modules, here, self._meeting)
        except (OSError, RuntimeError) as error:
            self._send(Packet.FAILED, 0, str(error).encode())
            return
        self._running = _Running(start, spec, launch, {rank: _Rank() for rank in here})
        self._watch(self._running)
        self._next_meeting()

    def _next_meeting(self) -> None:
        if self._meeting is not None:
            self._meeting.close()  # the ranks have it
            self._listen()

    def _watch(self, running: _Running) -> None:
        running.views = {rank: RowView(running.launch.board, rank) for rank in running.launch.ranks}

    def _handle(self, running: _Running, kind: Packet, rank: int, content: bytes) -> None:
        launch = running.launch
        if kind is Packet.REQUEST:
            channel = launch.files[launch.ranks.index(rank)].channel
            channel.setblocking(True)  # a rank reads at any time
            with contextlib.suppress(OSError):  # its process has ended, which is reported
                channel.sendall(content)
            channel.setblocking(False)
        elif kind is Packet.TAKEN:
            running.ranks[rank].window += COUNT.unpack(content)[0]
            self._send_answer(rank)
        elif kind is Packet.KILL:
            launch.kill(rank)
        elif kind is Packet.STACKS:
            launch.write_stacks()
            for number, files in zip(launch.ranks, launch.files):
                self._send(Packet.STACK, number, files.raw_stack())
        elif kind is Packet.REJOIN:
            self._rejoin(running, **json.loads(content))

    def _rejoin(self, running: _Running, store: list, dead: list[int], board_number: int) -> None:
        """Fork the ranks that have ended, and let all of this node join a new process group."""
        launch = running.launch
        launch.board.close()
        launch.board = Board(self._world_size)
        running.board_number = board_number
        launch.meet(self._meeting)
        job = pickle.dumps(replace(running.spec, store=tuple(store)))
        for rank, files in list(zip(launch.ranks, launch.files)):
            if rank in dead:
                launch.replace(rank, job, self._meeting)
                running.ranks[rank] = _Rank()
            else:
                meeting = () if self._meeting is None else self._meeting.descriptors
                board = launch.board.descriptor
                send_request(files.channel, JOIN, json.dumps(store).encode(), (board, *meeting))
        self._watch(running)
        self._next_meeting()

    def _read_exit(self) -> bool:
        running = self._running
        assert running is not None
        report = running.launch.next_exit()
        if report is None:
            self._send(Packet.FAILED, 0, running.launch.lost().encode())
            return False
        number, status = report
        rank, files = running.ranks[number], running.launch.files[running.launch.ranks.index(number)]
        rank.window = WINDOW  # what is left is small, and the last
        answer = rank.answer
        with contextlib.suppress(OSError):
            while data := files.channel.recv(CHUNK_BYTES):
                answer += data
        with contextlib.suppress(BlockingIOError):
            while data := os.read(files.output, CHUNK_BYTES):
                self._send(Packet.OUTPUT, number, data)
        self._send_row(number)
        self._send(Packet.ANSWER, number, answer)
        self._send(Packet.STACK, number, files.raw_stack())
        self._send(Packet.EXIT, number, STATUS.pack(status))
        running.ranks[number] = _Rank(channel_open=False, output_open=False)
        return True

    def _read_output(self, number: int) -> bool:
        assert self._running is not None
        rank = self._running.ranks[number]
        rank.output_open = self._pass_on_output(number, min(CHUNK_BYTES, rank.window)) is not None
        self._send_answer(number)
        return True

    def _pass_on_output(self, number: int, at_most: int) -> int | None:
        """Send what a rank has printed; return the number of bytes, or None at the end of its output."""
        assert self._running is not None
        launch = self._running.launch
        try:
            data = os.read(launch.files[launch.ranks.index(number)].output, at_most)
        except BlockingIOError:
            return 0
        if not data:
            return None
        rank = self._running.ranks[number]
        rank.window -= len(data)
        rank.printed -= len(data)
        self._send(Packet.OUTPUT, number, data)
        return len(data)

    def _read_answer(self, number: int) -> bool:
        assert self._running is not None
        rank = self._running.ranks[number]
        launch = self._running.launch
        files = launch.files[launch.ranks.index(number)]
        try:
            rank.answer = files.channel.recv(min(CHUNK_BYTES, rank.window))
        except BlockingIOError:
            return True
        except OSError:  # its process has ended
            rank.answer = b""
        if not rank.answer:
            rank.channel_open = False  # the server reports how its process has ended
            return True
        rank.printed = int.from_bytes(fcntl.ioctl(files.output, termios.FIONREAD, b"\0" * 4), sys.byteorder)
        self._send_answer(number)
        return True

    def _send_answer(self, number: int) -> None:
        """Send bytes of a rank's channel, after what it printed and the calls that it made before."""
        assert self._running is not None
        rank = self._running.ranks[number]
        while rank.answer and rank.printed > 0 and rank.window > 0 and rank.output_open:
            if not self._pass_on_output(number, min(rank.printed, rank.window)):
                rank.printed = 0
        if rank.answer and rank.printed <= 0:
            self._send_row(number)
            self._send(Packet.ANSWER, number, rank.answer)
            rank.window -= len(rank.answer)
            rank.answer = b""

    def _send_row(self, rank: int) -> None:
        assert self._running is not None
        if change := self._running.views[rank].changes():
            self._send(Packet.ROW, rank, COUNT.pack(self._running.board_number) + change)

    def _send(self, kind: Packet, rank: int, content: bytes) -> None:
        self._write(packed(kind, rank, content) + b"\n")

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._output, view) :]


def main(host: str, world_size: int) -> None:
    """Serve the notebook's process at standard input and output. What this process prints goes to stderr."""
    client.seed = seed.sow(PRELOAD)  # before it opens files, which a copy would keep open, or asks for GPUs
    output = os.dup(1)
    os.dup2(2, 1)
    Node(output, host, world_size).serve()


BOOT: Any = """
from dlo_lib.base.one_thread import import_without_threads
with import_without_threads():
    from dlo_lib.live_ranks.node import main
main(sys.argv[1], int(sys.argv[2]))
"""
"""The program of the node, for ``interpreter.trusted_python``."""
