"""In place of Python in the notebooks and the jobs of a test: the programs of ``is_forked`` run in a fork of
``kernel_zygote``, which has imported what they import. Everything else runs as usual.

A fork has the arguments, the environment, the working directory, the standard files and the Linux namespaces
of the process that runs this script, and receives the signals that this process receives. Its process id and
its parent are others, so the ranks of a node do not find each other by their parent: a test of what ends them
needs a real Python.

Run as a script by :func:`write_warm_python`'s, which needs 15 ms; the module imports nothing that is slow.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

FORKED = ["-P", "-m", "dlo_lib.train"]
"""How the script of a job on this machine starts a training."""
MODULES = {"dlo_lib.train", "dlo_lib.cluster.code.function_rank", "torch.distributed.run"}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCONT)


def write_warm_python(path: Path, name: str) -> None:
    """Write the executable. ``name``: of the socket of the zygote, in the abstract namespace."""
    code = f"import runpy; runpy.run_path({__file__!r})['main']({sys.executable!r}, {name!r})"
    path.write_text(f"#!{sys.executable} -IS\n{code}\n")
    path.chmod(0o755)


def is_forked(arguments: list[str]) -> bool:
    """Whether a fork runs ``python`` with these arguments: a module of ``MODULES``, or a file of a job."""
    _, program = split(arguments)
    if program[:1] == ["-m"]:
        return program[1] in MODULES
    return bool(program) and program[0].endswith(".py")


def split(arguments: list[str]) -> tuple[set[str], list[str]]:
    """Return the options of Python that a fork knows, and the rest."""
    for number, argument in enumerate(arguments):
        if argument not in ("-P", "-u"):
            return set(arguments[:number]), arguments[number:]
    return set(arguments), []


def main(python: str, name: str) -> None:
    """Run ``python`` with this process's arguments, or let the zygote do it."""
    arguments = sys.argv[1:]
    if not is_forked(arguments):
        os.execv(python, [python, *arguments])
    options, program = split(arguments)
    request = {
        "command": [python, *program],
        "safe path": "-P" in options,
        "unbuffered": "-u" in options,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect("\0" + name)
        socket.send_fds(line, [json.dumps(request).encode()], [0, 1, 2])
        for number in SIGNALS:
            signal.signal(number, lambda number, _: forward(line, number))
        status = int(line.recv(16) or b"1")  # nothing: the zygote has ended
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def forward(line: socket.socket, number: int) -> None:
    """Send the number of a signal to the zygote, which sends the signal to the fork."""
    with contextlib.suppress(OSError):  # the fork has just ended
        line.send(str(number).encode())
