"""A notebook in this process: cells of `%%ranks`, what they show, and how they fail."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from dlo_lib.live_ranks import load_ipython_extension, unload_ipython_extension


@dataclass
class Ran:
    """How a cell ended."""

    text: str
    html: str
    error: BaseException | None
    value: Any

    @property
    def message(self) -> str:
        assert self.error is not None, self.text
        return str(self.error)

    def by_rank(self) -> dict[str, str]:
        """The lines of the output by their label, without notes on the ranks."""
        lines: dict[str, list[str]] = {}
        for line in self.text.splitlines():
            if found := re.match(r"\[([^]]*)\] ?(.*)", line):
                lines.setdefault(found[1], []).append(found[2])
        return {label: "\n".join(texts) for label, texts in lines.items()}


@dataclass
class Notebook:
    shell: InteractiveShell
    published: list[dict] = field(default_factory=list)

    def try_cell(self, code: str) -> Ran:
        """Run a cell, which may fail."""
        self.shell.display_pub.outputs = self.published = []
        result = self.shell.run_cell(code, store_history=True)
        last = self.published[-1]["data"] if self.published else {}
        error = result.error_before_exec or result.error_in_exec
        return Ran(last.get("text/plain", ""), last.get("text/html", ""), error, result.result)

    def cell(self, code: str) -> Ran:
        """Run a cell that should succeed."""
        ran = self.try_cell(code)
        assert ran.error is None, ran.error
        return ran


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=config)
    shell.display_pub = CapturingDisplayPublisher()
    load_ipython_extension(shell)
    yield Notebook(shell)
    unload_ipython_extension(shell)
    InteractiveShell.clear_instance()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore SIGINT, which a process in a shell's background ignores: the test would wait forever."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
