"""Workers of a ``DataLoader`` start by fork where Python has another default, unless the program chooses."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from dlo_lib.base.worker_start import start_workers_by_fork

DEFAULTS = {"of 3.14": ["forkserver", "fork", "spawn"], "of 3.13": ["fork", "spawn", "forkserver"]}


@pytest.fixture(params=DEFAULTS)
def default(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The default start method: that of Python 3.14, then that of older ones. Nothing is chosen yet."""
    methods = DEFAULTS[request.param]
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: list(methods))
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    yield methods[0]
    multiprocessing.set_start_method(before, force=True)


def chosen() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def test_fork_is_the_default(default: str) -> None:
    start_workers_by_fork()
    assert chosen() == (None if default == "fork" else "fork")


def test_the_default_that_a_lock_has_chosen_is_replaced(default: str) -> None:
    multiprocessing.set_start_method(default)
    start_workers_by_fork()
    assert chosen() == "fork"


def test_what_the_program_has_chosen_stays(default: str) -> None:
    multiprocessing.set_start_method("spawn")
    start_workers_by_fork()
    assert chosen() == "spawn"


def test_a_system_without_fork_keeps_its_default(monkeypatch: pytest.MonkeyPatch, default: str) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    start_workers_by_fork()
    assert chosen() is None
