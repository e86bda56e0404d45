"""What ranks print: whole lines, as they come, with the rank before each."""

from __future__ import annotations

import os
import select
import sys
from collections import deque
from collections.abc import Iterable

_KEPT_LINES = 30


class LinePump:
    """Reads the ranks' output pipes and writes whole lines to ``sys.stdout``, so that two ranks never share a line."""

    def __init__(self, prefixes: dict[int, str]) -> None:
        self.prefixes = prefixes
        self.unfinished = dict.fromkeys(prefixes, b"")
        self.tails: dict[int, deque[str]] = {pipe: deque(maxlen=_KEPT_LINES) for pipe in prefixes}
        self.silent: set[int] = set()
        for pipe in prefixes:
            os.set_blocking(pipe, False)

    def read(self, pipe: int) -> bool:
        """Print what is there; False once the rank has closed its end."""
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        *lines, self.unfinished[pipe] = (self.unfinished[pipe] + data).split(b"\n")
        if not data and self.unfinished[pipe]:
            lines, self.unfinished[pipe] = [self.unfinished[pipe]], b""
        self._print(pipe, lines)
        return bool(data)

    def drain(self) -> None:
        """Print all that is there, the last line also when it has no end."""
        for pipe in self.prefixes:
            while select.select([pipe], [], [], 0)[0] and self.read(pipe):
                pass
            if self.unfinished[pipe]:
                self._print(pipe, [self.unfinished[pipe]])
                self.unfinished[pipe] = b""

    def silence(self, pipes: Iterable[int]) -> None:
        """Keep, but do not print, what these say from now on."""
        self.silent |= set(pipes)

    def tail(self, pipe: int) -> str:
        """The last lines it said."""
        return "\n".join(self.tails[pipe])

    def _print(self, pipe: int, lines: list[bytes]) -> None:
        texts = [line.decode(errors="replace") for line in lines]
        self.tails[pipe].extend(texts)
        if texts and pipe not in self.silent:
            sys.stdout.write("".join(f"{self.prefixes[pipe]}{text}\n" for text in texts))
            sys.stdout.flush()
