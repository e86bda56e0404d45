"""Refuse system calls that no lab needs, with a seccomp filter (classic BPF).

The filter is the second barrier. The first is that a worker has no capabilities and that its mounts contain
nothing to protect. The filter refuses system calls with a history of kernel exploits, calls that allocate
memory which belongs to no process, and calls through which two workers could communicate past the judge: they
see the same read-only files, so a lock, a lease or a notification on one of these files would be a signal. A
refused call fails as on a kernel that does not allow it (EPERM) or does not have it (ENOSYS), so that
libraries use their fallbacks. Locking a file succeeds and does nothing, because only processes of one worker
share files that can be written.

Reference: Documentation/userspace-api/seccomp_filter.rst of the Linux kernel. Cost: about 30 ns per call with
the bitmap cache of the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import platform
import socket
import struct
from dataclasses import dataclass

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, JUMP_EQUAL, JUMP_ABOVE, JUMP_ANY, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24  # in seccomp_data
THIRD_ARGUMENT, FOURTH_ARGUMENT = 32, 40
X32 = 0x40000000  # x86-64's second numbering of the same calls
NEW_NAMESPACE = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
CLONE_PIDFD = 0x1000  # the inode of such a descriptor has the number of processes ever started
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2
# Families that gloo and getifaddrs need. Internet addresses need no refusal: the network namespace of a
# worker has only a loopback device, through which the worker reaches no other process: not the host, not the
# judge and not another rank. It cannot enter another namespace (setns) or bring up a device (no capability).
# Abstract AF_UNIX names belong to the network namespace too.
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)

# name → number on x86-64, on AArch64
REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "setns": (308, 268), "unshare": (272, 97), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262), "quotactl": (179, 60), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
    "personality": (135, 92),
    # memory that belongs to no process, which the judge cannot measure
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "memfd_secret": (447, 447), "seccomp": (317, 277),  # a filter holds up to 256 KiB of constants
    # signals between workers: notification of events on a file, and the pages of a file that are in memory
    "inotify_init1": (294, 26), "mincore": (27, 232), "cachestat": (451, 451), "fadvise64": (221, 223),
    "readahead": (187, 213),
    # numbers that the kernel counts for the whole machine: processes and memory, requests for asynchronous
    # reading, processes ever started; and waiting until the machine has written its files
    "sysinfo": (99, 179), "io_setup": (206, 0), "pidfd_open": (434, 434), "sync": (162, 81),
    "syncfs": (306, 267),
}  # fmt: skip
# A filter can read the flags of clone, but not those of clone3. With a flag, preadv2 tells whether a page of
# a file is in memory. glibc and libffi have fallbacks for the three.
ABSENT = {"clone3": (435, 435), "memfd_create": (319, 279), "preadv2": (327, 286)}
ONLY_X86 = {"iopl": 172, "ioperm": 173, "modify_ldt": 154, "uselib": 134, "inotify_init": 253}
SOCKET, SOCKETPAIR, CLONE = (41, 198), (53, 199), (56, 220)
FORKS_OF_X86 = (57, 58)  # fork, vfork
EVENT = (290, 19)  # eventfd2: /proc/self/fdinfo has a number that counts those of the whole machine
EVENT_OF_X86 = 284  # eventfd
MMAP, PRCTL, MADVISE = (9, 222), (157, 167), (28, 233)
EVICTIONS = (20, 21)  # MADV_COLD, MADV_PAGEOUT: they drop pages of a file that all workers share
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGE_PAGES = 0x01, 0x20, 0x40000
CLONE_THREAD = 0x10000
FLOCK, FCNTL = (73, 32), (72, 25)
LOCKS = (6, 7, 37, 38)  # commands of fcntl: F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
# F_GETLK, F_OFD_GETLK, F_SETLEASE, F_GETLEASE, F_NOTIFY; and F_SETPIPE_SZ, because no measurement of memory
# sees a tensor in pipes of 1 MiB
REFUSED_COMMANDS = (5, 36, 1024, 1025, 1026, 1031)


@dataclass(frozen=True)
class Machine:
    """The ``AUDIT_ARCH`` value of a processor, and the column of its call numbers above."""

    audit: int
    column: int


MACHINE = platform.machine()
MACHINES = {
    "x86_64": Machine(0xC000003E, 0),
    "aarch64": Machine(0xC00000B7, 1),
    "arm64": Machine(0xC00000B7, 1),
}


class Unfiltered(OSError):
    """There is no filter for this processor, or the kernel accepts none."""


def install(machine: str = MACHINE, rank: bool = False) -> None:
    """Filter the calls of this process and of all processes that it starts. The process must have one thread.

    ``rank``: the process is a rank (:func:`program`).

    Raises:
        Unfiltered: the kernel accepts no filter, or this module has none for the processor.
    """
    code = program(_machine(machine), rank)
    text = ctypes.create_string_buffer(code, len(code))
    filter_ = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, MODE_FILTER, filter_, 0, 0):
        raise Unfiltered(ctypes.get_errno(), "the kernel accepts no seccomp filter")


def prepare() -> None:
    """Build the filter, so that forks of this process can reuse it."""
    with contextlib.suppress(Unfiltered):
        for rank in (False, True):
            program(_machine(MACHINE), rank)


def _machine(name: str) -> Machine:
    if name not in MACHINES:
        raise Unfiltered(errno.ENOSYS, f"no seccomp filter for {name}")
    return MACHINES[name]


@functools.cache
def program(machine: Machine, rank: bool = False) -> bytes:
    """Return the instructions of the filter, 8 bytes each.

    A call of another architecture kills the process, a refused call fails, and all other calls pass. A
    ``rank`` may also start no process and create no socket and no event: sockets hold data that no process
    has received, and descriptors in messages that no process has open.
    """
    column = machine.column
    code = [
        _step(LOAD, ARCHITECTURE),
        _step(JUMP_EQUAL, machine.audit, then=1),
        _step(RETURN, KILL),
        _step(LOAD, NUMBER),
    ]
    if column == 0:
        code += [_step(JUMP_ABOVE, X32, otherwise=1), _fail(errno.EPERM)]
        code += [part for number in ONLY_X86.values() for part in _when(number, [_fail(errno.EPERM)])]
    for numbers in REFUSED.values():
        code += _when(numbers[column], [_fail(errno.EPERM)])
    for numbers in ABSENT.values():
        code += _when(numbers[column], [_fail(errno.ENOSYS)])
    code += _when(FLOCK[column], [_fail(0)])
    commands = [_step(LOAD, SECOND_ARGUMENT)]
    commands += [part for command in LOCKS for part in _when(command, [_fail(0)])]
    commands += [part for command in REFUSED_COMMANDS for part in _when(command, [_fail(errno.EPERM)])]
    code += _when(FCNTL[column], [*commands, _step(RETURN, ALLOW)])
    option = [_step(LOAD, FIRST_ARGUMENT), *_when(PR_SET_SECCOMP, [_fail(errno.EPERM)]), _step(RETURN, ALLOW)]
    code += _when(PRCTL[column], option)
    # Shared memory without a file stays allocated when no process maps its pages; huge pages may be in no
    # process's resident memory.
    mapping = [
        _step(LOAD, FOURTH_ARGUMENT),
        _step(JUMP_ANY, MAP_HUGE_PAGES, then=2),
        _step(JUMP_ANY, MAP_ANONYMOUS, otherwise=2),
        _step(JUMP_ANY, MAP_SHARED, otherwise=1),
        _fail(errno.EPERM),
        _step(RETURN, ALLOW),
    ]
    code += _when(MMAP[column], mapping)
    advice = [_step(LOAD, THIRD_ARGUMENT)]
    advice += [part for value in EVICTIONS for part in _when(value, [_fail(errno.EINVAL)])]
    code += _when(MADVISE[column], [*advice, _step(RETURN, ALLOW)])
    if rank:
        for numbers in (SOCKET, SOCKETPAIR, EVENT):
            code += _when(numbers[column], [_fail(errno.EPERM)])
        if column == 0:
            code += _when(EVENT_OF_X86, [_fail(errno.EPERM)])
            code += [part for number in FORKS_OF_X86 for part in _when(number, [_fail(errno.EAGAIN)])]
    threads_only = [_step(JUMP_ANY, CLONE_THREAD, then=1), _fail(errno.EAGAIN)] if rank else []
    new_namespace = [
        _step(LOAD, FIRST_ARGUMENT),
        *threads_only,
        _step(JUMP_ANY, NEW_NAMESPACE | CLONE_PIDFD, otherwise=1),
        _fail(errno.EPERM),
        _step(RETURN, ALLOW),
    ]
    code += _when(CLONE[column], new_namespace)
    left = len(FAMILIES)
    families = [_step(LOAD, FIRST_ARGUMENT)]
    families += [_step(JUMP_EQUAL, family, then=left - place) for place, family in enumerate(FAMILIES)]
    families += [_fail(errno.EAFNOSUPPORT), _step(RETURN, ALLOW)]
    for numbers in (SOCKET, SOCKETPAIR):
        code += _when(numbers[column], families)
    return b"".join([*code, _step(RETURN, ALLOW)])


def _when(number: int, steps: list[bytes]) -> list[bytes]:
    """Return the instructions that run ``steps``, which must end in returns, for the call ``number``."""
    return [_step(JUMP_EQUAL, number, otherwise=len(steps)), *steps]


def _fail(error: int) -> bytes:
    """Return the instruction that ends the call with this error; with 0 it succeeds and does nothing."""
    return _step(RETURN, ERRNO | error)


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Return one ``struct sock_filter``; ``then`` and ``otherwise``: the number of instructions to skip."""
    return struct.pack("HBBI", code, then, otherwise, value)
