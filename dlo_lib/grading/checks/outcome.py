"""Run one check once, in the notebook or under the judge."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.claimed import ClaimScored
from dlo_lib.grading.checks.codec import NotPlain
from dlo_lib.grading.checks.contract import (
    Check,
    Late,
    NotWritten,
    Nudge,
    Run,
    Scenario,
    Student,
    Trial,
    Unmeasured,
    Wrong,
)
from dlo_lib.grading.checks.status import Status as Status
from dlo_lib.grading.checks.status import unreadable


class Ended(Exception):
    """The student's process died before it returned a result: TIMEOUT, OOM or KERNEL_DIED.

    ``words`` is ``message`` without text that the process chose.
    """

    def __init__(self, status: Status, message: str, words: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.words = message if words is None else words


@dataclass(frozen=True)
class Outcome:
    """The result of ``check``.

    Attributes:
        message: the whole text.
        words: the author's part of ``message``, without values.
        brief: ``words``, and what is known without the student's process, such as the student's own line.
        solutions: the course's solutions of other steps ran in the student's process, which could tell them.
        measured: JSON values that the check itself measured (``t.measure``).
    """

    check: Check
    status: Status
    message: str = ""
    words: str = ""
    milliseconds: float = 0.0
    brief: str = ""
    solutions: bool = False
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if the check passed."""
        return self.status is Status.OK

    @property
    def points(self) -> float:
        """The points earned: all or none."""
        return self.check.points if self.passed else 0.0


OF_AN_ANSWER = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""Exceptions of a check that a wrong structure, shape or number in an answer causes."""


def run_check(check: Check, student: Student, seed: int) -> Outcome:
    """Run ``check`` with inputs drawn from ``seed``. Exceptions of the check and of the student's code are
    caught.
    """
    trial = Trial(seed)
    began = time.perf_counter()
    status, message, words, *brief = _verdict(check, student, trial)
    milliseconds = (time.perf_counter() - began) * 1000
    shown = brief[0] if brief else words
    return Outcome(check, status, message, words, milliseconds, shown, measured=trial.measured)


def _verdict(
    check: Check, student: Student, trial: Trial
) -> tuple[Status, str, str] | tuple[Status, str, str, str]:
    watched = _Watched(student)
    try:
        check.function(watched, trial)
    except Unmeasured as note:  # only in a notebook: the judge runs where memory can be read
        if not trial.compared:
            return _grader_error("it measured before it compared")
        return Status.OK, str(note), str(note)
    except NotWritten as error:
        return Status.NOT_WRITTEN, str(error), error.words, error.brief
    except Wrong as error:
        message, forgotten = str(error), watched.forgotten_wait()
        if forgotten:
            message += f"{'' if message.endswith(('.', '!', '?')) else '.'} {forgotten}"
        status = Status.TIMEOUT if isinstance(error, Late) else Status.WRONG
        return status, message, error.words, error.brief or tr("a result is not right")
    except NotPlain as error:
        return (
            Status.WRONG,
            tr("what came back is not plain data: {reason}", reason=error),
            tr("what came back is not plain data"),
        )
    except Ended as error:
        return error.status, str(error), error.words
    except MemoryError:
        text = tr("to read what came back takes more memory than the grader has for it")
        return Status.OOM, text, text
    except ClaimScored as error:
        return _grader_error(f"TypeError: {error}")
    except Exception as error:  # noqa: BLE001  an error in the check
        reason = f"{type(error).__name__}: {error}"
        if watched.answered and isinstance(error, OF_AN_ANSWER):
            # The reference passes this check on the same inputs, so the student's answer is the cause.
            return Status.WRONG, f"{unreadable()} ({reason})", unreadable()
        return _grader_error(reason)
    if not trial.compared:
        return _grader_error("it compared nothing")
    return Status.OK, trial.explanation, trial.explanation


def not_run(check: Check, late: Outcome) -> Outcome:
    """Return the outcome of a check that does not run, because the code of its question did not end in time
    in an earlier check, whose outcome is ``late``. To run it would only take the same time again."""
    text = tr("not run: the same as above")  # short, so that each row has it
    return Outcome(check, late.status, text, text, brief=text)


class _Watched:
    """``student``, its last run on ranks, and whether it has given an answer to the check."""

    def __init__(self, student: Student) -> None:
        self._student = student
        self._run: Run | None = None
        self.answered = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._student, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            self.answered = True
            return value

        return call

    def ranks(
        self, scenario: Scenario, inputs_per_rank: Sequence[Mapping[str, Any]], nudge: Nudge | None = None
    ) -> Run:
        self._run = None
        self._run = self._student.ranks(scenario, inputs_per_rank, nudge)
        self.answered = True
        return self._run

    def run(self, scenario: Scenario, **inputs: Any) -> Any:
        value = self._student.run(scenario, **inputs)
        self.answered = True
        return value

    def is_own(self, name: str) -> bool:
        return self._student.is_own(name)

    def fresh(self, scenario: Scenario, **inputs: Any) -> Any:
        value = self._student.fresh(scenario, **inputs)
        self.answered = True
        return value

    def get(self, name: str) -> Any:
        value = self._student.get(name)
        self.answered = True
        return value

    def forgotten_wait(self) -> str:
        """Return what the student forgot in the last run that returned; it may explain a wrong result."""
        return self._run.forgotten_wait() if self._run is not None else ""


def _grader_error(reason: str) -> tuple[Status, str, str]:
    words = tr("the check itself failed: please tell your instructor")
    return Status.GRADER_ERROR, f"{words} ({reason})", words


def seed_for(secret: str, lab: str, check: Check) -> int:
    """Return the seed of a check's inputs: the same in each grading of a class, and unpredictable without
    ``secret``.
    """
    digest = hmac.new(secret.encode(), f"{lab}/{check.name}".encode(), hashlib.sha256).digest()
    return int.from_bytes(digest[:6], "big")
