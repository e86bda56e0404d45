"""The object ``ranks`` of a notebook: it starts the ranks when they are needed and releases idle ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import torch

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.base.ranks_idle import idle_minutes
from dlo_lib.base.text import tr
from dlo_lib.launch.client import end_server
from dlo_lib.launch.failure import RankFailure
from dlo_lib.launch.values import pack_variables, unpack_result
from dlo_lib.live_ranks.devices import Devices, note_on_gpus
from dlo_lib.live_ranks.messages import ASSIGN, COMPLETE, EVALUATE, RUN, RankCell
from dlo_lib.live_ranks.session import Reply, Session
from dlo_lib.live_ranks.transcript import Transcript


class Ranks:
    """The ranks of a notebook.

        %%ranks 4                  runs a cell on four ranks, and starts them first if they do not run
        %%ranks --job 1234         runs a cell on a rank for each GPU of a running job of SLURM
        ranks.pull("loss")         the values of a variable, or of an expression, on all ranks
        ranks.push("config")       gives all ranks the variable `config` of the notebook
        ranks.stop()               ends the ranks

    Attributes:
        idle_minutes: the ranks are released when no cell has used them for so long; 0 keeps them. It is
            ``$DLO_RANKS_IDLE_MINUTES`` at first, or 20.
    """

    def __init__(self, namespace: Mapping[str, object]) -> None:
        self.idle_minutes = idle_minutes()
        self._namespace = namespace
        self._session: Session | None = None
        self._place: _Place | None = None
        self._released: _Place | None = None
        """Where ranks were that were released because they were idle."""
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
        assert self._place is not None
        if self._place.job:
            return tr(
                "{count} ranks in job {job}, for cells that begin with %%ranks",
                count=self.world_size,
                job=self._place.job,
            )
        return tr("{count} ranks, for cells that begin with %%ranks", count=self.world_size)

    def start(
        self, world_size: int | None = None, job: int | str | None = None, devices: Devices = Devices.ANY
    ) -> None:
        """Start ranks; those that run are kept if they are as many at the same place, and else ended.

        Args:
            world_size: the number of ranks; in a job it may be None for a rank for each GPU of the job, or
                for each task if it has no GPU.
            job: the number of a running job of SLURM; None: on this machine.
            devices: where the ranks compute.

        Raises:
            UserError: ``world_size`` is not a whole number of at least 1, there is no GPU for each rank and
                ``devices`` asks for one, or the job cannot be used.
            RankFailure: the ranks did not start.
        """
        if world_size is not None or job is None:
            require_count("the number of ranks", world_size)
        wanted = _Place(world_size or 0, None if job is None else str(job), devices)
        with self._lock:
            if self._place is not None and self._place.is_as(wanted):
                return
            found = None
            if wanted.job is not None:
                from dlo_lib.live_ranks.slurm_job import running_job

                found = running_job(wanted.job)
                wanted = replace(wanted, world_size=found.ranks(world_size))
            if self.world_size:
                self._notes.append(
                    tr("The {count} ranks were ended, and their variables are lost.", count=self.world_size)
                )
                self.stop()
            self._session = Session(wanted.world_size, devices, found)
            self._place, self._released = wanted, None
            if found is None and (note := note_on_gpus(devices, torch.cuda.device_count(), self.world_size)):
                self._notes.append(note)

    def come_back(self) -> None:
        """Start as many ranks as were released, if they were."""
        with self._lock:
            if (there := self._released) is not None:
                self.start(there.world_size, there.job, there.devices)

    def stop(self) -> None:
        """End the ranks; their variables are lost."""
        with self._lock:
            self._stop_timer()
            if self._session is not None:
                self._session.close()
                self._session = self._place = None

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
            self._released = self._place
            self.stop()
            end_server()
            self._notes.append(
                tr(
                    "The ranks were released after {minutes:g} minutes without a cell, and their variables "
                    "are lost.",
                    minutes=minutes,
                )
            )


@dataclass(frozen=True)
class _Place:
    """How many ranks there are, and where. ``job`` is None for this machine."""

    world_size: int
    job: str | None
    devices: Devices

    def is_as(self, wanted: _Place) -> bool:
        """Whether ranks here are what is wanted; 0 ranks wanted are as many as there are."""
        return (
            wanted.job == self.job
            and wanted.world_size in (0, self.world_size)
            and wanted.devices in (Devices.ANY, self.devices)
        )
