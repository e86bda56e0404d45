"""How a check can end: the words that instructors read. In a file of its own, so that what only reads reports need not wait for torch."""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """How a check ended."""

    OK = "OK"
    WRONG = "WRONG"
    NOT_WRITTEN = "NOT_WRITTEN"
    TIMEOUT = "TIMEOUT"
    OOM = "OOM"
    KERNEL_DIED = "KERNEL_DIED"
    GRADER_ERROR = "GRADER_ERROR"
