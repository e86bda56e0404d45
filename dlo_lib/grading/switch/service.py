"""One loop that serves all ranks of a run: reads what they ask, passes on what the exchange delivers, notices who ends.

It waits for nobody: reads and writes never block, and a rank that does not read has its answers kept. When no rank can move and nothing is
left to read, that is a dead-lock, known at once.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dlo_lib.comm.vocabulary import NameFile
from dlo_lib.grading.codec import NotPlain
from dlo_lib.grading.contract import Nudge, Wrong
from dlo_lib.grading.switch.exchange import MAX_HELD, Delivery, Exchange
from dlo_lib.grading.switch.request import End, Mark, Request, Wait, read
from dlo_lib.grading.switch.wire import Frame, Inbox, Outbox, frame
from dlo_lib.text import tr

TICK = 0.05  # seconds between two looks of ``Host.look``
SETTLE = 0.3  # seconds that ranks which still compute have, once others can never go on
MAX_FRAMES, MAX_MARKS = 200_000, 1000  # of one rank


class Host(Protocol):
    """What the loop needs to know of the ranks' processes, and tells."""

    def memory(self, rank: int) -> int | None:
        """Bytes that the process of ``rank`` holds; None where that cannot be known."""
        ...

    def other(self, rank: int, frame: Frame) -> bool | None:
        """Take a frame that is none of the switch's. True: the rank has ended well; False: it failed; None: neither."""
        ...

    def gone(self, rank: int, exchange: Exchange) -> None:
        """The connection of ``rank`` has ended before the rank did. May raise."""
        ...

    def look(self, exchange: Exchange) -> bool:
        """Called about every 50 ms; False ends the service. May raise."""
        ...


@dataclass
class _Seat:
    """One rank's place."""

    rank: int
    line: socket.socket
    inbox: Inbox
    outbox: Outbox
    frames: int = 0
    ended: bool = False


class Service:
    """The switch for ranks at the other ends of ``lines``. ``begun``: what was read from each before."""

    def __init__(
        self, lines: Sequence[socket.socket], host: Host, name_file: NameFile, nudge: Nudge | None = None, begun: Sequence[bytes] = ()
    ) -> None:
        self.exchange = Exchange(len(lines), name_file, nudge)
        self.held: dict[str, dict[int, int | None]] = {}
        """Memory by mark and rank; the largest where a rank passed a mark several times."""
        self.marked: dict[tuple[str, int], int] = {}
        """By mark and rank, how many calls the rank had made when it last passed the mark."""
        self._host = host
        begun = begun or [b""] * len(lines)
        self._seats = [_Seat(rank, line, Inbox(line, begun[rank]), Outbox(line)) for rank, line in enumerate(lines)]
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until every rank has ended, or those left wait for one that failed.

        Raises:
            Wrong: calls that do not agree, a dead-lock, or bytes that are no message. What the host's functions raise.
        """
        with self._selector:
            for seat in self._seats:
                self._selector.register(seat.line, selectors.EVENT_READ, seat)
            for seat in self._seats:
                self._taken(seat)  # what had arrived before
            looked = 0.0
            while not all(seat.ended for seat in self._seats):
                if time.monotonic() - looked >= TICK:
                    looked = time.monotonic()
                    if not self._host.look(self.exchange):
                        return
                self._round(TICK)
                if self.exchange.disagrees:
                    self._settled()
                    raise self.exchange.mismatch()
                if self.exchange.stuck() and (stuck := self._settled()):
                    if self.exchange.failed:
                        return  # they wait for a rank that raised or died: that is what to tell
                    raise self.exchange.deadlock(stuck)

    def _settled(self) -> dict[int, set[int]]:
        """The ranks that are stuck once nothing is left to read, and those that still compute had a moment to come to where they stop.

        So the same mistake gives the same message, whoever was quicker.
        """
        until = time.monotonic() + SETTLE
        while ((stuck := self.exchange.stuck()) or self.exchange.disagrees) and (left := until - time.monotonic()) > 0:
            if not self._round(left if any(map(self._computes, self._seats)) else 0.0):
                break
        return stuck

    def _computes(self, seat: _Seat) -> bool:
        return not seat.ended and self.exchange.views[seat.rank].waits_for is None

    def _round(self, seconds: float) -> bool:
        """Deal with what happens within ``seconds``; False when nothing did."""
        ready = self._selector.select(seconds)
        for key, events in ready:
            seat: _Seat = key.data
            if events & selectors.EVENT_WRITE:
                self._sent(seat, seat.outbox.flush())
            if events & selectors.EVENT_READ:
                if not seat.inbox.pump():
                    self._gone(seat)
                    continue
                self._taken(seat)
        return bool(ready)

    def _taken(self, seat: _Seat) -> None:
        try:
            while (arrived := seat.inbox.take()) is not None:
                seat.frames += 1
                if seat.frames > MAX_FRAMES:
                    raise NotPlain("endless messages")
                self._heard(seat, arrived)
        except NotPlain as error:
            text = tr("rank {rank} sent something unreadable: {reason}", rank=seat.rank, reason=error)
            raise Wrong(text, tr("a rank sent something unreadable")) from error

    def _heard(self, seat: _Seat, arrived: Frame) -> None:
        match read(arrived, seat.rank, len(self._seats)):
            case Request() as request if not seat.ended:
                for delivery in self.exchange.issue(request):
                    self._send(delivery)
            case Wait(seq):
                self.exchange.wait(seat.rank, seq)
            case Mark(seq, name):
                self._mark(seat.rank, name)
                self._send(Delivery(seat.rank, seq, ()))
            case End(raised):
                self._end(seat, raised)
            case None:
                if (well := self._host.other(seat.rank, arrived)) is not None:
                    self._end(seat, not well)

    def _mark(self, rank: int, name: str) -> None:
        if name not in self.held and len(self.held) >= MAX_MARKS:
            raise NotPlain("endless marks")
        known, now = self.held.setdefault(name, {}).get(rank), self._host.memory(rank)
        self.held[name][rank] = now if known is None or now is None else max(known, now)
        self.marked[name, rank] = self.exchange.issued(rank)

    def _end(self, seat: _Seat, raised: bool) -> None:
        seat.ended = True
        self.exchange.end(seat.rank, raised)

    def _gone(self, seat: _Seat) -> None:
        self._selector.unregister(seat.line)
        if not seat.ended:
            self._end(seat, raised=True)
            self._host.gone(seat.rank, self.exchange)

    def _send(self, delivery: Delivery) -> None:
        seat = self._seats[delivery.rank]
        head = {"done": delivery.seq, "source": delivery.source, "sizes": [tensor.nbytes for tensor in delivery.tensors]}
        self._sent(seat, seat.outbox.put(frame(head, delivery.tensors)))
        if sum(seat.outbox.size for seat in self._seats) > MAX_HELD:
            raise NotPlain(f"endless communication: {MAX_HELD >> 20} MiB were sent to the ranks and not read")

    def _sent(self, seat: _Seat, alive: bool) -> None:
        if seat.line not in self._selector.get_map():
            return
        waiting = alive and bool(seat.outbox)
        self._selector.modify(seat.line, selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0), seat)
