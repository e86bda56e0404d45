"""An answer of SLURM counts also where it cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.cluster.slurm import commands, snapshot
from dlo_lib.cluster.slurm.snapshot import Snapshot


def full(*arguments: object, **named: object) -> None:
    raise UserError("the disk is full")


def read_only(*arguments: object, **named: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize("error", [full, read_only])
def test_an_answer_that_cannot_be_shared_still_counts(error, monkeypatch, caplog):
    monkeypatch.setattr(snapshot, "write_text", error)
    answers = iter("ab")
    shared = Snapshot("test", lambda: 600)
    assert [shared.read(lambda: next(answers)) for _ in range(2)] == ["a", "b"]
    shared.invalidate()
    assert "answers of SLURM are not shared" in caplog.text


def test_an_answer_from_before_a_change_that_could_not_be_written_is_not_given_again(monkeypatch):
    answers = iter("ab")
    shared = Snapshot("test", lambda: 600)
    assert [shared.read(lambda: next(answers)) for _ in range(2)] == ["a", "a"]
    monkeypatch.setattr(snapshot, "write_text", full)
    shared.invalidate()
    assert shared.read(lambda: next(answers)) == "b"


def test_without_a_lock_each_process_asks(monkeypatch):
    monkeypatch.setattr(snapshot, "file_lock", read_only)
    assert Snapshot("test", lambda: 600).read(lambda: "a") == "a"


def test_a_command_that_does_not_answer_is_no_full_disk(tmp_path: Path):
    def silent() -> str:
        raise commands.NoAnswer("squeue has not answered for 60 s")

    with pytest.raises(commands.NoAnswer):
        Snapshot("test", lambda: 600).read(silent)
