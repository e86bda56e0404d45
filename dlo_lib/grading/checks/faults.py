"""Describe an exception in the student's code in one line: the exception, and the line of the student's code.

The message is the same in the notebook and in grading, where it arrives from the student's process as plain
data.
"""

from __future__ import annotations

import builtins
import errno
import linecache
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlo_lib.base.text import tr

MAX_TEXT = 300
MAX_SOURCE = 120
REASON = re.compile(r"\b(?:fatal )?error: ", re.IGNORECASE)
CELL_FILE = re.compile(r"<cell (?P<id>[\w-]+)>")
NOTEBOOK_FILES = ("ipykernel_", "<ipython-input", "<cell ")
PYTHONS_OWN = {
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}


@dataclass(frozen=True)
class Fault:
    """An exception in the student's code.

    Attributes:
        kind: the type, such as ``ValueError``; ``Missing`` for an undefined name; ``NotPlain`` for an answer
            that is not plain data.
        text: the exception's message, shortened.
        line, source: the innermost line of the student's code; 0 and "" if there is none.
        cell: the id of the cell, if known.
        function: the name of the innermost function of the student's code, if known.
    """

    kind: str
    text: str
    line: int = 0
    source: str = ""
    cell: str = ""
    function: str = ""

    @property
    def not_written(self) -> bool:
        """True if the answer is missing. A NotImplementedError with a message comes from torch, for a dtype
        or a layout.
        """
        return self.kind == "Missing" or (self.kind == "NotImplementedError" and not self.text)

    def message(self) -> str:
        """Return the message for the student, one line."""
        if self.kind == "Missing":
            return tr("`{name}` is not defined: run the cell that defines it", name=self.text)
        if self.not_written:
            named = self.function.isidentifier()  # an answer may call a step that is not written
            return tr("`{name}` is not written yet", name=self.function) if named else tr("not written yet")
        if self.kind == "NotPlain":
            return tr("your code returned {what}", what=self.text)
        raised = tr("your code raised {kind}: {text}", kind=self.kind, text=self.text).rstrip(": ")
        refused = self.kind == "BlockingIOError" and self.text.startswith(f"[Errno {errno.EAGAIN}]")
        if refused or self.text == "can't start new thread":  # os.fork, threading
            raised = tr("your code started too many processes or threads ({raised})", raised=raised)
        if self.kind == "OSError" and self.text.startswith(f"[Errno {errno.ENOSPC}]"):
            raised = tr("your code wrote more files than an answer may ({raised})", raised=raised)
        if not self.line:
            return raised
        return f"{raised} ({self._where})"

    def brief(self, own: Mapping[str, Sequence[str]]) -> str:
        """Return the message with nothing that the student's process could choose freely.

        That is a type of Python, and a line of ``own``, the lines of the student's cells by the cell's id.
        """
        if self.not_written:
            return tr("not written yet")
        if self.kind == "NotPlain":
            return tr("what came back is not plain data")
        known = self.kind in PYTHONS_OWN
        raised = (
            tr("your code raised {kind}", kind=self.kind) if known else tr("your code raised an exception")
        )
        lines = own.get(self.cell, ())
        if not 0 < self.line <= len(lines):
            return raised
        return f"{raised} ({replace(self, source=lines[self.line - 1].strip()[:MAX_SOURCE])._where})"

    @property
    def _where(self) -> str:
        where = tr("line {line} of your cell", line=self.line)
        if self.cell:
            where = tr("line {line} of cell `{cell}`", line=self.line, cell=self.cell)
        return f"{where}: `{self.source}`" if self.source else where


def fault_of(error: BaseException) -> Fault:
    """Return the fault for ``error``, with the innermost line of the student's code."""
    try:
        text = _shortened(" ".join(str(error).split()))
    except BaseException:  # noqa: BLE001  __str__ may be the student's code
        text = ""
    kind = str(type.__dict__["__name__"].__get__(type(error)))[:60]  # a metaclass may define __name__
    if isinstance(error, SyntaxError) and is_own(error.filename or ""):
        return Fault(
            kind,
            str(error.msg)[:MAX_TEXT],
            error.lineno or 0,
            (error.text or "").strip()[:MAX_SOURCE],
            _cell(error.filename or ""),
        )
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    if not own:
        return Fault(kind, text)
    last = own[-1]
    source = (last.line or linecache.getline(last.filename, last.lineno or 0)).strip()[:MAX_SOURCE]
    return Fault(kind, text, last.lineno or 0, source, _cell(last.filename), last.name)


def _shortened(text: str) -> str:
    """Return at most ``MAX_TEXT`` characters of ``text``: its beginning, and what follows the first "error:"
    behind it, because a compiler writes the reason of an error behind its long command.
    """
    reason = REASON.search(text, MAX_TEXT // 3)
    if len(text) <= MAX_TEXT or reason is None or reason.end() <= MAX_TEXT:
        return text[:MAX_TEXT]
    tail = text[reason.start() :][: MAX_TEXT * 2 // 3 - 3]
    return f"{text[: MAX_TEXT // 3]} … {tail}"


def fault_from(data: Any) -> Fault:
    """Return the fault in plain data from a student's process; fields of another type are empty."""
    given = data if type(data) is dict else {}

    def text(name: str) -> str:
        value = given.get(name)
        return value[:MAX_TEXT] if type(value) is str else ""

    line = given.get("line")
    return Fault(
        text("kind") or "Exception",
        text("text"),
        line if type(line) is int else 0,
        text("source"),
        text("cell"),
        text("function"),
    )


def is_own(filename: str) -> bool:
    """Return True if a file name of a traceback is a cell of the notebook."""
    return any(mark in filename for mark in NOTEBOOK_FILES)


def _cell(filename: str) -> str:
    match = CELL_FILE.search(filename)
    return match["id"] if match else ""
