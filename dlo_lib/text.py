"""The message catalogue. The English text is the key, so a translation needs no change in a lab.

A catalogue is ``dlo_lib/locale/<language>.toml`` with one table ``[messages]``, which maps an English
template to its translation. ``$DLO_LANG`` selects the language (two letters). A message without a translation
is shown in English."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path


def tr(message: str, /, **values: object) -> str:
    """Translate ``message`` to the language of the user and fill in ``values``, if
    any, with ``str.format``."""
    chosen = language()
    template = message if chosen == "en" else _catalogue(chosen).get(message, message)
    return template.format(**values) if values else template


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


@cache
def _catalogue(language: str) -> dict[str, str]:
    file = Path(__file__).parent / "locale" / f"{language}.toml"
    if not file.exists():
        return {}
    return dict(tomllib.loads(file.read_text(encoding="utf-8"))["messages"])
