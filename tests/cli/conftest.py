"""A small released course, as in the installation of a student."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlo_lib.grading.lab.course import source_labs
from dlo_lib.grading.lab.release import release_lab

SMALL_COURSE = Path(__file__).resolve().parents[1] / "grading" / "small_course"


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "course"
    shutil.copytree(SMALL_COURSE, folder)
    monkeypatch.setenv("DLO_COURSE", str(folder))
    for lab in source_labs():
        release_lab(lab)
    return folder


@pytest.fixture
def dlo() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command as a user does."""

    def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from dlo_lib.cli import main; main()", *arguments]
        return subprocess.run(
            command,
            cwd=folder,
            env=dict(os.environ, COLUMNS="200"),
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
