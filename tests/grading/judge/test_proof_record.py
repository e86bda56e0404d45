"""The record of the results of a lab's twins, with a key and a seal."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dlo_lib.grading.checks.contract import Check
from dlo_lib.grading.checks.twins import twin
from dlo_lib.grading.judge.proof_record import ProofRecord
from dlo_lib.grading.lab.modules import LabChecks

NAME = "lab_of_this_test"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the lab's module as a new process does, with a twin that has computed nothing."""

    def load() -> tuple[LabChecks, Any, list[int]]:
        module, computed = ModuleType(NAME), []

        def gradient(size: int) -> torch.Tensor:
            computed.append(size)
            return torch.full((size,), 0.5)

        def check_gradient(student: Any, t: Any) -> None: ...

        gradient.__module__ = check_gradient.__module__ = NAME
        module.gradient = twin(gradient)
        monkeypatch.setitem(sys.modules, NAME, module)
        return (
            LabChecks((Check(check_gradient, "q", 1.0, 1.0, "check_gradient", ""),)),
            module.gradient,
            computed,
        )

    return load


def test_twins_are_computed_once_for_all_processes_of_a_lab(fresh: Any, tmp_path: Path) -> None:
    record = ProofRecord(tmp_path / "proved", "key", "secret")
    checks, gradient, computed = fresh()
    gradient(3)
    assert not record.stands()
    assert record.save(checks) == ""
    assert record.stands()
    checks, gradient, computed = fresh()
    assert record.load(checks)
    assert torch.equal(gradient(3), torch.full((3,), 0.5))
    assert computed == []
    gradient(4)
    assert computed == [4]


@pytest.mark.parametrize("other", [{"key": "of a changed lab"}, {"secret": "of another class"}])
def test_a_record_of_another_lab_or_class_is_ignored(
    fresh: Any,
    tmp_path: Path,
    other: dict[str, str],
) -> None:
    checks, gradient, _ = fresh()
    gradient(3)
    given = {"file": tmp_path / "proved", "key": "key", "secret": "secret"}
    ProofRecord(**given).save(checks)
    checks, gradient, computed = fresh()
    assert not ProofRecord(**{**given, **other}).stands()
    assert not ProofRecord(**{**given, **other}).load(checks)
    gradient(3)
    assert computed == [3]


def test_a_record_with_a_wrong_seal_is_not_read(fresh: Any, tmp_path: Path) -> None:
    """The file is a pickle: replacing it would run code in the judge."""
    checks, gradient, _ = fresh()
    gradient(3)
    record = ProofRecord(tmp_path / "proved", "key", "secret")
    record.save(checks)
    whole = record.file.read_bytes()
    for forged in (whole[:40] + b"cos\nsystem\n(S'touch forged'\ntR.", whole[:-1] + b"!", whole[:10], b""):
        record.file.write_bytes(forged)
        assert not record.stands()
        assert not record.load(checks)


def test_only_the_instructor_can_read_the_record(fresh: Any, tmp_path: Path) -> None:
    checks, gradient, _ = fresh()
    gradient(3)
    record = ProofRecord(tmp_path / "proved", "key", "secret")
    record.save(checks)
    assert stat.S_IMODE(record.file.stat().st_mode) == 0o600


def test_twins_that_cannot_be_pickled_are_not_recorded(fresh: Any, tmp_path: Path) -> None:
    checks, _, _ = fresh()
    sys.modules[NAME].hook = twin(lambda size: lambda: size)  # type: ignore[attr-defined]
    sys.modules[NAME].hook(3)
    record = ProofRecord(tmp_path / "proved", "key", "secret")
    assert record.save(checks)
    assert not record.load(checks)
