"""The kernel of notebooks on a Hub: ``python -m dlo_lib.hub.kernel -f CONNECTION_FILE``.

It is ipykernel's. But it imports first what every lab imports, and keeps a copy of itself from which the
ranks come (``launch.seed``), so that PyTorch is in memory once for a notebook and its ranks. A module that
the kernel imports later is in it alone, and each name in it that Python knows already writes to a page that
was shared until then. The debugger is an exception, because few students open it.
"""

from __future__ import annotations

import os
import sys

from dlo_lib.base.one_thread import import_without_threads

MODULES = (
    "torch",
    "torch.distributed",
    "dlo_lib.grading.notebook.lab",
    "dlo_lib.live_ranks",
    "dlo_lib.labkit.figures",  # matplotlib
    "matplotlib.pyplot",
    "IPython.core.debugger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "ipykernel.kernelapp",
    "psutil",
    "sqlite3",
)
EXTENSION = "dlo_lib.grading.notebook.fresh_kernel"  # names the cell to run after a restart
INLINE = "module://matplotlib_inline.backend_inline"
"""ipykernel sets it when it starts, too late for a matplotlib that is imported already."""


def main() -> None:
    """Serve a notebook until it ends."""
    # As ipykernel_launcher: a random.py of the notebook's folder is for its cells, and not for what follows.
    if sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    os.environ.setdefault("MPLBACKEND", INLINE)
    from dlo_lib.hub import debugger

    with import_without_threads():  # the room of the ranks imports torch, and so numpy
        from dlo_lib.launch import client, seed

    debugger.defer()
    client.seed = seed.sow(MODULES)
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance([*sys.argv[1:], f"--ext={EXTENSION}"])


if __name__ == "__main__":
    main()
