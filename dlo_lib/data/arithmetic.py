"""Additions written out, "37+85=122": a text generated from a seed, of which the best loss that any model can reach is known.

A document is a list of problems, one a line; after each of them it ends with probability p = 1 / PROBLEMS_PER_DOCUMENT, else a new
line begins. A problem is 10 tokens, its end included: four digits that nobody can know, five tokens that follow from what stands before,
and the end, which is a little uncertain. So
    entropy = (4 ln 10 + h(p)) / 10 nats a token,     h(p) = -p ln p - (1 - p) ln(1 - p),
which is 0.959. A model that has learned only which symbols stand where stays at 1.49; the rest is adding. The numbers come from integer
hashes and are the same everywhere, whatever the version of PyTorch or NumPy.
"""

from __future__ import annotations

import math

import numpy as np

from dlo_lib.data.documents import FlatDocuments
from dlo_lib.data.reproducible import hashes
from dlo_lib.data.tokens import END_OF_TEXT

PROBLEMS_PER_DOCUMENT = 8
"""On average: the lengths are geometric, so documents are uneven."""

TOKENS_PER_PROBLEM = 10


def arithmetic(problems: int = 40_000, seed: int = 0) -> FlatDocuments:
    """``problems`` additions of two numbers below 100, as documents of byte tokens."""
    numbers = hashes(3 * problems, seed).reshape(problems, 3)
    first, second = numbers[:, 0] % 100, numbers[:, 1] % 100
    columns = [first // 10, first % 10, second // 10, second % 10, *(((first + second) // power) % 10 for power in (100, 10, 1))]
    digits = (np.stack(columns, axis=1) + ord("0")).astype(np.uint16)
    tokens = np.empty((problems, TOKENS_PER_PROBLEM), dtype=np.uint16)
    tokens[:, [0, 1, 3, 4, 6, 7, 8]] = digits
    tokens[:, 2], tokens[:, 5] = ord("+"), ord("=")
    ends = numbers[:, 2] % PROBLEMS_PER_DOCUMENT == 0
    ends[-1] = True
    tokens[:, 9] = np.where(ends, END_OF_TEXT, ord("\n"))
    return FlatDocuments(tokens.reshape(-1))


def entropy() -> float:
    """Nats a token: the loss of a model that knows the rule, on packed sequences of a multiple of ``TOKENS_PER_PROBLEM``.

    On other sequences it is slightly more, for they may begin within a problem.
    """
    p = 1 / PROBLEMS_PER_DOCUMENT
    end = -p * math.log(p) - (1 - p) * math.log(1 - p)
    return (4 * math.log(10) + end) / TOKENS_PER_PROBLEM
