"""Optuna's dashboard of a search, shown in a notebook.

A thread of the kernel serves the dashboard, so the server ends with the kernel. The dashboard is read-only:
it listens on 127.0.0.1, where other users of the machine can reach it, and it refuses every request except
GET and HEAD. For a kernel on another machine, run ``ssh -L PORT:127.0.0.1:PORT host`` and then open the link.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.hpo.journal import Journal

HOST = "127.0.0.1"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line for each request would fill the notebook."""


class Dashboard:
    """Serve the dashboard of the search at ``path`` until :meth:`stop`.

    A notebook displays the dashboard when it is the value of a cell.

    Raises:
        UserError: there is no search at ``path``, or the package optuna-dashboard is not installed.
    """

    def __init__(self, path: str | Path, *, height: int = 600) -> None:
        try:
            from optuna_dashboard import wsgi
        except ImportError as error:
            raise UserError(tr("optuna-dashboard is not installed: pip install optuna-dashboard")) from error
        journal = Journal(path)
        if not journal.path.is_file():
            raise UserError(tr("there is no search at {path}: create it with Search.make", path=journal.path))
        self.height = height
        self._server = make_server(HOST, 0, _read_only(wsgi(journal.storage())), _Server, _Silent)
        self.url = f"http://{HOST}:{self._server.server_port}/dashboard"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="optuna-dashboard", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the server and free its port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _repr_html_(self) -> str:
        link = f"<a href='{self.url}' target='_blank'>{self.url}</a>"
        return (
            f"{link}<iframe src='{self.url}' width='100%' height='{self.height}' style='border:0'></iframe>"
        )


def _read_only(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Content-Type", "text/plain"), ("Allow", "GET, HEAD")])
            return [b"this dashboard is read-only"]
        return app(environ, start_response)

    return serve
