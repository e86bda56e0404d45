"""Messages that travel round a ring arrive in order and unchanged, in few buffers, with receives posted
ahead."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dlo_lib.comm.collectives.messages import Communicator
from dlo_lib.comm.collectives.travelling import Ring, Travelling
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks

ROUNDS = 3
BUFFERS = 4
"""Three receives are posted, and the message that is here is sent."""


def number(owner: int, step: int, kind: int) -> float:
    return 100.0 * owner + step + 0.5 * kind


def travel(direction: int) -> None:
    """Two kinds of messages of changing sizes; each rank adds 1 to what it passes on."""
    ring = Ring(Communicator.of(None), direction)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    exchanges = ROUNDS * ranks
    sizes = [[1 + (step + kind) % 3 for step in range(exchanges)] for kind in range(2)]
    sizes[0][2] = 0  # not sent
    kinds = [
        Travelling(ring, kind, [(size, 2) for size in sizes[kind]], torch.zeros(1), torch.float64)
        for kind in range(2)
    ]
    arrived: list[set[int]] = [set(), set()]
    for step in range(exchanges):
        for kind, travelling in enumerate(kinds):
            travelling.exchange(torch.full((sizes[kind][step], 2), number(rank, step, kind)).double())
        for kind, travelling in reversed(list(enumerate(kinds))):
            message = travelling.wait()
            source = (rank - direction) % ranks
            assert message.shape == (sizes[kind][step], 2)
            assert (message == number(source, step, kind)).all()
            arrived[kind].add(message.untyped_storage().data_ptr())
    assert all(len(buffers) <= BUFFERS for buffers in arrived)


def pass_on() -> list[float]:
    """The message that arrived is changed and sent on from its buffer."""
    ranks = dist.get_world_size()
    travelling = Travelling(Ring(Communicator.of(None), 1), 0, [(4,)] * ranks, torch.zeros(1))
    message = torch.full((4,), float(dist.get_rank()))
    for _ in range(ranks):
        travelling.exchange(message)
        message = travelling.wait().add_(1)
    return message.tolist()


def receive_into() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    places = torch.zeros(ranks - 1, 5)
    ring = Ring(Communicator.of(None), 1)
    with trace_collectives() as trace:
        travelling = Travelling(ring, 0, [(5,)] * (ranks - 1), places, into=list(places))
        part = torch.full((5,), float(rank))
        for place in places:
            travelling.exchange(part)
            part = travelling.wait()
            assert part.data_ptr() == place.data_ptr()
    assert places[:, 0].tolist() == [(rank - 1 - step) % ranks for step in range(ranks - 1)]
    kinds = [event.call.kind.value for event in trace.events]
    ahead = min(3, ranks - 1)
    assert kinds[:ahead] == ["recv"] * ahead, "the receives are posted before the first send"


def all_of_it() -> None:
    travel(1)
    travel(-1)
    ranks = dist.get_world_size()
    assert pass_on() == [dist.get_rank() + ranks] * 4
    receive_into()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_messages_arrive_in_order_in_few_buffers(ranks):
    run_ranks(all_of_it, ranks)
