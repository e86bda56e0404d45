"""The workers of a run on ranks, between their channels and the server of the switch."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from dlo_lib.base.text import tr
from dlo_lib.comm.deadlock.vocabulary import what, where
from dlo_lib.grading.checks.faults import CELL_FILE
from dlo_lib.grading.checks.outcome import Ended, Status
from dlo_lib.grading.sandbox.remote_worker import Worker, deadline_after
from dlo_lib.grading.switch.exchange import Exchange
from dlo_lib.grading.switch.wire import Frame

GRACE = 0.3  # seconds that other ranks have after the first failure to report an earlier cause


class JudgedRanks:
    """The workers of a run on ranks, as the switch's server uses them (``server.Host``).

    ``files``: the files of student's and given code, whose lines messages may show.
    """

    def __init__(self, workers: Sequence[Worker], deadline: float, files: Collection[str]) -> None:
        self.answers: dict[int, dict[str, Any]] = {}
        """Answers by rank, in order of arrival; complete unless one of them is a fault."""
        self.pending = [worker.channel.leftover() for worker in workers]
        self._workers, self._deadline, self._files = workers, deadline, files

    def memory(self, rank: int) -> int:
        """Return the bytes that a rank holds beyond what it shares with the zygote."""
        return self._workers[rank].held_bytes()

    def source_file(self, file: str) -> str:
        """Return a name whose lines the judge may show.

        A rank chooses the name, and a message shows a line of the file of that name. So any other name than
        that of a cell becomes one in angle brackets, which ``linecache`` does not read from the disk.
        """
        return file if file in self._files else f"<file {file.rpartition('/')[2]}>"

    def handle_frame(self, rank: int, frame: Frame) -> bool | None:
        """Store the answer of a rank; return False if it is a fault, None if ``frame`` is no answer."""
        content = frame.to_bytes()
        self._workers[rank].channel.require_expected(content, len(content))
        worker = self._workers[rank]
        answer = worker.match_answer(worker.channel.decoded(content))
        if answer is None:
            return None
        self.answers[rank] = answer
        if "fault" in answer:
            self._deadline = min(self._deadline, deadline_after(GRACE))
        return "fault" not in answer

    def disconnected(self, rank: int, exchange: Exchange) -> None:
        """Raise the end of a rank's process, unless another rank has failed before."""
        if not self._failed:
            raise _on(rank, self._workers[rank].ended(), exchange)

    def poll(self, exchange: Exchange) -> bool:
        """Check the memory of all ranks and the deadline; return False to end the run."""
        for worker in self._workers:
            worker.check_memory()
        if time.monotonic() < self._deadline:
            return True
        if self._failed:
            return False
        late = [rank for rank in range(len(self._workers)) if rank not in self.answers]
        busy = [rank for rank in late if exchange.views[rank].waits_for is None] or late
        # The others wait for these, so the run is over when one of these has no time left.
        more = min(self._workers[rank].more_time(self._deadline, self._workers) for rank in busy)
        if more > 0:
            self._deadline = deadline_after(more)
            return True
        places = "; ".join(exchange.place(rank) for rank in range(len(self._workers)))
        words = tr("no answer in time from rank {late}", late=", ".join(map(str, busy)))
        raise Ended(Status.TIMEOUT, f"{words}: {places}", words)

    @property
    def _failed(self) -> bool:
        return any("fault" in answer for answer in self.answers.values())


def _on(rank: int, ended: Ended, exchange: Exchange) -> Ended:
    others = "; ".join(exchange.place(other) for other in exchange.views if other != rank)
    last = exchange.views[rank].last
    after_call = (
        tr(" after its {what} ({where})", what=what(last), where=where(last, cell_name))
        if last is not None
        else ""
    )
    text = tr("rank {rank}: {message}{after_call}", rank=rank, message=ended, after_call=after_call)
    words = tr("rank {rank}: {message}", rank=rank, message=ended.words)
    return Ended(ended.status, f"{text}; {others}" if others else text, words)


def cell_name(file: str) -> str:
    """Return ``cell `mean` `` for the file name under which a cell runs."""
    match = CELL_FILE.fullmatch(file)
    return tr("cell `{cell}`", cell=match["id"]) if match else file.removeprefix("<file ").removesuffix(">")
