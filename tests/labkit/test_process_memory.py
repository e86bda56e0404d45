"""The peak of a piece of code is found although it is over, and is compared with what was there before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dlo_lib.grading.switch import memory
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
    monkeypatch.setattr(memory, "read_proc", lambda path: "")
    monkeypatch.setattr(process_memory, "_CLEAR", tmp_path / "no" / "clear_refs")
    calls = []
    assert process_memory.private_bytes() is None
    assert process_memory.peak_bytes(lambda: calls.append(1), repeats=2, beyond=0) is None
    assert calls == [1, 1]


@linux
def test_memory_is_counted_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """``status`` is off by some MiB on kernels 6.2 to 6.16 with many processors."""
    read = memory.read_proc

    def approximate(path: str) -> str:
        return re.sub(
            r"(RssAnon|VmHWM):\s*(\d+)", lambda found: f"{found[1]}: {int(found[2]) + 4096}", read(path)
        )

    want = process_memory.private_bytes()
    monkeypatch.setattr(memory, "read_proc", approximate)
    assert want is not None
    assert abs((process_memory.private_bytes() or 0) - want) < MIB
    assert abs((process_memory.peak_bytes(lambda: torch.ones(2 * MIB)) or 0) - 8 * MIB) < MIB


def test_pages_of_files_and_of_shared_memory_are_not_private(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "status": "VmHWM:\t 9 kB\nRssAnon:\t 1024 kB\nRssFile:\t 7 kB\nRssShmem:\t 8 kB\nVmSwap:\t 4 kB\n",
        "smaps_rollup": "0 [rollup]\nRss: 9999 kB\nAnonymous: 3072 kB\nSwap: 4 kB\n",
    }
    monkeypatch.setattr(memory, "read_proc", lambda path: files.get(path.rpartition("/")[2], ""))
    assert process_memory.private_bytes() == (3072 + 4) << 10
    del files["smaps_rollup"]
    assert process_memory.private_bytes() == (1024 + 4) << 10
