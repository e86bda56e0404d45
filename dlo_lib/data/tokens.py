"""Bytes as tokens, the end-of-text token and the index of ignored targets."""

from __future__ import annotations

import numpy as np

END_OF_TEXT = 256
"""The token after the last byte of a document; it also pads inputs."""

BYTE_VOCABULARY = 257
"""256 bytes and ``END_OF_TEXT``: the vocabulary of the model ``tiny``."""

IGNORE_INDEX = -100
"""A target that is ignored: it counts neither in the loss nor in the number of tokens."""


def encode(text: str | bytes | memoryview) -> np.ndarray:
    """Return the bytes (UTF-8 for a text) as tokens, (length,) uint16, without an end-of-text token."""
    raw = text.encode() if isinstance(text, str) else text
    return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)


def decode(tokens: np.ndarray) -> str:
    """Return the text of byte tokens.

    End-of-text tokens are skipped; bytes that are not UTF-8 become U+FFFD.
    """
    tokens = np.asarray(tokens)
    return tokens[tokens < END_OF_TEXT].astype(np.uint8).tobytes().decode(errors="replace")
