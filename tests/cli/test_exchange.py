"""`dlo lab` uses the exchange of the class; without one it uses a private one, and prints which."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dlo_lib
from dlo_lib.base.errors import UserError
from dlo_lib.base.files import state_dir
from dlo_lib.cli.jupyter import start_jupyterlab, write_jupyter_config
from dlo_lib.grading.lab.exchange import ClassExchange, find_exchange, has_class

ROOT = Path(dlo_lib.__file__).parents[1]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration folder of a site."""
    monkeypatch.setattr("dlo_lib.grading.lab.exchange.jupyter_config_path", lambda: [str(tmp_path)])
    return tmp_path


def test_without_a_configuration_the_exchange_is_private(site: Path) -> None:
    exchange = find_exchange()
    assert exchange.folder == state_dir() / "exchange"
    assert "no nbgrader_config.py sets the exchange of a class: dlo lab --exchange FOLDER" in str(exchange)
    text = (write_jupyter_config(site, exchange) / "nbgrader_config.py").read_text()
    assert f"c.Exchange.root = {str(state_dir() / 'exchange')!r}" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nbgrader_config.py", 'c = get_config()\nc.Exchange.root = "/srv/exchange"\n'),
        ("nbgrader_config.json", json.dumps({"Exchange": {"root": "/srv/exchange"}})),
    ],
)
def test_the_exchange_of_the_site_is_kept(site: Path, name: str, text: str) -> None:
    (site / name).write_text(text)
    exchange = find_exchange()
    assert str(exchange) == f"Labs are fetched and submitted through the exchange that {site / name} sets."
    written = (write_jupyter_config(site, exchange) / "nbgrader_config.py").read_text()
    assert "Exchange" not in written
    assert "course_id" not in written


@pytest.mark.parametrize("text", ["# c.Exchange.root = '/old'\n", "c.Exchange.timezone = 'UTC'\n"])
def test_a_configuration_of_other_things_sets_no_exchange(site: Path, text: str) -> None:
    (site / "nbgrader_config.py").write_text(text)
    (site / "nbgrader_config.json").write_text("[]")
    assert find_exchange().folder == state_dir() / "exchange"


def test_the_option_wins_and_must_be_a_folder(site: Path, tmp_path: Path) -> None:
    (site / "nbgrader_config.py").write_text("c.Exchange.root = '/srv/exchange'\n")
    assert find_exchange(tmp_path).folder == tmp_path
    with pytest.raises(UserError, match="no folder .*nowhere: --exchange takes the folder"):
        find_exchange(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("site_text", "asked", "in_class"),
    [("", None, False), ("", "class", True), ("c.Exchange.root = '/srv/exchange'\n", None, True)],
)
def test_a_person_works_alone_as_long_as_no_exchange_is_set(
    site: Path, tmp_path: Path, site_text: str, asked: str | None, in_class: bool
) -> None:
    """Before the first start of `dlo lab` and after it; a class is one whose exchange `dlo submit` uses."""
    (site / "nbgrader_config.py").write_text(site_text)
    assert has_class() is bool(site_text)
    (tmp_path / "class").mkdir()
    write_jupyter_config(site, find_exchange(tmp_path / asked if asked else None))
    assert has_class() is in_class


def test_an_exchange_in_a_form_that_cannot_be_read_counts_as_a_class(site: Path) -> None:
    folder = write_jupyter_config(site, find_exchange())
    (folder / "nbgrader_config.py").write_text("c.Exchange.root = os.environ['EXCHANGE']\n")
    assert has_class()


def test_a_copy_of_a_lab_is_fetched_wherever_jupyterlab_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbgrader.server_extensions.assignment_list.handlers import AssignmentList

    work, elsewhere, exchange = tmp_path / "work", tmp_path / "elsewhere", tmp_path / "exchange"
    for folder in (work / "91_small", elsewhere, exchange / "dlo" / "outbound" / "91_small"):
        folder.mkdir(parents=True)
    config: list[str] = []

    def started(program: str, command: list[str], environment: dict[str, str]) -> None:
        config.append(environment["JUPYTER_CONFIG_PATH"])
        kernels = Path(environment["JUPYTER_PATH"].split(os.pathsep)[0]) / "kernels"
        config.append(json.loads((kernels / "python3" / "kernel.json").read_text())["argv"][-1])

    monkeypatch.setattr(os, "execvpe", started)
    monkeypatch.chdir(elsewhere)
    start_jupyterlab(work, None, False, ClassExchange(exchange))
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", config[0])
    extension = AssignmentList()
    extension.root_dir = str(work)
    (lab,) = extension.list_released_assignments()["value"]
    assert (lab["assignment_id"], lab["status"]) == ("91_small", "fetched")
    # The kernel loads it when it starts, so it must be small.
    code = f"import sys, {config[1].removeprefix('--ext=')}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
