"""The dashboards below the URL of a user's server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.hub.dashboards import _optuna, below, proxied

PREFIX = "/user/ada/optuna"


def page(app: Any, path: str) -> tuple[str, dict[str, str], bytes]:
    said: list[Any] = []
    environ: dict[str, Any] = {"wsgi.url_scheme": "http", "wsgi.input": None, "wsgi.errors": sys.stderr}
    environ |= {"REQUEST_METHOD": "GET", "PATH_INFO": path, "HTTP_ACCEPT_ENCODING": "gzip"}
    environ |= {"SERVER_NAME": "x", "SERVER_PORT": "80"}
    body = b"".join(app(environ, lambda status, headers, *rest: said.append((status, dict(headers)))))
    return *said[-1], body


@pytest.fixture
def dashboard(tmp_path: Path) -> Any:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(tmp_path / "lr.journal")))
    optuna.create_study(storage=storage, study_name="lr")
    return below(PREFIX, _optuna(tmp_path))


def test_all_paths_of_optuna_begin_with_the_prefix(dashboard: Any) -> None:
    status, headers, body = page(dashboard, "/")
    assert status.startswith("302")
    assert headers["Location"] == f"{PREFIX}/dashboard"
    _, headers, body = page(dashboard, "/dashboard")
    assert f'src="{PREFIX}/static/bundle.js"'.encode() in body
    assert headers["Content-Length"] == str(len(body))
    _, _, body = page(dashboard, "/static/bundle.js")
    assert f"`{PREFIX}/api/studies".encode() in body
    assert f'url_prefix:"{PREFIX}/dashboard"'.encode() in body
    assert b"${this.baseURL}/api/" not in body


def test_the_studies_of_the_newest_journal_are_served(dashboard: Any) -> None:
    status, _, body = page(dashboard, "/api/studies")
    assert status.startswith("200")
    assert b'"lr"' in body


def test_a_folder_without_a_search_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="create a search first"):
        _optuna(tmp_path)


def test_a_bundle_of_another_form_is_named() -> None:
    def other(environ: Any, start: Any) -> list[bytes]:
        start("200 OK", [])
        return [b"nothing"]

    with pytest.raises(UserError, match="install optuna-dashboard 0.21"):
        page(below(PREFIX, other), "/static/bundle.js")


def test_a_dashboard_listens_on_a_socket_and_not_on_a_port() -> None:
    for name, board in proxied(Path("/opt/dlo/.venv/bin/python")).items():
        assert board["unix_socket"] is True
        assert board["command"][3:] == [name, "{unix_socket}", "{base_url}" + name]
