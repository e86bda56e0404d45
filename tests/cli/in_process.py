"""Commands that run in the process of the tests, which saves the start of an interpreter for each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dlo_lib.cli import main


@dataclass(frozen=True)
class Ran:
    """The exit status and the output of a command."""

    status: int
    out: str
    err: str

    @property
    def refusal(self) -> str:
        """The single line of a command that was refused."""
        assert (self.status, self.out) == (2, ""), self
        (line,) = self.err.strip().splitlines()
        assert line.startswith("dlo: ")
        return line


Dlo = Callable[..., Ran]


def commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dlo:
    """Return what runs `dlo` with the given arguments."""

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["dlo", *map(str, arguments)])
        capsys.readouterr()
        status: object = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
        out, err = capsys.readouterr()
        assert isinstance(status, int)
        return Ran(status, out, err)

    return run
