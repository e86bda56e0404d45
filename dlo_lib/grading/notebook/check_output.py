"""What the student's code prints during a check, shown below the verdict: the first lines, and the rest in a
file. A print in a function that a check calls often would otherwise fill the notebook and stop the browser.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TextIO

from dlo_lib.base.text import tr

LINES, CHARACTERS = 50, 10_000
"""What a notebook shows of the output of one check."""
MOST = 100 << 20  # characters in the file


class CheckOutput(io.TextIOBase):
    """A stream that keeps the first lines, and writes everything to ``path`` if there are more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first = io.StringIO()
        self._lines = self._characters = 0
        self._file: TextIO | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Keep or store ``text``."""
        lines, self._lines = self._lines, self._lines + text.count("\n")
        self._characters += len(text)
        if self._file is None and self._lines <= LINES and self._characters <= CHARACTERS:
            return self._first.write(text)
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8", errors="replace")
            self._file.write(self._first.getvalue())
            kept = text.splitlines(keepends=True)[: max(0, LINES - lines)]
            self._first.write("".join(kept)[: max(0, CHARACTERS - self._first.tell())])
        if self._characters <= MOST:
            self._file.write(text)
        return len(text)

    def shown(self) -> str:
        """Return the first lines, and a line on the rest; close the file."""
        first = self._first.getvalue()
        if self._file is None:
            return first
        self._file.close()
        more = self._lines - first.count("\n")
        rest = tr("… {more:,} more lines, all of them in {path}", more=max(more, 1), path=self._path)
        return f"{first.rstrip(chr(10))}\n{rest}\n"
