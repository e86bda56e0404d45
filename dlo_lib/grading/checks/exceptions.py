"""Exceptions that end a check: the work is wrong, late or missing, or cannot be measured on this machine."""

from __future__ import annotations


class Wrong(Exception):
    """The student's work is wrong; the text explains how.

    Args:
        message: the whole text, with values of the check and of the student's process.
        words: the author's part of the text, without values; a hidden check shows only this part.
        brief: ``words``, and what is known without the student's process, such as the student's own line.
    """

    def __init__(self, message: str, words: str = "", brief: str = "") -> None:
        super().__init__(message)
        self.words = words
        self.brief = brief or words


class NotWritten(Wrong):
    """The answer is missing: a name is not defined, or its function raises NotImplementedError."""


class Late(Wrong):
    """The student's code did not end in time."""


class Unmeasured(Exception):
    """This machine cannot measure a quantity. Earlier comparisons of the check count; the text is a note."""
