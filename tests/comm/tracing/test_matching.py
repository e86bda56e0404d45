"""Calls of several ranks that match: when all had called, and when a message had arrived."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.tracing.events import Event, Moment
from dlo_lib.comm.tracing.trace import Trace
from dlo_lib.launch import run_ranks


def event(
    rank: int,
    kind: Kind,
    issued: float,
    done: float | None,
    wait: tuple[float, float],
    sequence: int = 1,
    peer: int = -1,
) -> Event:
    return Event(rank, Call(sequence, kind, "0", (0, 1), sequence, peer), issued, done, *wait)


def merged(*events: Event) -> Trace:
    return Trace.merged([Trace([event for event in events if event.rank == rank], 10.0) for rank in (0, 1)])


def test_no_data_moves_before_the_last_rank_has_called():
    trace = merged(event(0, Kind.ALL_REDUCE, 1, 6, (2, 6)), event(1, Kind.ALL_REDUCE, 5, 6, (5, 6)))
    early, last = trace.events
    assert early.all_called == last.all_called == 5
    assert (early.communicating, early.exposed, early.late) == (1, 1, 3), (
        "it waited from 2: until 5 for the late rank, then for the data"
    )
    assert (last.communicating, last.exposed, last.late) == (1, 1, 0)
    assert trace.hidden() == 0
    assert trace.summary().splitlines()[1].split()[-2:] == ["3000.0", "ms"]


def test_a_wait_that_begins_when_all_have_called_has_no_late_rank():
    hidden = merged(event(0, Kind.ALL_REDUCE, 1, 6, (5.5, 6)), event(1, Kind.ALL_REDUCE, 2, 6, (6, 6)))
    assert [found.late for found in hidden.events] == [0, 0]
    assert hidden.hidden() == pytest.approx(1 - 0.5 / 8)


def test_calls_at_different_positions_do_not_match():
    trace = merged(
        event(0, Kind.ALL_REDUCE, 1, 2, (1, 2)), event(1, Kind.ALL_REDUCE, 5, 6, (5, 6), sequence=2)
    )
    assert [found.all_called for found in trace.events] == [None, None]


def test_contradictory_moments_give_no_conclusion():
    """The first ended before the other called: their counts differ, or a root needs no other rank."""
    trace = merged(
        event(0, Kind.BROADCAST, 1, 2, (1, 2), peer=0), event(1, Kind.BROADCAST, 5, 6, (5, 6), peer=0)
    )
    assert [found.all_called for found in trace.events] == [None, None]
    assert trace.events[0].communicating == 1


def test_a_received_message_has_been_sent():
    trace = merged(event(0, Kind.SEND, 1, None, (9, 9), peer=1), event(1, Kind.RECV, 2, None, (3, 4), peer=0))
    sent, received = trace.events
    assert (sent.arrived, sent.over) == (4, 4), "though it is waited for at 9"
    assert received.over == 4
    assert sent.all_called == 2


def test_a_message_received_from_any_rank_matches_no_particular_send():
    trace = merged(event(0, Kind.SEND, 1, None, (9, 9), peer=1), event(1, Kind.RECV_ANY, 2, None, (3, 4)))
    assert [found.all_called for found in trace.events] == [None, None]
    assert trace.events[0].over == 9


def test_the_steps_of_a_rank_are_ordered():
    ahead = Trace(
        [event(0, Kind.ALL_GATHER, 1, 3, (4, 5)), event(0, Kind.ALL_GATHER, 2, 6, (7, 8), sequence=2)]
    )
    assert [(moment, call.sequence) for moment, call in ahead.order(0)] == [
        (Moment.ISSUED, 1), (Moment.ISSUED, 2), (Moment.WAITS, 1), (Moment.WAITED, 1), (Moment.WAITS, 2),
        (Moment.WAITED, 2),
    ]  # fmt: skip
    assert Trace([Event(0, Call(1, Kind.SEND, "0", (0, 1), 1), 1.0)]).order(0)[-1][0] is Moment.ISSUED
    assert ahead.order(1) == []


def one_rank_is_late() -> None:
    """The last rank calls when the others have told it that they called."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = distributed_c10d._get_default_store()
    if rank == world - 1:
        store.wait([f"{other} has called" for other in range(world - 1)])
    work = dist.all_reduce(torch.ones(4), async_op=True)
    store.set(f"{rank} has called", "")
    work.wait()
    messages = [dist.isend(torch.ones(2), (rank + 1) % world), dist.irecv(torch.ones(2), (rank - 1) % world)]
    dist.barrier()
    for message in messages:
        message.wait()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_real_ranks_wait_for_the_late_one(world_size):
    trace = run_ranks(one_rank_is_late, world_size, trace=True).trace
    *early, last = sorted(trace.select("all_reduce"), key=lambda event: event.issued)
    assert last.rank == world_size - 1
    assert last.late == 0
    assert all(event.all_called == last.issued < event.over for event in [*early, last])
    for sent in trace.select("send"):
        (received,) = trace.select("recv", sent.call.peer)
        assert sent.arrived == received.waited_until
        assert sent.all_called == max(sent.issued, received.issued)
    assert sorted(trace.spans) == list(range(world_size))
    assert all(
        start <= event.issued <= end for event in trace.events for start, end in [trace.spans[event.rank]]
    )
