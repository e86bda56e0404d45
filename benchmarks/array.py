"""Grades a class with an array of jobs on a virtual SLURM cluster of this machine, and compares the time with
the upper bound of list scheduling.

    bound = work / slots + the longest submission

The first row has submissions that only sleep, with the run times of a fictitious class. It measures the
overhead of the queue, of the array and of collecting the results. The second row has real submissions of
13_dp_limit through ``dlo grade --slurm``; the elements share the cores of this machine, and each starts a
separate judge. Needs root, slurm-wlm, munge, slurmdbd and mariadb-server.
"""

from __future__ import annotations

import contextlib
import csv
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.grading import DLO, LAB, _class
from benchmarks.paired import Row, Spread
from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.cli.grade_slurm import SlurmElements
from dlo_lib.grading.judge.array import collect_results
from dlo_lib.grading.judge.client import JudgeJob
from dlo_lib.grading.judge.work_queue import WorkQueue
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.source import read_lab, source_folder
from tests.cluster.fixtures import JEAN_ZAY
from tests.cluster.virtual_slurm import attached

SUBMISSIONS, SLOTS, REAL = 200, 20, 40
SITE = {"site": "jean-zay-v100", "account": "abc"}
POLL = 0.5
ROWS = 2


def rows(pairs: int = REAL) -> Iterator[Row]:
    """``pairs`` is the number of real submissions. The number of sleeping submissions is five times as
    large."""
    if missing := JEAN_ZAY.missing():
        raise UserError(f"no virtual cluster here: {missing}")
    with (
        tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as name,
        attached(JEAN_ZAY, Path(name) / "slurm") as conf,
    ):
        os.environ |= {"SLURM_CONF": str(conf), "DLO_HOME": f"{name}/home"}
        os.environ |= {"DLO_POLL_S": str(POLL), "OMP_NUM_THREADS": "1"}
        yield _sleeping(Path(name), SUBMISSIONS * pairs // REAL)
        yield _real(Path(name), pairs)


def _sleeping(folder: Path, count: int) -> Row:
    draw = random.Random(0)
    seconds = [min(25.0, draw.lognormvariate(1.5, 0.7)) for _ in range(count)]
    jobs = [
        JudgeJob(f"s{number}", Path(str(length)), Path(), "")
        for number, length in enumerate(seconds)
        for number, length in enumerate(seconds)
    ]
    queue, began = WorkQueue.of(folder / "queue", jobs), time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.sleeping", str(queue.folder)]
    sweep = [{"element": number} for number in range(SLOTS)]
    job = cluster.submit(command, gpus=0, cores=1, time=30, sweep=sweep, name="sleep", **SITE)  # type: ignore[arg-type]
    assert isinstance(job, cluster.Job)
    done = [code for _, code in collect_results(queue, SlurmElements(job), SLOTS, jobs)]
    wall = time.perf_counter() - began
    assert done == [0] * count
    return _row("array, fictitious run times", wall, seconds, SLOTS)


def _real(folder: Path, count: int) -> Row:
    lab = read_lab(source_folder(find_lab(LAB, source_labs())))
    course = _class(folder / "course", lab, count)
    slots = len(os.sched_getaffinity(0))
    options = [
        "--slurm",
        "--array",
        str(slots),
        "--cores",
        "1",
        "--site",
        SITE["site"],
        "--account",
        SITE["account"],
    ]
    with contextlib.chdir(course):
        # The first grading proves the lab and stores the result.
        os.spawnv(os.P_WAIT, sys.executable, [*DLO, "grade", LAB, "--only", "s000"])
        began = time.perf_counter()
        if os.spawnv(os.P_WAIT, sys.executable, [*DLO, "grade", LAB, *options]):
            raise UserError("dlo grade --slurm failed: see above")
        wall = time.perf_counter() - began
    with open(course / "grades" / LAB / "timings.csv", encoding="utf-8", newline="") as file:
        seconds = [float(row["wall_seconds"]) for row in csv.DictReader(file)]
    return _row("dlo grade --slurm, real submissions", wall, seconds, slots)


def _row(name: str, wall: float, seconds: list[float], slots: int) -> Row:
    share, longest = sum(seconds) / slots, max(seconds)
    ratio = wall / (share + longest)
    note = f"{len(seconds)} submissions, {slots} slots: {wall:.1f} s; "
    note += f"work / slots {share:.1f} s, the longest {longest:.1f} s"
    return Row(name, "work / slots + the longest", slots, Spread(ratio, ratio, ratio, 1), note=note)
