"""What a hostile answer costs its grader, beside the limit of its question.

``python -m tests.grading.answers.cost [--only TEXT] [--from FILE]`` judges the answers of ``93_survival``,
those of ``hostile_greedy.py`` of each lab, and 4 MB of added cells, each in a separate process. It prints the
CPU seconds of the judge, those of its calculator and of the student's processes together, and how much memory
the judge has taken. The last line has the largest figures. No answer should cost more than three times the
time that its question may take, or 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from dlo_lib.grading.judge.cells import Submission, rebuild_submission
from dlo_lib.grading.judge.judge import Judge, reference_submission, zygote_for
from dlo_lib.grading.judge.own_limits import OwnTime
from dlo_lib.grading.lab.course import source_folder, source_labs
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.grading.lab.source import LabSource, notebook_text, read_lab, source_notebook
from dlo_lib.grading.sandbox.host import Zygote
from tests.grading.answers import ROOT, SURVIVAL, Answer, Kind, declared

HOME = ROOT / "tests" / "grading" / "hostile" / "course"
sys.path.insert(0, str(ROOT / "tests" / "grading"))
from hostile.case import SEND  # noqa: E402  a function that sends bytes to the judge

MOST_TIMES, MOST_MEMORY = 3.0, 1 << 30
GREEDY = "greedy"
CELLS = Answer(
    SURVIVAL, Kind.HOSTILE, "megabytes_of_added_cells", "", "4 MB of cells without an answer", file="cells"
)
CELL = "import a  # {number}\n" + "exec(scale)\n" * 20_000


@dataclass(frozen=True)
class Cost:
    """What an answer costs.

    Attributes:
        judge, student: CPU time in seconds; that of the calculator is the student's.
        limit: seconds that the cells and the checks of the question may take.
        memory: bytes by which the judge has grown.
        status: the status of the question, or what ended the judge.
    """

    title: str
    judge: float
    student: float
    limit: float
    memory: int
    status: str

    @property
    def times(self) -> float:
        """The CPU time as a multiple of the limit."""
        return (self.judge + self.student) / self.limit

    def line(self) -> str:
        """Return a row of the table."""
        return (
            f"{self.title:48}  {self.judge:7.2f}  {self.student:7.2f}  {self.times:5.2f}  "
            f"{self.memory / 2**20:7.0f}  {self.status}"
        )


def costs(answers: list[Answer], lab: LabSource, zygote: Zygote) -> Iterator[Cost]:
    """Judge each answer in a child of this process; yield what it costs."""
    for answer in answers:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _measure(answer, lab, zygote, write)
        os.close(write)
        with open(read, encoding="utf-8") as pipe:
            text = pipe.read()
        _, status, spent = os.wait4(pid, 0)
        own = load_checks(lab.given, lab.folder).of(_question(answer, lab))
        limit = lab.info.load_seconds + sum(check.seconds for check in own)
        found = json.loads(text) if text else {"status": f"ended {status}", "student": 0.0, "memory": 0}
        yield Cost(answer.title, spent.ru_utime + spent.ru_stime, limit=limit, **found)


def _measure(answer: Answer, lab: LabSource, zygote: Zygote, pipe: int) -> NoReturn:
    before = _peak()
    own_time = OwnTime()
    judge = Judge(lab, load_checks(lab.given, lab.folder), "cost", zygote, own_time=own_time)
    question = _question(answer, lab)
    with own_time.limited():
        submission = _submission(answer, lab)
        report = judge.question(question, submission, judge.judge_alone(question, submission))
    judge.calculator.close()
    spent = {
        "student": judge.computed + judge.outside,
        "memory": _peak() - before,
        "status": report.status,
    }
    with open(pipe, "w", encoding="utf-8") as file:
        json.dump(spent, file)
    os._exit(0)


def _question(answer: Answer, lab: LabSource) -> str:
    return answer.question or lab.questions[0]


def _submission(answer: Answer, lab: LabSource) -> Submission:
    """Return the solutions with ``answer``, or with added cells."""
    if answer is CELLS:
        notebook = json.loads(notebook_text(source_notebook(lab.folder)))
        texts = [CELL.format(number=number) for number in range(17)]
        added = [
            {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": text}
            for i, text in enumerate(texts)
        ]
        return rebuild_submission({**notebook, "cells": [*notebook["cells"], *added]}, lab)
    text = answer.source(lab).replace("import send", SEND)
    text = text.replace("COURSE", "/course").replace("CHECKOUT", str(ROOT))
    return reference_submission(lab, {answer.question: text})


def _peak() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _by_lab() -> Iterator[tuple[LabSource, list[Answer]]]:
    yield read_lab(HOME / "solutions" / SURVIVAL), [*declared(SURVIVAL, Kind.HOSTILE), CELLS]
    for info in source_labs():
        greedy = [each for each in declared(info.directory, Kind.HOSTILE) if GREEDY in each.file]
        if greedy:
            yield read_lab(source_folder(info)), greedy


def main() -> int:
    """Print the table; return 1 if an answer costs more than it may."""
    parser = argparse.ArgumentParser(prog="python -m tests.grading.answers.cost", description=__doc__)
    parser.add_argument("--only", default="", help="answers with this text in their title")
    parser.add_argument(
        "--from", dest="file", default="", help="results, escapes, endings, ranks, greedy or cells"
    )
    chosen = parser.parse_args()
    print(f"{'answer':48}  {'judge s':>7}  {'own s':>7}  {'times':>5}  {'MiB':>7}  status")
    found, began = [], time.perf_counter()
    for lab, answers in _by_lab():
        some = [each for each in answers if chosen.only in each.title and chosen.file in each.file]
        if not some:
            continue
        with zygote_for(lab) as zygote:
            zygote.wait()
            for cost in costs(some, lab, zygote):
                found.append(cost)
                print(cost.line(), flush=True)
    if not found:
        return 0
    times, memory = max(cost.times for cost in found), max(cost.memory for cost in found)
    passed = time.perf_counter() - began
    print(f"{len(found)} answers: at most {times:.2f} times, {memory / 2**20:.0f} MiB ({passed:.0f} s)")
    return int(times > MOST_TIMES or memory > MOST_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
