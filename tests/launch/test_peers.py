"""A message to or from a rank that does not exist is refused at the call: gloo waits for it without end."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dlo_lib.grading.checks.contract import Wrong, scenario
from dlo_lib.grading.notebook.local_student import LocalStudent
from dlo_lib.launch import run_ranks
from dlo_lib.launch.failure import RankFailure


def receives_from(peer: int) -> None:
    dist.recv(torch.zeros(3), peer)


def sends_to(peer: int) -> None:
    dist.send(torch.zeros(3), peer)


def batched(peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(3), peer)]):
        work.wait()


@pytest.mark.parametrize("peer", [-1, 2])
@pytest.mark.parametrize("call", [receives_from, sends_to, batched])
def test_a_peer_that_does_not_exist_is_refused_with_the_ranks_that_do(call, peer: int) -> None:
    with pytest.raises(RankFailure, match=rf"ValueError: rank \d .* rank {peer}, but the ranks are 0 to 1"):
        run_ranks(call, 2, peer)


@scenario
def runs(student, rank, world):
    return student.program(rank)


@pytest.mark.parametrize("distance", [-1, 2])
def test_a_check_names_the_rank_that_does_not_exist(distance: int) -> None:
    student = LocalStudent({"program": lambda rank: receives_from(rank + distance)}, 60)
    with pytest.raises(Wrong, match="receives from rank -?[1-3], but the ranks are 0 to 1"):
        student.ranks(runs, [{}] * 2)
