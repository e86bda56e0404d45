"""The command in `datasets/` creates the corpora that its README describes."""

import runpy
from pathlib import Path

import pytest

from dlo_lib.data.arithmetic import TOKENS_PER_PROBLEM, arithmetic, entropy
from dlo_lib.data.python_corpus import corpus_file

DATASETS = Path(__file__).parents[2] / "datasets"


def test_the_command_creates_the_corpora_and_prints_their_sizes(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DLO_CACHE", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(DATASETS / "make.py"), run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert corpus_file().exists()
    assert str(corpus_file()) in said
    for name in (
        "python      train",
        "python      validation",
        "arithmetic  train",
        "arithmetic  validation",
    ):
        assert name in said


def test_an_error_is_one_line_with_exit_status_2(monkeypatch, tiny_disk, capsys):
    monkeypatch.setenv("DLO_CACHE", str(tiny_disk))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(DATASETS / "make.py"), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_readme_states_the_figures_of_the_code():
    page = (DATASETS / "README.md").read_text()
    assert f"{entropy():.4f} nats" in page
    assert f"{len(arithmetic().tokens):,} tokens" in page
    assert len(arithmetic().tokens) % TOKENS_PER_PROBLEM == 0


def test_no_data_is_committed():
    assert sorted(path.name for path in DATASETS.iterdir() if path.name != "__pycache__") == [
        "README.md",
        "make.py",
    ]
