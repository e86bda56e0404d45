"""Fingerprints of code: what two texts share although names, comments, layout and order differ.

Code becomes tokens. A name is one token for all names, except keywords, built-ins, names after a dot and the
names that the released notebook defines (``dist``, ``config``, a function of an earlier step): a student
cannot rename these, unless the cell binds them anew, as a parameter or a variable. Numbers and short strings
without a space keep their value, because results depend on them; other strings are messages and one token.
Comments, layout, docstrings and statements that do nothing are dropped. A fingerprint is the hash of

- a *run*, K tokens in a row: it shows copied passages, also in another cell;
- a *statement* of at least ``LEAST_STATEMENT`` tokens, with the cell that it is in: it is the same after
  statements were moved or others were inserted between them.

Runs are the k-grams of Schleimer, Wilkerson, Aiken, "Winnowing: Local Algorithms for Document
Fingerprinting", SIGMOD 2003. Winnowing keeps about a fifth of them to save memory; here all are kept, because
the answers of a class are short: of an answer of 60 tokens, winnowing keeps only some 10 fingerprints. Cost:
linear in the text. The text is only read, never parsed or executed, so that any text has fingerprints.
"""

from __future__ import annotations

import builtins
import hashlib
import keyword
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

K = 18  # tokens of a run
LEAST_STATEMENT = 6  # tokens: a shorter statement says nothing alone
MAX_TOKENS = 30_000  # of one text; the rest is not compared
MODULUS = (1 << 61) - 1
BASE = 1_000_003
END = ";"  # stands between two statements of a run
TOKEN = re.compile(
    r"""(?P<skip>\#[^\n]*|\s+|\\\n)
      | (?P<string>[rRbBfFuU]{0,2}(?:\"\"\"(?:[^\\]|\\.)*?\"\"\"|'''(?:[^\\]|\\.)*?'''|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'))
      | (?P<number>\d[\w.]*)
      | (?P<name>[^\W\d]\w*)
      | (?P<operator>\*\*=?|//=?|->|:=|[-+*/%@&|^=<>!]=|<<|>>|.)""",  # noqa: E501 - a pattern without white space
    re.VERBOSE | re.DOTALL,
)
# The parameters of a function, the targets of an assignment in a block, those of a loop; bounded, so that a
# hostile text takes linear time
BINDING = re.compile(
    r"\bdef\s{1,9}\w{1,99}\s{0,9}\(([^)]{0,999})\)|\blambda\s{1,9}([^:]{0,200}):"
    r"|^[ \t]{1,99}\(?(\w[\w \t,]{0,200}?)\)?[ \t]{0,9}(?::[^=\n]{0,100})?=(?!=)"
    r"|\bfor\s{1,9}\(?([\w \t,]{1,200}?)\)?\s{1,9}in\b",
    re.MULTILINE,
)
TARGET = re.compile(r"[\s*]*(\w+)")
HOLE, SPACE = re.compile(r"\{[^{}]*\}"), re.compile(r"\s")
PREFIXES = "rRbBfFuU"
LONGEST_KEY = 16  # characters of a string that keeps its value
OWN = frozenset(keyword.kwlist) | frozenset(name for name in dir(builtins) if name.islower())
BLOCKS = frozenset(
    (
        "if",
        "elif",
        "else",
        "for",
        "while",
        "with",
        "try",
        "except",
        "finally",
        "def",
        "class",
        "match",
        "case",
    )
)
IDLE = frozenset({("if", "False"), ("if", "True"), ("pass",)})  # statements without effect


@dataclass(frozen=True)
class Statement:
    """The tokens of one statement, or of the head of a block without its colon, and its lines from 1."""

    tokens: tuple[str, ...]
    first: int
    last: int

    @property
    def is_idle(self) -> bool:
        """Whether the statement can stand anywhere without a change of the result: an assertion, a lone name
        or constant, an assignment of one token."""
        alone = len(self.tokens) == 1 and self.tokens[0] not in ("return", "break", "continue")
        assigned = len(self.tokens) == 3 and self.tokens[1] == "="
        return alone or assigned or self.tokens[0] == "assert" or self.tokens in IDLE


@dataclass(frozen=True)
class Fingerprint:
    """A fingerprint and the lines of the passage; ``value`` is negative for a statement."""

    value: int
    first: int
    last: int


