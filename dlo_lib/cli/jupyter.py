"""Starting JupyterLab on the student's labs, with nbgrader's extensions set up for a person alone."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from textwrap import dedent

from dlo_lib.errors import UserError
from dlo_lib.files import state_dir, write_text

FIRST_PORT = 8888
QUIET = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}


def free_port(asked: int | None = None) -> int:
    """``asked`` when it is free, or the first free port from 8888 on.

    Raises:
        UserError: the port asked for is in use; a free one is named.
    """
    if asked is not None and not _is_free(asked):
        raise UserError(f"port {asked} is in use: use --port {free_port()} or leave --port out")
    if asked is not None:
        return asked
    return next(port for port in range(FIRST_PORT, 65_536) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will: a port in TIME_WAIT is free
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True


def start_jupyterlab(folder: Path, port: int | None, browser: bool) -> None:
    """Replace this process by JupyterLab on ``folder``; its URL is printed by the server. Does not return."""
    number = free_port(port)
    config = write_jupyter_config(folder)
    path = os.environ.get("JUPYTER_CONFIG_PATH")
    environment = {**os.environ, "JUPYTER_CONFIG_PATH": f"{config}{os.pathsep + path if path else ''}"}
    # Root may start a server in a container only when it says so.
    options = [f"--ServerApp.root_dir={folder}", f"--port={number}", "--ServerApp.port_retries=0", "--log-level=WARN"]
    options += [] if browser else ["--no-browser"]
    options += ["--allow-root"] if os.geteuid() == 0 else []
    sys.stdout.flush()
    os.execvpe(sys.executable, [sys.executable, "-m", "jupyterlab", *options], environment)


def write_jupyter_config(labs: Path) -> Path:
    """The folder of configuration files that `dlo lab` adds to Jupyter's own search path: an nbgrader exchange for one person."""
    folder, exchange = state_dir() / "jupyter", state_dir() / "exchange"
    exchange.mkdir(exist_ok=True)
    settings = f"""\
        # Written by `dlo lab` at each start. A class has an exchange of its own: see the instructor's configuration.
        c = get_config()
        c.CourseDirectory.course_id = "dlo"
        c.CourseDirectory.root = {str(labs)!r}
        c.Exchange.root = {str(exchange)!r}
        """
    write_text(folder / "nbgrader_config.py", dedent(settings))
    # A class may have no network, and nobody wants to be asked about news.
    write_text(folder / "labconfig" / "default_setting_overrides.json", json.dumps(QUIET))
    return folder
