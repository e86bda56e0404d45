"""A rank that waits in one thread is stuck only if no other thread of it can continue."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.grading.checks.contract import Wrong, scenario
from dlo_lib.grading.notebook.local_student import LocalStudent

PAUSE_S = 1.5  # long enough to count as stuck, if the wait of the other thread were that of the rank


@scenario
def runs(student, rank, world):
    return student.program(rank)


def send_waits_in_a_thread(rank: int) -> Tensor:
    came = torch.zeros(4)
    send = dist.isend(torch.full((4,), float(rank)), 1 - rank)
    thread = threading.Thread(target=send.wait)
    thread.start()
    time.sleep(PAUSE_S)
    dist.recv(came, 1 - rank)
    thread.join()
    return came


def receive_waits_while_a_thread_sends(rank: int) -> Tensor:
    def send() -> None:
        time.sleep(PAUSE_S)
        dist.send(torch.full((4,), float(rank)), 1 - rank)

    came = torch.zeros(4)
    thread = threading.Thread(target=send)
    thread.start()
    dist.recv(came, 1 - rank)
    thread.join()
    return came


@pytest.mark.parametrize("program", [send_waits_in_a_thread, receive_waits_while_a_thread_sends])
def test_a_wait_in_one_thread_is_no_deadlock_while_another_continues(program) -> None:
    run = LocalStudent({"program": program}, 60).ranks(runs, [{}] * 2)
    assert [result.tolist() for result in run.results] == [[1.0] * 4, [0.0] * 4]


def test_a_deadlock_in_threads_that_are_joined_is_explained() -> None:
    def both_receive(rank: int) -> None:
        thread = threading.Thread(target=dist.recv, args=(torch.zeros(4), 1 - rank))
        thread.start()
        thread.join()

    with pytest.raises(Wrong, match="DEADLOCK: ranks 0 and 1 wait"):
        LocalStudent({"program": both_receive}, 600).ranks(runs, [{}] * 2)
