"""Which other threads of a rank may still communicate while its main thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dlo_lib.comm.deadlock.helper_threads import HelperThreads


def blocked_in(file: str) -> Callable[[threading.Event, threading.Event], None]:
    """Return a function that seems to come from ``file`` and waits for the second event."""
    names: dict[str, Any] = {}
    exec(compile("def call(begun, end):\n    begun.set()\n    end.wait()", file, "exec"), names)
    return names["call"]


@contextmanager
def thread_in(file: str) -> Iterator[None]:
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=blocked_in(file), args=(begun, end))
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        end.set()
        thread.join()


@contextmanager
def thread_that_begins() -> Iterator[None]:
    """It runs no Python code but that of its start."""
    lock = threading.Lock()
    with lock:
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        yield
    thread.join()
    lock.release()


@contextmanager
def idle_worker() -> Iterator[None]:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield


@contextmanager
def timer() -> Iterator[None]:
    waiting = threading.Timer(600, int)
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()
        waiting.join()


# what waits for an event is in `wait` of the module threading, as an idle thread of a library is
DISTRIBUTED = str(Path(dist.__file__).with_name("distributed_c10d.py"))


@pytest.mark.parametrize(
    ("others", "may"),
    [
        (lambda: thread_in(DISTRIBUTED), True),
        (thread_that_begins, True),
        (lambda: thread_in("/usr/lib/python3/dist-packages/progress/monitor.py"), False),
        (idle_worker, False),
        (timer, False),
    ],
    ids=["inside torch.distributed", "begins", "of a library", "idle worker", "timer"],
)
def test_a_thread_that_is_about_to_call_may_communicate(others: Callable[[], Any], may: bool) -> None:
    helpers = HelperThreads[int](lambda wait: None)
    with others():
        assert helpers.may_communicate() is may
    assert not helpers.may_communicate()
