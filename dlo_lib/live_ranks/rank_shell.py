"""The IPython shell of a rank: cells have magics, ``await``, ``display`` and figures as in a notebook.

What it displays goes to the notebook's process, in the order of what it prints. It shows no tracebacks: the
notebook's process explains errors, because it knows which rank failed first.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import socket
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.completer import provisionalcompleter
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets import Type
from traitlets.config import Config

from dlo_lib.launch.frames import register_sources
from dlo_lib.launch.rank import send_message
from dlo_lib.live_ranks.messages import OUTPUT, RankCell, mark

INLINE = "module://matplotlib_inline.backend_inline"


class OutputSender:
    """Sends outputs of cells to the notebook's process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._numbers = itertools.count()

    def send(self, action: str, data: Mapping[str, Any] | None = None, display_id: str | None = None) -> None:
        """Send an output: ``action`` is show, update or clear."""
        number = next(self._numbers)
        content = {
            "number": number,
            "action": action,
            "data": {kind: _as_json(value) for kind, value in (data or {}).items()},
            "display_id": display_id,
        }
        send_message(self._channel, OUTPUT, json.dumps(content).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(1, mark(number))  # at once, because it is shorter than what a pipe takes in one piece


class RankDisplayPublisher(DisplayPublisher):
    """Receives what ``display`` shows."""

    sender: OutputSender

    def publish(  # type: ignore[override]
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        *,
        transient: Mapping[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        """Send an output."""
        self.sender.send("update" if update else "show", data, (transient or {}).get("display_id"))

    def clear_output(self, wait: bool = False) -> None:
        """Remove the outputs of this rank; the next output replaces them, so ``wait`` makes no difference."""
        self.sender.send("clear")


class RankDisplayHook(DisplayHook):
    """Receives the value of the last expression of a cell."""

    def write_output_prompt(self) -> None:
        """Write nothing: the view of the ranks has no prompts."""

    def write_format_data(self, format_dict: dict, md_dict: dict | None = None) -> None:
        """Send the value."""
        assert self.shell is not None
        self.shell.display_pub.sender.send("show", format_dict)

    def finish_displayhook(self) -> None:
        """Write nothing."""
        self._is_active = False


class NamedCompiler(CachingCompiler):
    """Compiles a cell under the file name that it has in the notebook, so that tracebacks lead there."""

    cell: RankCell | None = None

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """Return the name."""
        if self.cell is not None and raw_code == self.cell.code:
            return self.cell.file
        return super().get_code_name(raw_code, transformed_code, number)


class RankShell(InteractiveShell):
    """The shell; one per rank."""

    display_pub_class = Type(RankDisplayPublisher)
    displayhook_class = Type(RankDisplayHook)
    compiler_class = Type(NamedCompiler)
    compile: NamedCompiler
    display_pub: RankDisplayPublisher

    def run(self, cell: RankCell) -> None:
        """Run a cell.

        Raises:
            BaseException: what the cell raises.
        """
        self.compile.cell = cell
        result: ExecutionResult = self.run_cell(cell.code, store_history=True)
        register_sources({cell.file: tuple(cell.source.splitlines(keepends=True))})
        error = result.error_before_exec or result.error_in_exec
        if isinstance(error, UsageError):
            error.__traceback__ = None  # it names the fault, not a place
        if error is not None:
            raise error

    def completions(self, text: str, cursor: int) -> list[tuple[int, int, str, str | None]]:
        """Return the completions of ``text`` at ``cursor``: begin, end, text and type of each."""
        self.Completer.use_jedi = False  # which reads source code; here the objects exist
        with provisionalcompleter():
            found = self.Completer.completions(text, cursor)
            return [(one.start, one.end, one.text, one.type) for one in found]

    def showtraceback(self, *_: Any, **__: Any) -> None:
        """Show nothing: the error is reported to the notebook's process."""

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        """Show nothing."""

    def showindentationerror(self) -> None:
        """Show nothing."""

    def ask_exit(self) -> None:
        """End the cell that calls ``exit``: the ranks end with ``ranks.stop()``."""
        raise SystemExit

    def enable_gui(self, gui: str | None = None) -> None:
        """Do nothing, because a rank has no screen."""


def start_shell(channel: socket.socket, names: Mapping[str, object]) -> RankShell:
    """Create the shell of this process, with the variables ``names`` in ``__main__``."""
    main = sys.modules["__main__"]
    assert isinstance(main, ModuleType)
    vars(main).update(names)
    os.environ.setdefault("MPLBACKEND", INLINE)
    warnings.filterwarnings("ignore", "To exit: use", UserWarning)  # after sys.exit, which ends no rank
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.cache_size = 0  # Out would keep every tensor that a cell showed
    shell = RankShell.instance(config=config, user_module=main)
    shell.display_pub.sender = OutputSender(channel)
    if "matplotlib" in sys.modules:
        with suppress(ImportError):  # matplotlib_inline: figures are then not shown
            shell.enable_matplotlib("inline")
    return shell


def _as_json(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
