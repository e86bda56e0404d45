"""The output of ranks, as lines with the rank's number: ``[rank 1] loss 3.2``.

The stdout and stderr of a rank are one pipe, which the caller reads while it waits. Therefore lines appear at
once and are never mixed, and a rank that prints without end is slowed down instead of filling the memory.

gloo of PyTorch 2.8 and 2.9 prints a line for each process group that it connects, which no setting prevents.
These lines are left out.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable

_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 16
_OF_GLOO = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+\s*"
)


class RankOutput:
    """The lines of one rank's pipe, written to the ``sys.stdout`` that the caller has at that moment."""

    def __init__(self, rank: int, pipe: int) -> None:
        self._prefix = f"[rank {rank}] "
        self._pipe = pipe
        self._partial = b""

    def pump(self) -> bool:
        """Write the complete lines that have arrived; return False if the pipe is empty or at its end."""
        try:
            data = os.read(self._pipe, _CHUNK_BYTES)
        except BlockingIOError:  # a process that the rank started still holds the pipe
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _LONGEST_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        self._write(lines)
        return bool(data)

    def finish(self) -> None:
        """Write what is left in the pipe, including an incomplete line."""
        while self.pump():
            pass
        if self._partial:
            self._write([self._partial])
            self._partial = b""

    def _write(self, lines: list[bytes]) -> None:
        if shown := as_shown(lines):
            sys.stdout.write("".join(f"{self._prefix}{line}\n" for line in shown))
            sys.stdout.flush()


def as_shown(lines: Iterable[bytes]) -> list[str]:
    """Return what a terminal shows of lines: a progress bar redraws its line with carriage returns."""
    return [
        line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
        for line in lines
        if not _OF_GLOO.fullmatch(line)
    ]
