"""What passed between the ranks of a run, compared with what the technique needs.

A message may use ``{rank}``, ``{got}`` (bytes), ``{want}`` (bytes), ``{count}`` (calls), ``{kinds}``
(their names) and the values that are passed by name. Compare the results of the run first: traffic of a run
whose results are wrong proves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dlo_lib.comm.calls import Kind
from dlo_lib.grading.checks.claimed import Claimed
from dlo_lib.grading.checks.contract import Nudge, Run, Trial
from dlo_lib.grading.checks.runs import KEPT_NUMBERS
from dlo_lib.labkit.compare import fields


def kinds_of(run: Run, rank: int, besides: Collection[Kind] = ()) -> str:
    """Return the names of the calls that ``rank`` made, sorted, without those of ``besides``;
    empty when there are none."""
    return ", ".join(sorted({call.kind.value for call in run.calls(rank)} - {kind.value for kind in besides}))


def passes_only(t: Trial, run: Run, allowed: Collection[Kind], message: str) -> None:
    """No rank makes calls of other kinds than ``allowed``; ``{kinds}`` of the message are the others."""
    for rank in range(run.world):
        others = kinds_of(run, rank, allowed)
        t.that(not others, message, **fields(message, rank=rank, kinds=others))


def passes_exactly(
    t: Trial,
    run: Run,
    want: int | Sequence[int],
    message: str,
    kind: Kind | None = None,
    calls: int | None = None,
    **values: object,
) -> None:
    """Every rank passes ``want`` bytes (one number, or one for each rank), in
    ``calls`` calls if that is given.

    Args:
        kind: count the calls of this kind alone.
    """
    for rank in range(run.world):
        right = want if isinstance(want, int) else want[rank]
        got, count = run.bytes(rank, kind), len(run.calls(rank, kind))
        good = got == right and (calls is None or count == calls)
        t.that(good, message, **_fields(message, run, rank, got, right, count, values))


def passes_at_most(
    t: Trial,
    run: Run,
    most: int,
    message: str,
    kind: Kind | None = None,
    calls: int | None = None,
    **values: object,
) -> None:
    """No rank passes more than ``most`` bytes; if ``calls`` is given, each makes this number of calls."""
    for rank in range(run.world):
        got, count = run.bytes(rank, kind), len(run.calls(rank, kind))
        good = got <= most and (calls is None or count == calls)
        t.that(good, message, **_fields(message, run, rank, got, most, count, values))


def passes_at_least(t: Trial, run: Run, least: int, message: str, **values: object) -> None:
    """No rank passes less than ``least`` bytes, which are ``{want}`` of the message."""
    for rank in range(run.world):
        got, count = run.bytes(rank), len(run.calls(rank))
        t.that(got >= least, message, **_fields(message, run, rank, got, least, count, values))


def makes_calls(
    t: Trial,
    run: Run,
    kind: Kind,
    want: int,
    message: str,
    in_backward: bool | None = None,
    **values: object,
) -> None:
    """Every rank makes ``want`` calls of ``kind``, which are ``{count}`` of the message.

    Args:
        in_backward: count those of the backward pass alone, or those outside of it alone; None counts all.
    """
    for rank in range(run.world):
        counted = [call for call in run.calls(rank, kind) if in_backward in (None, call.in_backward)]
        shown = fields(message, rank=rank, count=len(counted), want=want, **values)
        t.that(len(counted) == want, message, **shown)


def uses_what_arrives(t: Trial, run: Run, kind: Kind | None = None, rank: int = 0, call: int = -1) -> None:
    """The result of ``rank`` depends on what it receives in a call of ``kind``.

    The scenario runs again on the same inputs, and one number that the rank receives is changed in transit. A
    result that does not change came to the rank on another way than through its messages, for example through
    a file lock, which no count of bytes shows.

    Args:
        run: a run whose results are right.
        kind: None for the kind of the rank's last call.
        call: the number of the call of this kind on this rank, -1 for the last one.
    """
    calls = run.calls(rank, kind)
    if kind is Kind.RECV and not calls:
        calls = run.calls(rank, Kind.RECV_ANY)
    t.that(bool(calls), "rank {rank} receives nothing", rank=rank)
    same_kind = run.calls(rank, calls[-1].kind)
    # The root of a broadcast receives nothing in it.
    places = [
        place for place, one in enumerate(same_kind) if one.kind is not Kind.BROADCAST or one.peer != rank
    ]
    t.that(bool(places), "rank {rank} receives nothing", rank=rank)
    place = places[call % len(places)]
    chosen = same_kind[place]
    members = chosen.members
    begin = (members.index(rank) + 1) % len(members) * chosen.numel if chosen.kind is Kind.ALL_GATHER else 0
    assert run.repeat is not None
    before, same = plain(run.results[rank]), True
    for offset in (0, chosen.numel // 2):  # the first one may be padding
        if same:
            again = run.repeat(Nudge(chosen.kind, rank, place, element=begin + offset, by=3.0))
            same = same_plain(before, plain(again.results[rank]))
    message = (
        "the result of rank {rank} does not depend on what it receives: a number of its {kind} number {call} "
        "was changed on the way, and the result is the same. Compute with the received values"
    )
    t.that(not same, message, rank=rank, kind=chosen.kind.value, call=place + 1)


def sends_one_of(
    t: Trial,
    run: Run,
    kind: Kind,
    known: Sequence[Sequence[Tensor]],
    message: str,
    rtol: float = 1e-6,
    first: int | None = None,
    divided: float = 1.0,
) -> None:
    """In each call of ``kind``, every rank sends the numbers of one of ``known[rank]``, or nothing.

    A rank that knows the inputs of the others could compute a right result and send messages of the right
    size with other numbers. The order of the numbers is free, unless a call sends more than the run keeps.

    Args:
        rtol: largest norm of the difference, relative to the norm of the right numbers.
        first: compare the first calls of the kind only.
        divided: the largest number by which a rank may have divided what it sends; 1 or more.
    """
    for rank in range(run.world):
        for sent in run.numbers(rank, kind)[:first]:
            good = not sent.numel() or any(_same_numbers(sent, want, rtol, divided) for want in known[rank])
            t.that(good, message, **fields(message, rank=rank))


def _same_numbers(sent: Tensor, want: Tensor, rtol: float, divided: float) -> bool:
    got, right = sent.double(), want.reshape(-1).to(sent.dtype).double()
    if right.numel() > got.numel() == KEPT_NUMBERS:
        right = right[:KEPT_NUMBERS]
    elif right.numel() == got.numel():
        got, right = got.sort().values, right.sort().values
    if got.shape != right.shape:
        return False
    length = right.norm()
    if divided > 1 and got.norm() > 0:
        got *= (length / got.norm()).clamp(1, divided)
    return bool((got - right).norm() <= rtol * length)


def plain(result: Any) -> list[Any]:
    """Return the leaves of a result in order, without claims, which are no evidence."""
    if isinstance(result, Claimed):
        return []
    if isinstance(result, dict):
        return [leaf for value in result.values() for leaf in plain(value)]
    if isinstance(result, (list, tuple)):
        return [leaf for value in result for leaf in plain(value)]
    return [result]


def same_plain(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two lists of leaves have equal values."""
    return len(one) == len(other) and all(
        torch.equal(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else type(a) is type(b) and a == b
        for a, b in zip(one, other)
    )


def _fields(
    message: str, run: Run, rank: int, got: int, want: int, count: int, values: dict[str, object]
) -> dict[str, object]:
    kinds = kinds_of(run, rank) or "no call"
    return fields(message, rank=rank, got=got, want=want, count=count, kinds=kinds, **values)
