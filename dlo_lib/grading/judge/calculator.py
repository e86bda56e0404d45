"""The process in which the judge computes with what a student sent (``checks.calculation``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.codec import NotPlain
from dlo_lib.grading.checks.contract import Scenario
from dlo_lib.grading.checks.outcome import Ended, Status
from dlo_lib.grading.judge.time_budget import TimeBudget
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.remote_worker import Worker, charged_seconds, deadline_after

MEMORY = 768 << 20  # bytes
LEAST_SECONDS = 0.05  # of a call
START_SECONDS = 10.0  # of the first call of a process besides: it imports what torch needs for graphs


class Calculator:
    """Starts a process of ``zygote`` when it is first called; ``budget`` is charged for its time.

    Attributes:
        left: seconds for the calls of the check that runs, which sets it.
        computed: seconds of CPU time so far.
    """

    def __init__(self, zygote: Zygote, budget: TimeBudget) -> None:
        self._zygote, self._budget = zygote, budget
        self._worker: Worker | None = None
        self.left = self.computed = 0.0

    def __call__(self, scenario: Scenario, inputs: Mapping[str, Any]) -> Any:
        """Return the result of a scenario of the library.

        Raises:
            Ended: it needs more time or memory than there is.
            RuntimeError: it raised an error, which is one of the library.
        """
        text = tr("to compute what came back takes more time or memory than a check has")
        start = 0.0
        if self._worker is None:
            self._worker = self._zygote.worker(MEMORY)
            start = START_SECONDS / 2**self._budget.exceeded
        worker, before = self._worker, self._worker.computed
        try:
            answer = worker.ask(
                deadline_after(max(self.left, LEAST_SECONDS) + start),
                do="run",
                name=scenario.name,
                source=scenario.source,
                inputs=dict(inputs),
            )
        except (Ended, NotPlain) as error:
            self._budget.note(error)
            self.close()
            status = error.status if isinstance(error, Ended) else Status.OOM
            raise Ended(status, f"{text} ({error})", text) from None
        finally:
            self.left -= max(0.0, charged_seconds([worker]) - start)
            self._charge(worker.computed - before)
        if "fault" in answer and answer["fault"].get("kind") == "MemoryError":
            raise Ended(Status.OOM, text, text)
        if "fault" in answer:
            raise RuntimeError(f"the calculator failed: {answer['fault']}")
        return answer.get("value")

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _charge(self, seconds: float) -> None:
        self.computed += seconds
        self._budget.computed += seconds
