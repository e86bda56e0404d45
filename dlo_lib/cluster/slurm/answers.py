"""What the answers of ``squeue``, ``scontrol show job`` and ``sacct`` say about one job of ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dlo_lib.base.text import tr
from dlo_lib.cluster.slurm.states import ElementStatus, State, of_slurm

QUEUE_FORMAT = "%F|%K|%T|%r|%S|%M|%k|%j|%o"
HISTORY_FIELDS = "JobID,State,ExitCode,Start,Elapsed,Comment,JobName"
_NOT_NAMED_YET = "allocation"  # in the accounting, for a moment
_SAID_BY_STATE = ("None", "NonZeroExitCode")


@dataclass(frozen=True)
class JobMark:
    """What tells a job of ours from another one with the same number, because numbers are used again.

    Attributes:
        name: of the job.
        script: path of its script; "" if it is not known.
        comment: the end of its comment; "" if it is not known.
    """

    name: str
    script: str = ""
    comment: str = ""

    def fits(self, called: str) -> bool:
        """Return whether ``called``, which is comment, name and command of a job, with bars between them, is
        that of this job. All of them may have bars.
        """
        signs = (
            f"|{self.name}|",
            f"|{self.script}|" if self.script else "",
            f"|{self.script} " if self.script else "",
            f"{self.comment}|" if self.comment else "",
        )
        return any(sign in f"|{called}|" for sign in signs if sign)


@dataclass(frozen=True)
class QueueRow:
    """One element in an answer.

    Attributes:
        state: in SLURM's words.
        called: comment, name and command, with bars between them.
    """

    number: int
    element: int
    state: str
    reason: str
    start: str
    elapsed: str
    called: str

    @property
    def is_ending(self) -> bool:
        """Whether the element has ended, or is ending."""
        return self.state == "COMPLETING" or of_slurm(self.state).over

    @property
    def is_cancelled(self) -> bool:
        """Whether the element is cancelled, or ends because it was cancelled a moment ago."""
        return self.state.startswith(("CANCELLED", "COMPLETING"))

    def status(self) -> ElementStatus:
        """Return its status."""
        reason = "" if self.reason in _SAID_BY_STATE else self.reason  # the state says the same
        if reason == "DependencyNeverSatisfied" and self.is_ending:
            reason = tr("the job that it waited for did not complete")
        never_began = of_slurm(self.state) is State.CANCELLED and not self.elapsed.strip("0:")
        start = "" if self.start in ("N/A", "Unknown") or never_began else self.start
        return ElementStatus(self.element, of_slurm(self.state), reason, start, self.elapsed)


def of_queue(answer: str) -> Iterator[QueueRow]:
    """Yield the rows of an answer of ``squeue`` with ``QUEUE_FORMAT``."""
    for line in answer.splitlines():
        parts = line.split("|", 6)
        if len(parts) == 7 and parts[0].isdigit():  # not a part of a comment with several lines
            number, index, state, reason, start, elapsed, called = parts
            element = int(index) if index.isdigit() else 0
            yield QueueRow(int(number), element, state, reason, start, elapsed, called)


def of_controller(answer: str) -> Iterator[QueueRow]:
    """Yield the rows of an answer of ``scontrol --oneliner show job``."""
    for line in answer.splitlines():
        found = re.match(r"JobId=(\d+) (?:ArrayJobId=(\d+) )?(?:ArrayTaskId=(\S+) )?", line)
        if found is None:
            continue
        called = "|".join(field(line, name, to_end=True) for name in ("Comment", "JobName", "Command"))
        for element in elements_of(found[3] or "0"):
            yield QueueRow(
                int(found[2] or found[1]),
                element,
                field(line, "JobState"),
                field(line, "Reason"),
                field(line, "StartTime"),
                field(line, "RunTime"),
                called,
            )


def of_accounting(answer: str, mark: JobMark | None) -> dict[int, ElementStatus]:
    """Return the statuses of ended elements in an answer of ``sacct`` with ``HISTORY_FIELDS``."""
    found = {}
    for line in answer.splitlines():
        identity, state, code, start, elapsed, called = line.split("|", 5)
        index = re.fullmatch(r"\d+(?:_(?:(\d+)|\[(\S+)\]))?", identity)
        if index is None or not of_slurm(state).over:
            continue
        for element in elements_of(index[1] or index[2] or "0") if is_ours(called, mark) else ():
            exit_code = int(code.split(":")[0])
            begun = "" if start in ("None", "Unknown") else start
            found[element] = ElementStatus(element, of_slurm(state), "", begun, elapsed, exit_code)
    return found


def is_ours(called: str, mark: JobMark | None) -> bool:
    """Whether a row of the accounting, with this comment and name, is of the job with ``mark``; None: any."""
    return mark is None or called.endswith(f"|{_NOT_NAMED_YET}") or mark.fits(called)


def elements_of(text: str) -> list[int]:
    """Return the numbers of elements in SLURM's short form.

    >>> elements_of("0-2,7,10-14:2%3")
    [0, 1, 2, 7, 10, 12, 14]
    """
    numbers: list[int] = []
    for part in text.partition("%")[0].split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if found is not None:
            first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            numbers += range(first, last + 1, step)
    return numbers


def field(line: str, name: str, to_end: bool = False) -> str:
    """Return the value of a field in a line of ``scontrol``; "" if there is none.

    Args:
        to_end: the value may have blanks: it ends where the next field begins.
    """
    value = r".*?(?= [A-Z][A-Za-z/:]*=|$)" if to_end else r"\S*"
    found = re.search(rf"(?:^| ){name}=({value})", line)
    return "" if found is None or found[1] == "(null)" else found[1]
