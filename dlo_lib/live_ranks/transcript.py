"""The output of one rank in one cell: what it prints and what it displays, in its order.

The memory of a transcript is limited, also for a rank that prints without end: of a long text the beginning
and the end are kept, and of many figures the first.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dlo_lib.base.text import tr
from dlo_lib.launch.output import as_shown
from dlo_lib.live_ranks.messages import LONGEST_MARK, MARK

_CHUNK_BYTES = 1 << 16
_HEAD, _TAIL = 30_000, 10_000
"""Characters kept at the beginning and at the end of a text."""
_SHOWN = 100
"""The number of outputs kept, beside text."""


@dataclass
class Text:
    """Printed text, without its middle if it is long."""

    head: str = ""
    tail: str = ""
    dropped: int = 0

    def add(self, text: str) -> None:
        """Add ``text`` at the end."""
        room = _HEAD - len(self.head)
        self.head += text[:room]
        rest = self.tail + text[room:]
        self.dropped += max(0, len(rest) - _TAIL)
        self.tail = rest[-_TAIL:]

    def __str__(self) -> str:
        """Return the lines as a terminal shows them."""
        gap = tr("\n… {count} characters are left out …\n", count=self.dropped) if self.dropped else ""
        lines = f"{self.head}{gap}{self.tail}".encode(errors="replace").split(b"\n")
        return "\n".join(as_shown(lines))


@dataclass
class RichOutput:
    """An output with rich content: ``data`` by MIME type."""

    data: dict[str, Any]
    display_id: str | None = field(default=None, compare=False)


class Transcript:
    """What one rank has put out, read from its pipe and its messages."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._unread = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: dict[int, dict[str, Any]] = {}
        """Outputs whose marks have not been read yet, by number."""
        self._items: list[Text | RichOutput] = []
        self._left_out = 0
        self.changed = False
        """Something has been added since this was set to False."""

    def follow(self, pipe: int) -> None:
        """Read from another pipe from now on, because the rank has a new process."""
        self._pipe = pipe

    def items(self) -> Iterator[str | RichOutput]:
        """Yield texts and outputs in their order."""
        for item in self._items:
            if isinstance(item, RichOutput):
                yield item
            elif text := str(item).removesuffix("\n"):
                yield text
        if self._left_out:
            yield tr("… {count} more outputs are left out …", count=self._left_out)

    def receive(self, content: bytes | bytearray) -> None:
        """Take over the content of an output; its mark in the pipe says where it belongs."""
        output = json.loads(content)
        self._pending[output["number"]] = output
        self._take()

    def pump(self) -> bool:
        """Take over what has arrived in the pipe; return False if it is empty or at its end."""
        try:
            data = os.read(self._pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._unread += data
        self._take()
        return bool(data)

    def finish(self) -> None:
        """Take over what is left in the pipe."""
        while self.pump():
            pass
        self._unread = MARK.sub(b"", self._unread)  # of outputs that a rank could not send to the end
        self._print(len(self._unread))

    def _take(self) -> None:
        """Take over what has been read, up to a mark whose content has not arrived."""
        while match := MARK.search(self._unread):
            self._print(match.start())
            output = self._pending.pop(int(match[1]), None)
            if output is None:
                return
            self._unread = self._unread[match.end() - match.start() :]
            self._apply(output)
        # A mark may have arrived in part.
        begin = self._unread.rfind(b"\x1b", max(0, len(self._unread) - LONGEST_MARK))
        self._print(len(self._unread) if begin < 0 else begin)

    def _print(self, size: int) -> None:
        text, self._unread = self._decoder.decode(self._unread[:size]), self._unread[size:]
        if not text:
            return
        self.changed = True
        if not (self._items and isinstance(self._items[-1], Text)):
            self._items.append(Text())
        last = self._items[-1]
        assert isinstance(last, Text)
        last.add(text)

    def _apply(self, output: dict[str, Any]) -> None:
        self.changed = True
        if output["action"] == "clear":
            self._items.clear()
        elif output["action"] == "update":
            for item in self._items:
                if isinstance(item, RichOutput) and item.display_id == output["display_id"]:
                    item.data = output["data"]
        elif sum(isinstance(item, RichOutput) for item in self._items) < _SHOWN:
            self._items.append(RichOutput(output["data"], output["display_id"]))
        else:
            self._left_out += 1
