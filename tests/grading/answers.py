"""Answers to questions of the labs, with the points that they must earn: those that avoid the work
(``tricks/``), and right ones that look unlike the solution (``odd/``).

Each is judged alone, with the reference solutions of the other steps. The header of an answer is
``# %% title {"question": ..., "earns": ...}``; an odd answer earns all.

``python -m tests.grading.answers [LAB ...]`` judges them and prints the table of their points.
"""

from __future__ import annotations

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
HEADER = re.compile(r"^# %% (\w+) (\{[^\n]*\})\n(.*?)(?=^# %% |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """One answer. ``earns``: its points; None for all of the question."""

    lab: str
    kind: str
    title: str
    question: str
    text: str
    earns: float | None = None

    @property
    def name(self) -> str:
        """The name of its test."""
        return f"{self.lab}-{self.kind}-{self.title}"

    def must_earn(self, lab: LabSource) -> float:
        """Return the points that it must earn."""
        return lab.test(self.question).points if self.earns is None else self.earns


def answers(kind: str) -> list[Answer]:
    """Return the answers of ``kind``, which is ``tricks`` or ``odd``, by lab."""
    return [
        Answer(file.stem, kind, title, text=text.strip(), **json.loads(header))
        for file in sorted((Path(__file__).parent / kind).glob("*.py"))
        for title, header, text in HEADER.findall(file.read_text(encoding="utf-8"))
    ]


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


def table(chosen: list[str]) -> Iterator[str]:
    """Yield a line for each answer to one of the ``chosen`` labs, or to all."""
    labs = OpenLabs()
    try:
        for kind in ("tricks", "odd"):
            for answer in answers(kind):
                if chosen and not answer.lab.startswith(tuple(chosen)):
                    continue
                report, most = labs.judged(answer), labs.lab(answer.lab).test(answer.question).points
                must = answer.must_earn(labs.lab(answer.lab))
                seen = "" if report.points == must else f"  EXPECTED {must:g}"
                yield (
                    f"{answer.lab[:2]}  {kind:6}  {answer.title:52}  {answer.question:10}  "
                    f"{report.points:g} of {most:g}  {report.status}{seen}"
                )
    finally:
        labs.close()


if __name__ == "__main__":
    for line in table(sys.argv[1:]):
        print(line, flush=True)
