"""Submissions to 13_dp_limit that take all they can get (``bombs``), by the command ``dlo grade``.

Each bomb is judged beside the reference solution, with two jobs. The first row compares the seconds until the
bomb's row with those of the reference alone; the note also has the CPU time. The second row compares the
reference beside the bomb with the reference alone, which is measured before every ``BETWEEN`` bombs; its
median counts. ``pairs`` is the number of measurements for each bomb. The first grading of the course proves
the lab. About 5 minutes on an idle machine with two cores.

CPU time needs a control group, as in ``benchmarks.grading``. That of a bomb is that of the whole command
beyond the command for the reference alone, so it includes the grader's for the bomb.
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
BETWEEN = 4
STUDENTS = {f"bomb{number:02d}": bomb for number, bomb in enumerate(BOMBS)}


def rows(pairs: int = 1) -> Iterator[Row]:
    """``pairs`` is the number of times that the reference is judged beside each bomb."""
    lab = read_lab(source_folder(find_lab(LAB, source_labs())))
    alone, beside = _Measured(), {bomb: _Measured() for bomb in BOMBS}
    with tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as name:
        course, aside = Path(name) / "course", Path(name) / "aside"
        answers = {"honest": {question: lab.solution(question).answer for question in lab.questions}}
        new_course(course, lab, answers | {bomb: bombed(lab, BOMBS[code]) for bomb, code in STUDENTS.items()})
        for student in STUDENTS:
            shutil.move(course / "submitted" / student, aside / student)
        graded(course)  # proves the lab
        for number, (student, bomb) in enumerate(pairs * list(STUDENTS.items())):
            if number % BETWEEN == 0:
                alone.measure(course)
            shutil.copytree(aside / student, course / "submitted" / student)
            beside[bomb].measure(course, student)
            shutil.rmtree(course / "submitted" / student)
        alone.measure(course)
    seconds = {bomb: statistics.median(found.bomb) for bomb, found in beside.items()}
    longest = max(seconds, key=seconds.__getitem__)
    reference, cpu = statistics.median(alone.honest), statistics.median(alone.cpu)
    own = statistics.median(alone.own)
    note = f"the reference alone {reference:.1f} s, {own:.1f} s of CPU time; seconds, and of CPU time: "
    note += ", ".join(
        f"{bomb} {value:.1f}, {statistics.median(beside[bomb].cpu) - cpu:.1f}"
        for bomb, value in seconds.items()
    )
    ratios = [value / reference for value in seconds.values()]
    yield Row(
        f"a bomb in each answer (the longest: {longest})", "the reference", 1, spread(ratios), note=note
    )
    slowed = {bomb: statistics.median(found.honest) / reference for bomb, found in beside.items()}
    note = ", ".join(f"{bomb} {ratio:.2f}" for bomb, ratio in slowed.items())
    note += f"; alone {min(alone.honest):.2f} to {max(alone.honest):.2f} s"
    yield Row("the reference beside a bomb", "alone", 1, spread(list(slowed.values())), note=note)


class _Measured:
    """Runs of the command: seconds in which the reference and the bomb were judged, CPU time of all processes
    and of the reference's."""

    def __init__(self) -> None:
        self.honest: list[float] = []
        self.bomb: list[float] = []
        self.cpu: list[float] = []
        self.own: list[float] = []

    def measure(self, course: Path, bomb: str = "") -> None:
        cost = graded(course)
        self.cpu.append(cost.cpu)
        self.own.append(cost.own)
        self.honest.append(judged_seconds(course, "honest"))
        if bomb:
            self.bomb.append(judged_seconds(course, bomb))


def judged_seconds(course: Path, student: str) -> float:
    """Return the seconds in which a submission was judged."""
    with open(course / "grades" / LAB / "timings.csv", encoding="utf-8", newline="") as file:
        return next(float(row["wall_seconds"]) for row in csv.DictReader(file) if row["student"] == student)
