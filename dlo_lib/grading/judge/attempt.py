"""Run a list of cells and give checks access to the names that they define: ``RemoteStudent`` is ``student``
under the judge.

An attempt has one process for plain calls. Each run on ranks starts a new process per rank. All processes run
the same cells first.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import functools
import linecache
import marshal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.codec import NotPlain
from dlo_lib.grading.checks.contract import Nudge, Run, Scenario, Wrong
from dlo_lib.grading.checks.faults import Fault, fault_from
from dlo_lib.grading.checks.outcome import Ended, Status
from dlo_lib.grading.checks.quiz_question import NAME as QUIZ
from dlo_lib.grading.judge.cells import Origin, SubmissionCell
from dlo_lib.grading.judge.judged_ranks import JudgedRanks, cell_name
from dlo_lib.grading.judge.time_budget import TimeBudget
from dlo_lib.grading.lab.syntax import imported_modules
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.remote_worker import Worker, charged_seconds, deadline_after
from dlo_lib.grading.switch.scenario import as_wrong, code_of, finished_run, has_claims, has_marks
from dlo_lib.grading.switch.server import SwitchServer

MOST_IMPORTS = 100  # of a submission, that the zygote is asked for


@dataclass
class Attempt:
    """Cells and the process that runs them; it starts when a check first needs it."""

    zygote: Zygote
    cells: Sequence[SubmissionCell]
    seconds: float  # for all cells together
    budget: TimeBudget = field(default_factory=TimeBudget)
    faults: dict[str, Fault] = field(default_factory=dict)  # by cell
    cut: bool = False  # a cell wrote too much
    broken_in: str = ""  # the cell that ended the process
    computed: float = 0.0  # seconds of CPU time of the student's processes that are closed
    outside: float = 0.0  # and outside of questions: their starts
    crowded: bool = False  # a process ran out of time because others used the processors
    quiz: Any = None  # the answers, once a check has read them
    _worker: Worker | None = None
    _broken: Ended | NotPlain | None = None

    def worker(self) -> Worker:
        """Return the process that has run the cells.

        Raises:
            Ended: the process ended in one of the cells.
            NotPlain: its answer is not plain data.
        """
        if self._broken is not None:
            raise self._broken
        if self._worker is None:
            self._worker = self.zygote.worker(imports=self._imports)
            try:
                answer = self._worker.ask(deadline_after(self.seconds), **self._request())
                self._note(_loaded(self._worker, answer))
                self.budget.note_load(self._worker.computed)
            except (Ended, NotPlain) as error:
                self.broken_in, self._broken = self._worker.cell, error
                self.budget.note(error)
                self.close()
                raise
        return self._worker

    @contextlib.contextmanager
    def ranks(self, world: int, measured: bool = False) -> Iterator[list[Worker]]:
        """Start ``world`` processes that have run the cells; kill them at the end.

        ``measured``: their scenario has marks.
        """
        self.worker()  # cells that end a process do so here, in one process
        workers = self.zygote.ranks(world, self._imports)
        try:
            for worker in workers if measured else ():
                worker.count_pages()
            deadline = deadline_after(self.seconds)
            for worker in workers:
                # The first worker has announced the cells: one that ends its process does so there.
                worker.post(deadline, **self._request(), measured=measured, announced=False)
            for worker in workers:
                self._note(_loaded(worker, worker.collect(deadline)))
            for worker in workers if measured else ():
                worker.expect_marks()
            yield workers
        except Ended as error:
            self.budget.note(error)
            raise
        finally:
            for worker in workers:
                self._end(worker)

    def renew(self) -> None:
        """Kill the process if it has run more than the cells: the next call starts a new one."""
        if self._worker is not None and self._worker.used:
            self.close()

    def close(self) -> None:
        """Kill the process."""
        if self._worker is not None:
            self._end(self._worker)
            self._worker = None

    @property
    def holds_solutions(self) -> bool:
        """True if the cells hold the course's solution of a step, which the student's code can read."""
        return any(cell.origin is Origin.SOLUTION for cell in self.cells)

    @property
    def own_lines(self) -> dict[str, list[str]]:
        """The lines of the student's cells, by the id of the cell."""
        return {cell.id: cell.source.splitlines(keepends=True) for cell in self.cells if _is_own(cell)}

    def _end(self, worker: Worker) -> None:
        worker.close()
        self.computed += worker.computed
        self.outside += worker.outside
        self.budget.computed += worker.computed
        self.crowded = self.crowded or worker.crowded

    @property
    def spent(self) -> float:
        """Seconds of CPU time of the student's processes so far."""
        return self.computed + (self._worker.computed if self._worker is not None else 0.0)

    def show_own_lines(self) -> None:
        """Register the lines of the student's cells for messages; lines of the reference solution stay
        hidden.
        """
        own = self.own_lines
        for cell in self.cells:
            file = f"<cell {cell.id}>"
            linecache.cache[file] = (len(cell.source), None, own.get(cell.id, []), file)

    @functools.cached_property
    def _imports(self) -> list[str]:
        return imported_modules(cell.source for cell in self.cells if _is_own(cell))[:MOST_IMPORTS]

    def _request(self) -> dict[str, Any]:
        cells = [
            {"id": cell.id, "source": cell.source, "own": True}
            if _is_own(cell)
            else {"id": cell.id, "source": cell.source, "own": False, "code": _code_of(cell.id, cell.source)}
            for cell in self.cells
        ]
        return {"do": "load", "cells": cells}

    def _note(self, reports: Any) -> None:
        for report in reports if type(reports) is list else []:
            if type(report) is dict and type(report.get("cell")) is str:
                self.cut = self.cut or report.get("cut") is True
                if report.get("fault") is not None:
                    self.faults[report["cell"]] = fault_from(report["fault"])


