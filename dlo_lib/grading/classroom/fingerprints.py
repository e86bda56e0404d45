"""Fingerprints of code by winnowing: texts that share a passage share fingerprints, wherever the passage is
and whatever its names are.

Code becomes tokens. All names are one token, except keywords, built-ins and names after a dot; literals are
one token per kind; comments, layout and docstrings are dropped. Every run of K tokens is hashed, and the
smallest hash of every W consecutive ones (the rightmost of equals) is a fingerprint. So a common passage of W
+ K - 1 tokens is always found, none shorter than K is, and about 2 / (W + 1) of the hashes are fingerprints.

Schleimer, Wilkerson, Aiken, "Winnowing: Local Algorithms for Document Fingerprinting", SIGMOD 2003. Cost:
linear in the text.
"""

from __future__ import annotations

import builtins
import hashlib
import keyword
import re
from collections.abc import Iterable, Iterator
from functools import cache

K, W = 18, 8
MODULUS = (1 << 61) - 1
BASE = 1_000_003
TOKEN = re.compile(
    r"""(?P<skip>\#[^\n]*|\s+|\\\n)
      | (?P<string>[rRbBfFuU]{0,2}(?:\"\"\"(?:[^\\]|\\.)*?\"\"\"|'''(?:[^\\]|\\.)*?'''|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'))
      | (?P<number>\d[\w.]*)
      | (?P<name>[^\W\d]\w*)
      | (?P<operator>\*\*=?|//=?|->|:=|[-+*/%@&|^=<>!]=|<<|>>|.)""",  # noqa: E501 - a pattern without white space
    re.VERBOSE | re.DOTALL,
)
OWN = frozenset(keyword.kwlist) | frozenset(name for name in dir(builtins) if name.islower())


def tokens(text: str) -> Iterator[str]:
    """Yield the tokens of ``text``, which may be invalid Python."""
    before, fresh = "", True  # fresh: a statement begins here
    for found in TOKEN.finditer(text):
        kind, word = found.lastgroup, found[0]
        if kind == "skip":
            fresh = fresh or "\n" in word
            continue
        if kind == "string" and fresh:
            continue  # a docstring
        if kind == "name" and word not in OWN and before != ".":
            yield "name"
        elif kind in ("string", "number"):
            yield str(kind)
        else:
            yield word
        before, fresh = word, False


def hashes(text: str) -> list[int]:
    """Return the hash of every run of K tokens, in order."""
    values = [_value(token) for token in tokens(text)]
    if len(values) < K:
        return []
    leaving = pow(BASE, K - 1, MODULUS)
    rolled, result = 0, []
    for place, value in enumerate(values):
        if place >= K:
            rolled = (rolled - values[place - K] * leaving) % MODULUS
        rolled = (rolled * BASE + value) % MODULUS
        if place >= K - 1:
            result.append(rolled)
    return result


def winnow(values: list[int]) -> set[int]:
    """Return the smallest of each W consecutive hashes; of fewer hashes, the smallest of all."""
    if len(values) <= W:
        return {min(values)} if values else set()
    kept, chosen = set(), -1
    for end in range(W, len(values) + 1):
        start = end - W
        if chosen < start:  # the last choice has left the window: search all of it
            chosen = min(range(start, end), key=lambda place: (values[place], -place))
        elif values[end - 1] <= values[chosen]:
            chosen = end - 1
        kept.add(values[chosen])
    return kept


def fingerprints(text: str, known: Iterable[int] = ()) -> set[int]:
    """Return the fingerprints of ``text`` without the hashes in ``known``, those of the released code."""
    return winnow(hashes(text)) - set(known)


@cache
def _value(token: str) -> int:
    return int.from_bytes(hashlib.blake2b(token.encode("utf-8", "replace"), digest_size=7).digest(), "big")
