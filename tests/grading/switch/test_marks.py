"""Marks in a scenario: the number of calls issued when the memory was read, also for marks sent by the
student.
"""

import time

import pytest
import torch
import torch.distributed as dist

from dlo_lib.grading.checks.contract import scenario
from dlo_lib.grading.notebook.local_student import LocalStudent
from dlo_lib.grading.switch import local

HONEST = """
def work(x):
    dist.all_reduce(x)
    return x
"""
SENDS_IT_EARLY = """
import gc
from dlo_lib.grading.switch.link import Link

def work(x):
    for link in [one for one in gc.get_objects() if type(one) is Link]:
        link.mark("half")
        Link.mark = lambda *arguments: None  # the scenario has the original
    dist.all_reduce(x)
    return x
"""
REPLACES_IT = """
import sys

def work(x):
    sys._getframe(1).f_globals["mark"] = lambda name: None
    sys._getframe(1).f_builtins["mark"] = lambda name: None
    dist.all_reduce(x)
    return x
"""


@scenario
def halves(student, rank, world):
    student.work(torch.ones(3))
    mark("half")  # noqa: F821 - of the ranks
    student.work(torch.ones(3))
    return rank


def calls_before_half(source: str) -> list[int]:
    names = {"torch": torch, "dist": dist}
    exec(compile(source, "<cell work>", "exec"), names)
    run = LocalStudent(names, 60).ranks(halves, [{}, {}])
    assert [len(run.calls(rank)) for rank in range(2)] == [2, 2]
    return [run.calls_before(rank, "half") for rank in range(2)]


def test_a_mark_comes_after_the_calls_before_it():
    assert calls_before_half(HONEST) == [1, 1]


def test_a_mark_of_the_student_does_not_replace_that_of_the_scenario():
    assert calls_before_half(SENDS_IT_EARLY) == [1, 1]
    assert calls_before_half(REPLACES_IT) == [1, 1]


@scenario
def holds(student, rank, world):
    held = torch.ones(1 << 22)  # 16 MiB
    mark("held")  # noqa: F821 - of the ranks
    return held.sum().item()


def test_what_a_rank_allocates_counts_although_the_switch_is_slow(monkeypatch: pytest.MonkeyPatch):
    """On a loaded machine the switch reads the memory of a new rank late: the rank waits for it."""
    read = local.exact_bytes

    def late(pid: int) -> int:
        time.sleep(0.3)
        return read(pid)

    monkeypatch.setattr(local, "exact_bytes", late)
    run = LocalStudent({}, 60).ranks(holds, [{}, {}])
    assert all(1 << 24 <= run.memory(rank, "held") < 3 << 23 for rank in range(2))


SENDS_WHAT_NO_RANK_RECEIVES = """
def keep(x):
    if dist.get_rank() == 0:
        work = dist.isend(x.repeat(1 << 20), 1)
        return work
    return None

def back(work):
    got = torch.empty(1 << 22)
    if work is None:
        dist.recv(got, 0)
        dist.send(got, 0)
    else:
        dist.recv(got, 1)
        work.wait()
    return got
"""


@scenario
def keeps(student, rank, world):
    kept = student.keep(torch.arange(4.0))
    mark("kept")  # noqa: F821 - of the ranks
    dist.barrier()
    return student.back(kept)[:8].clone()


def test_what_a_rank_has_sent_and_no_rank_has_received_counts():
    names = {"torch": torch, "dist": dist}
    exec(compile(SENDS_WHAT_NO_RANK_RECEIVES, "<cell keep>", "exec"), names)
    run = LocalStudent(names, 60).ranks(keeps, [{}, {}])
    assert run.results[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert run.memory(0, "kept") > 1 << 24


@scenario
def neighbours(student, rank, world):
    """Rank 1 receives when rank 0 is past its mark, or after a second: then rank 0 waits."""
    import time

    past = torch.zeros(1)
    if rank == 1:
        told, until = dist.irecv(past, 0, tag=1), time.monotonic() + 1
        while time.monotonic() < until and not told.is_completed():
            time.sleep(0.01)
        came = torch.zeros(3)
        dist.recv(came, 0)
        told.wait()
    else:
        student.work(torch.ones(3))
        mark("returned")  # noqa: F821 - of the ranks
        dist.send(past, 1, tag=1)
    return rank


SENDS = {
    "blocking": ("dist.send(x, 1)", 0),
    "waits": ("dist.isend(x, 1).wait()", 0),
    "forgets": ("dist.isend(x, 1)", 1),
    "in a thread": ("threading.Thread(target=dist.send, args=(x, 1)).start()", 1),
    "in a thread that ends": ("t = threading.Thread(target=dist.send, args=(x, 1)); t.start(); t.join()", 0),
    "forgets and hides it": (
        "dist.isend(x, 1); [one._unwaited.clear() for one in gc.get_objects() if type(one) is Link]",
        1,
    ),
}


@pytest.mark.parametrize("how", SENDS)
def test_a_send_that_is_not_complete_at_a_mark_is_seen(how: str) -> None:
    """The switch knows it, whatever thread sends and whatever the rank says of its waits."""
    line, unfinished = SENDS[how]
    source = f"""
import gc
import threading
from dlo_lib.grading.switch.link import Link

def work(x):
    {line}
"""
    names = {"torch": torch, "dist": dist}
    exec(compile(source, "<cell work>", "exec"), names)
    run = LocalStudent(names, 60).ranks(neighbours, [{}, {}])
    begun = run.calls_before(0, "returned")
    assert (begun == 0) + len(run.open_calls(0, "returned")) == unfinished