class RemoteStudent:
    """``student`` under the judge: each call is a message. All calls of a check share ``seconds``, without
    the start of processes.
    """

    def __init__(self, attempt: Attempt, question: str, seconds: float) -> None:
        self._attempt = attempt
        self._question = question
        self._seconds = self._left = seconds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._ask(do="call", name=name, args=list(args), kwargs=kwargs)

    @property
    def charged(self) -> float:
        """The seconds that the questions have used so far, computing or sleeping."""
        return self._seconds - self._left

    def fresh(self, scenario: Scenario, **inputs: Any) -> Any:
        """Return the result of ``scenario`` in a process that has only run the cells."""
        self._attempt.renew()
        return self.run(scenario, **inputs)

    def get(self, name: str) -> Any:
        """Return the value of a name; that of the quiz is read once."""
        if name != QUIZ:
            return self._ask(do="get", name=name)
        if self._attempt.quiz is None:
            self._attempt.quiz = self._ask(do="get", name=name)
        return self._attempt.quiz

    def is_own(self, name: str) -> bool:
        """Return True: all names are those of the submission."""
        return True

    def run(self, scenario: Scenario, **inputs: Any) -> Any:
        """Return the result of ``scenario`` in the process for calls."""
        source = scenario.source
        return self._ask(has_claims(scenario), do="run", name=scenario.name, source=source, inputs=inputs)

    def ranks(
        self, scenario: Scenario, inputs_per_rank: Sequence[Mapping[str, Any]], nudge: Nudge | None = None
    ) -> Run:
        """Run ``scenario`` in one process per rank, without a network; the switch in this process connects
        them.
        """
        world = len(inputs_per_rank)
        with self._attempt.ranks(world, has_marks(scenario)) as workers, self._timed(workers) as deadline:
            code = base64.b64encode(code_of(scenario)).decode()
            shared = {"do": "rank", "name": scenario.name, "code": code, "world": world}
            for rank, (worker, inputs) in enumerate(zip(workers, inputs_per_rank)):
                worker.post(deadline, has_claims(scenario), **shared, rank=rank, inputs=dict(inputs))
            self._attempt.show_own_lines()
            files = {f"<cell {cell.id}>" for cell in self._attempt.cells} | {f"<scenario {scenario.name}>"}
            judged = JudgedRanks(workers, deadline, files)
            lines = [worker.channel.line for worker in workers]
            asked = [worker.asked for worker in workers]
            service = SwitchServer(lines, judged, cell_name, nudge, judged.pending, asked)
            service.run()
            for (
                rank,
                answer,
            ) in judged.answers.items():  # in the order in which they came: the first is the cause
                if "fault" in answer:
                    raise self._wrong(fault_from(answer["fault"]), rank)
            for rank in range(world):
                if rank not in judged.answers:  # student's code has found the connection and ended it
                    text = tr("rank {rank} has left the other ranks before it returned a result", rank=rank)
                    raise Wrong(text, tr("a rank left before it returned a result"))
            values = [judged.answers[rank].get("value") for rank in range(world)]
        return finished_run(values, service, scenario, nudge, self.ranks, inputs_per_rank)

    def _ask(self, claims: bool = False, **request: Any) -> Any:
        worker = self._attempt.worker()
        try:
            with self._timed([worker]) as deadline:
                answer = worker.ask(deadline, claims, **request)
        except (Ended, NotPlain) as error:
            self._attempt.budget.note(error)
            self._attempt.close()  # the next call starts a new process
            _raise_refusals(worker)
            raise
        _raise_refusals(worker)
        if "fault" in answer:
            raise self._wrong(fault_from(answer["fault"]))
        return answer.get("value")

    def _wrong(self, fault: Fault, rank: int | None = None) -> Exception:
        if _out_of_memory(fault):
            self._attempt.crowded = True  # other submissions may have had the memory
            return Ended(Status.OOM, tr("out of memory: {text}", text=fault.text), tr("out of memory"))
        broken = self._attempt.faults.get(self._question)
        if fault.kind == "Missing" and broken is not None:
            return as_wrong(broken, self._attempt.own_lines)  # the cell that defines the name failed
        wrong = as_wrong(fault, self._attempt.own_lines)
        if rank is None or fault.not_written:
            return wrong
        text, brief = (
            tr("rank {rank}: {message}", rank=rank, message=said) for said in (str(wrong), wrong.brief)
        )
        return Wrong(text, wrong.words, brief)

    @contextlib.contextmanager
    def _timed(self, workers: Sequence[Worker]) -> Iterator[float]:
        """Yield the deadline of one question to ``workers``, and subtract the time that they are charged."""
        try:
            yield deadline_after(self._left)
        finally:
            self._left -= charged_seconds(workers)


def _raise_refusals(worker: Worker) -> None:
    """Raise the reason for which a function of the check refused a call: the rest follows from it."""
    for asked in worker.asked:
        asked.raise_refusal()


def _is_own(cell: SubmissionCell) -> bool:
    return cell.origin in (Origin.ANSWER, Origin.EXTRA)


@functools.lru_cache(maxsize=256)
def _code_of(cell: str, source: str) -> str | None:
    """Compile a cell of the course for all workers; None if it is not plain Python, which a worker reads.

    A worker would spend a fifth of its start on it. The judge compiles no cell of a student, because a
    compiler can be made to run out of memory.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = compile(source, f"<cell {cell}>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError:  # a cell with magics
            return None
    return base64.b64encode(marshal.dumps(code)).decode()


def _loaded(worker: Worker, answer: Mapping[str, Any]) -> Any:
    worker.cell = ""  # all cells have run
    if "fault" in answer:
        raise NotPlain(fault_from(answer["fault"]).message())
    return answer.get("value")


def _out_of_memory(fault: Fault) -> bool:
    return fault.kind == "MemoryError" or "can't allocate memory" in fault.text
