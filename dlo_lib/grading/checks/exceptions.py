"""Exceptions that end a check: the work is wrong, is missing, or cannot be measured on this machine."""

from __future__ import annotations


class Wrong(Exception):
    """The student's work is wrong; the text explains how.

    ``words`` is the author's part of the text, without values; a hidden check shows only this part.
    """

    def __init__(self, message: str, words: str = "") -> None:
        super().__init__(message)
        self.words = words


class NotWritten(Wrong):
    """The answer is missing: a name is not defined, or its function raises NotImplementedError."""


class Unmeasured(Exception):
    """This machine cannot measure a quantity. Earlier comparisons of the check count; the text is a note."""
