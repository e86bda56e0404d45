"""For every test: a state folder of its own, and the `gpu` tests only where there is a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

DEAR_TO_SET_UP = {"test_hostile.py", "test_classroom.py", "test_feedback.py"}  # files that grade a class before their first test


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress, gradebooks and the student's copies of this test alone; the text corpora are made once a session."""
    home = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("DLO_HOME", str(home))
    monkeypatch.setenv("DLO_WORK", str(home / "work"))
    monkeypatch.setenv("DLO_CACHE", str(tmp_path_factory.getbasetemp().parent / "dlo-cache"))  # one for all workers of pytest-xdist
    for name in ("DLO_LANG", "DLO_HIDDEN", "DLO_COURSE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 1 MiB, to run out of space on."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("NOT TESTED HERE: a full disk (mounting a small tmpfs needs root)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-size", action="store_true", help="run the reference labs at full size")


class WholeFiles(LoadScopeScheduling):
    """As by default one test after the other goes to whoever is free, but a file that is dear to set up goes to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return file if Path(file).name in DEAR_TO_SET_UP else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeFiles | None:
    return WholeFiles(config, log) if config.getvalue("dist") == "load" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="NOT TESTED HERE: needs a CUDA GPU"))
