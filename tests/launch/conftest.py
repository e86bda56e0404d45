"""What tests of starting and ending share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What a shell starts in the background ignores interrupts from birth, and then this test would wait for ever."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
