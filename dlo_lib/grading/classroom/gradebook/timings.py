"""``timings.csv``: the CPU time of each submission, and of what the students share.

A process that writes the file cannot count its own end. So the command writes it when the judging service has
ended, which leaves the end of Python.
"""

from __future__ import annotations

import os
from pathlib import Path

from dlo_lib.base.files import write_text
from dlo_lib.grading.classroom.gradebook.export import REPORTS, GradeTable
from dlo_lib.grading.classroom.roster.tables import csv_text
from dlo_lib.grading.judge.report_store import load, report_file
from dlo_lib.grading.sandbox.limits import tree_cpu_seconds

TIMINGS = "timings.csv"
SHARED = "(all students)"  # the row that belongs to no student
OWN_SECONDS = ("judge_cpu", "student_cpu", "start_cpu")


def write_timings(folder: Path, table: GradeTable) -> None:
    """Write ``timings.csv`` to the folder of the lab's grades.

    The last row is what the students whom this run has judged share: the proof, the processes from which
    theirs are forked, these forks, and the command. It has the CPU time of this process, of its descendants
    and of those that they have waited for, without the times in the other rows.
    """
    timings = {
        row.student: stored.timing
        for row in table.rows
        if (stored := load(report_file(folder / REPORTS, row.student))) is not None
    }
    own = sum(timings.get(student, {}).get(kind, 0.0) for student in table.judged for kind in OWN_SECONDS)
    if (spent := tree_cpu_seconds(os.getpid())) > own:
        timings[SHARED] = {"shared_cpu": round(spent - own, 3)}
    kinds = sorted({kind for timing in timings.values() for kind in timing})
    rows = [
        [student, *(f"{timing.get(kind, 0.0):g}" for kind in kinds)] for student, timing in timings.items()
    ]
    write_text(folder / TIMINGS, csv_text(["student", *(f"{kind}_seconds" for kind in kinds)], rows))