def size(value: int) -> float:
    """Return the part of one fingerprint in a passage: a run of K tokens counts 1 in all, since about K runs
    begin in K tokens; so do three statements."""
    return 1 / K if value >= 0 else 1 / 3


def statements(text: str, names: frozenset[str] = frozenset()) -> Iterator[Statement]:
    """Yield the statements of ``text``, which may be invalid Python; ``names`` keep their own token where the
    text does not bind them."""
    own = names - _bound(text)
    current: list[str] = []
    line = first = 1
    last, depth, before = 1, 0, ""
    for found in TOKEN.finditer(text):
        kind, word, here = found.lastgroup, found[0], line
        line += word.count("\n")
        at_end = kind == "skip" and "\n" in word and not word.startswith("\\") and depth == 0
        head = (
            word == ":" and depth == 0 and bool(current) and current[0] in BLOCKS and "lambda" not in current
        )
        if at_end or head or (word == END and depth == 0):
            if current:
                yield Statement(tuple(current), first, last)
            current = []
        elif kind != "skip" and not (kind == "string" and not current):  # such a string is a docstring
            first, last = (first if current else here), line
            depth = max(0, depth + (word in "([{") - (word in ")]}"))
            if word in ")]}" and current and current[-1] == ",":
                current.pop()
            current.append(_token(str(kind), word, before, own))
        before = word if kind != "skip" else before
    if current:
        yield Statement(tuple(current), first, last)


def _bound(text: str) -> frozenset[str]:
    """Return the names that ``text`` binds in functions: parameters, targets of assignments and of loops."""
    found: set[str] = set()
    for line in BINDING.finditer(text):
        for part in line.groups(default=""):
            for target in part.split(","):
                name = TARGET.match(target)
                if name:
                    found.add(name[1])
    return frozenset(found)


def _token(kind: str, word: str, before: str, names: frozenset[str]) -> str:
    if kind == "name" and before != "." and word not in OWN and word not in names:
        return "name"
    if kind != "string":
        return word
    inside = HOLE.sub("{}", word.lstrip(PREFIXES).strip("\"'"))
    return f'"{inside}"' if len(inside) <= LONGEST_KEY and not SPACE.search(inside) else "string"


def tokens(text: str, names: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the tokens of ``text``, without the ends of statements."""
    for statement in statements(text, names):
        yield from statement.tokens


def marks(text: str, names: frozenset[str] = frozenset(), cell: str = "") -> Iterator[Fingerprint]:
    """Yield the fingerprints of ``text`` with their lines.

    Args:
        names: names that keep their own token.
        cell: the statements of this cell equal only those of a cell with the same name.
    """
    run: deque[tuple[int, int]] = deque()  # the hash of each token, and its line
    leaving, rolled = pow(BASE, K - 1, MODULUS), 0
    for statement in _limited(statements(text, names)):
        if statement.is_idle:
            continue
        if len(statement.tokens) >= LEAST_STATEMENT:
            value = _value("\0".join((cell, *statement.tokens)))
            yield Fingerprint(-1 - value, statement.first, statement.last)
        for token in (*statement.tokens, END):
            if len(run) == K:
                rolled = (rolled - run.popleft()[0] * leaving) % MODULUS
            run.append((_value(token), statement.first))
            rolled = (rolled * BASE + run[-1][0]) % MODULUS
            if len(run) == K:
                yield Fingerprint(rolled, run[0][1], statement.last)


def fingerprints(
    text: str, names: frozenset[str] = frozenset(), cell: str = "", known: Iterable[int] = ()
) -> frozenset[int]:
    """Return the values of the fingerprints of ``text`` without those in ``known``."""
    return frozenset(mark.value for mark in marks(text, names, cell)) - frozenset(known)


def _limited(every: Iterator[Statement]) -> Iterator[Statement]:
    left = MAX_TOKENS
    for statement in every:
        yield Statement(tuple(islice(statement.tokens, left)), statement.first, statement.last)
        left -= len(statement.tokens)
        if left <= 0:
            return


@lru_cache(maxsize=1 << 16)
def _value(token: str) -> int:
    return int.from_bytes(hashlib.blake2b(token.encode("utf-8", "replace"), digest_size=7).digest(), "big")
