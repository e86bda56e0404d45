"""The steps that messages take: orders in which all ranks send and receive in each step, and others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.grading.checks.contract import Run, Trial, Wrong
from dlo_lib.labkit.messages import (
    in_few_rounds,
    no_rank_gathers,
    steps_of_messages,
    to_the_right,
    whole_tensors,
)

Orders = list[list[Call]]


def call(kind: Kind, peer: int, is_async: bool, numel: int = 1) -> Call:
    return Call(0, kind, "", (), 0, peer=peer, is_async=is_async, numel=numel)


def send(peer: int, is_async: bool = False) -> Call:
    return call(Kind.SEND, peer, is_async)


def recv(peer: int, is_async: bool = False) -> Call:
    return call(Kind.RECV, peer, is_async)


def run_of(orders: Orders) -> Run:
    return Run([None] * len(orders), tuple(tuple(calls) for calls in orders))


def shifted(ranks: int, is_async: bool, receive_first: bool = False) -> Orders:
    """In step d each rank sends to the rank at distance d."""
    orders: Orders = [[] for _ in range(ranks)]
    for rank, calls in enumerate(orders):
        for distance in range(1, ranks):
            both = [send((rank + distance) % ranks, is_async), recv((rank - distance) % ranks, is_async)]
            calls += both[::-1] if receive_first else both
    return orders


def all_started(ranks: int) -> Orders:
    """The receives are started first, then the sends, in the order of the distance."""
    return [
        [recv((rank - d) % ranks, True) for d in range(1, ranks)]
        + [send((rank + d) % ranks, True) for d in range(1, ranks)]
        for rank in range(ranks)
    ]


def lower_ranks_send_first(ranks: int) -> Orders:
    """An exchange of blocking calls: a rank that sends to a higher rank sends first."""
    orders: Orders = [[] for _ in range(ranks)]
    for rank, calls in enumerate(orders):
        for distance in range(1, ranks):
            both = [send((rank + distance) % ranks), recv((rank - distance) % ranks)]
            calls += both if rank < (rank + distance) % ranks else both[::-1]
    return orders


def round_robin(ranks: int) -> Orders:
    """Pairs of ranks whose sum is the same exchange at the same time; each rank pauses once."""
    return [
        [
            one
            for total in range(ranks)
            if (to := (total - rank) % ranks) != rank
            for one in (send(to, True), recv(to))
        ]
        for rank in range(ranks)
    ]


def to_rank_0_first(ranks: int) -> Orders:
    return [
        [recv(other, True) for other in range(ranks) if other != rank]
        + [send(other, True) for other in range(ranks) if other != rank]
        for rank in range(ranks)
    ]


def one_at_a_time(ranks: int) -> Orders:
    orders: Orders = [[] for _ in range(ranks)]
    for source in range(ranks):
        for to in range(ranks):
            if source != to:
                orders[source].append(send(to))
                orders[to].append(recv(source))
    return orders


@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_rank_sends_and_receives_in_each_step(ranks: int) -> None:
    for orders in (
        shifted(ranks, is_async=True),
        shifted(ranks, is_async=False),
        shifted(ranks, is_async=False, receive_first=True),
        all_started(ranks),
        lower_ranks_send_first(ranks),
    ):
        assert steps_of_messages(run_of(orders)) == ranks - 1


@pytest.mark.parametrize("ranks", range(4, 9))
def test_a_rank_that_pauses_once_costs_a_step(ranks: int) -> None:
    assert ranks - 1 <= steps_of_messages(run_of(round_robin(ranks))) <= ranks


@pytest.mark.parametrize("ranks", range(4, 9))
@pytest.mark.parametrize("orders", [to_rank_0_first, one_at_a_time])
def test_ranks_that_wait_take_more_steps(ranks: int, orders: Callable[[int], Orders]) -> None:
    assert steps_of_messages(run_of(orders(ranks))) > ranks


def wrong(check: Callable[..., None], *arguments: object) -> str:
    try:
        check(Trial(0), *arguments)
    except Wrong as error:
        return str(error)
    return ""


def test_a_ring_sends_to_the_right_and_gathers_nowhere() -> None:
    right = run_of([[send((rank + 1) % 4, True), recv((rank - 1) % 4)] for rank in range(4)])
    star = run_of([[recv(other) for other in (1, 2, 3)], *[[send(0)] for _ in range(3)]])
    assert wrong(to_the_right, right) == wrong(no_rank_gathers, right) == ""
    assert wrong(to_the_right, star).startswith("rank 1 of 4 sends to rank 0")
    assert wrong(no_rank_gathers, star).startswith("everything is gathered on rank 0")


def test_the_rounds_of_a_tree_depend_on_the_order_of_its_messages() -> None:
    tree = {0: [1, 2], 1: [], 2: [3], 3: []}
    message = "{got} rounds, {least} are enough: {tree}"
    assert wrong(in_few_rounds, tree, 0, 2, message) == ""
    assert "3 rounds, 2 are enough: 0: 1, 2; 2: 3" in wrong(in_few_rounds, tree, 0, 2, message, True)


def test_a_message_that_carries_the_tensor_twice_is_found() -> None:
    run = run_of([[call(Kind.SEND, 1, True, 6)], [call(Kind.RECV, 0, True, 6)]])
    assert wrong(whole_tensors, run, [6]) == ""
    assert "a message of 6 elements, the tensor has 3 or 4" in wrong(whole_tensors, run, [3, 4])
