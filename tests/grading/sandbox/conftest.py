"""A zygote in this host's sandbox, for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.isolation import find_isolation


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Zygote]:
    found = find_isolation()
    if found.isolation is None:
        pytest.skip(f"NOT TESTED HERE: the sandbox ({'; '.join(found.reasons)})")
    with Zygote(isolation=found.isolation) as zygote:
        yield zygote
