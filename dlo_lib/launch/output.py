"""The output of ranks, as lines with the rank's number: ``[rank 1] loss 3.2``.

The stdout and stderr of a rank are one pipe, which the caller reads while it waits. Therefore lines appear at
once and are never mixed, and a rank that prints without end is slowed down instead of filling the memory.
"""

from __future__ import annotations

import os
import sys

_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 16


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
        if lines:
            sys.stdout.write("".join(f"{self._prefix}{as_shown(line)}\n" for line in lines))
            sys.stdout.flush()


def as_shown(line: bytes) -> str:
    """Return what a terminal shows of a line; a progress bar redraws its line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
