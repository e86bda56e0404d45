"""The ranks of a session in a job of SLURM.

On each node of the job, srun starts a process that forks the node's ranks (``node``). A thread of this
process passes on packets between them and the connections that a session expects: a channel, an output and a
stack file for each rank, a control socket, and a board, of which this process keeps a copy. A session
therefore supervises and explains these ranks like ranks of this machine.

Cells pass through srun alone. SLURM starts a step in a job only for the user who owns the job, and srun and
its tasks prove to each other that they belong to the step, so no other user can send a cell.

Cost: one srun for each node; 0.1 ms for a message, and about 5 MB/s for values.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.comm.deadlock.board import Board
from dlo_lib.launch.client import Launch, connect_rank
from dlo_lib.launch.failure import RankFailure
from dlo_lib.launch.meeting import LOOPBACK
from dlo_lib.launch.server import REPORT, REQUEST, ServerRequest
from dlo_lib.live_ranks.devices import Devices, gpu_each
from dlo_lib.live_ranks.local_ranks import session_modules, session_spec
from dlo_lib.live_ranks.node import NodeReport, Start
from dlo_lib.live_ranks.node_link import LEAVE_S, NodeLink, RankLink
from dlo_lib.live_ranks.packets import CHUNK_BYTES, COUNT, HELLO, STATUS, Packet, packed
from dlo_lib.live_ranks.slurm_job import RunningJob, why_ended

_START_S = 180.0  # for the imports of a node, which may come from a slow file system
_QUEUED_BYTES = 4 << 20
"""No more requests are read while this number of bytes waits for a node."""


class JobRanks(Launch):
    """The ranks of a session in a job.

    Args:
        world_size: a multiple of the number of nodes.

    Raises:
        UserError: there is no GPU for each rank.
        RankFailure: the ranks did not start.
    """

    def __init__(self, job: RunningJob, world_size: int, devices: Devices, explain: bool) -> None:
        self.job = job
        self.ranks = range(world_size)
        self.files = []
        self.board = Board(world_size)
        self._board_number = 0
        self._lost = ""
        self._modules = tuple(session_modules())
        self._commands: deque[Callable[[], None]] = deque()
        self._wakes, self._wake = os.pipe()
        self._lock = threading.Condition()
        self._port = 0
        self.control, self._server_end = socket.socketpair()
        self._links: list[NodeLink] = []
        self._rank_links: list[RankLink] = []
        self._thread = threading.Thread(target=self._pass_on, name="dlo-job-ranks", daemon=True)
        host = LOOPBACK if len(job.nodes) == 1 else job.nodes[0]
        try:
            for at, node in enumerate(job.nodes):
                self._links.append(NodeLink(job, node, host if at == 0 else "", world_size))
            per_node = world_size // len(job.nodes)
            has_gpus = [self._await_node(link, devices, per_node) for link in self._links]
            nccl = all(has_gpus)
            spec = pickle.dumps(session_spec(world_size, explain, nccl))
            for at, link in enumerate(self._links):
                for _ in range(per_node):
                    self._connect(link)
                begin = Start((host, self._port), at * per_node, per_node, nccl, self._modules)
                link.send(begin.packet(spec))
            self._host = host
            self._port = 0
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def join_again(self, dead: Collection[int]) -> None:
        """Let all ranks join a new process group; those that have ended are replaced."""
        with self._lock:
            if not self._lock.wait_for(lambda: self._port or self._lost, _START_S):
                raise RankFailure(tr("the node of rank 0 does not answer"))
            store = (self._host, self._port)
            self._port = 0
            self.board.close()
            self.board = Board(len(self.ranks))
            self._board_number += 1
        for rank in dead:
            link = self._rank_links[rank].link
            self.files[rank].close()
            self.files[rank], self._rank_links[rank] = self._new_connections(link)
        content = json.dumps({"store": store, "dead": sorted(dead), "board_number": self._board_number})
        # After the requests that the ranks have not received yet.
        self._commands.append(lambda: self._send_all(packed(Packet.REJOIN, 0, content.encode())))
        os.write(self._wake, b"\0")

    def lost(self) -> str:
        """Return why the ranks cannot be reached."""
        return self._lost or tr("the ranks of job {job} have ended", job=self.job.number)

    def close(self) -> None:
        """End the ranks, and the steps of the job. The job stays."""
        started = self._thread.is_alive()
        self.stop()
        if started:
            self._thread.join()
        until = time.monotonic() + LEAVE_S
        for link in self._links:
            link.leave()
        for link in self._links:
            link.close(until)
        for rank in self._rank_links:
            rank.close()
        self._server_end.close()
        with self._lock:
            self.board.close()
        for files in self.files:
            files.close()
        for end in (self._wakes, self._wake):
            os.close(end)

    def stop(self) -> None:
        """End the thread that passes on packets, and with it the ranks."""
        if self._thread.is_alive():
            super().stop()
        else:
            self.control.close()

    def _connect(self, link: NodeLink) -> None:
        files, rank = self._new_connections(link)
        self.files.append(files)
        self._rank_links.append(rank)

    def _new_connections(self, link: NodeLink):
        files, theirs, write = connect_rank()
        theirs.setblocking(False)
        os.set_blocking(write, False)
        return files, RankLink(link, theirs, write, files.stack_file)

    def _await_node(self, link: NodeLink, devices: Devices, ranks: int) -> bool:
        """Wait until a node can start ranks; return whether each gets a GPU there."""
        report = None
        until = time.monotonic() + _START_S
        begun = False
        while report is None or (link is self._links[0] and not self._port):
            left = until - time.monotonic()
            poll = select.poll()
            poll.register(link.from_node, select.POLLIN)
            readable = poll.poll(max(0.0, 1000 * left))
            if not readable or not link.read():
                raise RankFailure(self._why_not_started(link, timed_out=not readable))
            begun = begun or link.unpacker.skip_to(HELLO + b"\n")
            for kind, _, content in link.unpacker.packets() if begun else ():
                if kind is Packet.NODE:
                    report = NodeReport(**json.loads(content))
                elif kind is Packet.LISTENS:
                    self._port = COUNT.unpack(content)[0]
        if self.job.gpus_per_node and devices is Devices.ANY:
            devices = Devices.GPU
        where = tr("on node {node} of job {job}", node=link.node, job=self.job.number)
        return gpu_each(devices, report.gpus, ranks, report.nccl, where)

    def _why_not_started(self, link: NodeLink, timed_out: bool) -> str:
        if timed_out:
            how = tr("it has not answered for {seconds:.0f} s", seconds=_START_S)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                link.process.wait(LEAVE_S)
            if ended := why_ended(self.job, link.said()):
                return ended
            how = tr("its process ended with status {status}", status=link.process.poll())
        return tr(
            "the ranks of job {job} did not start on node {node}: {how}\n{said}",
            job=self.job.number,
            node=link.node,
            how=how,
            said=link.said(),
        ).strip()

    # What follows runs in the thread.

    def _pass_on(self) -> None:
        try:
            while self._handle_events():
                pass
        except UserError as error:
            self._lose(str(error))
        finally:
            for rank in self._rank_links:
                rank.close()
            self._server_end.close()  # the session finds that the ranks are lost

    def _handle_events(self) -> bool:
        poll = select.poll()
        calls: dict[int, Callable[[], bool]] = {}

        def on(source: int, events: int, call: Callable[[], bool]) -> None:
            calls[source] = call
            poll.register(source, events)

        on(self._server_end.fileno(), select.POLLIN, self._read_control)
        on(self._wakes, select.POLLIN, lambda: bool(os.read(self._wakes, 64)))
        for link in self._links:
            on(link.from_node, select.POLLIN, functools.partial(self._read_node, link))
            if link.unsent:
                on(link.to_node, select.POLLOUT, functools.partial(self._write_node, link))
        for number, rank in enumerate(self._rank_links):
            if rank.ended:
                continue
            to_channel = bool(rank.arrived) and rank.arrived[0][0] is Packet.ANSWER
            reads = rank.link.unsent_bytes < _QUEUED_BYTES
            on(
                rank.channel.fileno(),
                select.POLLIN * reads | select.POLLOUT * to_channel,
                functools.partial(self._serve_channel, number),
            )
            if rank.arrived and not to_channel:
                on(rank.output, select.POLLOUT, functools.partial(self._hand_over, number))
        for source, _ in poll.poll():
            if not calls[source]():
                return False
        while self._commands:
            for number in range(len(self._rank_links)):
                self._read_requests(number)
            self._commands.popleft()()
        return True

    def _send_all(self, packet: bytes) -> None:
        for link in self._links:
            link.send(packet)

    def _read_control(self) -> bool:
        data = self._server_end.recv(REQUEST.size, socket.MSG_WAITALL)
        if not data:
            return False
        what, rank = REQUEST.unpack(data)
        if what == ServerRequest.KILL:
            self._rank_links[rank].link.send(packed(Packet.KILL, rank))
        elif what == ServerRequest.STACKS:
            self._send_all(packed(Packet.STACKS))
        return True

    def _write_node(self, link: NodeLink) -> bool:
        link.write()
        return True

    def _read_node(self, link: NodeLink) -> bool:
        still_open = link.read()
        for kind, number, content in link.unpacker.packets():
            if kind is Packet.LISTENS:
                with self._lock:
                    self._port = COUNT.unpack(content)[0]
                    self._lock.notify_all()
            elif kind is Packet.ROW:
                self._apply(content)
            elif kind is Packet.STACK:
                self._write_stack(self._rank_links[number], content)
            elif kind is Packet.FAILED:
                self._lose(content.decode(errors="replace"))
                return False
            else:
                self._rank_links[number].arrived.append((kind, content))
                self._hand_over(number)
        if not still_open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                link.process.wait(LEAVE_S)
            said = link.said()
            lines = said.splitlines()
            self._lose(
                why_ended(self.job, said)
                or tr(
                    "the connection to the ranks on node {node} of job {job} has broken: {said}",
                    node=link.node,
                    job=self.job.number,
                    said=lines[-1] if lines else tr("srun says nothing"),
                )
            )
        return still_open

    def _lose(self, why: str) -> None:
        with self._lock:
            self._lost = self._lost or why
            self._lock.notify_all()

    def _apply(self, content: bytes) -> None:
        with self._lock:
            if COUNT.unpack_from(content)[0] == self._board_number and not self.board.memory.closed:
                self.board.apply(content[COUNT.size :])

    def _write_stack(self, rank: RankLink, content: bytes) -> None:
        with contextlib.suppress(ValueError):  # closed, because the rank was replaced
            os.ftruncate(rank.stack_file.fileno(), 0)
            os.pwrite(rank.stack_file.fileno(), content, 0)

    def _serve_channel(self, number: int) -> bool:
        self._read_requests(number)
        return self._hand_over(number)

    def _read_requests(self, number: int) -> None:
        rank = self._rank_links[number]
        with contextlib.suppress(OSError):  # there is nothing, or the session has closed its end
            while rank.link.unsent_bytes < _QUEUED_BYTES:
                data = rank.channel.recv(CHUNK_BYTES)
                if not data:
                    return
                rank.link.send(packed(Packet.REQUEST, number, data))

    def _hand_over(self, number: int) -> bool:
        """Give the session what has arrived from a rank, as far as it takes it."""
        rank = self._rank_links[number]
        taken = 0
        while rank.arrived and not rank.ended:
            kind, content = rank.arrived[0]
            if kind is Packet.EXIT:
                self._server_end.sendall(REPORT.pack(number, STATUS.unpack(content)[0]))
                rank.close()
                break
            try:
                sent = (
                    rank.channel.send(content)
                    if kind is Packet.ANSWER and content
                    else (os.write(rank.output, content) if content else 0)
                )
            except BlockingIOError:
                break
            except OSError:  # the session has closed its end
                sent = len(content)
            taken += sent
            if sent < len(content):
                rank.arrived[0] = (kind, content[sent:])
            else:
                rank.arrived.popleft()
        if taken:
            rank.link.send(packed(Packet.TAKEN, number, COUNT.pack(taken)))
        return True
