"""The object ``ranks`` of a notebook: it starts the ranks when they are needed and releases idle ones."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle

from dlo_lib.errors import UserError, require_count
from dlo_lib.launch.client import end_server
from dlo_lib.launch.failure import RankFailure
from dlo_lib.launch.values import pack_variables, unpack_result
from dlo_lib.live_ranks.messages import ASSIGN, COMPLETE, EVALUATE, RUN, RankCell
from dlo_lib.live_ranks.session import Reply, Session
from dlo_lib.live_ranks.transcript import Transcript
from dlo_lib.text import tr

IDLE_VARIABLE = "DLO_RANKS_IDLE_MINUTES"
IDLE_MINUTES = 20.0


class Ranks:
    """The ranks of a notebook.

        %%ranks 4                  runs a cell on four ranks, and starts them first if they do not run
        ranks.pull("loss")         the values of a variable, or of an expression, on all ranks
        ranks.push("config")       gives all ranks the variable `config` of the notebook
        ranks.stop()               ends the ranks

    Attributes:
        idle_minutes: the ranks are released when no cell has used them for so long; 0 keeps them. It is
            ``$DLO_RANKS_IDLE_MINUTES`` at first, or 20.
    """

    def __init__(self, namespace: Mapping[str, object]) -> None:
        self.idle_minutes = _idle_minutes()
        self._namespace = namespace
        self._session: Session | None = None
        self._released = 0  # number of ranks that were released because they were idle
        self._notes: list[str] = []
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks that run; 0 if none do."""
        return self._session.world_size if self._session is not None else 0

    def __repr__(self) -> str:
        """Return the number of ranks and what they can do."""
        if not self.world_size:
            return tr("no ranks: a cell that begins with %%ranks 4 starts four")
        return tr("{count} ranks, for cells that begin with %%ranks", count=self.world_size)

    def start(self, world_size: int) -> None:
        """Start ``world_size`` ranks; ranks that run are kept if their number is the same, and else ended.

        Raises:
            UserError: ``world_size`` is not a whole number of at least 1.
            RankFailure: the ranks did not start.
        """
        require_count("the number of ranks", world_size)
        with self._lock:
            if self.world_size == world_size:
                return
            if self.world_size:
                self._notes.append(
                    tr("The {count} ranks were ended, and their variables are lost.", count=self.world_size)
                )
                self.stop()
            self._session = Session(world_size)
            self._released = 0

    def come_back(self) -> None:
        """Start as many ranks as were released, if they were."""
        with self._lock:
            if self._released:
                self.start(self._released)

    def stop(self) -> None:
        """End the ranks; their variables are lost."""
        with self._lock:
            self._stop_timer()
            if self._session is not None:
                self._session.close()
                self._session = None

    def pull(self, name: str, rank: int | None = None) -> Any:
        """Return the values of a variable on all ranks as a list, or that of one rank.

        Tensors arrive on the CPU. ``name`` may also be an expression, such as ``"layer.weight.grad"``.

        Raises:
            UserError: no ranks run, or there is no rank with this number.
            RankFailure: the expression raises an error on a rank, or its value cannot be copied.
        """
        values = [unpack_result(answer) for answer in self._ask(EVALUATE, name.encode(), self._chosen(rank))]
        return values if rank is None else values[0]

    def push(self, *names: str, rank: int | None = None, **values: object) -> None:
        """Copy variables of the notebook, or ``values``, to the ranks, under the same names.

        Raises:
            UserError: no ranks run, there is no rank with this number, the notebook has no variable of this
                name, or a value cannot be copied.
        """
        for name in names:
            if name not in self._namespace:
                raise UserError(f"the notebook has no variable {name}: define it first")
        both = {name: self._namespace[name] for name in names} | values
        self._ask(ASSIGN, pack_variables(both), self._chosen(rank))

    def run(
        self,
        cell: RankCell,
        rank: int | None = None,
        progress: Callable[[Sequence[Transcript]], None] = lambda _: None,
    ) -> tuple[Reply, list[Transcript]]:
        """Run a cell on all ranks, or on one; return how it ended, and the output of each rank.

        Args:
            progress: called with the output while the ranks work.

        Raises:
            UserError: no ranks run, or there is no rank with this number.
            RankFailure: the ranks are lost.
        """
        chosen = self._chosen(rank)
        with self._in_use() as session:
            transcripts = session.transcripts()
            reply = session.request(
                RUN, cloudpickle.dumps(cell), chosen, transcripts, lambda: progress(transcripts)
            )
        return reply, transcripts

    def complete(self, text: str, cursor: int, rank: int = 0) -> list[tuple[int, int, str, str]]:
        """Return the completions of ``text`` on a rank: begin, end, text and type of each.

        Empty if no ranks run, if they are in use, or if it fails: there is no place to show why.
        """
        if not self._lock.acquire(blocking=False):
            return []
        try:
            if not self.world_size:
                return []
            content = json.dumps([text, cursor]).encode()
            (answer,) = self._ask(COMPLETE, content, [min(rank, self.world_size - 1)])
            return [tuple(found) for found in json.loads(answer)]
        except RankFailure:
            return []
        finally:
            self._lock.release()

    def take_notes(self) -> list[str]:
        """Return what has become of the ranks since the last call, in sentences."""
        notes, self._notes = self._notes, []
        return notes

    def _chosen(self, rank: int | None) -> list[int]:
        if not self.world_size:
            notes = " ".join(self.take_notes())
            raise UserError(f"{notes} no ranks run: begin a cell with %%ranks 4".strip())
        if rank is None:
            return list(range(self.world_size))
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise UserError(f"there is no rank {rank}: the ranks are 0 to {self.world_size - 1}")
        return [rank]

    def _ask(self, kind: bytes, content: bytes, ranks: Sequence[int]) -> tuple[bytes | bytearray, ...]:
        with self._in_use() as session:
            reply = session.request(kind, content, ranks)
        self._notes += reply.notes
        if reply.interrupted:
            raise KeyboardInterrupt
        if reply.failure is not None:
            raise reply.failure
        return reply.answers

    @contextmanager
    def _in_use(self) -> Iterator[Session]:
        """Keep the ranks for a request; afterwards end them if they are lost."""
        with self._lock:
            self._stop_timer()
            session = self._session
            if session is None:
                raise UserError("no ranks run: begin a cell with %%ranks 4")
            try:
                yield session
            finally:
                if session.usable:
                    self._start_timer()
                else:
                    self._notes.append(tr("The ranks were ended, and their variables are lost."))
                    self.stop()

    def _start_timer(self) -> None:
        if self.idle_minutes > 0:
            self._timer = threading.Timer(60 * self.idle_minutes, self._release, [self.idle_minutes])
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release(self, minutes: float) -> None:
        """End the ranks and the server that forks them, which hold the memory."""
        with self._lock:
            if self._timer is not threading.current_thread():
                return  # a cell was faster
            self._released = self.world_size
            self.stop()
            end_server()
            self._notes.append(
                tr(
                    "The ranks were released after {minutes:g} minutes without a cell, and their variables "
                    "are lost.",
                    minutes=minutes,
                )
            )


def _idle_minutes() -> float:
    text = os.environ.get(IDLE_VARIABLE, "")
    try:
        minutes = float(text or IDLE_MINUTES)
    except ValueError:
        minutes = -1.0
    if not 0 <= minutes < float("inf"):
        raise UserError(f'{IDLE_VARIABLE} is "{text}": use a number of minutes, or 0 to keep idle ranks')
    return minutes
