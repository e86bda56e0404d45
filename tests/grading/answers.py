"""Answers to questions of the labs, with the points that they must earn.

- ``tricks/`` and ``odd/``: single answers that avoid the work, and right ones that look unlike the solution.
  The header of an answer is ``# %% title {"question": ..., "earns": ...}``.
- ``submissions/hostile/`` and ``submissions/odd/``: submissions of several answers. Each begins with
  ``# == name: what it tries``; the header of an answer is ``# %% question {"earns": ...}``. What stands
  before the first header begins each of its answers.

An answer without ``earns`` earns all if it is odd, and nothing otherwise. Each is judged alone, with the
reference solutions of the other steps.

``python -m tests.grading.answers [LAB ...]`` judges them and prints the table of their points. ``--only
NAME`` takes the answers with this text in their name. The command ends with 1 if an answer earns other points
than it must. It takes about 20 minutes of CPU time for all, so it is not part of ``make test``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.grading.judge.judge import judge_answer
from dlo_lib.grading.judge.lab_zygote import zygote_for
from dlo_lib.grading.judge.report import QuestionReport
from dlo_lib.grading.lab.source import LabSource, read_lab
from dlo_lib.grading.sandbox.host import Zygote

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SUBMISSION = re.compile(r"^# == (\w+): ([^\n]*)\n(.*?)(?=^# == |\Z)", re.MULTILINE | re.DOTALL)
HEADER = re.compile(r"^# %% (\w+)(?: (\{[^\n]*\}))?\n(.*?)(?=^# %% |\Z)", re.MULTILINE | re.DOTALL)
ODD = "odd"


@dataclass(frozen=True)
class Answer:
    """One answer. ``earns``: its points; None for all of an odd one, and for nothing of another."""

    lab: str
    kind: str
    title: str
    question: str
    text: str
    earns: float | None = None
    tries: str = ""

    @property
    def name(self) -> str:
        """The name of its test."""
        return f"{self.lab}-{self.kind}-{self.title}"

    def must_earn(self, lab: LabSource) -> float:
        """Return the points that it must earn."""
        if self.earns is None:
            return lab.test(self.question).points if self.kind == ODD else 0.0
        return self.earns


def answers(kind: str) -> list[Answer]:
    """Return the single answers of ``kind``, which is ``tricks`` or ``odd``, by lab."""
    return [
        Answer(file.stem, kind, title, text=text.strip(), **json.loads(header))
        for file in sorted((HERE / kind).glob("*.py"))
        for title, header, text in HEADER.findall(file.read_text(encoding="utf-8"))
    ]


def submissions(kind: str) -> list[Answer]:
    """Return the answers of the submissions of ``kind``, which is ``hostile`` or ``odd``, by lab."""
    return [
        Answer(file.stem, kind, name, question, text.strip(), tries=tries, **json.loads(header or "{}"))
        for file in sorted((HERE / "submissions" / kind).glob("*.py"))
        for name, tries, body in SUBMISSION.findall(file.read_text(encoding="utf-8"))
        for question, header, text in _answers_of(body)
    ]


def _answers_of(body: str) -> Iterator[tuple[str, str, str]]:
    """Yield question, header and text of each answer of a submission."""
    common = body.partition("# %% ")[0].strip()
    for question, header, text in HEADER.findall(body):
        yield question, header, f"{common}\n\n\n{text.strip()}" if common else text


class OpenLabs:
    """The labs and their zygotes, each started when its first answer is judged."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[LabSource, Zygote]] = {}

    def lab(self, name: str) -> LabSource:
        """Return the lab of this folder."""
        if name not in self._open:
            lab = read_lab(ROOT / "solutions" / name)
            self._open[name] = lab, zygote_for(lab)
        return self._open[name][0]

    def judged(self, answer: Answer) -> QuestionReport:
        """Judge ``answer``."""
        lab = self.lab(answer.lab)
        return judge_answer(lab, answer.question, answer.text, self._open[answer.lab][1])

    def close(self) -> None:
        """End the zygotes."""
        for _, zygote in self._open.values():
            zygote.close()


@dataclass
class Points:
    """The points of all answers of one submission."""

    earned: float = 0.0
    must: float = 0.0
    most: float = 0.0

    def add(self, earned: float, must: float, most: float) -> None:
        """Add those of an answer."""
        self.earned, self.must, self.most = self.earned + earned, self.must + must, self.most + most

    def __str__(self) -> str:
        return f"{self.earned:g} / {self.must:g} / {self.most:g}"


class Table:
    """The table of the points: earned, deserved, and of the questions that an answer attempts."""

    def __init__(self, labs: OpenLabs, chosen: list[str], only: str) -> None:
        self._labs, self._chosen, self._only = labs, tuple(chosen), only
        self.unexpected = 0

    def lines(self) -> Iterator[str]:
        """Judge the answers and yield the lines of the table."""
        singles = [answer for kind in ("tricks", ODD) for answer in answers(kind)]
        several = [answer for kind in ("hostile", ODD) for answer in submissions(kind)]
        yield "points: earned / deserved / of the questions that it answers"
        for own in (singles, several):
            groups = itertools.groupby(filter(self._takes, own), key=lambda answer: answer.name)
            for _, group in groups:
                yield from self._submission(list(group))
        yield f"{self.unexpected} answers earn other points than they deserve"

    def _takes(self, answer: Answer) -> bool:
        return answer.lab.startswith(self._chosen or ("",)) and self._only in answer.name

    def _submission(self, own: list[Answer]) -> Iterator[str]:
        points, notes = Points(), []
        for answer in own:
            report = self._labs.judged(answer)
            lab = self._labs.lab(answer.lab)
            must = answer.must_earn(lab)
            points.add(report.points, must, lab.test(answer.question).points)
            if report.points != must:
                self.unexpected += 1
                notes.append(f"    {answer.question} earns {report.points:g}, NOT {must:g}: ")
                notes += [
                    f"        {check.status}: {check.title}: {check.message}" for check in report.checks
                ]
        first = own[0]
        yield f"{first.lab[:2]}  {first.kind:7}  {first.title:52}  {points!s:16}  {first.tries}".rstrip()
        yield from notes


def main() -> int:
    """Print the table; return 1 if an answer earns other points than it must."""
    parser = argparse.ArgumentParser(prog="python -m tests.grading.answers", description=__doc__)
    parser.add_argument("labs", nargs="*", help="numbers of labs; all without")
    parser.add_argument("--only", default="", help="answers with this text in their name")
    chosen = parser.parse_args()
    labs = OpenLabs()
    table = Table(labs, chosen.labs, chosen.only)
    try:
        for line in table.lines():
            print(line, flush=True)
    finally:
        labs.close()
    return 1 if table.unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
