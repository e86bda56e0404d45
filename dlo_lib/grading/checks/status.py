"""The statuses of a check. This module does not import torch, so that reading reports is fast."""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """The status of a check, as instructors read it."""

    OK = "OK"
    WRONG = "WRONG"
    NOT_WRITTEN = "NOT_WRITTEN"
    TIMEOUT = "TIMEOUT"
    OOM = "OOM"
    KERNEL_DIED = "KERNEL_DIED"
    GRADER_ERROR = "GRADER_ERROR"
