"""The decision whether ranks can make progress, from the board alone: it uses neither torch nor a clock.

*Issuing* an operation satisfies its partners; only a *wait* blocks. A waiting rank is stuck when a partner
that it needs has not issued the matching operation and never will, because that partner has ended or is
itself stuck. The stuck ranks are therefore the largest set of waiting ranks in which each needs a rank of the
set or a rank that has ended (a greatest fixed point). A rank that computes is never in this set, however long
it takes, and neither is a rank that waits for it.

Calls that meet must also agree: in operation, dtype, size, root and reduction. Backends do not check this.
"""

from __future__ import annotations

import sys
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock.board import ENDED, Activity

_POSITIONS = 4096


@dataclass
class RankView:
    """What is known about one rank."""

    rank: int
    state: Activity = Activity.STARTING
    waits_for: Call | None = None
    since: int = 0
    """Time at which it entered its state, in ``time.monotonic_ns``."""
    death: str | None = None
    """How its process ended, if it ended without recording it."""
    lost: bool = False
    """Some of its calls were not seen: it counts as having issued every call that another rank waits for."""
    other_threads: bool = False
    """Its other threads may communicate while this thread waits or has finished."""
    last: Call | None = None
    issued: dict[tuple, int] = field(default_factory=lambda: defaultdict(int))
    """Number of calls it issued, by (send, receive or collective, channel)."""
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The members of the groups on which it issued calls."""

    @property
    def ended(self) -> bool:
        """Whether this rank issues no more calls."""
        return self.death is not None or (self.state in ENDED and not self.other_threads)

    @property
    def in_call(self) -> bool:
        """Whether this rank is in a call that needs other ranks, or the call failed."""
        return self.state in (Activity.WAITING, Activity.BROKEN)

    def note(self, call: Call) -> None:
        """Count a call of this rank."""
        if call.kind is not Kind.JOIN:
            self.last = call
        self.members[call.group] = call.members
        self.issued[_key(call.kind, call.channel(self.rank))] = call.sequence


@dataclass(frozen=True)
class Mismatch:
    """Calls that meet and do not agree. ``what`` names the first property in which they differ."""

    what: str
    calls: dict[int, Call]
    """The calls by rank; for a message, those of the sender and the receiver."""
    pair: tuple[int, int] | None = None
    """For an all-to-all, the sender and the receiver whose sizes differ."""


def _key(kind: Kind, channel: tuple) -> tuple:
    return (kind if kind.point_to_point else None, *channel)


def missing_partners(view: RankView, views: dict[int, RankView]) -> set[int]:
    """Return the ranks whose matching operation the wait of ``view`` still needs; empty if it can end."""
    call = view.waits_for
    if call is None:
        return set()
    me, group = view.rank, call.group

    def issued(rank: int, kind: Kind, channel: tuple) -> int:
        view = views.get(rank)  # a rank on another machine may have no row here
        return sys.maxsize if view is None or view.lost else view.issued[_key(kind, channel)]

    if call.kind is Kind.SEND:
        received = issued(call.peer, Kind.RECV, (group, me, call.peer, call.tag))
        takes_any = issued(call.peer, Kind.RECV_ANY, (group, None, call.peer, call.tag))
        return set() if received >= call.sequence or takes_any else {call.peer}
    if call.kind is Kind.RECV:
        return set() if issued(call.peer, Kind.SEND, call.channel(me)) >= call.sequence else {call.peer}
    if call.kind is Kind.RECV_ANY:
        others = [rank for rank in call.members if rank != me]
        for other in others:
            channel = (group, other, me, call.tag)
            if issued(other, Kind.SEND, channel) > issued(me, Kind.RECV, channel):
                return set()
        return set(others)
    partners: Iterable[int] = call.members
    if call.kind is Kind.NEW_GROUP:
        partners = call.shape
    elif call.kind is Kind.BROADCAST:
        partners = _tree_neighbours(call.members, call.peer, me)
    elif call.kind in (Kind.GATHER, Kind.SCATTER) and call.peer != me:
        # A leaf needs the root only; a reduce is a ring, in which every rank needs all others.
        partners = (call.peer,)
    return {
        rank
        for rank in partners
        if rank != me and issued(rank, call.kind, call.channel(rank)) < call.sequence
    }


def all_matched(views: dict[int, RankView]) -> bool:
    """Whether each rank has issued the calls that match all calls of the others, so that the next calls of
    all ranks meet. Receives from any rank count as not matched, because their senders are not known.
    """
    return not any(view.lost for view in views.values()) and all(
        views[other].issued.get((answer, *channel), 0) == count
        for view in views.values()
        for (kind, *channel), count in view.issued.items()
        for other, answer in _partners(kind, channel, view)
    )


def _partners(kind: Kind | None, channel: list, view: RankView) -> list[tuple[int, Kind | None]]:
    """Return the ranks that match the calls of ``view`` on a channel, and what they call there."""
    if kind is Kind.SEND:
        return [(channel[2], Kind.RECV)]
    if kind is Kind.RECV:
        return [(channel[1], Kind.SEND)]
    if kind is Kind.RECV_ANY:
        return [(view.rank, None)]  # which it never calls
    return [(other, None) for other in view.members[channel[0]]]


def _tree_neighbours(members: tuple[int, ...], root: int, me: int) -> set[int]:
    """Return the ranks that ``me`` needs in gloo's broadcast: the ranks up to the root, and its children.

    Counted from the root, rank v receives the data from v without its highest bit.
    """
    count, first = len(members), members.index(root)
    mine = (members.index(me) - first) % count
    needed = {mine | 1 << bit for bit in range(mine.bit_length(), count.bit_length())}
    above = mine
    while above:
        above &= ~(1 << above.bit_length() - 1)
        needed.add(above)
    return {members[(first + one) % count] for one in needed if one < count}


def stuck_ranks(views: dict[int, RankView]) -> dict[int, set[int]]:
    """Return the waiting ranks that can never make progress, each with the partners that it lacks."""
    ended = {view.rank for view in views.values() if view.ended}
    lacks = {}
    for view in views.values():
        waits = view.in_call and view.death is None and not view.other_threads and not view.lost
        if waits and (missing := missing_partners(view, views)):
            lacks[view.rank] = missing
    while True:
        hopeless = ended | lacks.keys()
        # One missing partner makes a rank stuck; a receive from any rank is stuck if all are missing.
        moves = {
            rank
            for rank, missing in lacks.items()
            if not (missing <= hopeless if _takes_any(views[rank]) else missing & hopeless)
        }
        if not moves:
            return lacks
        for rank in moves:
            del lacks[rank]


def _takes_any(view: RankView) -> bool:
    return view.waits_for is not None and view.waits_for.kind is Kind.RECV_ANY


class CallMatcher:
    """Calls by the position at which they meet.

    A position is removed once all calls have arrived and agree.
    """

    def __init__(self) -> None:
        self._positions: OrderedDict[tuple, dict[int, Call]] = OrderedDict()
        self._any_source: set[tuple] = set()
        """Where a message was received from any rank: later numbers do not show which messages meet."""

    def add(self, rank: int, call: Call) -> Mismatch | None:
        """Add a call; return a mismatch if it does not agree with the calls that it meets."""
        if call.kind is Kind.RECV_ANY:
            self._any_source.add((call.group, rank, call.tag))
            return None
        if (
            call.kind.point_to_point
            and (call.group, call.peer if call.kind is Kind.SEND else rank, call.tag) in self._any_source
        ):
            return None
        place = ("message" if call.kind.point_to_point else "", *call.channel(rank), call.sequence)
        calls = self._positions.setdefault(place, {})
        calls[rank] = call
        if len(calls) == 1:
            if len(self._positions) > _POSITIONS:  # the calls of ranks on other machines are missing
                self._positions.popitem(last=False)
            return None
        mismatch = message_mismatch(calls) if call.kind.point_to_point else collective_mismatch(calls)
        if mismatch is None and len(calls) == (2 if call.kind.point_to_point else len(call.members)):
            del self._positions[place]
        return mismatch


def message_mismatch(calls: dict[int, Call]) -> Mismatch | None:
    """A send and its receive must hold the same dtype and number of elements."""
    first, second = calls.values()
    if (first.dtype, first.numel) == (second.dtype, second.numel):
        return None
    return Mismatch("size" if first.payload_bytes != second.payload_bytes else "dtype", calls)


def collective_mismatch(calls: dict[int, Call]) -> Mismatch | None:
    """Return the first difference between the calls of the ranks at one position of a group's order."""
    for what, value in _MUST_AGREE.items():
        if len({value(call) for call in calls.values()}) > 1:
            return Mismatch(what, calls)
    if next(iter(calls.values())).kind is Kind.ALL_TO_ALL:
        return _splits_mismatch(calls)
    return None


def _splits_mismatch(calls: dict[int, Call]) -> Mismatch | None:
    members = next(iter(calls.values())).members
    for sender, sent in calls.items():
        for receiver, received in calls.items():
            if sent.send_splits[members.index(receiver)] != received.receive_splits[members.index(sender)]:
                return Mismatch("splits", calls, (sender, receiver))
    return None


def signature(call: Call) -> int:
    """Return a number (32 bits) that is equal for calls that may meet, and the same in every process."""
    if call.kind.point_to_point:
        return zlib.crc32(f"{call.dtype} {call.numel}".encode())
    return zlib.crc32(repr([value(call) for value in _MUST_AGREE.values()]).encode())


def _size(call: Call) -> tuple[int, ...]:
    """Return the members of a new group, or the number of elements if it must be equal on all ranks."""
    if call.kind is Kind.NEW_GROUP:
        return call.shape
    return () if call.kind is Kind.ALL_TO_ALL else (call.numel,)


_MUST_AGREE = {
    "kind": lambda call: call.kind.value,
    "dtype": lambda call: call.dtype,
    "root": lambda call: call.peer,
    "size": _size,
    "reduction": lambda call: call.reduction,
}
