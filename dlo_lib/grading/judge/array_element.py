"""One element of an array that judges a class: it takes submissions from the queue, one at a time, until the
queue is empty.

Its cores are reserved for it, so that no other process takes time or memory from a submission. After a
restart it first judges the submissions that it had already taken. It writes report files, never the
gradebook.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from dlo_lib.base.files import write_text
from dlo_lib.grading.judge.client import JudgeClient, JudgeJob
from dlo_lib.grading.judge.work_queue import WorkQueue
from dlo_lib.grading.lab.course import LabInfo, find_lab, source_labs

SETTINGS = "settings.json"  # in the queue's folder


def write_settings(queue: WorkQueue, lab: LabInfo, course: Path, unsafe: bool) -> None:
    """Write the settings that elements need beside the queue."""
    write_text(
        queue.folder / SETTINGS, json.dumps({"lab": lab.directory, "course": str(course), "unsafe": unsafe})
    )


def work(queue: WorkQueue, element: int, judge: Callable[[JudgeJob], int]) -> None:
    """Take submissions, one at a time, as ``element``; ``judge`` returns the exit status of each."""
    while (ticket := queue.take(element)) is not None:
        queue.finish(ticket, judge(ticket.job))


def main(
    folder: Annotated[Path, typer.Argument(help="folder of the queue")],
    element: Annotated[int, typer.Option(help="number of this element in the array")],
) -> None:
    """Judge submissions of a queue."""
    queue = WorkQueue(folder)
    if not queue.has_work_for(element):
        return
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    lab = find_lab(settings["lab"], source_labs())
    with JudgeClient(lab, Path(settings["course"]), settings["unsafe"]) as service:

        def judge(job: JudgeJob) -> int:
            ((_, code),) = service.judge([job], 1)
            return code

        work(queue, element, judge)


def run() -> None:
    """Run :func:`main` with the arguments of this process."""
    typer.run(main)
