"""The project keeps plain technical English: no word of the list below comes back.

The test reads the comments, the strings (docstrings, messages, help texts) and the names of test functions in
``*.py`` files, and the text of ``*.md`` files. An exact technical use of a word is an entry of ``ALLOWED``
with its reason.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BUILT = ("labs",)
"""Written from ``solutions`` by `dlo build`."""

WORDS = {
    r"(?<!user )\bnobody\b": "name the subject: no rank, no worker, no student",
    (
        r"\b(who|what|which)(so)?ever (is|was|has|had|it|they|he|wants?|holds?|asks?|comes?|goes)\b"
    ): "name the subject",
    r"\b(whoever|somebody|someone|anybody|anyone)\b": "name the subject: a user, a process, a program",
    r"\b(go|goes|going|gone|went) on\b": "continue, resume",
    r"\b(its|their|your|our|his|her|my|one's) own way\b": "name the method",
    r"\bof (its|their|your|our|his|her|my|one's) own\b": "separate, private, new",
    r"\b(is|are|was|were|yet|still) to come\b": "name the event and say when it happens",
    r"\bnot for long\b": "give the duration",
    r"\bfor ever\b": "forever, always",
    r"[,;:] for (it|they|he|she|we|you|there|this|that|those|one|none|nothing|every|all|no) "
    r"(\w+ )?(is|are|was|may|must|can|could|would|will|has|have|needs?|takes?|begins?|ends?)\b": "because",
    r"\b(is|are|was|were|been|being) told\b": "receive, report, print",
    r"\btold apart\b": "distinguish",
    r"\b(says?|said) so\b": "report, print, raise",
    r"\b(none|nothing|no \w+|all) but\b|\bbut for\b": "except, only",
    r"\b(put|gives?|given) back\b": "restore, release",
    r"\bas (it|they) (was|were)\b": "unchanged",
    r"\b(stands?|stood) (there|still|aside)\b": "occur, wait",
    r"\b(begin|begins) anew\b|\bmade again\b": "restart, recreate",
    r"\bthe (judge|library|machine|ranks?|run|process)'s own\b": "name the owner once, with `of`",
    r"\bso many\b": "this number of",
    r"\bat hand\b|\ball the same\b|\bat first hand\b": "say what is available, or `still`",
    r"\b(would|may|might) like to\b": "say what happens",
    r"\ball else\b": "the rest, the others",
    r"\bhanded in\b": "submitted",
    r"\bmade[- ]up\b": "fictitious",
    r"\blays?\b|\blaid\b": "place, concatenate, write",
    r"\bdead-lock": "deadlock, the spelling of the field",
}
"""Patterns, without regard to case, and the plain word or the way to a plain sentence."""

ALLOWED: dict[tuple[str, str], str] = {
    ("tests/grading/classroom/collect/test_collection.py", "nobody"): "the Unix user",
    ("tests/grading/sandbox/test_isolation.py", "nobody"): "the Unix user",
}
"""(file, matched text in lower case) with the reason."""

_PATTERNS = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in WORDS.items()]
_STRINGS = {
    tokenize.STRING,
    tokenize.COMMENT,
    *(getattr(tokenize, name) for name in ["FSTRING_MIDDLE"] if hasattr(tokenize, name)),
}


def files() -> list[Path]:
    """Return the Python and Markdown files of the repository, without ``BUILT`` and this one."""
    tops = [top for top in ROOT.iterdir() if top.name[0] != "." and top.name not in BUILT]
    found = [path for top in tops for path in ([top] if top.is_file() else sorted(top.rglob("*")))]
    return [
        path
        for path in found
        if path.suffix in (".py", ".md") and "__pycache__" not in path.parts and path != Path(__file__)
    ]


def prose(text: str, suffix: str) -> Iterator[tuple[int, str]]:
    """Yield the pieces of prose of a file with the number of their first line."""
    if suffix == ".md":
        yield 1, text
        return
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _STRINGS:
            yield token.start[0], token.string
        elif before == "def" and token.string.startswith("test_"):
            yield token.start[0], token.string.replace("_", " ")
        before = token.string


def faults(name: str, text: str) -> list[str]:
    """Return one line for each word of the list in ``text``, the content of the file ``name``."""
    lines = []
    for first, piece in prose(text, Path(name).suffix):
        for pattern, instead in _PATTERNS:
            for match in pattern.finditer(piece):
                if (name, match[0].lower()) not in ALLOWED:
                    line = first + piece.count("\n", 0, match.start())
                    lines.append(f"{name}:{line}: {match[0]!r}: {instead}")
    return lines


def test_the_project_is_in_plain_words():
    found = [
        line
        for path in files()
        for line in faults(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(["these are not plain words:", *found])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("room/code.py", "x = 1  # nobody waits\n"),
        ("room/code.py", '"""One idea.\n\nIt goes on afterwards.\n"""\n'),
        ("room/code.py", 'raise ValueError(f"{x} is of its own")\n'),
        ("room/code.py", "def test_a_run_goes_on():\n    pass\n"),
        ("room/code.py", "# The model is on the meta device, for it may fit on no rank.\n"),
        ("room/page.md", "# A guide\n\nFor whoever has an account.\n"),
    ],
)
def test_the_words_are_found_in_comments_strings_names_and_pages(name, text):
    assert faults(name, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("room/code.py", "go_on = nobody = 1\n"),
        ("room/code.py", "# The sandbox runs as the user nobody.\n"),
        ("room/code.py", "# Use one thread for every rank, and memory for all of them.\n"),
        ("room/page.md", "The run continues; it waits for this rank.\n"),
    ],
)
def test_code_and_technical_uses_are_not_faults(name, text):
    assert not faults(name, text)
