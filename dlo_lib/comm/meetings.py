"""Which calls of a trace met: those of different ranks that were one communication, and what each tells about the others.

Until the last one has called nothing travels: what the early ones have until then is a late partner, not a slow wire. And what has been
received has been sent, which is all that is known of the end of an ``isend`` that is waited for much later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dlo_lib.comm.calls import Kind

if TYPE_CHECKING:
    from dlo_lib.comm.trace import Event


def tell_each_other(events: Iterable[Event]) -> None:
    """Note in the events of several ranks, on one clock, when all had called, and of messages when they had arrived.

    Nothing is noted where a partner is missing, or where one was over before all had called: a root may need nobody, and ranks whose traces
    began at different calls count differently.
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
    """The events that met, complete ones only. Messages received from any rank met nobody in particular."""
    found: dict[tuple, list[Event]] = defaultdict(list)
    for event in events:
        if event.call.kind is not Kind.RECV_ANY:
            found[(event.call.kind.point_to_point, *event.call.channel(event.rank), event.call.sequence)].append(event)
    return [met for met in found.values() if len(met) == (2 if met[0].call.kind.point_to_point else len(met[0].call.members))]
