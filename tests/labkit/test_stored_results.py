"""Stored figures are marked as stored; where the GPU or the package is there, the cell measures instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.card_labs import as_toml
from dlo_lib.labkit.stored_results import StoredResult, measured_or_stored, show_stored

STORED = StoredResult("an H100", "2026-11-22", "torch 2.11", {"kept": 23.0, "checkpointed": 19.5})


def refuse() -> float:
    pytest.fail("there is nothing to measure on")


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, free_gib: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")


def test_without_a_gpu_the_stored_figures_are_shown_with_card_and_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measured_or_stored({"kept": refuse}, STORED, gib=27) == {"kept": 23.0}
    said = "STORED, not measured here (no GPU). This cell on an H100, 2026-11-22, torch 2.11:\n"
    assert capsys.readouterr().out == said


def test_on_a_gpu_the_cell_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu(monkeypatch, 30)
    assert measured_or_stored({"kept": lambda: 7.0}, STORED, gib=27) == {"kept": 7.0}
    assert capsys.readouterr().out == "Measured on this machine, a card:\n"


def test_a_gpu_with_too_little_memory_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu(monkeypatch, 20)
    assert measured_or_stored({"checkpointed": refuse}, STORED, gib=27) == {"checkpointed": 19.5}
    assert "less than 27 GiB free" in capsys.readouterr().out


def test_a_measurement_needs_a_stored_figure_on_every_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_gpu(monkeypatch, 30)
    with pytest.raises(KeyError, match="batch 4"):
        measured_or_stored({"batch 4": lambda: 1.0}, STORED, gib=1)


def test_a_package_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert measured_or_stored({"kept": refuse}, STORED, package="no_such_package") == {"kept": 23.0}
    assert "not measured here (no_such_package is not installed)" in capsys.readouterr().out


def test_with_the_package_the_cell_measures_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measured_or_stored({"kept": lambda: 7.0}, STORED, package="torch") == {"kept": 7.0}
    assert capsys.readouterr().out == "Measured on this machine:\n"


def test_what_a_cell_showed_on_a_gpu_is_printed_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shows = {"table": "RMSNorm\t0.02 ms\n\"quoted\" \\ '''\n", "bars": "three bars.\n"}
    stored = as_toml({"machine": "an H100", "date": "2026-11-27", "software": "torch 2.11"}, shows)
    (tmp_path / "lab.toml").write_text(stored)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    show_stored("lab", "table", tmp_path)
    said = "STORED, not measured here (no GPU). This cell on an H100, 2026-11-27, torch 2.11:\n"
    assert capsys.readouterr().out == said + shows["table"]
    with pytest.raises(KeyError, match="figure"):
        show_stored("lab", "figure", tmp_path)
    on_a_gpu(monkeypatch, 30)
    show_stored("lab", "figure", tmp_path)  # the cell itself shows it
    assert capsys.readouterr().out == ""
