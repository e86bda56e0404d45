"""A worker with many running tasks has the priority of one process; the judge counts the time of all."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dlo_lib.grading.checks.outcome import Ended, Status
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.limits import descendants
from dlo_lib.grading.sandbox.processor_share import share_processor
from dlo_lib.grading.sandbox.remote_worker import Worker, deadline_after

CELL = """
import os
def spin():
    while True: pass
def children(count):
    for _ in range(count):
        if os.fork() == 0: spin()
    spin()
def one(): spin()
def renice():
    os.nice(-1)
"""


@pytest.fixture
def worker(sandbox: Zygote, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker without a control group."""
    monkeypatch.setattr("dlo_lib.grading.sandbox.host.find_hierarchy", lambda: None)
    one = sandbox.worker()
    cell = {"id": "a", "own": True, "source": CELL}
    one.ask(deadline_after(20), do="load", cells=[cell])
    yield one
    one.close()


def priority(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def run_out(worker: Worker, name: str, *arguments: object, seconds: float) -> list[int]:
    """Let the worker run out of time; return the priorities of its processes."""
    with pytest.raises(Ended) as ended:
        worker.ask(deadline_after(seconds), do="call", name=name, args=list(arguments), kwargs={})
    assert ended.value.status is Status.TIMEOUT
    return [priority(pid) for pid in (worker.pid, *descendants(worker.pid))]


def test_several_processes_share_the_priority_of_one_process(worker: Worker) -> None:
    before = priority(worker.pid)
    priorities = run_out(worker, "children", 8, seconds=2.0)
    assert len(priorities) > 3
    assert min(priorities) > before


def test_a_fork_bomb_ends_at_once(worker: Worker) -> None:
    with pytest.raises(Ended, match="more than 16 processes and threads computed at once") as ended:
        worker.ask(deadline_after(60), do="call", name="children", args=[40], kwargs={})
    assert ended.value.status is Status.TIMEOUT


def test_one_process_keeps_its_priority(worker: Worker) -> None:
    before = priority(worker.pid)
    assert run_out(worker, "one", seconds=0.5) == [before]


def test_a_worker_cannot_raise_its_priority(worker: Worker) -> None:
    answer = worker.ask(deadline_after(20), do="call", name="renice", args=[], kwargs={})
    assert answer["fault"]["kind"] == "PermissionError"


def test_a_process_that_has_ended_is_left_out() -> None:
    assert share_processor([2**22 + 1]) == (0, 0)
