"""`dlo submit`: hand a student's notebook in through the exchange of the class, by ``nbgrader submit``."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.interpreter import trusted_python
from dlo_lib.base.text import tr
from dlo_lib.cli.jupyter import nbgrader_environment
from dlo_lib.cli.workspace import own_notebook
from dlo_lib.grading.lab.course import find_lab
from dlo_lib.grading.lab.times import how_late
from dlo_lib.grading.notebook.class_state import class_states

NBGRADER = "import runpy; runpy.run_module('nbgrader', run_name='__main__')"
"""``python -m nbgrader``, without the student's modules: an ``html.py`` among the labs is not imported."""
NOT_RELEASED = (
    "Assignment not found",
    "Inbound directory doesn't exist",
    "No course id",
    "directory doesn't exist",
)
"""What nbgrader says if the exchange has no such lab."""


def submit_lab(name: str) -> Path:
    """Submit the student's folder of a lab and return its notebook.

    Raises:
        UserError: there is no copy of the lab, its folder has another name, the exchange of the class does
            not have the lab, or nbgrader refuses the submission.
    """
    lab = find_lab(name)
    notebook = own_notebook(name)
    folder = notebook.parent.resolve()
    if folder.name != lab.directory:  # nbgrader submits a lab under the name of its folder
        raise UserError(
            tr("{notebook} is not in a folder {lab}: move it there", notebook=notebook, lab=lab.directory)
        )
    done = subprocess.run(
        trusted_python(NBGRADER, "submit", lab.directory, "--Exchange.path_includes_course=False"),
        cwd=folder.parent,
        env=nbgrader_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return notebook
    if any(text in done.stdout for text in NOT_RELEASED):
        raise UserError(
            tr(
                "no exchange of a class has {lab}: hand in {notebook} as your instructor says, or name the "
                "exchange once: dlo lab --exchange FOLDER",
                lab=lab.directory,
                notebook=notebook,
            )
        )
    lines = [line for line in done.stdout.splitlines() if "nbgrader submit failed" not in line]
    errors = [line for line in lines if "ERROR" in line] or lines[-1:] or [tr("no output")]
    reason = re.sub(r"^\[[^]]*\]\s*", "", errors[0])  # the name of the program and the level
    raise UserError(tr("nbgrader did not submit {lab}: {reason}", lab=lab.directory, reason=reason))


def what_counts(name: str, notebook: Path) -> list[str]:
    """Return sentences on the due date of the submission that was just made, and on which one counts.

    Empty without a class that publishes a due date.
    """
    lab = find_lab(name)
    state = class_states([lab], notebook.parent.parent).get(lab.directory)
    if state is None or state.due is None or state.submitted is None:
        return []
    due = state.local(state.due)
    seconds = state.seconds_late(state.submitted)
    if not seconds:
        return [tr("It is on time: the due date is {due}.", due=due)]
    lines = [tr("It is {late} LATE: the due date was {due}.", late=how_late(seconds), due=due)]
    if state.on_time is not None:
        text = "Your submission of {time}, which was on time, counts; your instructor sees both."
        lines.append(tr(text, time=state.local(state.on_time)))
    elif state.rule:
        lines.append(tr("Late work in this class: {rule}.", rule=state.rule))
    lines.append(tr("If your instructor gave you an extension, that date counts."))
    return lines
