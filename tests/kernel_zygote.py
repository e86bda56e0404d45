"""A process that has imported what every notebook imports, and forks Jupyter kernels: all notebooks of a
worker pay for those imports once, and so do their ranks: each kernel has a seed (``dlo_lib.launch.seed``),
as on a Hub, but here the seed is a child of this process, which waits for it and so counts its CPU time.

The programs of a job, such as a training that a notebook submits to this machine or a rank under SLURM, are
forks too: ``warm_python`` asks for them on a socket, whose descriptor is the second argument.

Run as a script. Each line of its standard input is a request, as JSON: the command line of a kernel, its
folder and its environment. It answers with two lines: the kernel's process id as soon as the kernel leads a
new process group, and the kernel's exit status when it has ended. One kernel lives at a time. The end
of the input ends this process. Before the fork, only ``lifetime`` and ``huge_pages`` of the library under
test are imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

# The environment asks matplotlib for the backend of notebooks.
WARM = (
    "ipykernel.kernelapp",
    "IPython.terminal.ipapp",
    "matplotlib.pyplot",
    "torch.distributed",
    "torch._dynamo",  # which torch.optim imports at the first optimiser
    "torch.distributed.optim",  # 0.3 s in each rank of lab 14 otherwise
)
OF_TRAININGS = ("rich.progress", "torch.distributed.checkpoint", "torch.utils.tensorboard", "typer")
MOST_BYTES = 1 << 20  # of a request for a program
LIBC = ctypes.CDLL(None, use_errno=True)


def be_kernel(request: dict[str, Any], to_seed: socket.socket) -> NoReturn:
    """What ``python -m ipykernel_launcher ...`` does in a new process."""
    os.setsid()
    print(os.getpid(), flush=True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    take_place(request)
    client, seed = (importlib.import_module(f"dlo_lib.launch.{name}") for name in ("client", "seed"))
    client.seed = seed.Seed(to_seed)
    run_program(request["command"])


def run_program(command: list[str]) -> NoReturn:
    """What ``python -m MODULE ...`` or ``python FILE ...`` does from here on; ends this process."""
    code = 1
    try:
        if command[1] == "-m":
            sys.argv[:] = command[2:]
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = command[1:]
            runpy.run_path(command[1], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  as the interpreter shows it; this fork must not return
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def be_seed(request: dict[str, Any], to_kernel: socket.socket) -> NoReturn:
    """Fork the servers of the kernel's ranks; they have its environment and its folder."""
    take_place(request)
    importlib.import_module("dlo_lib.launch.seed").serve(to_kernel)
    raise AssertionError("the seed returned")


def take_place(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])


def serve_programs(listener: socket.socket, parent: int) -> NoReturn:
    """Fork a program for each connection, until a SIGTERM; ranks of one program are several at once."""
    try:
        importlib.import_module("dlo_lib.base.lifetime").die_with(parent)
        signal.signal(signal.SIGTERM, lambda *_: (reap(), os._exit(0)))
        while True:
            line = listener.accept()[0]
            with line:
                data, files, _, _ = socket.recv_fds(line, MOST_BYTES, 3)
                if os.fork() == 0:
                    listener.close()
                    be_guard(json.loads(data), files, line)
                for file in files:
                    os.close(file)
            reap()
    finally:
        os._exit(1)


def reap() -> None:
    """Wait for the children that have ended, so that their CPU time is counted as this process's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def be_guard(request: dict[str, Any], files: list[int], line: socket.socket) -> NoReturn:
    """Fork a program and wait for it."""
    try:
        importlib.import_module("dlo_lib.base.lifetime").die_with(os.getppid())
        asker = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        child = os.fork()
        if child == 0:
            line.close()
            be_program(request, files, asker)
        for file in files:
            os.close(file)
        wait_for_program(child, line)
        os._exit(0)
    finally:
        os._exit(1)


def be_program(request: dict[str, Any], files: list[int], asker: int) -> NoReturn:
    """What ``python -P -m MODULE ...`` or ``python FILE ...`` does in a new process with these standard files
    in the namespaces of the process ``asker``: a node of a virtual cluster has namespaces for its host name
    and its mounts.
    """
    importlib.import_module("dlo_lib.base.lifetime").die_with(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
    enter_namespaces(asker)
    take_place(request)
    command, first = request["command"], []
    if command[1] != "-m":
        first = [os.path.dirname(command[1])]
    elif not request["safe path"]:
        first = [os.getcwd()]
    sys.path[:0] = [*first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if request["unbuffered"]:
        sys.stdout.reconfigure(write_through=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "dlo_lib"]:
        del sys.modules[name]  # a job runs a copy of the library
    run_program(command)


def enter_namespaces(process: int) -> None:
    for kind in ("uts", "mnt"):
        if os.readlink(f"/proc/{process}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}"):
            continue
        with open(f"/proc/{process}/ns/{kind}") as namespace:
            if LIBC.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {kind} of process {process}")


def wait_for_program(child: int, line: socket.socket) -> None:
    """Send the signals that the asking process receives; answer with the exit status; end the program if the
    asking process has ended."""
    handle = os.pidfd_open(child)
    alive = True
    while handle not in select.select([handle, line] if alive else [handle], [], [])[0]:
        number = line.recv(16)
        alive = bool(number)
        os.kill(child, int(number) if alive else signal.SIGKILL)
    os.close(handle)
    _, status = os.waitpid(child, 0)
    if alive:
        with contextlib.suppress(BrokenPipeError):  # the asking process has ended meanwhile
            line.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def main(parent: int, listener: socket.socket) -> None:
    del sys.path[0]  # this folder: a kernel starts without it
    importlib.import_module("dlo_lib.base.lifetime").die_with(parent)
    # The import of ipykernel reads this: a kernel ends with this process.
    os.environ["JPY_PARENT_PID"] = str(os.getpid())
    gc.disable()
    for module in (*WARM, *OF_TRAININGS):
        importlib.import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection would write to pages that all of them share
    for _ in importlib.import_module("dlo_lib.base.huge_pages").collapse():
        pass  # each rank of a notebook is a fork of a fork of this process
    programs = os.fork()
    if programs == 0:
        serve_programs(listener, os.getppid())
    listener.close()
    for line in sys.stdin:
        request = json.loads(line)
        to_seed, to_kernel = socket.socketpair()
        seed = os.fork()
        if seed == 0:
            to_seed.close()
            be_seed(request, to_kernel)
        kernel = os.fork()
        if kernel == 0:
            to_kernel.close()
            be_kernel(request, to_seed)
        to_seed.close()
        to_kernel.close()
        _, status = os.waitpid(kernel, 0)
        os.waitpid(seed, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os.kill(programs, signal.SIGTERM)
    os.waitpid(programs, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
