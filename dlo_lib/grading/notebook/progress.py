"""A student's progress: points earned in the notebook and hints shown, one small JSON file per lab below the
state folder.

The file belongs to the student and has no effect on grades, which come from the judge.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlo_lib.base.files import state_dir, write_text
from dlo_lib.grading.lab.course import LabInfo, course_root, labs

NOT_STARTED, STARTED, DONE = "not started", "started", "done"


@dataclass
class Progress:
    """The record of one lab.

    Args:
        lab: the directory of the lab.
        earned: the points that each question earned last.
        possible: the most that the visible checks of each question give.
        hints: the number of hints shown for each question.
        quiz_tries: the checks of the quiz that had an answer to every question.
        judged: for each question a digest of the text of its cell that the last check judged, and the time,
            in seconds since 1970.
    """

    lab: str
    earned: dict[str, float] = field(default_factory=dict)
    possible: dict[str, float] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    quiz_tries: int = 0
    judged: dict[str, tuple[str, float]] = field(default_factory=dict)

    def save(self) -> None:
        """Write the record atomically."""
        write_text(_file(self.lab), json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")


@dataclass(frozen=True)
class Standing:
    """A lab and the student's progress in it. ``points`` includes hidden checks, ``earned`` only the
    notebook's; ``visible`` is the most that ``earned`` can be.
    """

    directory: str
    number: int
    name: str
    title: str
    core: bool
    minutes: int
    points: float
    earned: float
    state: str
    visible: float = 0.0

    @property
    def share(self) -> float:
        """What is earned of what the notebook can give, from 0 to 1."""
        if self.state == DONE:
            return 1.0
        return min(1.0, self.earned / self.visible) if self.visible else 0.0


def read_progress(lab: str) -> Progress:
    """Return the record of the lab in the directory ``lab``; an empty one if there is no readable record."""
    try:
        read = json.loads(_file(lab).read_text(encoding="utf-8"))
        return Progress(
            lab,
            _numbers(read["earned"]),
            _numbers(read["possible"]),
            {q: int(n) for q, n in read["hints"].items()},
            int(read.get("quiz_tries", 0)),  # earlier records have neither
            {q: (str(text), float(at)) for q, (text, at) in read.get("judged", {}).items()},
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return Progress(lab)


def standings() -> list[Standing]:
    """Return all labs of the course, in order, with the student's progress."""
    return [_standing(lab) for lab in labs()]


def _standing(lab: LabInfo) -> Standing:
    progress = read_progress(lab.directory)
    points = _points(course_root() / "labs" / lab.directory / lab.notebook)
    complete = points.keys() <= progress.earned.keys() and all(
        progress.earned[question] >= progress.possible.get(question, 0.0) for question in points
    )
    state = NOT_STARTED if not (progress.earned or progress.hints) else DONE if complete else STARTED
    earned = sum(progress.earned.values())
    return Standing(
        lab.directory,
        lab.number,
        lab.name,
        lab.title,
        lab.core,
        lab.minutes,
        sum(points.values()),
        earned,
        state,
        sum(progress.possible.get(question, most) for question, most in points.items()),
    )


def _points(notebook: Path) -> dict[str, float]:
    """Return the points by question, from the test cells of a released notebook."""
    if not notebook.is_file():
        return {}
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    graded: list[dict[str, Any]] = [
        cell["metadata"]["nbgrader"] for cell in cells if cell["metadata"].get("nbgrader", {}).get("grade")
    ]
    return {cell["grade_id"].removeprefix("test_"): float(cell["points"]) for cell in graded}


def _file(lab: str) -> Path:
    return state_dir() / "progress" / f"{lab}.json"


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}
