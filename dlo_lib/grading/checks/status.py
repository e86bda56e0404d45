"""The statuses of a check, and the words of one of them. This module does not import torch, so that reading
reports is fast.
"""

from __future__ import annotations

from enum import Enum

from dlo_lib.base.text import tr


class Status(Enum):
    """The status of a check, as instructors read it."""

    OK = "OK"
    WRONG = "WRONG"
    NOT_WRITTEN = "NOT_WRITTEN"
    TIMEOUT = "TIMEOUT"
    OOM = "OOM"
    KERNEL_DIED = "KERNEL_DIED"
    GRADER_ERROR = "GRADER_ERROR"


def unreadable() -> str:
    """Return the words about an answer with which a check cannot compute."""
    return tr("what came back does not have the form that the check reads")
