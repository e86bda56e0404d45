"""What ranks print, as lines that say whose they are: ``[rank 1] loss 3.2``.

Each rank's stdout and stderr are one pipe, read by the caller while it waits, so lines come live, are never torn, and a rank that prints
without end is slowed down instead of filling memory.
"""

from __future__ import annotations

import os
import sys

_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 16


class RankOutput:
    """The lines of one rank's pipe, written to the caller's ``sys.stdout`` as it is at that moment."""

    def __init__(self, rank: int, pipe: int) -> None:
        self._prefix = f"[rank {rank}] "
        self._pipe = pipe
        self._partial = b""

    def pump(self) -> bool:
        """Write the whole lines that have arrived; False at the end of the pipe, or when nothing is in it."""
        try:
            data = os.read(self._pipe, _CHUNK_BYTES)
        except BlockingIOError:  # something that the rank has started still holds the pipe
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _LONGEST_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        self._write(lines)
        return bool(data)

    def finish(self) -> None:
        """Write what is left in the pipe, and the line that was begun."""
        while self.pump():
            pass
        if self._partial:
            self._write([self._partial])
            self._partial = b""

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            sys.stdout.write("".join(f"{self._prefix}{_as_shown(line)}\n" for line in lines))
            sys.stdout.flush()


def _as_shown(line: bytes) -> str:
    """A progress bar redraws its line with carriage returns: what a terminal would show in the end."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
