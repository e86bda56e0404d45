"""Enter a machine: mount its file system, make it the root, become its user, run one command.

`unshare` creates the mount, process and host-name namespaces, which end with the command, and with them all
processes and mounts. If the machine has no network, `unshare` creates a network namespace too, in which only
the loopback interface is enabled.

    python3 enter.py '{"lower": [...], "upper": ..., "work": ..., "at": ...,
                          "binds": [[from, to, "ro"]], ...}'
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
SHARED_MEMORY = "64m"  # Docker's default
IFF_UP, SIOCSIFFLAGS = 1, 0x8914  # <linux/if.h>, <linux/sockios.h>


def main() -> None:
    machine = json.loads(sys.argv[1])
    if machine["alone"]:
        loopback_up()
        if machine["proxy_fd"] is not None:
            hand_over_listener(machine["proxy_fd"], machine["proxy_port"])
    at = Path(machine["at"])
    mount("--make-rprivate", "/")
    layers = ":".join(machine["lower"])
    mount(
        "-t",
        "overlay",
        "-o",
        f"lowerdir={layers},upperdir={machine['upper']},workdir={machine['work']}",
        "overlay",
        str(at),
    )
    mount("-t", "proc", "proc", str(at / "proc"))
    mount("-t", "sysfs", "-o", "ro", "sysfs", str(at / "sys"))
    mount("-t", "tmpfs", "-o", "mode=1777,size=2g", "tmpfs", str(at / "tmp"))
    make_devices(at / "dev")
    for source, target, mode in machine["binds"]:
        bind(source, at / target.lstrip("/"), read_only=mode == "ro")
    socket.sethostname("machine")
    become_root_of(at)
    if machine["umask"] is not None:
        os.umask(machine["umask"])
    user = (
        []
        if machine["uid"] == 0
        else ["setpriv", f"--reuid={machine['uid']}", f"--regid={machine['uid']}", "--clear-groups"]
    )
    command = [*user, *machine["command"]]
    os.chdir(machine["cwd"])
    os.execvpe(command[0], command, machine["env"])


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def bind(source: str, target: Path, read_only: bool) -> None:
    if Path(source).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount("--bind", source, str(target))
    if read_only:
        mount("-o", "remount,bind,ro", str(target))


def make_devices(dev: Path) -> None:
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(dev))
    for name in DEVICES:
        (dev / name).touch()
        mount("--bind", f"/dev/{name}", str(dev / name))
    for name, options in {
        "pts": "newinstance,ptmxmode=0666",
        "shm": f"mode=1777,size={SHARED_MEMORY}",
    }.items():
        (dev / name).mkdir()
        mount("-t", "devpts" if name == "pts" else "tmpfs", "-o", options, name, str(dev / name))
    for name, target in {
        "ptmx": "pts/ptmx",
        "fd": "/proc/self/fd",
        "stdin": "fd/0",
        "stdout": "fd/1",
        "stderr": "fd/2",
    }.items():
        (dev / name).symlink_to(target)


def become_root_of(at: Path) -> None:
    """Use pivot_root, because below a chroot the kernel forbids user namespaces, which the sandbox needs."""
    os.chdir(at)
    subprocess.run(["pivot_root", ".", "."], check=True)
    subprocess.run(["umount", "-l", "."], check=True)
    os.chdir("/")


def loopback_up() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def hand_over_listener(fd: int, port: int) -> None:
    """Pass a listening socket to the proxy outside; a socket stays in the namespace of its creation."""
    with socket.socket() as listener, socket.socket(fileno=fd) as channel:
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
        socket.send_fds(channel, [b"proxy"], [listener.fileno()])


if __name__ == "__main__":
    main()
