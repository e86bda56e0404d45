"""One list of cells run once, and the student's names in it as checks reach them: ``RemoteStudent`` is ``student`` under the judge.

An attempt has one process for plain calls and, for each run on ranks, a fresh one a rank. All run the same cells first.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlo_lib.grading.codec import NotPlain
from dlo_lib.grading.contract import Run, Scenario, Wrong
from dlo_lib.grading.faults import Fault, fault_from
from dlo_lib.grading.host import Worker, Zygote, after
from dlo_lib.grading.intake import Origin, TakenCell
from dlo_lib.grading.lockdown import Network
from dlo_lib.grading.outcome import Ended, Status
from dlo_lib.grading.student import as_wrong
from dlo_lib.text import tr

LOAD_SECONDS = 20.0  # for all cells together
GRACE = 0.3  # seconds that other ranks have after a first failure, so that the earliest cause is heard


@dataclass
class Attempt:
    """Cells and the process they ran in; it starts when a check first needs it."""

    zygote: Zygote
    cells: Sequence[TakenCell]
    faults: dict[str, Fault] = field(default_factory=dict)  # by cell
    cut: bool = False  # a cell wrote too much
    broken_in: str = ""  # the cell that ended the process
    _worker: Worker | None = None
    _broken: Ended | NotPlain | None = None

    def worker(self) -> Worker:
        """The process with the cells run.

        Raises:
            Ended: running them ended it.
        """
        if self._broken is not None:
            raise self._broken
        if self._worker is None:
            self._worker = self.zygote.worker()
            try:
                self._note(_loaded(self._worker, self._worker.ask(after(LOAD_SECONDS), **self._request())))
            except (Ended, NotPlain) as error:
                self.broken_in, self._broken = self._worker.cell, error
                self.close()
                raise
        return self._worker

    @contextlib.contextmanager
    def ranks(self, world: int) -> Iterator[list[Worker]]:
        """``world`` fresh processes with the cells run, killed at the end."""
        self.worker()  # cells that end a process show it here, before there are many
        workers = [self.zygote.worker(network=Network.ZYGOTE) for _ in range(world)]
        try:
            deadline = after(LOAD_SECONDS)
            for worker in workers:
                worker.post(deadline, **self._request())
            for worker in workers:
                self._note(_loaded(worker, worker.collect(deadline)))
            yield workers
        finally:
            for worker in workers:
                worker.close()

    def close(self) -> None:
        """Kill its process."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _request(self) -> dict[str, Any]:
        cells = [{"id": cell.id, "source": cell.source, "own": cell.origin is not Origin.GIVEN} for cell in self.cells]
        return {"do": "load", "cells": cells}

    def _note(self, reports: Any) -> None:
        for report in reports if type(reports) is list else []:
            if type(report) is dict and type(report.get("cell")) is str:
                self.cut = self.cut or report.get("cut") is True
                if report.get("fault") is not None:
                    self.faults[report["cell"]] = fault_from(report["fault"])


class RemoteStudent:
    """``student`` under the judge: every call is a message. ``seconds`` is for all calls of a check together, starting up apart."""

    def __init__(self, attempt: Attempt, question: str, seconds: float) -> None:
        self._attempt = attempt
        self._question = question
        self._left = seconds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._ask(do="call", name=name, args=list(args), kwargs=kwargs)

    def get(self, name: str) -> Any:
        """The value of a name."""
        return self._ask(do="get", name=name)

    def ranks(self, scenario: Scenario, inputs_per_rank: Sequence[Mapping[str, Any]]) -> Run:
        """Run ``scenario`` on separate processes over gloo."""
        world = len(inputs_per_rank)
        with self._attempt.zygote.meeting() as folder, self._attempt.ranks(world) as workers, self._timed() as deadline:
            shared = {"do": "rank", "name": scenario.name, "source": scenario.source, "world": world, "store": f"{folder}/store"}
            for rank, (worker, inputs) in enumerate(zip(workers, inputs_per_rank)):
                worker.post(deadline, **shared, rank=rank, inputs=dict(inputs), seconds=max(1.0, self._left))
            answers = _gather(workers, deadline)
            for rank, answer in answers.items():
                if "fault" in answer:
                    raise self._wrong(fault_from(answer["fault"]), rank)
            return Run([answers[rank].get("value") for rank in range(world)])

    def _ask(self, **request: Any) -> Any:
        worker = self._attempt.worker()
        try:
            with self._timed() as deadline:
                answer = worker.ask(deadline, **request)
        except (Ended, NotPlain):
            self._attempt.close()  # the next call gets a fresh process
            raise
        if "fault" in answer:
            raise self._wrong(fault_from(answer["fault"]))
        return answer.get("value")

    def _wrong(self, fault: Fault, rank: int | None = None) -> Exception:
        if _out_of_memory(fault):
            return Ended(Status.OOM, tr("out of memory: {text}", text=fault.text))
        broken = self._attempt.faults.get(self._question)
        if fault.kind == "Missing" and broken is not None:
            return as_wrong(broken)  # the cell that should define the name failed: that is what to tell
        wrong = as_wrong(fault)
        if rank is None or fault.not_written:
            return wrong
        return Wrong(tr("rank {rank}: {message}", rank=rank, message=str(wrong)), wrong.words)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[float]:
        began = time.monotonic()
        try:
            yield began + self._left
        finally:
            self._left -= time.monotonic() - began


def _gather(workers: Sequence[Worker], deadline: float) -> dict[int, dict[str, Any]]:
    """The answers by rank, in the order they came; complete unless one of them is a fault.

    Raises:
        Ended: a rank died or grew too large, or one did not answer in time.
    """
    answers: dict[int, dict[str, Any]] = {}
    with selectors.DefaultSelector() as selector:
        for rank, worker in enumerate(workers):
            selector.register(worker.channel, selectors.EVENT_READ, rank)
        while len(answers) < len(workers):
            left = deadline - time.monotonic()
            if left <= 0:
                if any("fault" in answer for answer in answers.values()):
                    return answers
                late = ", ".join(str(rank) for rank in range(len(workers)) if rank not in answers)
                done = ", ".join(map(str, sorted(answers))) or tr("none")
                raise Ended(Status.TIMEOUT, tr("no answer in time from rank {late} (done: {done})", late=late, done=done))
            for key, _ in selector.select(min(left, 0.05)):
                rank, worker = key.data, workers[key.data]
                if not worker.channel.pump():
                    raise _on(rank, worker.ended())
                while (message := worker.channel.take()) is not None:
                    if (answer := worker.heard(message[0])) is not None and rank not in answers:
                        answers[rank] = answer
                        if "fault" in answer:
                            deadline = min(deadline, after(GRACE))
            for worker in workers:
                worker.look()
    return answers


def _on(rank: int, ended: Ended) -> Ended:
    return Ended(ended.status, tr("rank {rank}: {message}", rank=rank, message=ended))


def _loaded(worker: Worker, answer: Mapping[str, Any]) -> Any:
    worker.cell = ""  # from here on it is not in a cell
    if "fault" in answer:
        raise NotPlain(fault_from(answer["fault"]).message())
    return answer.get("value")


def _out_of_memory(fault: Fault) -> bool:
    return fault.kind == "MemoryError" or "can't allocate memory" in fault.text
