"""The time now, when the device has done what it was told."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds on the machine's monotonic clock, the same for all its processes; an accelerator is waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()
