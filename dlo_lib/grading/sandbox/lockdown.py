"""Create the namespaces of a worker inside the zygote's, so that it sees no other worker, no network, and
only a few files that it can write.

The zygote is an ordinary user without capabilities. Each worker starts in a new user namespace with the
capabilities of root. It mounts a /proc and two small file systems, brings its loopback device up, and then
drops all capabilities.

Reference: namespaces(7), user_namespaces(7), capabilities(7). Cost: about 10 ms per worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from dlo_lib.grading.sandbox.limits import Limits
from dlo_lib.grading.sandbox.seccomp import CLONE, MACHINE, MACHINES

MOUNTS, UTS, IPC, USER, PID, NET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NO_SUID, NO_DEVICES, NO_EXECUTE, BIND, RECURSIVE, PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = (
    1,
    4,
    24,
    36,
    38,
)
CAPABILITY_VERSION = 0x20080522
SIOCSIFFLAGS, UP_AND_RUNNING = 0x8914, 0x41
TERMINALS = "/dev/pts"
WORK = Path("/tmp/work")  # the working directory and home of a worker

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None, use_errno=True)  # its calls keep the GIL, as os.fork does


def fork_into_namespaces() -> int:
    """Fork as ``os.fork`` does, with the child as the first process of new namespaces; return 0 in the child.

    ``unshare`` would need two forks of a large process, because it moves only the children into a new pid
    namespace. One fork saves a third of a worker's cost.

    Raises:
        OSError: the kernel or the settings of the host do not allow it.
    """
    flags = USER | MOUNTS | PID | IPC | UTS | NET | signal.SIGCHLD
    _python.PyOS_BeforeFork()
    pid = int(_python.syscall(CLONE[MACHINES[MACHINE].column], flags, 0, 0, 0, 0))
    if pid == 0:
        _python.PyOS_AfterFork_Child()
        return 0
    _python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), f"clone: {os.strerror(ctypes.get_errno())}")
    return pid


def map_ids(user: int, group: int) -> None:
    """Map the user and group ids of the outer namespace, so that the files of the sandbox keep their owner.

    Raises:
        OSError: the kernel or the settings of the host do not allow it.
    """
    prctl(PR_SET_DUMPABLE, 1)  # otherwise only root may write the maps
    _write("/proc/self/setgroups", b"deny")
    _write("/proc/self/uid_map", b"%d %d 1" % (user, user))
    _write("/proc/self/gid_map", b"%d %d 1" % (group, group))


def mount_worker_files(limits: Limits, keep: Sequence[str]) -> None:
    """Replace the zygote's mounts by the worker's. Call it in the first process of the pid namespace.

    Args:
        limits: the sizes of the file systems.
        keep: paths below /tmp that stay visible, such as those of an interpreter or a library installed
            there.
    """
    prctl(PR_SET_DUMPABLE, 0)  # student's code has the same uid and must not read or trace it
    _mount("none", "/", "", RECURSIVE | PRIVATE)
    _mount("proc", "/proc", "proc", NO_SUID | NO_DEVICES | NO_EXECUTE)
    _write("/proc/sys/user/max_user_namespaces", b"0")
    with contextlib.suppress(OSError):  # before Linux 5.8
        # Over the first one: only processes. The other files count what all workers do (memory, load, locks),
        # so that one worker could read what another one signals.
        _mount("proc", "/proc", "proc", NO_SUID | NO_DEVICES | NO_EXECUTE, "subset=pid")
    kept = [(path, os.open(path, os.O_PATH)) for path in keep]
    for path, size in (("/tmp", limits.scratch), ("/dev/shm", limits.shared_memory)):
        _mount(
            "tmpfs", path, "tmpfs", NO_SUID | NO_DEVICES, f"size={size},nr_inodes={limits.inodes},mode=1777"
        )
    for path, descriptor in kept:
        _bind_again(path, descriptor)
    if os.path.isdir(TERMINALS):  # two workers could communicate through the terminals of a shared folder
        most = f"newinstance,ptmxmode=0666,mode=620,max={limits.terminals}"
        _mount("devpts", TERMINALS, "devpts", NO_SUID | NO_EXECUTE, most)
    # A shared mapping of /dev/zero is memory that belongs to no process. /dev/full reads as zeros too.
    _mount("/dev/full", "/dev/zero", "", BIND)
    _loopback_up()
    os.mkdir(WORK)


def drop_privileges() -> None:
    """Drop all capabilities of this process and of every program that it starts."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    capability = 0
    while _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _call("capset", header, none)


def prctl(option: int, value: int) -> None:
    """Set a property of this process."""
    _call("prctl", option, value, 0, 0, 0)


def _write(path: str, text: bytes) -> None:
    """Write to a file of /proc. A file opened as text costs a worker 2 ms: it imports the codec."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text)
    finally:
        os.close(descriptor)


def _bind_again(path: str, descriptor: int) -> None:
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(f"/proc/self/fd/{descriptor}"):
        place.mkdir()
    else:
        place.touch()
    _mount(f"/proc/self/fd/{descriptor}", path, "", BIND | RECURSIVE)
    os.close(descriptor)


def _loopback_up() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", UP_AND_RUNNING))


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _call(
        "mount",
        source.encode(),
        target.encode(),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
