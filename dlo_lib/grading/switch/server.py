"""One loop that serves all ranks of a run: it reads their messages, sends results, and notices ranks that
end.

Reads and writes never block: results for a rank that does not read are stored. A deadlock is found at once:
no rank can continue, and no message is left to read.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dlo_lib.base.text import tr
from dlo_lib.comm.calls import Call, CallSite
from dlo_lib.comm.deadlock.vocabulary import NameFile
from dlo_lib.grading.checks.asked import Asked
from dlo_lib.grading.checks.codec import NotPlain, unpack
from dlo_lib.grading.checks.contract import Nudge, Wrong
from dlo_lib.grading.checks.stand_in import answer_to, as_tensor
from dlo_lib.grading.switch.exchange import MAX_HELD, Delivery, Exchange, is_cell
from dlo_lib.grading.switch.memory import sent_and_unread
from dlo_lib.grading.switch.request import AskedCall, CallRequest, Mark, ScenarioEnd, Unwaited, Wait, read
from dlo_lib.grading.switch.wire import Frame, Inbox, Outbox, frame

TICK = 0.05  # seconds between two calls of ``Host.poll``
SETTLE = 0.3  # seconds that computing ranks have once others are stuck
MAX_FRAMES, MAX_MARKS = 200_000, 1000  # of one rank


class Host(Protocol):
    """The functions that the loop calls for the ranks' processes."""

    def memory(self, rank: int) -> int | None:
        """Return the bytes that the process of ``rank`` holds; None if unknown."""
        ...

    def source_file(self, file: str) -> str:
        """Return the name of ``file``, which a rank named as that of its call, whose lines messages show."""
        ...

    def handle_frame(self, rank: int, frame: Frame) -> bool | None:
        """Handle a frame that is not a message of the switch.

        Return True if the rank has finished, False if it has failed, otherwise None.
        """
        ...

    def disconnected(self, rank: int, exchange: Exchange) -> None:
        """Handle a connection that closed before ``rank`` ended. May raise."""
        ...

    def poll(self, exchange: Exchange) -> bool:
        """Return False to end the service; called about every 50 ms. May raise."""
        ...


@dataclass
class _Connection:
    """The state of the connection to one rank."""

    rank: int
    line: socket.socket
    inbox: Inbox
    outbox: Outbox
    frames: int = 0
    ended: bool = False
    events: int = selectors.EVENT_READ  # that the server waits for

    def unread_bytes(self) -> int:
        """Return the bytes of results that the rank has not read, here and in the kernel (Linux)."""
        return self.outbox.size + sent_and_unread(self.line)


