"""TensorBoard and optuna-dashboard behind the server of a user:

    python -m dlo_lib.hub.dashboards NAME SOCKET PREFIX

jupyter-server-proxy starts this program when the user opens it and passes on only requests that the Hub has
authenticated. The program listens on a Unix socket in a folder of the user: a port of the loopback interface
is open to all users of a machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import EXIT_BAD_INPUT, UserError
from dlo_lib.base.lifetime import die_with
from dlo_lib.base.text import tr

NAMES = {"tensorboard": "TensorBoard", "optuna": "Optuna"}
_BUNDLE = "/static/bundle.js"
_IN_BUNDLE = {"${this.baseURL}/api/": "%s/api/", 'url_prefix:"/dashboard"': 'url_prefix:"%s/dashboard"'}
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def proxied(python: Path) -> dict[str, dict[str, Any]]:
    """Return the servers for the configuration of jupyter-server-proxy.

    Args:
        python: the interpreter of the users' environment.
    """
    return {
        name: {
            "command": [
                str(python),
                "-m",
                "dlo_lib.hub.dashboards",
                name,
                "{unix_socket}",
                "{base_url}" + name,
            ],
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


def serve_optuna(unix_socket: str, prefix: str, folder: Path) -> None:
    """Serve the newest search below ``folder`` until this process ends.

    Raises:
        UserError: there is none, or optuna-dashboard is missing or has another form than expected.
    """
    _serve(unix_socket, below(prefix.rstrip("/"), _optuna(folder)))


def _optuna(folder: Path) -> Application:
    try:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
        from optuna_dashboard import wsgi
    except ImportError as error:
        raise UserError(tr("optuna-dashboard is not installed: pip install optuna-dashboard")) from error
    journals = sorted(folder.rglob("*.journal"), key=lambda file: file.stat().st_mtime)
    if not journals:
        raise UserError(tr("no *.journal below {folder}: create a search first", folder=folder))
    return wsgi(JournalStorage(JournalFileBackend(str(journals[-1]))))


def below(prefix: str, app: Application) -> Application:
    """Let the pages of optuna-dashboard, whose paths begin at the root of a host, work below ``prefix``."""

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ["HTTP_ACCEPT_ENCODING"] = ""  # the bundle as text
        path = environ.get("PATH_INFO", "")
        said: list[tuple[str, list[tuple[str, str]]]] = []

        def keep(status: str, headers: list[tuple[str, str]], *rest: object) -> None:
            said.append((status, headers))

        body = b"".join(app(environ, keep))
        status, headers = said[-1]
        if path == _BUNDLE:
            body = _replaced(body, {old: new % prefix for old, new in _IN_BUNDLE.items()})
        elif path.startswith("/dashboard"):
            body = _replaced(body, {f'"{_BUNDLE}"': f'"{prefix}{_BUNDLE}"'})
        headers = [(key, value) for key, value in headers if key.lower() != "content-length"]
        headers = [
            (key, prefix + "/dashboard" if key.lower() == "location" else value) for key, value in headers
        ]
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body]

    return serve


def _replaced(body: bytes, changes: dict[str, str]) -> bytes:
    for old, new in changes.items():
        if old.encode() not in body:
            raise UserError(
                tr("this optuna-dashboard has no {text}: install optuna-dashboard 0.21", text=old)
            )
        body = body.replace(old.encode(), new.encode())
    return body


def main(name: str, unix_socket: str, prefix: str) -> None:
    """Serve a dashboard on a Unix socket until the server of the user ends."""
    die_with(os.getppid())
    try:
        if name == "tensorboard":
            serve_tensorboard(unix_socket, Path.cwd())
        else:
            serve_optuna(unix_socket, prefix, Path.cwd())
    except UserError as error:
        print(f"dashboards: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main(*sys.argv[1:4])
