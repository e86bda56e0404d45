"""Every reference notebook runs from top to bottom in a fresh kernel, away from the checkout, without an error in any cell.

`nbval --nbval-lax` runs them: it fails a cell that raises and compares no outputs. Sizes are reduced by the variables that lab.toml lists;
`make course` runs the same with --full-size.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlo_lib.grading.course import LabInfo, source_labs
from dlo_lib.grading.release import released_files
from dlo_lib.grading.source import build_notebook, source_folder

CELL_SECONDS = 600  # far above the 90 s a whole lab may take: it ends a run that hangs


@pytest.mark.parametrize("lab", source_labs(), ids=lambda lab: lab.directory)
def test_reference_notebook_runs(lab: LabInfo, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for name, content in released_files(lab).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    shutil.copyfile(build_notebook(source_folder(lab)), tmp_path / lab.notebook)  # the released one, with the solutions in
    sizes = {} if request.config.getoption("--full-size") else dict(lab.reduced)
    nbval = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax", f"--nbval-cell-timeout={CELL_SECONDS}"]
    run = subprocess.run([*nbval, lab.notebook], cwd=tmp_path, env={**os.environ, **sizes}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
