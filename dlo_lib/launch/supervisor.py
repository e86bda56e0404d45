"""The caller's side while ranks work: it forwards their output, reads their messages, notices their ends.

One loop waits for all of this. It ends when every rank has answered, or when the error to raise is known: the
error of the rank that failed first (``launch.failure``), or a deadlock that the watcher explains.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from dlo_lib.comm.deadlock.board import Activity
from dlo_lib.comm.deadlock.exit_status import MemoryKills, describe_exit
from dlo_lib.comm.deadlock.watcher import POLL_S, Watcher
from dlo_lib.launch.client import Launch
from dlo_lib.launch.failure import Ending, RankFailure, RankState, blame, dead_locked, timed_out
from dlo_lib.launch.frames import name_cells
from dlo_lib.launch.rank import HEADER, RETURNED

_SETTLE_S = 0.2  # after a rank's failure: time for the same failure to show on other ranks
_REPORT_S = 5.0  # after an error of a rank: time for its report
_CAUSE_S = 1.0  # after broken communication: time for the cause to show
_CHUNK_BYTES = 1 << 20


class Output(Protocol):
    """Receives what one rank prints."""

    def pump(self) -> bool:
        """Take over what has arrived; return False if the pipe is empty or at its end."""

    def finish(self) -> None:
        """Take over what is left."""


class Supervisor:
    """Waits for an answer of each rank of ``launch``.

    Args:
        watcher: explains deadlocks; None if they are not explained.
        outputs: receive what each rank prints.
        timeout: seconds; None waits forever.
        with_stacks: add the stack of each rank to the explanation of a deadlock.
    """

    def __init__(
        self,
        launch: Launch,
        watcher: Watcher | None,
        outputs: Sequence[Output],
        timeout: float | None = None,
        with_stacks: bool = False,
    ) -> None:
        self.launch = launch
        self.watcher = watcher
        self.outputs = outputs
        self.states = [RankState(rank) for rank in range(len(launch.files))]
        self._with_stacks = with_stacks
        self._kills = MemoryKills()
        self._table = ""
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._received = [bytearray() for _ in self.states]
        self.ended: set[int] = set()
        """The ranks whose processes have ended."""
        self._selector = selectors.DefaultSelector()

    def listen(self) -> None:
        """Begin to read from the ranks and from the server that forks them."""
        self._selector.register(self.launch.control, selectors.EVENT_READ, self._read_exit)
        for rank, files in enumerate(self.launch.files):
            self._selector.register(files.output, selectors.EVENT_READ, partial(self._read_output, rank))
            self._selector.register(files.channel, selectors.EVENT_READ, partial(self._read_messages, rank))

    def wait_for_outcome(self) -> RankFailure | None:
        """Wait until all ranks have returned (None) or the error to raise is known."""
        while any(state.ending is Ending.RUNNING for state in self.states):
            explanation = self.watcher.look() if self.watcher is not None else None
            failed = [state for state in self.states if state.failed]
            if explanation is not None and self._error_is_coming():
                explanation = None
            if explanation is not None and all(state.is_consequence for state in failed):
                # Broken connections are a consequence of the deadlock.
                return dead_locked(self.states, explanation, self._stacks() if self._with_stacks else ())
            until = [state.at + (_CAUSE_S if state.is_consequence else _SETTLE_S) for state in failed]
            if self._deadline is not None:
                until.append(self._deadline)
            if not self.wait(min(until, default=None), POLL_S if self.watcher is not None else None):
                break
        if any(state.failed for state in self.states):
            return blame(self.states, self._table)
        if self._timeout is not None and any(state.ending is Ending.RUNNING for state in self.states):
            return timed_out(self.states, self._timeout, self._stacks())
        return None

    def _error_is_coming(self) -> bool:
        """Whether a rank has raised an error that it has not reported yet. It is the cause, not the others
        that wait for this rank."""
        assert self.watcher is not None
        now = time.monotonic_ns()
        return any(
            view.state is Activity.RAISED
            and self.states[rank].ending is Ending.RUNNING
            and now - view.since < _REPORT_S * 1e9
            for rank, view in self.watcher.views.items()
        )

    def _stacks(self) -> list[str]:
        return [name_cells(stack) for stack in self.launch.stacks()]

    def wait(self, until: float | None, at_most: float | None = None) -> bool:
        """Handle the next events, for at most ``at_most`` seconds; return False once ``until`` has passed."""
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            return False
        for key, _ in self._selector.select(
            min((wait for wait in (left, at_most) if wait is not None), default=None)
        ):
            key.data()
        return True

    def _forget(self, source: int | socket.socket) -> None:
        if source in self._selector.get_map():  # one round of events may contain a source twice
            self._selector.unregister(source)

    def _read_output(self, rank: int) -> None:
        if not self.outputs[rank].pump():
            self._forget(self.launch.files[rank].output)

    def _read_messages(self, rank: int) -> bool:
        """Read what has arrived from a rank; return False if nothing has, or it has answered."""
        channel, received = self.launch.files[rank].channel, self._received[rank]
        try:
            data = channel.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            self._forget(channel)  # its process has ended: the server reports how
            return False
        received += data
        while len(received) >= HEADER.size:
            kind, size = HEADER.unpack_from(received)
            if len(received) < HEADER.size + size:
                break
            if len(received) == HEADER.size + size:  # no copy of a large result
                message, received = received, bytearray()
                self._received[rank] = received
                del message[: HEADER.size]
            else:
                message = received[HEADER.size : HEADER.size + size]
                del received[: HEADER.size + size]
            self.on_message(rank, kind, message)
        return self.states[rank].ending is Ending.RUNNING

    def on_message(self, rank: int, kind: bytes, message: bytearray) -> None:
        """Handle a message of a rank: its result or its error."""
        state = self.states[rank]
        state.at = time.monotonic()
        if kind == RETURNED:
            state.ending, state.result = Ending.RETURNED, message
        else:
            report = json.loads(message)
            state.ending, state.headline, state.is_consequence = (
                Ending.RAISED,
                report["headline"],
                report["is_consequence"],
            )
            state.traceback = name_cells(report["traceback"])

    def _read_exit(self) -> None:
        report = self.launch.next_exit()
        if report is None:
            raise RankFailure(self.launch.lost())
        self.on_exit(*report)

    def on_exit(self, rank: int, status: int) -> None:
        """Note the end of a rank's process, with its wait status."""
        self.ended.add(rank)
        state = self.states[rank]
        # It may have answered before its end.
        while state.ending is Ending.RUNNING and self._read_messages(rank):
            pass
        if state.ending is Ending.RUNNING:
            state.ending, state.at, state.headline = (
                Ending.DIED,
                time.monotonic(),
                describe_exit(status, self._kills),
            )
            if self.watcher is not None:
                self.watcher.died(rank, state.headline)
                self._table = self._table or self.watcher.table()
            if stack := name_cells(self.launch.files[rank].stack()):
                state.traceback = f"It was here (most recent call last):\n{stack}"

    def close(self) -> None:
        """Take over what is left of the output, and stop reading."""
        for output in self.outputs:
            output.finish()
        self._selector.close()
