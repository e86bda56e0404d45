"""A class judged by an array of jobs on a virtual SLURM cluster of this machine, against the time that work and slots allow.

    bound = work / slots + the longest submission

First with submissions that only sleep, for as long as a made-up class computes: what queue, array and collecting cost. Then with real
submissions of 13_dp_limit through ``dlo grade --slurm``, where the elements share this machine's cores and each starts a judge of its own.
Needs root, slurm-wlm, munge, slurmdbd and mariadb-server.
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
from dlo_lib.cli.grade_slurm import SlurmElements
from dlo_lib.errors import UserError
from dlo_lib.grading.array import collected
from dlo_lib.grading.course import find_lab, source_labs
from dlo_lib.grading.judging import Job
from dlo_lib.grading.source import read_lab, source_folder
from dlo_lib.grading.work_queue import WorkQueue
from tests.cluster.fixtures import JEAN_ZAY
from tests.cluster.virtual_slurm import attached

SUBMISSIONS, SLOTS, REAL = 200, 20, 40
SITE = {"site": "jean-zay-v100", "account": "abc"}
POLL = 0.5


def rows(pairs: int = REAL) -> Iterator[Row]:
    """``pairs``: real submissions; of those that sleep there are five times as many."""
    if missing := JEAN_ZAY.missing():
        raise UserError(f"no virtual cluster here: {missing}")
    with tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as name, attached(JEAN_ZAY, Path(name) / "slurm") as conf:
        os.environ |= {"SLURM_CONF": str(conf), "DLO_HOME": f"{name}/home", "DLO_POLL_S": str(POLL), "OMP_NUM_THREADS": "1"}
        yield _sleeping(Path(name), SUBMISSIONS * pairs // REAL)
        yield _real(Path(name), pairs)


def _sleeping(folder: Path, count: int) -> Row:
    draw = random.Random(0)
    seconds = [min(25.0, draw.lognormvariate(1.5, 0.7)) for _ in range(count)]
    jobs = [Job(f"s{number}", Path(str(length)), Path("nowhere"), "") for number, length in enumerate(seconds)]
    queue, began = WorkQueue.of(folder / "queue", jobs), time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.sleeping", str(queue.folder)]
    sweep = [{"element": number} for number in range(SLOTS)]
    job = cluster.submit(command, gpus=0, cores=1, time=30, sweep=sweep, name="sleep", **SITE)  # type: ignore[arg-type]
    assert isinstance(job, cluster.Job)
    done = [code for _, code in collected(queue, SlurmElements(job), SLOTS, jobs)]
    wall = time.perf_counter() - began
    assert done == [0] * count
    return _row("array, made-up run times", wall, seconds, SLOTS)


def _real(folder: Path, count: int) -> Row:
    lab = read_lab(source_folder(find_lab(LAB, source_labs())))
    course = _class(folder / "course", lab, count)
    slots = len(os.sched_getaffinity(0))
    options = ["--slurm", "--array", str(slots), "--cores", "1", "--site", SITE["site"], "--account", SITE["account"]]
    with contextlib.chdir(course):
        os.spawnv(os.P_WAIT, sys.executable, [*DLO, "grade", LAB, "--only", "s000"])  # the lab is proved, and that is kept
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
    note = f"{len(seconds)} submissions, {slots} slots: {wall:.1f} s; work / slots {share:.1f} s, the longest {longest:.1f} s"
    return Row(name, "work / slots + the longest", slots, Spread(ratio, ratio, ratio, 1), note=note)
