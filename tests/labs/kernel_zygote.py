"""A process that has imported what every notebook imports, and forks Jupyter kernels: all notebooks of a
worker pay for those imports once.

Run as a script. Each line of its standard input is a request, as JSON: the command line of a kernel, its
folder and its environment. It answers with two lines: the kernel's process id as soon as the kernel leads a
new process group, and the kernel's exit status when it has ended. One kernel lives at a time. The end
of the input ends this process. Of the library under test, only ``lifetime`` is imported here.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
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


def be_kernel(request: dict[str, Any]) -> NoReturn:
    """What ``python -m ipykernel_launcher ...`` does in a new process."""
    os.setsid()
    print(os.getpid(), flush=True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    _, _, module, *arguments = request["command"]
    sys.argv[:] = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else bool(end.code))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def main(parent: int) -> None:
    del sys.path[0]  # this folder: a kernel starts without it
    importlib.import_module("dlo_lib.lifetime").die_with(parent)
    # The import of ipykernel reads this: a kernel ends with this process.
    os.environ["JPY_PARENT_PID"] = str(os.getpid())
    for module in WARM:
        importlib.import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            be_kernel(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
