"""What is known of one communication call: the words that the tracer, the dead-lock explainer and their readers share.

A ``Call`` is made when a rank issues an operation. Collectives of a group meet in the order in which each rank issues them: the k-th of one
rank meets the k-th of the others. Point-to-point messages meet as the j-th on (group, source, destination, tag). ``sequence`` is
that k or j, so two calls meet exactly when their ``channel()`` and ``sequence`` agree.

Bytes: ``payload_bytes`` is the size of the full tensor (before a reduce-scatter, after an all-gather); ``ring_bytes`` what a ring algorithm
then sends per rank, with f = (N-1)/N: all-reduce 2Bf, reduce-scatter and all-gather Bf, all-to-all Bf. Trees send other amounts.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple


class Kind(enum.Enum):
    """The operations of ``torch.distributed``, whatever function or library issued them."""

    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_GATHER = "all_gather"
    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"
    MONITORED_BARRIER = "monitored_barrier"  # which no barrier of the other kind meets
    SEND = "send"
    RECV = "recv"
    RECV_ANY = "recv from any rank"
    NEW_GROUP = "new_group"
    JOIN = "init_process_group"

    @property
    def point_to_point(self) -> bool:
        return self in (Kind.SEND, Kind.RECV, Kind.RECV_ANY)

    @property
    def rooted(self) -> bool:
        return self in (Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER)


_KIND, _SITE = 1, -2  # where a call and its record hold them


@dataclass(frozen=True, slots=True)
class Site:
    """Where a person's code called: the nearest frame that is neither torch's nor this library's; else the library's own."""

    file: str
    line: int
    function: str
    api: str
    """The function of torch that was called there, such as ``isend`` or ``backward``; where the library did, what it called."""


NOWHERE = Site("?", 0, "", "")


class Call(NamedTuple):
    """One operation as one rank issued it. Sizes are of the local tensors; times are ``time.monotonic_ns``. A tuple, for speed."""

    number: int
    """1, 2, 3, ... in the order of issue on this rank."""
    kind: Kind
    group: str
    members: tuple[int, ...]
    """Global ranks of the group; for ``new_group``, which all must call, the whole world: its own members are in ``shape``."""
    sequence: int
    peer: int = -1
    """Global rank of the root, the destination or the source; -1 when there is none."""
    tag: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    numel: int = 0
    """Elements of this rank's tensors; -1 where ranks may have different ones (an uneven all-gather)."""
    payload_bytes: int = 0
    reduction: str = ""
    is_async: bool = False
    in_backward: bool = False
    by_reducer: bool = False
    """Issued by the C++ reducer of PyTorch's DistributedDataParallel."""
    send_splits: tuple[int, ...] = ()
    """All-to-all: elements for each member; else empty."""
    receive_splits: tuple[int, ...] = ()
    site: Site = NOWHERE
    issued: int = 0

    @property
    def ring_bytes(self) -> float:
        ranks = len(self.members)
        if self.kind.point_to_point or self.kind is Kind.BROADCAST:
            return float(self.payload_bytes) if self.kind is not Kind.RECV and ranks > 1 else 0.0
        share = {Kind.ALL_REDUCE: 2.0, Kind.BARRIER: 0.0, Kind.MONITORED_BARRIER: 0.0, Kind.NEW_GROUP: 0.0}.get(self.kind, 1.0)
        return share * self.payload_bytes * (ranks - 1) / ranks

    def channel(self, rank: int) -> tuple:
        """What this call is counted on by ``rank``; a send and its receive are on the same channel."""
        return channel(self.kind, self.group, self.peer, self.tag, rank)

    def record(self) -> tuple:
        """Plain values only, for a log that another process reads; ``from_record`` is its inverse."""
        site = self.site
        return (self[0], self.kind.value, *self[_KIND + 1 : _SITE], (site.file, site.line, site.function, site.api), self.issued)

    @classmethod
    def from_record(cls, record: tuple[Any, ...]) -> Call:
        values = list(record)
        values[_KIND], values[_SITE] = Kind(values[_KIND]), Site(*values[_SITE])
        return cls(*values)


def channel(kind: Kind, group: str, peer: int, tag: int, rank: int) -> tuple:
    """What ``rank`` counts a call on; a send and its receive are on the same channel."""
    if kind is Kind.SEND:
        return (group, rank, peer, tag)
    if kind is Kind.RECV:
        return (group, peer, rank, tag)
    if kind is Kind.RECV_ANY:
        return (group, None, rank, tag)
    return (group,)
