"""Which calls of different ranks belong to one communication, and what each says about the others.

No data moves until the last rank has called. Until then the other ranks wait for a late partner, not for a
slow link. A message that was received has been sent; this is all that is known about the end of an ``isend``
that is waited for much later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from dlo_lib.comm.calls import Kind
from dlo_lib.comm.tracing.events import Event


def match_events(events: Iterable[Event]) -> None:
    """Set ``all_called`` and, for messages, ``arrived`` in events of several ranks that share one clock.

    Nothing is set if a partner is missing, or if one call was over before all ranks had called. The latter
    happens for a root that needs no other rank, and if the traces of the ranks began at different calls.
    """
    for met in _meetings(events):
        moment = max(event.issued for event in met)
        if any(event.over is not None and event.over < moment for event in met):
            continue
        for event in met:
            event.all_called = moment
        if met[0].call.kind.point_to_point:
            send, receive = sorted(met, key=lambda event: event.call.kind is not Kind.SEND)
            send.arrived = receive.over


def _meetings(events: Iterable[Event]) -> list[list[Event]]:
    """Return the complete groups of matching events. A receive from any rank matches no particular event."""
    found: dict[tuple, list[Event]] = defaultdict(list)
    for event in events:
        if event.call.kind is not Kind.RECV_ANY:
            found[
                (event.call.kind.point_to_point, *event.call.channel(event.rank), event.call.sequence)
            ].append(event)
    return [
        met
        for met in found.values()
        if len(met) == (2 if met[0].call.kind.point_to_point else len(met[0].call.members))
    ]
