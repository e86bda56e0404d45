"""One student of the hostile class: the submission, and the expected row.

Every case begins with the lab's solution as a notebook. The student has attempted the questions for which the
case expects points and those that it changes; the others stay unchanged since the release, so that a row is
cheap. By default, the expected points are those of the questions without ranks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.grading.answers import Kind, declared

LAB = "93_survival"
NOTEBOOK = "survival.ipynb"
ALL = {"scale": 3.0, "quantise": 1.0, "mean": 3.0, "fsdp": 2.0, "quiz": 2.0}
PLAIN = {"scale": 3.0, "quantise": 1.0, "quiz": 2.0}  # the questions without ranks
REST = {"quantise": 1.0, "quiz": 2.0}  # without `scale`

CHECKOUT = Path(__file__).resolve().parents[3]
SEND = """
def send(data):
    import os, socket
    for number in range(3, 64):
        try:
            socket.socket(fileno=os.dup(number)).sendall(data)
        except OSError:
            pass
"""
ITSELF = object()

Notebook = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One case.

    Args:
        status: the beginning of the row's status.
        says: words of its warnings or of a check's message.
        points: by question; 0 for those that are not named.
        row: its number in the list of submissions that a grader must survive.
    """

    student: str
    hand_in: Callable[[Notebook, Path], object]
    status: str
    points: Mapping[str, float]
    says: str
    row: str


class Family:
    """Register similar cases; a student has the name of the function unless the case has one."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def case(
        self,
        status: str = "GRADED",
        points: Mapping[str, float] = REST,
        says: str = "",
        row: str = "",
        student: str = "",
    ) -> Callable[[Callable[[Notebook, Path], object]], Callable[[Notebook, Path], object]]:
        """Register a function ``(notebook, folder)`` that changes the notebook or returns what to write
        instead.

        That is text, bytes, plain data, or ``ITSELF`` if the function has written the files.
        """

        def add(function: Callable[[Notebook, Path], object]) -> Callable[[Notebook, Path], object]:
            self.cases.append(Case(student or function.__name__, function, status, points, says, row))
            return function

        return add

    def read(self, file: str) -> None:
        """Register a case for each answer in ``hostile_<file>.py`` of tests/grading/answers/93_survival.

        The header of an answer says what the row must say: ``{"status": "KERNEL_DIED", "says": "ended by
        itself", "row": "8"}``. COURSE and CHECKOUT in the text become the folders of that name, because an
        attacker knows them. ``import send`` defines a function that sends bytes to the judge without
        Python's sockets.
        """
        for answer in declared(LAB, Kind.HOSTILE):
            if answer.file != f"{Kind.HOSTILE.value}_{file}":
                continue
            expected = {"status": "GRADED", "says": "", "row": "", **answer.values}
            rest = {"quiz": PLAIN["quiz"]} if expected["status"] == "TIMEOUT" else PLAIN  # saves time-outs
            points = {name: most for name, most in {**rest, answer.question: answer.earns}.items() if most}
            hand_in = _answering(answer.question, answer.text)
            self.cases.append(Case(answer.title, hand_in, points=points, **expected))


def _answering(question: str, text: str) -> Callable[[Notebook, Path], None]:
    def hand_in(notebook: Notebook, folder: Path) -> None:
        cell(notebook, question)["source"] = (
            text.replace("COURSE", str(folder.parents[2]))
            .replace("CHECKOUT", str(CHECKOUT))
            .replace("import send", SEND)
        )

    return hand_in


def write(case: Case, reference: Notebook, released: Notebook, course: Path) -> None:
    """Write the submission of ``case`` where the course expects it."""
    folder = course / "submitted" / case.student / LAB
    folder.mkdir(parents=True)
    (folder / "timestamp.txt").write_text("2026-11-20 12:00:00.000000 UTC")
    notebook = copy.deepcopy(reference)
    for question in ALL:
        if question not in case.points:
            cell(notebook, question)["source"] = cell(released, question)["source"]
    instead = case.hand_in(notebook, folder)
    if isinstance(instead, bytes):
        (folder / NOTEBOOK).write_bytes(instead)
    elif isinstance(instead, str):
        (folder / NOTEBOOK).write_text(instead, encoding="utf-8")
    elif instead is not ITSELF:
        (folder / NOTEBOOK).write_text(json.dumps(notebook if instead is None else instead), encoding="utf-8")


def cell(notebook: Notebook, identity: str) -> dict[str, Any]:
    """Return the cell with that id."""
    return next(cell for cell in notebook["cells"] if cell["id"] == identity)


def own_cell(text: str, identity: str = "mine") -> dict[str, Any]:
    """Return a code cell that a student adds."""
    return {
        "cell_type": "code",
        "id": identity,
        "metadata": {},
        "source": text,
        "outputs": [],
        "execution_count": None,
    }
