"""Submissions to 13_dp_limit that take all they can get (``bombs``), by the command ``dlo grade``.

The first row compares each bomb, judged alone, with the reference solution: seconds until the row, and of
CPU time. The second row is the time of the reference solution beside each bomb, with two jobs, divided by
its time alone just before; ``pairs`` is the number of these measurements for each bomb. The first grading of
the course proves the lab.

CPU time needs a control group, as in ``benchmarks.grading``.
"""

from __future__ import annotations

import csv
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bombs import BOMBS, bombed
from benchmarks.grading import LAB, graded, new_course, spread
from benchmarks.paired import Row
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.source import read_lab, source_folder

ROWS = 2


def rows(pairs: int = 1) -> Iterator[Row]:
    """``pairs`` is the number of times that the reference is judged beside each bomb."""
    lab = read_lab(source_folder(find_lab(LAB, source_labs())))
    students = {f"bomb{number:02d}": name for number, name in enumerate(BOMBS)}
    with tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as name:
        course, aside = Path(name) / "course", Path(name) / "aside"
        answers = {"honest": {question: lab.solution(question).answer for question in lab.questions}}
        answers |= {student: bombed(lab, BOMBS[bomb]) for student, bomb in students.items()}
        new_course(course, lab, answers)
        graded(course, "--only", "honest")  # proves the lab
        honest = graded(course, "--only", "honest")
        alone = judged_seconds(course, "honest")
        costs = {student: graded(course, "--only", student) for student in students}
        seconds = {student: cost.wall - honest.wall + alone for student, cost in costs.items()}
        longest = max(seconds, key=seconds.__getitem__)
        note = f"alone {alone:.1f} s, {honest.own:.1f} s of CPU time; seconds, and of CPU time: " + ", ".join(
            f"{bomb} {seconds[student]:.1f}, {costs[student].cpu - honest.cpu + honest.own:.1f}"
            for student, bomb in students.items()
        )
        slowest = f"a bomb in each answer (the longest: {students[longest]})"
        yield Row(
            slowest, "the reference", 1, spread([value / alone for value in seconds.values()]), note=note
        )

        shutil.move(course / "submitted", aside)
        shutil.copytree(aside / "honest", course / "submitted" / "honest")
        ratios: dict[str, float] = {}
        for student, bomb in students.items():
            found = []
            for _ in range(pairs):
                graded(course)
                before = judged_seconds(course, "honest")
                shutil.copytree(aside / student, course / "submitted" / student)
                graded(course)  # with two jobs
                found.append(judged_seconds(course, "honest") / before)
                shutil.rmtree(course / "submitted" / student)
            ratios[bomb] = statistics.median(found)
    note = ", ".join(f"{bomb} {ratio:.2f}" for bomb, ratio in ratios.items())
    yield Row("the reference beside a bomb", "alone", 1, spread(list(ratios.values())), note=note)


def judged_seconds(course: Path, student: str) -> float:
    """Return the seconds in which a submission was judged."""
    with open(course / "grades" / LAB / "timings.csv", encoding="utf-8", newline="") as file:
        return next(float(row["wall_seconds"]) for row in csv.DictReader(file) if row["student"] == student)
