"""`make gpu` without a GPU, and where a step fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

COMMAND = Path(__file__).resolve().parents[2] / "deploy" / "gpu.py"


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(COMMAND), *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT TESTED HERE: a machine without a GPU")
def test_without_a_gpu_it_prints_one_line(tmp_path):
    done = run("--to", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpu: PyTorch sees no GPU here: run this command on a machine that has one\n"
    assert not (tmp_path / "out").exists()


def test_a_step_that_fails_keeps_its_output_and_does_not_stop_the_others(tmp_path):
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    @staticmethod\n    def get_device_name():\n        return 'a card'\n"
    )
    done = run("--to", str(tmp_path / "out"), "--only", "report", "benchmark", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    first, report, benchmark = done.stdout.splitlines()
    assert first == f"gpu: a card, outputs in {tmp_path / 'out'}"
    assert report.startswith("gpu: report: status 1 after ")
    assert benchmark.startswith("gpu: benchmark: status 1 after ")
    assert "Traceback" in (tmp_path / "out" / "report.txt").read_text()
