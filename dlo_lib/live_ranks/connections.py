"""Break the connections of this process to other ranks, so that a call that waits for them raises an error.

A rank that waits in gloo waits in C++, where no Python exception reaches it, and gloo has no call to give up.
It does give up when a connection ends: every call of the group that waits raises an error within
milliseconds, also in the threads of asynchronous calls. NCCL has a call to give up. The group is of no use
afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import sys

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d


def break_connections() -> None:
    """Break the connections of all process groups of this process.

    Called by a thread other than the one that waits.
    """
    for group, (backend, _) in list(c10d._world.pg_map.items()):
        if "nccl" in backend:
            group._get_backend(torch.device("cuda")).abort()
    _shut_down(_sockets())


def _sockets() -> set[int]:
    """Return the file descriptors of the connected TCP sockets that belong to no socket object of Python."""
    pythons = {one.fileno() for one in gc.get_objects() if isinstance(one, socket.socket)}
    folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    return {int(name) for name in os.listdir(folder)} - pythons


def _shut_down(files: set[int]) -> None:
    for file in sorted(files):
        with contextlib.suppress(OSError):  # closed in the meantime, or not connected
            if not stat.S_ISSOCK(os.fstat(file).st_mode):
                continue
            with socket.socket(fileno=os.dup(file)) as copy:
                is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
                # gloo ends the process when accept fails on the socket that it listens on.
                if is_tcp and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    copy.shutdown(socket.SHUT_RDWR)


def holds_group(value: object) -> bool:
    """Whether ``value`` holds a process group: a group, a mesh, or a module that communicates."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    if isinstance(value, torch.nn.Module):
        return any(
            isinstance(getattr(module, "process_group", None), dist.ProcessGroup)
            for module in value.modules()
        ) or any(isinstance(parameter, DTensor) for parameter in value.parameters())
    return isinstance(value, dist.ProcessGroup | DeviceMesh | DTensor)
