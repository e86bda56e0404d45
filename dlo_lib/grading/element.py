"""One element of an array that judges a class: it takes submissions from the queue, one at a time, until there are no more.

It has cores of its own, so whatever runs out of time or memory has been judged with nobody beside it. Killed and started again, it begins
with what it had taken. It writes report files; the gradebook has another writer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from dlo_lib.files import write_text
from dlo_lib.grading.course import LabInfo, find_lab, source_labs
from dlo_lib.grading.judging import Job, JudgingService
from dlo_lib.grading.work_queue import WorkQueue

SETTINGS = "settings.json"  # in the queue's folder


def write_settings(queue: WorkQueue, lab: LabInfo, course: Path, unsafe: bool) -> None:
    """What elements need to know beside the queue."""
    write_text(queue.folder / SETTINGS, json.dumps({"lab": lab.directory, "course": str(course), "unsafe": unsafe}))


def work(queue: WorkQueue, element: int, judge: Callable[[Job], int]) -> None:
    """Take submissions, one at a time, as ``element``; ``judge`` gives the exit status of each."""
    while (ticket := queue.take(element)) is not None:
        queue.finish(ticket, judge(ticket.job))


def main(
    folder: Annotated[Path, typer.Argument(help="of the queue")],
    element: Annotated[int, typer.Option(help="the number of this one in its array")],
) -> None:
    """Judge submissions of a queue."""
    queue = WorkQueue(folder)
    if not queue.anything_left_to(element):
        return
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    lab = find_lab(settings["lab"], source_labs())
    with JudgingService(lab, Path(settings["course"]), settings["unsafe"]) as service:

        def judge(job: Job) -> int:
            ((_, code),) = service.judged([job], 1)
            return code

        work(queue, element, judge)


if __name__ == "__main__":
    typer.run(main)
