"""Give a worker with several running tasks about the share of the processors that one process has.

Without this, it would slow down the submission that is judged beside it. The judge lowers the priority of the
tasks from outside; tasks that they start inherit it, and a worker has no right to raise it again. It needs no
control group. A worker with more than ``MOST_RUNNING`` running tasks is a bomb, and the judge ends it.

Reference: sched(7): a step of 1 in the nice value is a factor of 1.25 in processor time; the autogroup of a
session has a nice value too. Cost: 20 µs for each task.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable

from dlo_lib.grading.sandbox.limits import task_state, tasks_of

STEP = 1.25
LOWEST = 10  # a lower one could keep locks of the kernel for seconds
MOST_RUNNING = 16  # no lab has more than four


def share_processor(pids: Iterable[int]) -> tuple[int, int]:
    """Lower the priority of the tasks of these processes by the number of those that run; return the number
    of all tasks and of those that run.
    """
    tasks = [(pid, task) for pid in pids for task in tasks_of(pid)]
    if len(tasks) < 2:
        return len(tasks), len(tasks)
    running = sum(task_state(pid, task) == "R" for pid, task in tasks)
    if running > 1:
        nice = min(LOWEST, math.ceil(math.log(running, STEP)))
        for pid in {pid for pid, _ in tasks}:
            # The kernel has no autogroups, or limits how often they change
            with contextlib.suppress(OSError), open(f"/proc/{pid}/autogroup", "w", encoding="ascii") as file:
                file.write(str(nice))
        for _, task in tasks:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if os.getpriority(os.PRIO_PROCESS, task) < nice:
                    os.setpriority(os.PRIO_PROCESS, task, nice)
    return len(tasks), running
