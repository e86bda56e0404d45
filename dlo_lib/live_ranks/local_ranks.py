"""The ranks of a session on the notebook's machine."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Collection

import torch
import torch.distributed as dist

from dlo_lib.base.text import tr
from dlo_lib.comm.deadlock.board import Board
from dlo_lib.launch.client import Launch
from dlo_lib.launch.meeting import LOOPBACK, MeetingFiles
from dlo_lib.launch.rank import LaunchSpec
from dlo_lib.launch.run import launch_spec
from dlo_lib.launch.values import pack_call
from dlo_lib.live_ranks.devices import Devices, gpu_each
from dlo_lib.live_ranks.messages import JOIN, send_request
from dlo_lib.live_ranks.rank import PRELOAD, serve


class LocalRanks(Launch):
    """Ranks that the server of this process has forked.

    Raises:
        UserError: there is no GPU for each rank, and ``devices`` asks for one.
    """

    where = ""

    def __init__(self, world_size: int, devices: Devices, explain: bool) -> None:
        gpus = torch.cuda.device_count()
        nccl = gpu_each(devices, gpus, world_size, dist.is_nccl_available(), tr("on this machine"))
        self._job = pickle.dumps(session_spec(world_size, explain, nccl))
        super().__init__(world_size, self._job, session_modules())

    def join_again(self, dead: Collection[int]) -> None:
        """Let all ranks join a new process group; those that have ended are replaced."""
        world_size = len(self.ranks)
        self.board.close()
        self.board = Board(world_size)
        meeting = MeetingFiles(world_size, LOOPBACK)
        self.meet(meeting)
        where = json.dumps([LOOPBACK, meeting.port]).encode()
        for rank, files in enumerate(self.files):
            if rank in dead:
                self.replace(rank, self._job, meeting)
            else:
                shared = (self.board.descriptor, *meeting.descriptors)
                send_request(files.channel, JOIN, where, shared)
        meeting.close()


def session_spec(world_size: int, explain: bool, nccl: bool) -> LaunchSpec:
    """Return what the ranks of a session need, with the current state of this process."""
    return launch_spec(world_size, pack_call(serve, (), {}), explain=explain, session=True, nccl=nccl)


def session_modules() -> list[str]:
    """Return what the server imports before it forks ranks of a session."""
    drawing = ("matplotlib.pyplot", "matplotlib_inline.backend_inline")
    return [*PRELOAD, *(drawing if drawing[0] in sys.modules else ())]
