"""Find questions that communicate and whose checks pass ranks that do not use what they receive.

Such ranks could have the numbers from a covert channel. The checks of the reference solution run a second
time on the recorded answers of the first, in which a nudge (``checks.runs.Nudge``) changes nothing. So the
second time starts no process, except for a run with a nudge that the check itself asks for. At least one
check of each question that communicates must fail then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dlo_lib.comm.calls import Kind
from dlo_lib.grading.checks.asked import asked_again, asked_in
from dlo_lib.grading.checks.contract import Check, Nudge, Run, Scenario, Student
from dlo_lib.grading.checks.outcome import Outcome, Status, run_check
from dlo_lib.grading.judge.judge import Judge

AskedBefore = tuple[int, list[Any], dict[str, Any]]
"""A call of a function of the check: its number in the inputs, and its arguments."""
SENDS_NOTHING = (Kind.BARRIER, Kind.MONITORED_BARRIER, Kind.NEW_GROUP, Kind.JOIN)


class GuardedJudge(Judge):
    """A judge of the reference solution that also looks for checks which need the received data.

    Attributes:
        guarded: by question whose ranks receive data, whether one of its checks fails without them.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.guarded: dict[str, bool] = {}

    def outcome(self, check: Check, student: Student, seed: int) -> Outcome:
        """Run ``check``, and run it again on the same answers without an effect of nudges."""
        recorder = AnswerRecorder(student)
        outcome = super().outcome(check, recorder, seed)
        if outcome.passed and recorder.receives:
            again = run_check(check, ReplayedStudent(recorder.answers), seed)
            needs = again.status is Status.WRONG
            self.guarded[check.question] = self.guarded.get(check.question, False) or needs
        return outcome

    def unguarded(self) -> list[str]:
        """Return the questions whose ranks receive data that no check needs."""
        return [question for question, guarded in self.guarded.items() if not guarded]


class AnswerRecorder:
    """``student``, whose answers are recorded in order, each with the calls of functions of the check that
    came before it.

    Attributes:
        receives: whether a rank has received data in one of the runs.
    """

    def __init__(self, student: Student) -> None:
        self._student = student
        self.answers: list[tuple[Any, Sequence[AskedBefore]]] = []
        self.receives = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._student, name)
        return lambda *args, **kwargs: self._recorded(lambda: function(*args, **kwargs), [args, kwargs])

    def get(self, name: str) -> Any:
        """Return the value of a name."""
        return self._recorded(lambda: self._student.get(name))

    def run(self, scenario: Scenario, **inputs: Any) -> Any:
        """Return the result of ``scenario`` without ranks."""
        return self._recorded(lambda: self._student.run(scenario, **inputs), [(), inputs])

    def ranks(
        self, scenario: Scenario, inputs_per_rank: Sequence[Mapping[str, Any]], nudge: Nudge | None = None
    ) -> Run:
        """Run ``scenario`` on ranks; with a nudge also without it, and record that run."""
        plain = inputs_per_rank if nudge is None else asked_again(inputs_per_rank)
        run: Run = self._recorded(lambda: self._student.ranks(scenario, plain), plain)
        if nudge is not None:
            run = self._student.ranks(scenario, inputs_per_rank, nudge)
        self.receives = self.receives or has_received(run)
        return run

    def _recorded(self, answer: Callable[[], Any], given: Any = ()) -> Any:
        calls: list[AskedBefore] = []
        for number, asked in enumerate(asked_in(given)):
            asked.heard = partial(_keep, calls, number)
        try:
            value = answer()
        except Exception as error:
            self.answers.append((error, calls))
            raise
        kept = replace(value, results=copy.deepcopy(value.results)) if isinstance(value, Run) else value
        self.answers.append((kept if isinstance(value, Run) else copy.deepcopy(value), calls))
        return value


def _keep(calls: list[AskedBefore], number: int, args: list[Any], kwargs: dict[str, Any]) -> None:
    calls.append((number, copy.deepcopy(args), copy.deepcopy(kwargs)))


class ReplayedStudent:
    """Give the recorded answers in order, after the same calls of functions of the check; a run that is
    repeated with a nudge is the same run."""

    def __init__(self, answers: Sequence[tuple[Any, Sequence[AskedBefore]]]) -> None:
        self._answers = iter(answers)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._next([args, kwargs])

    def ranks(
        self, scenario: Scenario, inputs_per_rank: Sequence[Mapping[str, Any]], nudge: Nudge | None = None
    ) -> Run:
        """Return the recorded run."""
        run: Run = self._next(inputs_per_rank)
        return replace(run, repeat=lambda nudge: run)

    def _next(self, given: Any) -> Any:
        answer, calls = next(self._answers)
        functions = asked_in(given)
        for number, args, kwargs in calls:
            functions[number].answer(args, kwargs)
        for asked in functions:
            asked.raise_refusal()
        if isinstance(answer, Exception):
            raise answer
        return answer


def has_received(run: Run) -> bool:
    """Return whether a rank of ``run`` has received data from another one."""
    return any(
        call.kind not in (*SENDS_NOTHING, Kind.SEND) and len(call.members) > 1 and call.payload_bytes
        for calls in run.traffic
        for call in calls
    )