class SwitchServer:
    """The switch for ranks at the other ends of ``lines``.

    ``received``: bytes already read from each. ``asked``: the functions of the check that each rank may call.
    """

    def __init__(
        self,
        lines: Sequence[socket.socket],
        host: Host,
        name_file: NameFile,
        nudge: Nudge | None = None,
        received: Sequence[bytes] = (),
        asked: Sequence[Sequence[Asked]] = (),
    ) -> None:
        self.exchange = Exchange(len(lines), name_file, nudge)
        self.held: dict[str, dict[int, int | None]] = {}
        """Memory in bytes by mark and rank; the largest value if a rank passed a mark several times."""
        self.marked: dict[tuple[str, int], int] = {}
        """The number of calls that a rank had made when it last passed a mark, by mark and rank."""
        self.open: dict[str, dict[int, tuple[Call, ...]]] = {}
        """The calls of a rank that were not complete when it last passed a mark, by mark and rank."""
        self.at_first_loss: tuple[list[int], str] | None = None
        """The ranks that computed, and a table of all ranks, when the first connection was lost."""
        self._host, self._name_file = host, name_file
        self._asked = asked or [()] * len(lines)
        received = received or [b""] * len(lines)
        ends = [(Inbox(line, earlier), Outbox(line)) for line, earlier in zip(lines, received)]
        self._connections = [_Connection(rank, lines[rank], *end) for rank, end in enumerate(ends)]
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until every rank has ended, or the others wait for a rank that has failed.

        Raises:
            Wrong: calls that do not agree, a deadlock, an invalid message, or a call that a function of the
                check refuses. Exceptions of the host's functions and of those of the check pass.
        """
        with self._selector:
            for connection in self._connections:
                self._selector.register(connection.line, selectors.EVENT_READ, connection)
            for connection in self._connections:
                self._handle_frames(connection)  # what has already arrived
            looked = 0.0
            while not all(connection.ended for connection in self._connections):
                if time.monotonic() - looked >= TICK:
                    looked = time.monotonic()
                    if not self._host.poll(self.exchange):
                        return
                self._serve_events(TICK)
                if self.exchange.disagrees:
                    self._wait_for_others()
                    raise self.exchange.mismatch()
                if self.exchange.stuck() and (stuck := self._wait_for_others()):
                    if self.exchange.failed:
                        return  # they wait for a rank that raised or died: the host reports that
                    raise self.exchange.deadlock(stuck)

    def _wait_for_others(self) -> dict[int, set[int]]:
        """Return the stuck ranks after all messages are read and computing ranks had time to reach their next
        wait.

        So the same mistake gives the same message, independent of the speed of ranks.
        """
        until = time.monotonic() + SETTLE
        while ((stuck := self.exchange.stuck()) or self.exchange.disagrees) and (
            left := until - time.monotonic()
        ) > 0:
            if not self._serve_events(left if any(map(self._computes, self._connections)) else 0.0):
                break
        return stuck

    def _computes(self, connection: _Connection) -> bool:
        view = self.exchange.views[connection.rank]
        return not connection.ended and (view.waits_for is None or view.other_threads)

    def _serve_events(self, seconds: float) -> bool:
        """Handle the events of the next ``seconds``; return False if there were none."""
        ready = self._selector.select(seconds)
        for key, events in ready:
            connection: _Connection = key.data
            if events & selectors.EVENT_WRITE:
                self._update_events(connection, connection.outbox.flush())
            if events & selectors.EVENT_READ:
                if not connection.inbox.pump():
                    self._disconnected(connection)
                    continue
                self._handle_frames(connection)
        return bool(ready)

    def _handle_frames(self, connection: _Connection) -> None:
        try:
            while (arrived := connection.inbox.take()) is not None:
                connection.frames += 1
                if connection.frames > MAX_FRAMES:
                    raise NotPlain("endless messages")
                self._handle_message(connection, arrived)
        except NotPlain as error:
            text = tr("rank {rank} sent something unreadable: {reason}", rank=connection.rank, reason=error)
            raise Wrong(text, tr("a rank sent something unreadable")) from error

    def _handle_message(self, connection: _Connection, arrived: Frame) -> None:
        match read(arrived, connection.rank, len(self._connections)):
            case CallRequest() as request if not connection.ended:
                for delivery in self.exchange.issue(replace(request, site=self.shown(request.site))):
                    self._send(delivery)
            case Wait(seq, helpers):
                self.exchange.wait(connection.rank, seq, helpers)
            case Mark(seq, name):
                self._mark(connection.rank, name)
                self._send(Delivery(connection.rank, seq, ()))
            case AskedCall() as call:
                self._answer(connection.rank, call)
            case Unwaited(calls):
                self.exchange.leave(connection.rank, calls)
            case ScenarioEnd(raised):
                self._end(connection, raised)
            case None:
                if (well := self._host.handle_frame(connection.rank, arrived)) is not None:
                    self._end(connection, not well)

    def shown(self, site: CallSite) -> CallSite:
        """Return the site with names of files whose lines a message may show.

        A caller that is no cell is left out, because a scenario of the check calls the student's function.
        """
        file, caller = self._host.source_file(site.file), site.caller
        if caller is not None and not is_cell(self._name_file(self._host.source_file(caller[0]))):
            caller = None
        return site if (file, caller) == (site.file, site.caller) else replace(site, file=file, caller=caller)

    def _mark(self, rank: int, name: str) -> None:
        """Record the memory of a rank, including what the switch holds for it.

        A rank could otherwise keep a tensor in a message that it receives later.
        """
        if name not in self.held and len(self.held) >= MAX_MARKS:
            raise NotPlain("endless marks")
        known, now = self.held.setdefault(name, {}).get(rank), self._host.memory(rank)
        if now is not None:
            now += self.exchange.unfinished_bytes(rank) + self._connections[rank].unread_bytes()
        self.held[name][rank] = now if known is None or now is None else max(known, now)
        self.marked[name, rank] = self.exchange.issued(rank)
        self.open.setdefault(name, {})[rank] = self.exchange.open_calls(rank)

    def _answer(self, rank: int, call: AskedCall) -> None:
        """Answer a call of a function of the check. A refusal ends the run: what the ranks do after it
        follows from it."""
        if call.function >= len(self._asked[rank]):
            raise NotPlain("a call of a function that the rank was not given")
        asked = self._asked[rank][call.function]
        answer = answer_to(asked, unpack(call.call))
        asked.raise_refusal()
        self._send(Delivery(rank, call.seq, (as_tensor(answer),)))

    def _end(self, connection: _Connection, raised: bool) -> None:
        connection.ended = True
        self.exchange.end(connection.rank, raised)

    def _disconnected(self, connection: _Connection) -> None:
        self._selector.unregister(connection.line)
        if not connection.ended:
            self.at_first_loss = self.at_first_loss or (self.exchange.busy(), self.exchange.table())
            self._end(connection, raised=True)
            self._host.disconnected(connection.rank, self.exchange)

    def _send(self, delivery: Delivery) -> None:
        connection = self._connections[delivery.rank]
        head = {
            "done": delivery.seq,
            "source": delivery.source,
            "sizes": [tensor.nbytes for tensor in delivery.tensors],
        }
        self._update_events(connection, connection.outbox.put(frame(head, delivery.tensors)))
        if sum(connection.outbox.size for connection in self._connections) > MAX_HELD:
            raise NotPlain(f"endless communication: {MAX_HELD >> 20} MiB were sent to the ranks and not read")

    def _update_events(self, connection: _Connection, alive: bool) -> None:
        waiting = alive and bool(connection.outbox)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
        if events != connection.events and connection.line in self._selector.get_map():
            connection.events = events
            self._selector.modify(connection.line, events, connection)
