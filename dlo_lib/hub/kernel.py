"""The kernel of notebooks on a Hub: ``python -m dlo_lib.hub.kernel -f CONNECTION_FILE``.

It is ipykernel's. But it imports first what every lab imports, and keeps a copy of itself from which the
ranks come (``launch.seed``), so that PyTorch is in memory once for a notebook and its ranks.
"""

from __future__ import annotations

import os
import sys

MODULES = ("torch", "torch.distributed", "dlo_lib.grading.notebook.lab", "ipykernel.kernelapp")


def main() -> None:
    """Serve a notebook until it ends."""
    # As ipykernel_launcher: a random.py of the notebook's folder is for its cells, and not for what follows.
    if sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    from dlo_lib.launch import client, seed

    client.seed = seed.sow(MODULES)
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance()


if __name__ == "__main__":
    main()
