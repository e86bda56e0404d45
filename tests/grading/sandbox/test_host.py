"""Each process of the judge ends with the process that started it, also if that is killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from dlo_lib.grading.checks.outcome import Ended, Status
from dlo_lib.grading.sandbox import remote_worker
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.isolation import Unsandboxed, find_isolation
from dlo_lib.grading.sandbox.limits import ran_seconds
from dlo_lib.grading.sandbox.remote_worker import READY_SECONDS, deadline_after

STARTS_ONE = "import subprocess\nchild = subprocess.Popen(['sleep', '600'])"
HOLD = f"""
import time
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.remote_worker import deadline_after
zygote = Zygote()
worker = zygote.worker()
worker.ask(deadline_after(60), do="load", cells=[{{"id": "a", "own": True, "source": {STARTS_ONE!r}}}])
print(zygote._process.pid, *worker.processes(), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module", params=["plain", "sandboxed"])
def any_zygote(request: pytest.FixtureRequest) -> Iterator[Zygote]:
    """A zygote without isolation, and one with this host's."""
    isolation = Unsandboxed() if request.param == "plain" else find_isolation().isolation
    if isolation is None:
        pytest.skip(f"NOT TESTED HERE: the sandbox ({'; '.join(find_isolation().reasons)})")
    with Zygote(isolation=isolation) as zygote:
        yield zygote


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def soon(condition) -> bool:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def cell(source: str) -> dict[str, object]:
    return {"do": "load", "cells": [{"id": "a", "own": True, "source": source}]}


def call(name: str) -> dict[str, object]:
    return {"do": "call", "name": name, "args": [], "kwargs": {}}


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
"""


DRAWS = """
import random, numpy, torch
def drawn(): return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
"""


def test_random_numbers_of_every_worker_start_from_the_same_seed(any_zygote: Zygote) -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    wanted = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
    for _ in range(2):
        worker = any_zygote.worker()
        worker.ask(deadline_after(20), **cell(DRAWS))
        assert worker.ask(deadline_after(20), **call("drawn"))["value"] == wanted
        worker.close()


@pytest.mark.parametrize("source", [STARTS_ONE, DAEMON], ids=["child", "daemon"])
def test_processes_that_a_worker_started_end_with_it(any_zygote: Zygote, source: str) -> None:
    worker = any_zygote.worker()
    worker.ask(deadline_after(20), **cell(source))
    started = worker.processes()
    assert len(started) == 2
    worker.close()
    assert soon(lambda: all(map(gone, started)))


def test_nothing_is_left_when_the_judge_is_killed() -> None:
    judge = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert judge.stdout is not None
    pids = [int(pid) for pid in judge.stdout.readline().split()]
    assert len(pids) == 3, "zygote, worker, and what that started"
    assert not any(map(gone, pids))
    judge.send_signal(signal.SIGKILL)
    judge.wait()
    assert soon(lambda: all(map(gone, pids)))


def test_all_computing_of_a_short_worker_is_counted(any_zygote: Zygote) -> None:
    """The ticks of 10 ms, in which ``stat`` of a process counts, would miss it or count twice as much."""
    worker = any_zygote.worker()
    worker.ask(deadline_after(20), **cell("def short(): return sum(range(50_000))"))
    worker.ask(deadline_after(20), **call("short"))
    assert worker.outside + worker.computed == pytest.approx(ran_seconds(worker.pid), rel=0.2)
    worker.close()


@pytest.mark.parametrize(("state", "more"), [("R", READY_SECONDS), ("S", 0.0)])
def test_a_process_that_waits_for_a_processor_is_not_asleep(
    any_zygote: Zygote, monkeypatch: pytest.MonkeyPatch, state: str, more: float
) -> None:
    """The kernel counts the wait when it ends: until then it is time without computing, as sleep is."""
    worker = any_zygote.worker()
    deadline = deadline_after(5)
    worker.post(deadline, do="get", name="__name__")
    monkeypatch.setattr(worker, "used_seconds", lambda workers: 5.1)
    monkeypatch.setattr(remote_worker, "task_state", lambda pid, task: state)
    assert worker.more_time(deadline) == more
    worker.close()


def test_a_rank_announces_no_cell(any_zygote: Zygote) -> None:
    """The worker that runs the cells first has announced them; it would be 15 messages for each rank."""
    first, rank = any_zygote.worker(), any_zygote.worker()
    for worker, request in ((first, cell("x = 1")), (rank, {**cell("x = 1"), "announced": False})):
        worker.ask(deadline_after(20), **request)
    assert (first.cell, rank.cell) == ("a", "")
    first.close()
    rank.close()


def test_an_answer_prepared_in_advance_is_ignored(zygote: Zygote) -> None:
    worker = zygote.worker()
    early = "import gc\nfrom dlo_lib.grading.sandbox.channel import Channel\n"
    early += (
        "line = next(x for x in gc.get_objects() if isinstance(x, Channel))\n"
        "[line.send({'id': n, 'value': 1}) for n in range(99)]\n"
    )
    worker.ask(deadline_after(20), **cell(early + "def late():\n    import time; time.sleep(60)"))
    with pytest.raises(Ended) as ended:
        worker.ask(deadline_after(0.3), **call("late"))
    assert ended.value.status is Status.TIMEOUT
    worker.close()


def test_each_worker_has_a_separate_folder_that_is_removed_with_it(any_zygote: Zygote) -> None:
    one, two = any_zygote.worker(), any_zygote.worker()
    look = "import os\ndef seen(): return os.listdir('.')"
    one.ask(deadline_after(20), **cell(f"open('here', 'w').write('x')\n{look}"))
    two.ask(deadline_after(20), **cell(look))
    assert one.ask(deadline_after(5), **call("seen"))["value"] == ["here"]
    assert two.ask(deadline_after(5), **call("seen"))["value"] == []
    one.close()
    two.close()
    assert any_zygote.isolation.confines or not one.folder.exists()
