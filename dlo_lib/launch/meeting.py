"""Where the ranks of a process group meet: a store of addresses, from which each rank connects to the others.

Torch's store is a port without a key: every user of the machine can read and write it. So the ranks of one
machine share a file in a folder that only their user can enter (torch's ``FileStore``). Ranks on several
machines use the store that rank 0 serves. Gloo's own connections have no key either: a user who reaches a
port of a rank while the ranks meet can take the place of another.
"""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dlo_lib.base.temporary_folders import locked_folder, remove_stale

LOOPBACK = "127.0.0.1"
_FOLDER = "dlo-meeting-"  # prefix of a folder among the temporary files


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a process group meet: the store that rank 0 serves, or a file of one machine.

    Attributes:
        listener: the listening socket of the port, which rank 0 needs; other ranks of its machine may have it
            too. With a file, it only keeps the port from other programs until the ranks have met.
        store: the path of the file; None: the store of rank 0.
    """

    host: str
    port: int
    listener: socket.socket | None = None
    store: str | None = None

    @classmethod
    def of(
        cls, place: tuple[str, int] | None, listener: int | None = None, store: int | None = None
    ) -> Meeting:
        """Return the meeting at ``place`` (None: at the listener's), with the files that a rank received."""
        own = None if listener is None else socket.socket(fileno=listener)
        if place is None:
            assert own is not None  # every rank of this machine inherits it
            place = LOOPBACK, own.getsockname()[1]
        if store is None:
            return cls(*place, own)
        try:
            return cls(*place, own, os.readlink(f"/proc/self/fd/{store}"))
        finally:
            os.close(store)

    def join(self, rank: int, world_size: int) -> dist.Store:
        """Return the store in which the ranks meet."""
        if self.store is not None:
            if self.listener is not None:
                self.listener.close()
            return dist.FileStore(self.store, world_size)
        if rank == 0:  # the store takes over the listening socket
            assert self.listener is not None
            return dist.TCPStore(
                LOOPBACK,
                self.port,
                world_size,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=self.listener.detach(),
            )
        if self.listener is not None:
            self.listener.close()
        return dist.TCPStore(self.host, self.port, world_size, is_master=False, wait_for_workers=False)


class MeetingFiles:
    """What ranks need to meet: a port, taken from now on so that two launches never use the same one, and for
    the ranks of one machine a file in place of torch's store.

    Args:
        host: where the port is open; "" is all interfaces.
    """

    def __init__(self, world_size: int, host: str) -> None:
        self._listener = socket.create_server((host, 0), backlog=max(128, world_size))
        self._store: int | None = None
        self._folder: Path | None = None
        self._lock: int | None = None
        # A rank finds the path of the file in /proc. Without it (macOS), torch's store remains.
        if host == LOOPBACK and Path("/proc/self/fd").exists():
            remove_stale(_FOLDER)
            self._folder, self._lock = locked_folder(f"{_FOLDER}{os.getpid()}-")  # with the mode 0700
            self._store = os.open(self._folder / "store", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    @property
    def port(self) -> int:
        """The number of the port."""
        return self._listener.getsockname()[1]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The files that a rank receives, for :meth:`Meeting.of`."""
        return (self._listener.fileno(), *(() if self._store is None else (self._store,)))

    def close(self) -> None:
        """Close this process's descriptors, once the ranks have theirs."""
        self._listener.close()
        if self._store is not None:
            os.close(self._store)
            self._store = None

    def remove(self) -> None:
        """Close, and remove the file, once no rank is left in the process group."""
        self.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
