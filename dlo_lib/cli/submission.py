"""`dlo submit`: hand a student's notebook in through nbgrader's exchange of the class."""

from __future__ import annotations

import json
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

HAND_IN = "from dlo_lib.cli.hand_in import main; main()"
"""Run without the student's modules: an ``html.py`` among the labs is not imported."""


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
        trusted_python(HAND_IN, lab.directory),
        cwd=folder.parent,
        env=nbgrader_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        released, reason = True, (done.stderr.strip() or tr("no output")).splitlines()[-1]
    else:
        answer = json.loads(done.stdout)
        released, reason = answer["released"], " ".join(answer["error"].split())
    if not released:
        raise UserError(
            tr(
                "no exchange of a class has {lab}: hand in {notebook} as your instructor says, or name the "
                "exchange once: dlo lab --exchange FOLDER",
                lab=lab.directory,
                notebook=notebook,
            )
        )
    if reason:
        raise UserError(tr("nbgrader did not submit {lab}: {reason}", lab=lab.directory, reason=reason))
    return notebook


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
