"""The message catalogue. The English text is the key, so a translation needs no change in a lab.

A catalogue is ``dlo_lib/base/locale/<language>.toml`` with one table ``[messages]``, which maps an English
template to its translation. ``$DLO_LANG`` selects the language (two letters). A message without a translation
is shown in English."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter


def tr(message: str, /, **values: object) -> str:
    """Translate ``message`` to the language of the user and fill in ``values``, if
    any, with ``str.format``."""
    template = _translated(message)
    return template.format(**values) if values else template


def without_values(message: str) -> str:
    """Translate ``message``, a template with fields, and write … for each field: the words of its author."""
    parts = Formatter().parse(_translated(message))
    return "".join(words if field is None else f"{words}…" for words, field, *_ in parts)


def language() -> str:
    """Return the language of the user, as two letters."""
    return os.environ.get("DLO_LANG", "en")[:2].lower()


def columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Format ``rows`` of equal length as lines with aligned columns, two spaces apart; no rows give an empty
    text.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def span(milliseconds: float) -> str:
    """Return a span of time with the unit that a reader expects.

    >>> span(515.4), span(9_876), span(61_515)
    ('515 ms', '9.9 s', '1 min 2 s')
    """
    if milliseconds < 999.5:
        return tr("{number:.0f} ms", number=milliseconds)
    seconds = milliseconds / 1000
    if seconds < 59.95:
        return tr("{number:.1f} s", number=seconds)
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return tr("{hours} h {minutes} min", hours=minutes // 60, minutes=minutes % 60)
    return tr("{minutes} min {seconds} s", minutes=minutes, seconds=rest)


WIDTH = 95
"""The number of characters that fit on a line of a notebook in a window of 1280 pixels."""


def shortened(line: str) -> str:
    """Return ``line`` without what exceeds ``WIDTH``."""
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


@dataclass(frozen=True)
class MessagePart:
    """A part of a message: ``rows`` of cells if it is a table, otherwise ``text``."""

    text: str
    rows: tuple[tuple[str, ...], ...] = ()


def blocks(message: str) -> list[MessagePart]:
    """Split ``message`` at its empty lines, and the tables into their cells.

    A table is a block of several lines that begin with two spaces and have columns two spaces apart. A line
    that begins further to the right belongs to the second cell of the row above.
    """
    return [_block(text) for text in message.strip("\n").split("\n\n") if text.strip()]


def _block(text: str) -> MessagePart:
    lines = text.splitlines()
    rows: list[list[str]] = []
    for line in lines:
        cells = re.split(r" {2,}", line.strip())
        if not line.startswith("  "):
            return MessagePart(text)
        if line.startswith("   ") and rows:
            rows[-1][1] += f"\n{line.strip()}"
        else:
            rows.append(cells)
            if len(cells) < 2:
                return MessagePart(text)
    return MessagePart(text, tuple(map(tuple, rows))) if len(rows) > 1 else MessagePart(text)


def _translated(message: str) -> str:
    chosen = language()
    return message if chosen == "en" else _catalogue(chosen).get(message, message)


@cache
def _catalogue(language: str) -> dict[str, str]:
    file = Path(__file__).parent / "locale" / f"{language}.toml"
    if not file.exists():
        return {}
    return dict(tomllib.loads(file.read_text(encoding="utf-8"))["messages"])
