"""A process that has imported what every notebook imports, and forks Jupyter kernels: all notebooks of a
worker pay for those imports once, and so do their ranks: each kernel has a seed (``dlo_lib.launch.seed``),
as on a Hub, but here the seed is a child of this process, which waits for it and so counts its CPU time.

Run as a script. Each line of its standard input is a request, as JSON: the command line of a kernel, its
folder and its environment. It answers with two lines: the kernel's process id as soon as the kernel leads a
new process group, and the kernel's exit status when it has ended. One kernel lives at a time. The end
of the input ends this process. Before the fork, only ``lifetime`` of the library under test is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import sys
from typing import Any, NoReturn

# The environment asks matplotlib for the backend of notebooks.
WARM = (
    "ipykernel.kernelapp",
    "IPython.terminal.ipapp",
    "matplotlib.pyplot",
    "torch.distributed",
    "torch._dynamo",  # which torch.optim imports at the first optimiser
)


def be_kernel(request: dict[str, Any], to_seed: socket.socket) -> NoReturn:
    """What ``python -m ipykernel_launcher ...`` does in a new process."""
    os.setsid()
    print(os.getpid(), flush=True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    take_place(request)
    _, _, module, *arguments = request["command"]
    sys.argv[:] = [module, *arguments]
    try:
        client, seed = (importlib.import_module(f"dlo_lib.launch.{name}") for name in ("client", "seed"))
        client.seed = seed.Seed(to_seed)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else bool(end.code))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def be_seed(request: dict[str, Any], to_kernel: socket.socket) -> NoReturn:
    """Fork the servers of the kernel's ranks; they have its environment and its folder."""
    take_place(request)
    importlib.import_module("dlo_lib.launch.seed").serve(to_kernel)
    raise AssertionError("the seed returned")


def take_place(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])


def main(parent: int) -> None:
    del sys.path[0]  # this folder: a kernel starts without it
    importlib.import_module("dlo_lib.lifetime").die_with(parent)
    # The import of ipykernel reads this: a kernel ends with this process.
    os.environ["JPY_PARENT_PID"] = str(os.getpid())
    for module in WARM:
        importlib.import_module(module)
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


if __name__ == "__main__":
    main(int(sys.argv[1]))
