"""Start JupyterLab on the labs of the student, with the extensions of nbgrader
configured for a single user."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import state_dir, write_text
from dlo_lib.cli.private import close_copies
from dlo_lib.cli.workspace import work_dir
from dlo_lib.grading.lab.course import BUILT_FILES, LAB_FILE, labs
from dlo_lib.grading.lab.exchange import ClassExchange, find_exchange
from dlo_lib.hub.extensions import NOT_FOR_STUDENTS, SETTINGS, write_style

FIRST_PORT = 8888
KERNEL = {
    "argv": [
        sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}",
        # names the cell to run after a restart, before any cell of a lab has run
        "--ext=dlo_lib.grading.notebook.fresh_kernel",
    ],
    "display_name": "Python 3 (ipykernel)",
    "language": "python",
    "metadata": {"debugger": True},
}  # fmt: skip
HIDDEN_FILES = (LAB_FILE, *BUILT_FILES, "__pycache__", "*.pyc", "*~")
"""Patterns of files that the file browser does not list, because only programs read them."""


def free_port(asked: int | None = None) -> int:
    """Return ``asked`` if it is free; without it, the first free port from 8888.

    Raises:
        UserError: the port ``asked`` is in use; the message names a free one.
    """
    if asked is not None and not _is_free(asked):
        raise UserError(f"port {asked} is in use: use --port {free_port()} or omit --port")
    if asked is not None:
        return asked
    return next(port for port in range(FIRST_PORT, 65_536) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like the server
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True


def start_url(folder: Path) -> str:
    """Return the path of the URL at which JupyterLab opens: lab 00 if ``folder`` has it, otherwise the
    launcher.
    """
    first = next((f"{lab.directory}/{lab.notebook}" for lab in labs() if lab.number == 0), None)
    return f"/lab/tree/{first}" if first and (folder / first).is_file() else "/lab"


def start_jupyterlab(folder: Path, port: int | None, browser: bool, exchange: ClassExchange) -> None:
    """Replace this process by JupyterLab on ``folder``, which prints its URL.

    This function does not return.
    """
    number = free_port(port)
    os.chdir(folder)  # the Assignment List looks for fetched labs in the current folder
    environment = _environment(write_jupyter_config(folder, exchange))
    close_copies(environment)
    # Jupyter requires --allow-root if the user is root, as in a container.
    options = [
        f"--ServerApp.root_dir={folder}",
        f"--port={number}",
        "--ServerApp.port_retries=0",
        f"--LabApp.default_url={start_url(folder)}",
        f"--ContentsManager.hide_globs={list(HIDDEN_FILES)!r}",
        "--log-level=WARN",
    ]
    options += [] if browser else ["--no-browser"]
    options += ["--allow-root"] if os.geteuid() == 0 else []
    sys.stdout.flush()
    os.execvpe(sys.executable, [sys.executable, "-m", "jupyterlab", *options], environment)


def nbgrader_environment() -> dict[str, str]:
    """Return the environment of commands of nbgrader: they find the exchange that `dlo lab` used last."""
    config = state_dir() / "jupyter"
    if not (config / "nbgrader_config.py").is_file():
        config = write_jupyter_config(work_dir(), find_exchange())
    environment = _environment(config)
    close_copies(environment)
    return environment


def _environment(config: Path) -> dict[str, str]:
    places = {
        name: os.pathsep.join([str(config), *_others(os.environ.get(name, ""), config)])
        for name in ("JUPYTER_CONFIG_PATH", "JUPYTER_PATH")
    }
    return {**_folders(), **os.environ, **places}


def _others(path: str, config: Path) -> list[str]:
    return [place for place in path.split(os.pathsep) if place and place != str(config)]


def _folders() -> dict[str, str]:
    """Return folders in the state folder for Jupyter, IPython and matplotlib if the
    home folder is read-only."""
    if os.access(Path.home(), os.W_OK):
        return {}
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR")
    return {name: str(state_dir() / "home" / name.lower()) for name in names}


def write_jupyter_config(labs: Path, exchange: ClassExchange) -> Path:
    """Write the configuration and the kernel that `dlo lab` adds to Jupyter's search paths; return their
    folder.

    It comes before those of the user and of the site, so it sets no exchange if one of them does.
    """
    folder = state_dir() / "jupyter"
    lines = [
        "# Written by `dlo lab` at each start.",
        "c = get_config()",
        f"c.CourseDirectory.root = {str(labs)!r}",
    ]
    if exchange.folder is not None:
        exchange.folder.mkdir(exist_ok=True)
        lines += ['c.CourseDirectory.course_id = "dlo"', f"c.Exchange.root = {str(exchange.folder)!r}"]
    write_text(folder / "nbgrader_config.py", "\n".join([*lines, ""]))
    write_text(folder / "labconfig" / "default_setting_overrides.json", json.dumps(SETTINGS))
    # It has the name of the kernel that notebooks ask for, and comes before that of the environment.
    write_text(folder / "kernels" / "python3" / "kernel.json", json.dumps(KERNEL, indent=1))
    server = {"ServerApp": {"tornado_settings": write_style(folder)}}
    write_text(folder / "jupyter_server_config.json", json.dumps(server, indent=1))
    page = json.dumps({"disabledExtensions": NOT_FOR_STUDENTS})
    write_text(folder / "labconfig" / "page_config.json", page)
    return folder
