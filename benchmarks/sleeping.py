"""An element of ``benchmarks array`` that judges nothing: a submission's "notebook" is how many seconds it takes. It imports no torch, so
that twenty of them start quickly on two cores."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from dlo_lib.grading.element import work
from dlo_lib.grading.judging import Job
from dlo_lib.grading.work_queue import WorkQueue


def judge(job: Job) -> int:
    time.sleep(float(str(job.notebook)))
    return 0


if __name__ == "__main__":
    work(WorkQueue(Path(sys.argv[1])), int(sys.argv[-1]), judge)
