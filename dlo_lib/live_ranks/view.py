"""What a cell of ``%%ranks`` shows: the output of each rank, one below the other or in tabs.

Ranks with the same output share one section.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlo_lib.base.markup import render
from dlo_lib.base.text import tr
from dlo_lib.comm.deadlock.vocabulary import ranks_in_words
from dlo_lib.live_ranks.transcript import RichOutput, Transcript

_KINDS = (
    "text/html",
    "image/svg+xml",
    "image/png",
    "image/jpeg",
    "text/markdown",
    "text/latex",
    "text/plain",
)
"""MIME types in the order of preference."""
_AS_MARKUP = ("text/html", "image/svg+xml")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Section:
    """The output of some ranks, which is the same: texts and outputs in their order."""

    label: str
    items: tuple[str | RichOutput, ...]

    def parts(self) -> list[tuple[str, Any]]:
        """Return each item as (how it is shown, content): markup, an image's MIME type, or text."""
        return [_part(item) for item in self.items]

    def lines(self) -> list[str]:
        """Return the output as text."""
        texts = [
            item
            if isinstance(item, str)
            else str(item.data.get("text/plain", tr("(an output without text)")))
            for item in self.items
        ]
        return [_ANSI.sub("", line) for text in texts for line in text.splitlines()]


def sections(transcripts: Sequence[Transcript], merge: bool = True) -> list[Section]:
    """Return the sections of all ranks that have put out something, in the order of ranks."""
    outputs = [tuple(transcript.items()) for transcript in transcripts]
    ranks_of: list[tuple[tuple[str | RichOutput, ...], list[int]]] = []
    for rank, items in enumerate(outputs):
        same = next((ranks for other, ranks in ranks_of if merge and other == items), None)
        if same is not None:
            same.append(rank)
        elif items:
            ranks_of.append((items, [rank]))
    return [Section(_label(ranks, len(outputs)), items) for items, ranks in ranks_of]


def bundle(found: Sequence[Section], notes: Sequence[str] = (), tabs: bool = False) -> dict[str, str]:
    """Return the output of a notebook cell: HTML and text.

    Args:
        notes: sentences on the ranks, shown above their output.
        tabs: one tab for each section.
    """
    lines = [f"({note})" for note in notes]
    lines += [f"[{section.label}] {line}" for section in found for line in section.lines()]
    return {
        "text/html": render(
            "ranks",
            sections=found,
            notes=notes,
            tabs=tabs and len(found) > 1,
            name=f"dlo-ranks-{next(_numbers)}",
        ),
        "text/plain": "\n".join(lines),
    }


def _label(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size > 2:
        return tr("all {count} ranks", count=world_size)
    return ranks_in_words(ranks)


def _part(item: str | RichOutput) -> tuple[str, Any]:
    if isinstance(item, str):
        return "text", _ANSI.sub("", item)
    kind = next((kind for kind in _KINDS if kind in item.data), None)
    if kind is None:
        return "text", tr("(an output without text)")
    if kind in _AS_MARKUP:
        return "markup", item.data[kind]
    return (kind if kind.startswith("image/") else "text"), item.data[kind]
