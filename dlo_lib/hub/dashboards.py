"""TensorBoard and the searches of Optuna behind the server of a user:

    python -m dlo_lib.hub.dashboards NAME SOCKET

jupyter-server-proxy starts this program when the user opens it and passes on only requests that the Hub has
authenticated. The program listens on a Unix socket in a folder of the user: a port of the loopback interface
is open to all users of a machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from dlo_lib.base.lifetime import die_with
from dlo_lib.hub.searches import Application, application

NAMES = {"tensorboard": "TensorBoard", "optuna": "Optuna"}


def proxied(python: Path) -> dict[str, dict[str, Any]]:
    """Return the servers for the configuration of jupyter-server-proxy.

    Args:
        python: the interpreter of the users' environment.
    """
    return {
        name: {
            "command": [str(python), "-m", "dlo_lib.hub.dashboards", name, "{unix_socket}"],
            "unix_socket": True,
            "timeout": 60,
            "absolute_url": False,
            "launcher_entry": {"title": title, "enabled": True},
            "new_browser_tab": True,
        }
        for name, title in NAMES.items()
    }


def serve_tensorboard(unix_socket: str, folder: Path) -> None:
    """Serve the runs below ``folder`` until this process ends."""
    from tensorboard.program import TensorBoard

    # Neither main() nor launch(), which need a port and write it to a file for all users of the machine.
    board = TensorBoard(server_class=lambda app, flags: app)
    board.configure(argv=["tensorboard", f"--logdir={folder}", "--reload_interval=5", "--load_fast=false"])
    _serve(unix_socket, board._make_server())


def _serve(unix_socket: str, app: Application) -> None:
    from werkzeug.serving import run_simple

    run_simple(f"unix://{unix_socket}", 0, app, threaded=True)


def main(name: str, unix_socket: str) -> None:
    """Serve a dashboard on a Unix socket until the server of the user ends."""
    die_with(os.getppid())
    if name == "tensorboard":
        serve_tensorboard(unix_socket, Path.cwd())
    else:
        _serve(unix_socket, application(Path.cwd()))


if __name__ == "__main__":
    main(*sys.argv[1:3])
