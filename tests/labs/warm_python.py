"""In place of Python in the notebooks of a test: ``-P -m dlo_lib.train``, as the script of a job starts a
training, runs in a fork of ``kernel_zygote``, which has imported what it imports. Everything else runs as
usual.

Run as a script by :func:`write_warm_python`'s, which needs 15 ms; the module imports nothing that is slow.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

FORKED = ["-P", "-m", "dlo_lib.train"]


def write_warm_python(path: Path, name: str) -> None:
    """Write the executable. ``name``: of the socket of the zygote, in the abstract namespace."""
    code = f"import runpy; runpy.run_path({__file__!r})['main']({sys.executable!r}, {name!r})"
    path.write_text(f"#!{sys.executable} -IS\n{code}\n")
    path.chmod(0o755)


def main(python: str, name: str) -> None:
    """Run ``python`` with this process's arguments, or let the zygote do it."""
    if sys.argv[1 : 1 + len(FORKED)] != FORKED:
        os.execv(python, [python, *sys.argv[1:]])
    request = {"command": [python, *sys.argv[2:]], "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect("\0" + name)
        socket.send_fds(line, [json.dumps(request).encode()], [0, 1, 2])
        status = int(line.recv(16) or b"1")  # nothing: the zygote has ended
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)
