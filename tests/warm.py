"""Fixtures of the process that has imported torch and forks kernels and the programs of jobs: the tests of a
pytest process that use it pay for its imports once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm_python import write_warm_python


def programs_socket() -> str:
    """The name of the socket on which the zygote of this process listens for programs."""
    return f"dlo-programs-{os.getpid()}"


@pytest.fixture(scope="session")
def kernel_zygote() -> Iterator[subprocess.Popen[str]]:
    """Ended and waited for, so that its CPU time is counted."""
    environment = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # no fork survives a thread
    command = [sys.executable, str(Path(__file__).with_name("kernel_zygote.py")), str(os.getpid())]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + programs_socket())
        listener.listen()
        process = subprocess.Popen(
            [*command, str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            bufsize=1,
            pass_fds=[listener.fileno()],
        )
    with process:
        yield process


@pytest.fixture
def warm_python(
    kernel_zygote: subprocess.Popen[str],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The first ``python`` of the path, ``sys.executable`` and that of torchrun are ``warm_python``."""
    python = tmp_path_factory.mktemp("warm") / "python"
    write_warm_python(python, programs_socket())
    monkeypatch.setenv("PATH", str(python.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHON_EXEC", str(python))
    monkeypatch.setattr(sys, "executable", str(python))
    return python
