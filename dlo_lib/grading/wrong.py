"""How a check says that it ends early: the work is wrong, is not there yet, or cannot be measured on this machine."""

from __future__ import annotations


class Wrong(Exception):
    """The student's work is wrong; the text teaches.

    ``words`` is what the check's author wrote of it, without values: all that a hidden check shows.
    """

    def __init__(self, message: str, words: str = "") -> None:
        super().__init__(message)
        self.words = words


class NotWritten(Wrong):
    """There is no answer yet: a name is missing, or its function still raises NotImplementedError."""


class Unmeasured(Exception):
    """This machine cannot measure what the check asks for. What was compared before counts; the text is a note for the student."""
