"""Interpret the filter's program as the kernel does; ``test_sandbox`` tests it in the kernel."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct

import pytest

from dlo_lib.grading.sandbox import seccomp
from dlo_lib.grading.sandbox.seccomp import (
    ABSENT,
    ALLOW,
    CLONE,
    ERRNO,
    KILL,
    MACHINES,
    REFUSED,
    SOCKET,
    X32,
    Machine,
    Unfiltered,
    program,
)

PROCESSORS = [MACHINES["x86_64"], MACHINES["aarch64"]]
EPERM, ENOSYS, NO_FAMILY = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS, ERRNO | errno.EAFNOSUPPORT


def verdict(
    machine: Machine,
    number: int,
    argument: int = 0,
    second: int = 0,
    audit: int | None = None,
    third: int = 0,
    fourth: int = 0,
    rank: bool = False,
) -> int:
    """Return the result of the filter for a call."""
    head = (number, machine.audit if audit is None else audit, 0)
    data = struct.pack("<IIQQQQQ", *head, argument, second, third, fourth)
    code = program(machine, rank)
    steps = [struct.unpack_from("HBBI", code, place) for place in range(0, len(code), 8)]
    place, loaded = 0, 0
    while True:
        code, then, otherwise, value = steps[place]
        place += 1
        if code == seccomp.LOAD:
            loaded = struct.unpack_from("<I", data, value)[0]
        elif code == seccomp.RETURN:
            return value
        else:
            holds = {
                seccomp.JUMP_EQUAL: loaded == value,
                seccomp.JUMP_ABOVE: loaded >= value,
                seccomp.JUMP_ANY: bool(loaded & value),
            }[code]
            place += then if holds else otherwise


@pytest.mark.parametrize("machine", PROCESSORS, ids=["x86-64", "AArch64"])
def test_listed_calls_are_refused_and_the_others_pass(machine: Machine) -> None:
    refused = {numbers[machine.column] for numbers in REFUSED.values()}
    absent = {numbers[machine.column] for numbers in ABSENT.values()}
    assert {verdict(machine, number) for number in refused} == {EPERM}
    assert {verdict(machine, number) for number in absent} == {ENOSYS}
    by_argument = (SOCKET, seccomp.SOCKETPAIR, seccomp.FLOCK)
    others = set(range(460)) - refused - absent - {numbers[machine.column] for numbers in by_argument}
    allowed = {number for number in others if verdict(machine, number) == ALLOW}
    assert others - allowed == (set(seccomp.ONLY_X86.values()) if machine.column == 0 else set())


@pytest.mark.parametrize("machine", PROCESSORS, ids=["x86-64", "AArch64"])
def test_the_first_argument_decides_for_sockets_and_forks(machine: Machine) -> None:
    families = {family: verdict(machine, SOCKET[machine.column], family) for family in range(46)}
    assert {family for family, result in families.items() if result == ALLOW} == {
        socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK,
    }  # fmt: skip
    assert set(families.values()) == {ALLOW, NO_FAMILY}
    assert verdict(machine, CLONE[machine.column], 17) == ALLOW  # SIGCHLD: a fork
    assert verdict(machine, CLONE[machine.column], 0x3D0F00) == ALLOW  # a thread of glibc's
    assert verdict(machine, CLONE[machine.column], 0x10000000 | 17) == EPERM  # CLONE_NEWUSER
    assert verdict(machine, CLONE[machine.column], 0x1000 | 17) == EPERM  # CLONE_PIDFD


@pytest.mark.parametrize("machine", PROCESSORS, ids=["x86-64", "AArch64"])
def test_locks_do_nothing_and_other_signals_on_files_are_refused(machine: Machine) -> None:
    column = machine.column
    assert verdict(machine, seccomp.FLOCK[column], 3, fcntl.LOCK_EX | fcntl.LOCK_NB) == ERRNO
    commands = {command: verdict(machine, seccomp.FCNTL[column], 3, command) for command in range(1100)}
    assert {command for command, result in commands.items() if result == ERRNO} == {
        fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW,
    }  # fmt: skip
    assert {command for command, result in commands.items() if result == EPERM} == {
        fcntl.F_GETLK, fcntl.F_OFD_GETLK, fcntl.F_SETLEASE, fcntl.F_GETLEASE, fcntl.F_NOTIFY,
        fcntl.F_SETPIPE_SZ,
    }  # fmt: skip
    assert set(commands.values()) == {ALLOW, ERRNO, EPERM}


@pytest.mark.parametrize("machine", PROCESSORS, ids=["x86-64", "AArch64"])
def test_shared_memory_without_a_file_and_huge_pages_are_refused(machine: Machine) -> None:
    flags = {
        "private": 0x22, "of a file": 0x01, "shared": 0x21, "shared, checked": 0x23, "huge": 0x40022
    }  # fmt: skip
    results = {
        name: verdict(machine, seccomp.MMAP[machine.column], fourth=value) for name, value in flags.items()
    }
    assert {name for name, result in results.items() if result == EPERM} == {
        "shared",
        "shared, checked",
        "huge",
    }
    assert set(results.values()) == {ALLOW, EPERM}


@pytest.mark.parametrize("machine", PROCESSORS, ids=["x86-64", "AArch64"])
def test_no_advice_drops_pages_of_a_file_that_all_workers_share(machine: Machine) -> None:
    advice = {value: verdict(machine, seccomp.MADVISE[machine.column], third=value) for value in range(110)}
    assert {value: result for value, result in advice.items() if result != ALLOW} == {
        20: ERRNO | errno.EINVAL, 21: ERRNO | errno.EINVAL,
    }  # fmt: skip


@pytest.mark.parametrize("machine", PROCESSORS, ids=["x86-64", "AArch64"])
def test_only_the_judge_installs_a_filter(machine: Machine) -> None:
    options = {option: verdict(machine, seccomp.PRCTL[machine.column], option) for option in range(80)}
    assert {option for option, result in options.items() if result != ALLOW} == {seccomp.PR_SET_SECCOMP}


@pytest.mark.parametrize("machine", PROCESSORS, ids=["x86-64", "AArch64"])
def test_a_rank_starts_threads_but_no_process_no_socket_and_no_event(machine: Machine) -> None:
    column, again = machine.column, ERRNO | errno.EAGAIN
    assert column == 1 or verdict(machine, seccomp.EVENT_OF_X86, rank=True) == EPERM
    for numbers in (SOCKET, seccomp.SOCKETPAIR, seccomp.EVENT):
        assert verdict(machine, numbers[column], socket.AF_UNIX, rank=True) == EPERM
    assert verdict(machine, CLONE[column], 17, rank=True) == again
    assert verdict(machine, CLONE[column], 0x3D0F00, rank=True) == ALLOW  # a thread of glibc's
    assert verdict(machine, CLONE[column], 0x10000000 | 0x3D0F00, rank=True) == EPERM
    for number in seccomp.FORKS_OF_X86:
        assert column == 1 or verdict(machine, number, rank=True) == again


@pytest.mark.parametrize("machine", PROCESSORS, ids=["x86-64", "AArch64"])
def test_calls_of_another_architecture_kill_the_process(machine: Machine) -> None:
    assert verdict(machine, 1, audit=0x40000003) == KILL


def test_x86s_second_numbering_is_refused() -> None:
    assert verdict(MACHINES["x86_64"], X32 | 39) == EPERM


def test_a_processor_without_a_filter_is_refused() -> None:
    with pytest.raises(Unfiltered, match="no seccomp filter for riscv64"):
        seccomp.install("riscv64")
