"""Messages between ranks, compared with what rings, trees and an all-to-all need: who sends to whom, in how
many rounds or steps.

Compare the results of the run first: traffic of a run whose results are wrong proves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.grading.checks.contract import Run, Trial


def sent(run: Run, rank: int) -> int:
    """Return the bytes of the messages that ``rank`` sends."""
    return run.bytes(rank, Kind.SEND)


def targets(run: Run, rank: int) -> list[int]:
    """Return the ranks to which ``rank`` sends, in order."""
    return [call.peer for call in run.calls(rank, Kind.SEND)]


# -- rings


def no_rank_gathers(t: Trial, run: Run) -> None:
    """No rank receives from all others while they receive only from it."""
    sources = [{call.peer for call in run.calls(rank, Kind.RECV)} for rank in range(run.world)]
    for rank, found in enumerate(sources):
        others_listen = all(other <= {rank} for other in sources if other is not found)
        star = run.world > 2 and len(found) == run.world - 1 and others_listen
        t.that(
            not star,
            "everything is gathered on rank {rank}: in a ring each rank communicates only with its two "
            "neighbours",
            rank=rank,
        )


def to_the_right(t: Trial, run: Run) -> None:
    """Each rank sends to its right neighbour only."""
    for rank in range(run.world):
        astray = [to for to in targets(run, rank) if to != (rank + 1) % run.world]
        t.that(
            not astray,
            "rank {rank} of {world} sends to rank {to}: in a ring each rank sends only to its right "
            "neighbour",
            rank=rank,
            world=run.world,
            to=astray[0] if astray else -1,
        )


# -- trees


def rounds(children: Mapping[int, Sequence[int]], rank: int, in_order: bool) -> int:
    """Return the rounds of the tree below ``rank``, in each of which a rank sends (or receives) one message:
    in the order of ``children``, or in the best order.
    """
    below = [rounds(children, child, in_order) for child in children[rank]]
    if not in_order:
        below.sort(reverse=True)
    return max((place + 1 + more for place, more in enumerate(below)), default=0)


def in_few_rounds(
    t: Trial,
    children: Mapping[int, Sequence[int]],
    root: int,
    least: int,
    message: str,
    in_order: bool = False,
) -> None:
    """A tree of messages takes ``least`` rounds. Each rank except ``root`` is the child of one rank.

    ``{tree}`` of the message are the messages, ``{got}`` and ``{least}`` the rounds.
    """
    got = rounds(children, root, in_order)
    tree = "; ".join(f"{rank}: {', '.join(map(str, others))}" for rank, others in children.items() if others)
    t.that(got == least, message, world=len(children), got=got, least=least, tree=tree)


def whole_tensors(t: Trial, run: Run, sizes: Sequence[int]) -> None:
    """Every message has as many elements as one of the tensors, whose sizes are ``sizes``."""
    for rank in range(run.world):
        other = next((call for call in run.calls(rank, Kind.SEND) if call.numel not in sizes), None)
        t.that(
            other is None,
            "rank {rank} of {world} sends a message of {got} elements, the tensor has {want}: each message "
            "carries the tensor once",
            rank=rank,
            world=run.world,
            got=other.numel if other else 0,
            want=" or ".join(map(str, sizes)),
        )


# -- all-to-all


def steps_of_messages(run: Run) -> int:
    """Return the steps that the messages take if a rank sends one and receives one in a step.

    A rank sends in the order of its calls, and a call starts after the blocking calls before it. A blocking
    send and the blocking receive next to it count as one call, because an exchange may make both at the same
    time. If several ranks send to one rank, that with the most calls left goes first.
    """
    calls = [[call for call in run.calls(rank) if call.kind.point_to_point] for rank in range(run.world)]
    done: list[set[int]] = [set() for _ in calls]
    left = [len(targets(run, rank)) for rank in range(run.world)]
    for step in itertools.count():
        if not any(left):
            return step
        ordered = True
        sends, receives = {rank for rank in range(run.world) if left[rank]}, set(range(run.world))
        while True:
            passed = []
            for rank in sorted(sends, key=lambda rank: len(done[rank]) - len(calls[rank])):
                to = _pass_next(calls, done, rank, receives, ordered)
                if to is not None:
                    receives.discard(to)
                    passed.append(rank)
                    left[rank] -= 1
            sends.difference_update(passed)
            if not passed and (not ordered or len(receives) < run.world):
                break
            ordered = bool(passed)  # the calls wait in another order than they look, for example in threads
    raise AssertionError("unreachable")


def _pass_next(
    calls: Sequence[Sequence[Call]], done: Sequence[set[int]], rank: int, receives: set[int], ordered: bool
) -> int | None:
    """Pass the next message of ``rank`` to a rank of ``receives``; return the receiver, or None if the
    message cannot be passed yet.
    """
    unsent = next(p for p, call in enumerate(calls[rank]) if call.kind is Kind.SEND and p not in done[rank])
    to = calls[rank][unsent].peer
    if to not in receives or unsent not in _ready(calls[rank], done[rank], ordered):
        return None
    for place in _ready(calls[to], done[to], ordered):
        call = calls[to][place]
        if call.kind in (Kind.RECV, Kind.RECV_ANY) and call.peer in (rank, -1):
            done[rank].add(unsent)
            done[to].add(place)
            return to
    return None


def _ready(calls: Sequence[Call], done: set[int], ordered: bool) -> Iterator[int]:
    """Yield the places of the calls that can start: with ``ordered``, after the blocking calls before."""
    before: list[int] = []
    for place, call in enumerate(calls):
        if place in done:
            continue
        pair = place > 0 and (call.kind is Kind.SEND) != (calls[place - 1].kind is Kind.SEND)
        if not ordered or before in ([], [place - 1] if pair else []):
            yield place
        before += [] if call.is_async else [place]
