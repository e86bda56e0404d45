"""Fingerprints of code: what two texts share although names, comments, layout and order differ.

Code becomes tokens. A name is one token for all names, except keywords, built-ins, names after a dot and the
names that the released notebook defines (``dist``, ``config``, a function of an earlier step): a student
cannot rename these, unless the cell binds them anew, as a parameter or a variable. Numbers and short strings
without a space keep their value, because results depend on them; other strings are messages and one token,
and a string that holds code is read as code too. Comments, layout, docstrings, long lists of constants and
statements that do nothing or are repeated are dropped. A fingerprint is the hash of

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
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

K = 18  # tokens of a run
LEAST_STATEMENT = 6  # tokens: a shorter statement says nothing alone
MAX_TOKENS = 30_000  # of one text; the rest is not compared
MOST_READ = 2_000_000  # tokens of one text, with those that are dropped
MOST_EQUAL = 8  # equal statements of a text that count
LONGEST_DATA = 64  # constants, names and commas in a row; more are a table
DATA = re.compile(r"\d.*|\".*|string|name|[-,:()\[\]{}]", re.DOTALL)
LEAST_TEXT = 80  # characters of strings in a row that may be code
CODE_LINE = re.compile(
    r"""\s*(?:@\w | (?:async\ )?def\ \w+\s*\( | class\ \w+\s*[(:] | return\b.*[\w)\]]$
      | (?:for|if|while|with|elif)\b.*[:{(]\s*$
      | (?:import|from)\ [\w.]+(?:\ import\ .*)?$
      | [\w.\[\],\ ]{1,60}\s*[-+*/%&|^@]?=[^=].*
      | [\w.]+\(.*\)\s*;?$
      | .*[{}]\s*$)""",
    re.VERBOSE,
)
LEAST_CODE = (3, 0.5)  # lines that look like code, and their part of all lines
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
SEPARATOR = re.compile(r"[\n;]")
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
        or constant, an assignment of one token, a tuple of constants."""
        alone = len(self.tokens) == 1 and self.tokens[0] not in ("return", "break", "continue")
        assigned = len(self.tokens) == 3 and self.tokens[1] == "="
        if alone or assigned or self.tokens[0] == "assert" or self.tokens in IDLE:
            return True
        return all(token != "name" and DATA.fullmatch(token) for token in self.tokens)


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


def strings(text: str) -> Iterator[tuple[str, int]]:
    """Yield the content of the strings of ``text`` that look like code, with the line where each begins.

    Strings with only commas, plus signs and layout between them are one, as in a list of lines.
    """
    parts: list[str] = []
    line = first = 1
    for found in TOKEN.finditer(text):
        word = found[0]
        if found.lastgroup == "string":
            first = first if parts else line
            inside = word.lstrip(PREFIXES)
            quote = 3 if inside[:3] in ('"""', "'''") else 1
            parts.append(inside[quote:-quote].replace("\\n", "\n"))
        elif parts and found.lastgroup != "skip" and word not in (",", "+"):
            yield from _if_code(parts, first)
            parts = []
        line += word.count("\n")
    yield from _if_code(parts, first)


def _if_code(parts: list[str], line: int) -> Iterator[tuple[str, int]]:
    if sum(map(len, parts)) < LEAST_TEXT:
        return
    content = "\n".join(part.rstrip("\n") for part in parts)
    lines = [each for each in SEPARATOR.split(content) if each.strip()]
    like = sum(1 for each in lines if CODE_LINE.match(each[:200]))
    if like >= LEAST_CODE[0] and like >= LEAST_CODE[1] * len(lines):
        yield content, line


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
    yield from _marks(text, names, cell)
    for content, line in strings(text):
        for mark in _marks(content, names, cell):
            yield Fingerprint(mark.value, mark.first + line - 1, mark.last + line - 1)


def _marks(text: str, names: frozenset[str], cell: str) -> Iterator[Fingerprint]:
    run: deque[tuple[int, int]] = deque()  # the hash of each token, and its line
    leaving, rolled = pow(BASE, K - 1, MODULUS), 0
    for statement in _limited(statements(text, names)):
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


def is_read_whole(text: str) -> bool:
    """Return False if ``text`` has more tokens than are compared."""
    return len(text) <= MAX_TOKENS or sum(len(one.tokens) for one in _limited(statements(text))) < MAX_TOKENS


def _limited(every: Iterator[Statement]) -> Iterator[Statement]:
    """Yield at most ``MAX_TOKENS`` tokens of statements, without idle ones, tables and repetitions."""
    left, read = MAX_TOKENS, MOST_READ
    seen: Counter[tuple[str, ...]] = Counter()
    for statement in every:
        read -= len(statement.tokens)
        short = tuple(_without_tables(statement.tokens))
        seen[short] += 1
        if seen[short] <= MOST_EQUAL and short != ("table",) and not statement.is_idle:
            yield Statement(short[:left], statement.first, statement.last)
            left -= len(short)
        if left <= 0 or read <= 0:
            return


def _without_tables(every: tuple[str, ...]) -> Iterator[str]:
    """Yield the tokens with one token for each long list of constants."""
    if len(every) <= LONGEST_DATA:
        yield from every
        return
    for is_data, group in groupby(every, lambda token: DATA.fullmatch(token) is not None):
        run = list(group)
        yield from (["table"] if is_data and len(run) > LONGEST_DATA else run)


@lru_cache(maxsize=1 << 16)
def _value(token: str) -> int:
    return int.from_bytes(hashlib.blake2b(token.encode("utf-8", "replace"), digest_size=7).digest(), "big")
