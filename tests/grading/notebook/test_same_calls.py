"""The switch records the same calls of a program as the tracer on gloo.

There is one difference: an all-to-all reaches the switch in pieces, so that ``shape`` is that of a piece
instead of the whole tensor.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlo_lib.base.torch_compat import RELEASE
from dlo_lib.comm.calls import Call, Kind
from dlo_lib.grading.checks.contract import scenario
from dlo_lib.grading.notebook.local_student import LocalStudent
from dlo_lib.launch import run_ranks
from tests.fsdp2 import fully_shard


def collectives(rank: int, world: int) -> None:
    x = torch.arange(6.0) + rank
    dist.all_reduce(x, dist.ReduceOp.MAX)
    dist.broadcast(x, 1)
    dist.all_gather([torch.empty(6) for _ in range(world)], x)
    shard = torch.empty(6)
    dist.reduce_scatter(shard, [x] * world)
    works = [dist.isend(x, (rank + 1) % world, tag=3), dist.irecv(shard, (rank - 1) % world, tag=3)]
    for work in works:
        work.wait()
    dist.all_to_all_single(torch.empty(2 * world), torch.ones(2 * world, dtype=torch.float32))
    dist.barrier()


def ddp(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(5, 3))
    for _ in range(3):
        model(torch.ones(2, 5) * rank).sum().backward()


def fsdp(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, 5) * rank).sum().backward()


PROGRAMS = {"collectives": collectives, "ddp": ddp, "fsdp": fsdp}


@scenario
def runs(student, rank, world):
    student.program(rank, world)
    return rank


def traced(program: str) -> None:
    PROGRAMS[program](dist.get_rank(), dist.get_world_size())


def told(call: Call) -> tuple:
    # PyTorch 2.8 has no AVG on gloo: FSDP sums there and divides itself, and asks the switch for AVG.
    reduction = "SUM" if RELEASE < (2, 9) and call.reduction == "AVG" else call.reduction
    shape = call.send_splits if call.kind is Kind.ALL_TO_ALL else call.shape
    return (
        call.kind,
        call.payload_bytes,
        call.numel,
        call.dtype,
        shape,
        call.peer,
        call.tag,
        reduction,
        call.in_backward,
        call.by_reducer,
    )


def by_kind(calls: list[tuple]) -> list[tuple]:
    """Concurrent sends and receives complete in any order."""
    return sorted(
        calls,
        key=lambda call: (
            call[0] in (Kind.SEND, Kind.RECV),
            call[0].value if call[0] in (Kind.SEND, Kind.RECV) else "",
        ),
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_switch_and_tracer_record_the_same_calls(program):
    run = LocalStudent({"program": PROGRAMS[program]}, 120).ranks(runs, [{}] * 3)
    trace = run_ranks(traced, 3, program, trace=True).trace
    assert run.unwaited == ((),) * 3
    for rank in range(3):
        at_switch, seen = (
            [told(call) for call in run.calls(rank)],
            [told(event.call) for event in trace.events if event.rank == rank],
        )
        assert len(at_switch) > 5
        assert by_kind(at_switch) == by_kind(seen)
