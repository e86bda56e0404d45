"""Additions such as "37+85=122": text generated from a seed, with a known entropy, which is the lowest
possible loss.

A document is a list of problems, one per line. After each problem, the document ends with probability
p = 1 / PROBLEMS_PER_DOCUMENT. A problem has 10 tokens: four random digits, five tokens that follow from the
tokens before them, and the end of the line or of the document, which is nearly certain. Therefore
    entropy = (4 ln 10 + h(p)) / 10 nats per token,     h(p) = -p ln p - (1 - p) ln(1 - p),
which is 0.959. A model that has only learned the positions of the symbols reaches 1.49; the difference is
addition. The numbers come from integer hashes, so they are the same on every machine and with every version
of PyTorch and NumPy."""

from __future__ import annotations

import math

import numpy as np

from dlo_lib.data.documents import FlatDocuments
from dlo_lib.data.reproducible import hashes
from dlo_lib.data.tokens import END_OF_TEXT

PROBLEMS_PER_DOCUMENT = 8
"""The mean number of problems; the number is geometrically distributed, so documents have different lengths.
"""

TOKENS_PER_PROBLEM = 10


def arithmetic(problems: int = 40_000, seed: int = 0) -> FlatDocuments:
    """Generate ``problems`` additions of two numbers below 100, as documents of byte tokens."""
    numbers = hashes(3 * problems, seed).reshape(problems, 3)
    first, second = numbers[:, 0] % 100, numbers[:, 1] % 100
    columns = [
        first // 10,
        first % 10,
        second // 10,
        second % 10,
        *(((first + second) // power) % 10 for power in (100, 10, 1)),
    ]
    digits = (np.stack(columns, axis=1) + ord("0")).astype(np.uint16)
    tokens = np.empty((problems, TOKENS_PER_PROBLEM), dtype=np.uint16)
    tokens[:, [0, 1, 3, 4, 6, 7, 8]] = digits
    tokens[:, 2], tokens[:, 5] = ord("+"), ord("=")
    ends = numbers[:, 2] % PROBLEMS_PER_DOCUMENT == 0
    ends[-1] = True
    tokens[:, 9] = np.where(ends, END_OF_TEXT, ord("\n"))
    return FlatDocuments(tokens.reshape(-1))


def entropy() -> float:
    """Return the entropy in nats per token: the loss of a model that can add.

    It holds for packed sequences whose length is a multiple of ``TOKENS_PER_PROBLEM``. For other lengths the
    lowest loss is slightly higher, because a sequence can start inside a problem."""
    p = 1 / PROBLEMS_PER_DOCUMENT
    end = -p * math.log(p) - (1 - p) * math.log(1 - p)
    return (4 * math.log(10) + end) / TOKENS_PER_PROBLEM
