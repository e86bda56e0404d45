"""Bytes as tokens, and the two marks beside them: the end of a text, and a target that does not count."""

from __future__ import annotations

import numpy as np

END_OF_TEXT = 256
"""The token after the last byte of a document; it also fills inputs that are not there."""

BYTE_VOCABULARY = 257
"""256 bytes and ``END_OF_TEXT``: the vocabulary of the model ``tiny``."""

IGNORE_INDEX = -100
"""A target that counts neither in the loss nor in the number of tokens."""


def encode(text: str | bytes | memoryview) -> np.ndarray:
    """The bytes (of UTF-8) as tokens, (length,) uint16, without an end."""
    raw = text.encode() if isinstance(text, str) else text
    return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)


def decode(tokens: np.ndarray) -> str:
    """The text of byte tokens; the end of a text is left out, and bytes that are not UTF-8 become U+FFFD."""
    tokens = np.asarray(tokens)
    return tokens[tokens < END_OF_TEXT].astype(np.uint8).tobytes().decode(errors="replace")
