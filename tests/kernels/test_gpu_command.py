"""`make gpu` without a GPU; parts that fail, reach their limit, or are done; and what is kept."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

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


@pytest.fixture
def gpu(monkeypatch, tmp_path) -> ModuleType:
    """The module of the command on a machine with a card, with four short parts."""
    specification = importlib.util.spec_from_file_location("gpu_command", COMMAND)
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "gpu_command", module)
    specification.loader.exec_module(module)

    def part(code: str, limit: float = 60, by_default: bool = True) -> object:
        return module.Part(lambda folder, limit: ["-c", code, str(folder)], limit, by_default)

    crash = "import os; print('a line', flush=True); os.abort()"
    save = "import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'rows.json').write_text('[]'); print('saved')"
    parts = {
        "crashes": part(crash),
        "waits": part("import time; print('first'); time.sleep(600)", limit=1),
        "saves": part(save),
        "search-this": part("print('found')", by_default=False),
    }
    monkeypatch.setattr(module, "CARD", "print('a card')")
    monkeypatch.setattr(module, "PARTS", parts)
    monkeypatch.setattr(module, "GROUPS", {"search": ["search-this"]})
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(module, "KEPT", tmp_path / "parts")
    return module


def called(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *args])
    return gpu.main()


def without_times(text: str) -> list[str]:
    return [re.sub(r"\d+ s\b", "N s", line) for line in text.splitlines()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT TESTED HERE: a machine without a GPU")
def test_without_a_gpu_it_prints_one_line(tmp_path):
    done = run("--to", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "gpu: PyTorch sees no GPU here: use a machine that has one, and a PyTorch for CUDA\n"
    )
    assert not (tmp_path / "out").exists()


def test_an_unknown_part_is_refused():
    done = run("--only", "kernel")
    assert done.returncode == 2
    assert "'kernel' is no part: use kernels, table, training, tests, search-launch" in done.stderr


def test_a_part_that_fails_does_not_stop_the_others_and_all_is_packed(gpu, monkeypatch, tmp_path, capsys):
    assert called(gpu, monkeypatch, "--to", str(tmp_path / "out")) == 1
    assert without_times(capsys.readouterr().out) == [
        f"gpu: a card, outputs in {tmp_path / 'out'}",
        "gpu: crashes: status -6 after N s: a line",
        "gpu: waits: status 124 after N s, stopped at its limit of N s: first",
        "gpu: saves: status 0 after N s: saved",
        "gpu: all parts took N s",
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["results.tar.gz", "summary.txt"]
    assert "== waits\nfirst" in (tmp_path / "out" / "summary.txt").read_text()
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as archive:
        assert {"crashes/output.txt", "saves/output.txt", "saves/rows.json"} <= set(archive.getnames())


def test_a_second_run_leaves_out_what_is_done(gpu, monkeypatch, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert called(gpu, monkeypatch, "saves", "search", "--to", out) == 0
    capsys.readouterr()
    assert called(gpu, monkeypatch, "--to", out, "--only", "crashes", "saves") == 1
    printed = capsys.readouterr().out
    assert "gpu: crashes: status -6" in printed
    assert re.search(r"gpu: saves: done before \(\d+-\d+-\d+ \d+:\d+\); --again repeats it", printed)
    assert called(gpu, monkeypatch, "saves", "--again", "--to", out) == 0
    assert "gpu: saves: status 0" in capsys.readouterr().out


def test_the_total_limits_the_parts(gpu, monkeypatch, tmp_path, capsys):
    assert called(gpu, monkeypatch, "saves", "--to", str(tmp_path / "out"), "--total", "4") == 1
    assert "gpu: saves: not run, because 4 s are over" in capsys.readouterr().out


def test_the_parts_of_a_whole_run_take_eight_minutes_at_most(monkeypatch):
    specification = importlib.util.spec_from_file_location("gpu_limits", COMMAND)
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "gpu_limits", module)
    specification.loader.exec_module(module)
    limits = {name: part.limit for name, part in module.PARTS.items() if part.by_default}
    assert list(limits) == ["kernels", "table", "training", "tests"]
    assert sum(limits.values()) <= module.TOTAL == 480
