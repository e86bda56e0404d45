"""An element of ``benchmarks array`` that sleeps instead of judging. The "notebook" of a submission is a
number of seconds. The module does not import torch, so that twenty elements start quickly on two cores."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from dlo_lib.grading.judge.array_element import work
from dlo_lib.grading.judge.client import JudgeJob
from dlo_lib.grading.judge.work_queue import WorkQueue


def judge(job: JudgeJob) -> int:
    time.sleep(float(str(job.notebook)))
    return 0


if __name__ == "__main__":
    work(WorkQueue(Path(sys.argv[1])), int(sys.argv[-1]), judge)
