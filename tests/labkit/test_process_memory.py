"""The peak of a piece of code is found although it is over, and is compared with what was there before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dlo_lib.labkit import process_memory
from dlo_lib.launch import run_ranks

MIB = 2**20
linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux reports the private memory of a process"
)


def measured() -> tuple[int | None, int | None, int | None]:
    """The growth by a tensor of 8 MiB that stays; the peaks of one of 32 MiB, beyond two moments."""
    torch.ones(MIB).add(1)  # the first call loads code
    before = process_memory.private_bytes()
    kept = torch.ones(2 * MIB)
    after = process_memory.private_bytes()

    def run() -> None:
        torch.ones(8 * MIB)

    alone = process_memory.peak_bytes(run)
    both = process_memory.peak_bytes(run, beyond=before)
    growth = None if before is None or after is None else after - before
    return growth if kept[0] else None, alone, both


@linux
def test_the_peak_is_that_of_the_code() -> None:
    growth, alone, both = run_ranks(measured, 1)[0]
    for got, want in ((growth, 8), (alone, 32), (both, 40)):
        assert got is not None
        assert abs(got - want * MIB) < MIB


def test_where_the_system_reports_nothing_the_code_runs_and_the_peak_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process_memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(process_memory, "_CLEAR", tmp_path / "no" / "clear_refs")
    calls = []
    assert process_memory.private_bytes() is None
    assert process_memory.peak_bytes(lambda: calls.append(1), repeats=2, beyond=0) is None
    assert calls == [1, 1]
