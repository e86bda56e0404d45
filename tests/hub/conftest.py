"""A Hub with a class for all tests: ada and blaise are its students, head grades."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub.class_on_hub import ClassOnHub, class_on_hub, missing


@pytest.fixture(scope="session")
def hub() -> Iterator[ClassOnHub]:
    """A Hub whose servers are processes of this machine; the small lab is released."""
    if reason := missing():
        pytest.skip(f"NOT TESTED HERE: a real JupyterHub ({reason})")
    with class_on_hub() as running:
        running.enrol("deep", running.person("ada"), running.person("blaise"))
        running.release("deep")
        yield running
