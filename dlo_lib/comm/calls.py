"""The record of one communication call, shared by the tracer, the deadlock explainer and their readers.

A ``Call`` is created when a rank issues an operation. Collectives of a group meet in the order in which each
rank issues them: the k-th of one rank meets the k-th of the others. Point-to-point messages meet as the j-th
on (group, source, destination, tag). ``sequence`` is that k or j: two calls meet exactly when their
``channel()`` and ``sequence`` are equal.

Bytes: ``payload_bytes`` is the size of the full tensor (before a reduce-scatter, after an all-gather).
``ring_bytes`` is what a ring algorithm sends per rank for these B bytes, with f = (N-1)/N: all-reduce 2Bf;
reduce-scatter, all-gather and all-to-all Bf. Trees send other amounts.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple


class Kind(enum.Enum):
    """The operations of ``torch.distributed``, independent of the function or library that issues them."""

    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_GATHER = "all_gather"
    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"
    MONITORED_BARRIER = "monitored_barrier"  # meets only monitored barriers
    SEND = "send"
    RECV = "recv"
    RECV_ANY = "recv from any rank"
    NEW_GROUP = "new_group"
    JOIN = "init_process_group"
    UNKNOWN = "unknown operator"  # of a newer release; meets calls of the same operator

    @property
    def point_to_point(self) -> bool:
        """Whether it is a send or a receive."""
        return self in (Kind.SEND, Kind.RECV, Kind.RECV_ANY)

    @property
    def rooted(self) -> bool:
        """Whether one rank is the root."""
        return self in (Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER)


_TOWARDS = {
    Kind.SEND: "sends to",
    Kind.RECV: "receives from",
    Kind.BROADCAST: "broadcasts from",
    Kind.REDUCE: "reduces to",
    Kind.GATHER: "gathers to",
    Kind.SCATTER: "scatters from",
}


def require_peer(kind: Kind, rank: int, peer: int, size: int) -> None:
    """Refuse a peer or a root outside the group: gloo waits for rank -1 without end.

    Args:
        rank: the rank that calls, within the group.
        peer: the source, the destination or the root, within the group.
        size: the number of ranks of the group.

    Raises:
        ValueError: there is no such rank.
    """
    if kind in _TOWARDS and not 0 <= peer < size:
        raise ValueError(
            f"rank {rank} {_TOWARDS[kind]} rank {peer}, but the ranks are 0 to {size - 1}: "
            f"count them modulo {size}, as in (rank - 1) % {size}, or leave this call out"
        )


_KIND, _SITE = 1, -3  # their positions in a call and in its record


@dataclass(frozen=True, slots=True)
class CallSite:
    """The line that made a call: the nearest frame of user code, or of this library where there is none."""

    file: str
    line: int
    function: str
    api: str
    """The function of torch that this line called, such as ``isend`` or ``backward``."""
    caller: tuple[str, int] | None = None
    """File and line of the user's function that called this one, or None: the line may be a helper's."""


NOWHERE = CallSite("?", 0, "", "")


class Call(NamedTuple):
    """One operation as one rank issued it, with the sizes of the local tensors. A tuple, for speed."""

    number: int
    """Position in the order of issue on this rank: 1, 2, 3, ..."""
    kind: Kind
    group: str
    members: tuple[int, ...]
    """Global ranks of the group. For ``new_group``: all ranks of the world, which must all call it; ``shape``
    then holds the members of the new group."""
    sequence: int
    peer: int = -1
    """Global rank of the root, the destination or the source; -1 if there is none."""
    tag: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    numel: int = 0
    """Elements of this rank's tensors; -1 if the ranks may have different numbers (an uneven all-gather)."""
    payload_bytes: int = 0
    """0 if the kind is ``UNKNOWN``."""
    reduction: str = ""
    is_async: bool = False
    in_backward: bool = False
    by_reducer: bool = False
    """Issued by the C++ reducer of PyTorch's DistributedDataParallel."""
    send_splits: tuple[int, ...] = ()
    """All-to-all: number of elements for each member; otherwise empty."""
    receive_splits: tuple[int, ...] = ()
    site: CallSite = NOWHERE
    issued: int = 0
    """Time of the call, in ``time.monotonic_ns``."""
    operator: str = ""
    """The name in torch's dispatcher, if the kind is ``UNKNOWN``; otherwise empty."""

    @property
    def ring_bytes(self) -> float:
        """Bytes that this rank sends in a ring algorithm; a broadcast and a message send their payload."""
        ranks = len(self.members)
        if self.kind.point_to_point or self.kind is Kind.BROADCAST:
            return float(self.payload_bytes) if self.kind is not Kind.RECV and ranks > 1 else 0.0
        share = {
            Kind.ALL_REDUCE: 2.0,
            Kind.BARRIER: 0.0,
            Kind.MONITORED_BARRIER: 0.0,
            Kind.NEW_GROUP: 0.0,
        }.get(self.kind, 1.0)
        return share * self.payload_bytes * (ranks - 1) / ranks

    def channel(self, rank: int) -> tuple:
        """Return the key under which ``rank`` counts this call; a send and its receive share one key."""
        if self.kind is Kind.UNKNOWN:
            return (self.group, self.operator)
        return channel(self.kind, self.group, self.peer, self.tag, rank)

    def record(self) -> tuple:
        """Return plain values only, for a log that another process reads; inverse of ``from_record``."""
        site = self.site
        return (
            self[0],
            self.kind.value,
            *self[_KIND + 1 : _SITE],
            (site.file, site.line, site.function, site.api, site.caller),
            *self[_SITE + 1 :],
        )

    @classmethod
    def from_record(cls, record: tuple[Any, ...]) -> Call:
        """Return the call of which ``record`` was made."""
        values = list(record)
        values[_KIND], values[_SITE] = Kind(values[_KIND]), CallSite(*values[_SITE])
        return cls(*values)


def channel(kind: Kind, group: str, peer: int, tag: int, rank: int) -> tuple:
    """Return the key under which ``rank`` counts a call; a send and its receive share one key."""
    if kind is Kind.SEND:
        return (group, rank, peer, tag)
    if kind is Kind.RECV:
        return (group, peer, rank, tag)
    if kind is Kind.RECV_ANY:
        return (group, None, rank, tag)
    return (group,)
