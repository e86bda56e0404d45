"""The message catalogue: English is the key, so that another language can be laid beside it without touching a lab.

A catalogue is ``dlo_lib/locale/<language>.toml``, one table ``[messages]`` from the English template to its translation.
The language is ``$DLO_LANG`` (two letters); what a catalogue lacks is shown in English.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path


def tr(message: str, /, **values: object) -> str:
    """``message`` in the reader's language, with ``values`` filled in by ``str.format`` when there are any."""
    language = os.environ.get("DLO_LANG", "en")[:2].lower()
    template = message if language == "en" else _catalogue(language).get(message, message)
    return template.format(**values) if values else template


def columns(rows: Sequence[tuple[str, ...]]) -> str:
    """``rows``, all of one length, as lines with aligned columns two spaces apart; no rows give an empty text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)


@cache
def _catalogue(language: str) -> dict[str, str]:
    file = Path(__file__).parent / "locale" / f"{language}.toml"
    if not file.exists():
        return {}
    return dict(tomllib.loads(file.read_text(encoding="utf-8"))["messages"])
