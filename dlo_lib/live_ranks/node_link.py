"""The connections of a session to the nodes of a job, and to the ranks on them (``job_ranks``)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from typing import IO

from dlo_lib.base.interpreter import trusted_python
from dlo_lib.live_ranks.node import BOOT
from dlo_lib.live_ranks.packets import CHUNK_BYTES, Packet, Unpacker
from dlo_lib.live_ranks.slurm_job import RunningJob, step_environment

LEAVE_S = 5.0
"""How long a node may take to end."""


class NodeLink:
    """The connection to one node."""

    def __init__(self, job: RunningJob, node: str, host: str, world_size: int) -> None:
        self.node = node
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the link
        self.unpacker = Unpacker(from_node=True)
        self.unsent: deque[bytes] = deque()
        self.unsent_bytes = 0
        self.open = True
        options = ["--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--cpu-bind=none"]
        self.process = subprocess.Popen(
            [
                "srun",
                f"--jobid={job.number}",
                *options,
                f"--nodelist={node}",
                "--job-name=dlo-ranks",
                *trusted_python(BOOT, host, str(world_size), user_settings=True),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=step_environment(),
            start_new_session=True,  # an interrupt reaches only this process, which then stops its ranks
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.to_node, self.from_node = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.to_node, False)
        os.set_blocking(self.from_node, False)

    def send(self, packet: bytes) -> None:
        """Send a packet when the node can take it."""
        self.unsent.append(packet)
        self.unsent_bytes += len(packet)
        self.write()

    def write(self) -> None:
        """Send what the node can take now."""
        try:
            while self.unsent:
                packet = self.unsent.popleft()
                sent = 0
                try:
                    sent = os.write(self.to_node, packet)
                finally:
                    self.unsent_bytes -= sent
                    if sent < len(packet):
                        self.unsent.appendleft(packet[sent:])
        except BlockingIOError:
            return
        except OSError:  # srun has ended, which the end of its output shows
            self.unsent.clear()
            self.unsent_bytes = 0

    def read(self) -> bool:
        """Read what has arrived; return False at the end of the output."""
        try:
            data = os.read(self.from_node, CHUNK_BYTES)
        except BlockingIOError:
            return True
        self.unpacker.add(data)
        return bool(data)

    def said(self) -> str:
        """Return what srun and the node have written to stderr."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace").strip()

    def leave(self) -> None:
        """Ask the node to end its ranks and itself, which it does at the end of its input."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def close(self, until: float) -> None:
        """Wait for the end of srun, and end it if it does not end."""
        assert self.process.stdout is not None
        self.leave()
        for stop in (self.process.terminate, self.process.kill):
            try:
                self.process.wait(max(0.1, until - time.monotonic()))
                break
            except subprocess.TimeoutExpired:
                stop()  # srun passes it on to the node
                until = time.monotonic() + LEAVE_S
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


@dataclass
class RankLink:
    """This process's ends of a rank's connections that the session does not use, and what waits for them."""

    link: NodeLink
    channel: socket.socket
    output: int
    stack_file: IO[bytes]
    arrived: deque[tuple[Packet, bytes]] = field(default_factory=deque)
    ended: bool = False

    def close(self) -> None:
        """Close the ends; the session sees the ends of the streams."""
        if not self.ended:
            self.ended = True
            self.channel.close()
            os.close(self.output)
