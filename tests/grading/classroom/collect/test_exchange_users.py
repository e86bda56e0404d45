"""A class of Unix users on one machine: each submits, the instructor grades, and each reads their own
feedback.

Needs root, to add users for the duration of the test and to run commands as them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlo_lib.grading.classroom.collect.collection import collect
from dlo_lib.grading.classroom.feedback.feedback import make_feedback, release_feedback
from dlo_lib.grading.classroom.gradebook.batch import Options, grade_lab
from dlo_lib.grading.classroom.gradebook.inventory import ItemState
from dlo_lib.grading.classroom.gradebook.nbgrader_course import create_course, open_course
from dlo_lib.grading.classroom.publish.publication import publish
from dlo_lib.grading.lab.source import LabSource
from tests.grading.other_user import command_of
from tests.grading.small_class import LAB, right, small_lab, wrong_scale

ADA, BLAISE = (f"dlo-{name}-{os.getpid() % 100000}" for name in ("ada", "blaise"))
FETCH_AND_SUBMIT = """
from pathlib import Path
from nbgrader.apps import FetchAssignmentApp, SubmitApp
FetchAssignmentApp.launch_instance(["{lab}"]); FetchAssignmentApp.clear_instance()
Path("{lab}/small.ipynb").write_text(Path("answer.ipynb").read_text())
SubmitApp.launch_instance(["{lab}"])
"""
FETCH_FEEDBACK = """
from nbgrader.apps import FetchFeedbackApp
FetchFeedbackApp.launch_instance(["{lab}"])
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("useradd", "userdel", "runuser", "bwrap"))),
        reason=(
            "NOT TESTED HERE: an exchange with several Unix users (needs root, "
            "useradd, runuser and bubblewrap)"
        ),
    ),
]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's: the exchange and the homes of two
    temporary users.
    """
    folder = Path(tempfile.mkdtemp(prefix="dlo-test-exchange-"))
    folder.chmod(0o755)
    (folder / "exchange").mkdir()
    (folder / "exchange").chmod(0o777)
    try:
        for name in (ADA, BLAISE):
            add = ["useradd", "--no-create-home", "--no-user-group", "--home-dir", str(folder / name), name]
            subprocess.run(add, check=True, capture_output=True)
            (folder / name).mkdir(mode=0o700)
            config = (
                "c = get_config()\nc.CourseDirectory.course_id = 'dlo'\n"
                f"c.Exchange.root = {str(folder / 'exchange')!r}\n"
            )
            (folder / name / "nbgrader_config.py").write_text(config)
            shutil.chown(folder / name, name)
            shutil.chown(folder / name / "nbgrader_config.py", name)
        yield folder
    finally:
        for name in (ADA, BLAISE):
            subprocess.run(["userdel", name], capture_output=True)
        shutil.rmtree(folder)


@pytest.fixture
def lab(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> LabSource:
    monkeypatch.setenv("DLO_COURSE", str(checkout))
    return small_lab()


def as_user(name: str, place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as ``name`` in their home."""
    path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    return subprocess.run(
        command_of(name, place / name, *command), capture_output=True, text=True, timeout=300, env=path
    )


def python(name: str, place: Path, script: str) -> None:
    done = as_user(name, place, sys.executable, "-c", script.format(lab=LAB))
    assert done.returncode == 0, done.stderr


def test_each_student_submits_and_reads_only_their_own_feedback(place: Path, lab: LabSource) -> None:
    folder = create_course(place / "course", place / "exchange", [ADA, BLAISE])
    folder.chmod(0o700)
    course = open_course(folder)
    publish(course, lab.info)
    for name, notebook in ((ADA, right), (BLAISE, wrong_scale)):
        answer = place / name / "answer.ipynb"
        answer.write_text(json.dumps(notebook(lab)))
        answer.chmod(0o644)
        python(name, place, FETCH_AND_SUBMIT)

    inbound = place / "exchange" / "dlo" / "inbound"
    (of_ada,) = inbound.glob(f"{ADA}+*")
    assert of_ada.owner() == ADA
    assert as_user(BLAISE, place, "ls", str(inbound)).returncode != 0  # students cannot list submissions
    assert as_user(BLAISE, place, "cp", "answer.ipynb", str(of_ada / "small.ipynb")).returncode != 0
    forged = inbound / f"{ADA}+{LAB}+2099-01-01 00:00:00 UTC"  # the newest, if it were Ada's
    assert as_user(BLAISE, place, "cp", "-r", LAB, str(forged)).returncode == 0

    inventory = collect(course, lab.info)
    assert [item.student for item in inventory.of(ItemState.NEW)] == [ADA, BLAISE]
    (refused,) = inventory.of(ItemState.REFUSED)
    assert f"written by {BLAISE}" in "; ".join(refused.notes)

    rows = {row.student: row for row in grade_lab(lab.info, folder, options=Options(jobs=2)).rows}
    assert rows[ADA].status == "GRADED"
    assert rows[BLAISE].total < rows[ADA].total == 12
    make_feedback(course, lab.info)
    release_feedback(course, lab.info)
    for name in (ADA, BLAISE):
        python(name, place, FETCH_FEEDBACK)
    pages = {
        name: next((place / name / LAB / "feedback").rglob("small.html")).read_text()
        for name in (ADA, BLAISE)
    }
    assert "12" in pages[ADA]
    assert pages[ADA] != pages[BLAISE]
    assert as_user(BLAISE, place, "ls", str(place / "exchange" / "dlo" / "feedback")).returncode != 0
