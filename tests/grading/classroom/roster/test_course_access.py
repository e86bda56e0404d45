"""Students cannot enter a course, and several graders of one group work on it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.gradebook.nbgrader_course import create_course, open_course
from dlo_lib.grading.classroom.publish.publication import fill_source
from dlo_lib.grading.classroom.roster.course_access import enter_course
from tests.grading.other_user import command_of
from tests.grading.small_class import LAB, hand_in, right, small_lab, wrong_scale

GROUP, ADA, GRACE, STUDENT = (
    f"dlo-{name}-{os.getpid() % 100000}" for name in ("graders", "ada", "grace", "student")
)
DLO = [sys.executable, "-c", "from dlo_lib.cli import main; main()"]
as_root = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("useradd", "groupadd", "runuser", "bwrap"))),
        reason="NOT TESTED HERE: several Unix users (needs root, useradd, groupadd, runuser and bubblewrap)",
    ),
]


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """A shared course changes the umask of the process."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user of the machine can enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="dlo-test-access-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_course_is_entered_by_its_grader_alone(reachable: Path) -> None:
    assert mode(create_course(reachable / "course")) == 0o700


@pytest.mark.parametrize("open_mode", [0o755, 0o750, 0o711, 0o704, 0o2775])
def test_a_course_that_others_can_enter_is_refused_with_the_cure(reachable: Path, open_mode: int) -> None:
    course = create_course(reachable / "course")
    course.chmod(open_mode)
    with pytest.raises(UserError, match=r"other users of this machine can read the course in .*: chmod "):
        open_course(course)
    assert mode(course) == open_mode
    assert mode(create_course(course)) in (0o700, 0o2770)  # `dlo course` closes it
    open_course(course)


@pytest.mark.parametrize("open_mode", [0o755, 0o750])
def test_below_a_closed_folder_the_mode_does_not_matter(reachable: Path, open_mode: int) -> None:
    (reachable / "home").mkdir(mode=0o700)
    course = create_course(reachable / "home" / "course")
    course.chmod(open_mode)
    enter_course(course)


def test_an_unknown_group_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='unknown group "grader-s"'):
        create_course(tmp_path / "course", group="grader-s")


@pytest.fixture
def graders(reachable: Path) -> Iterator[Path]:
    """Two graders in one group, and a student."""
    try:
        subprocess.run(["groupadd", GROUP], check=True, capture_output=True)
        for name in (ADA, GRACE, STUDENT):
            add = ["useradd", "--no-create-home", "--home-dir", str(reachable / name), name]
            more = [] if name == STUDENT else ["--groups", GROUP]
            subprocess.run([*add, *more], check=True, capture_output=True)
            (reachable / name).mkdir(mode=0o700)
            shutil.chown(reachable / name, name)
        yield reachable
    finally:
        for name in (ADA, GRACE, STUDENT):
            subprocess.run(["userdel", name], capture_output=True)
        subprocess.run(["groupdel", GROUP], capture_output=True)


def as_user(name: str, place: Path, checkout: Path, *command: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "DLO_COURSE": str(checkout),
        "HOME": str(place / name),
    }
    return subprocess.run(
        command_of(name, place / name, *command), capture_output=True, text=True, timeout=300, env=settings
    )


class TestGraders:
    pytestmark = as_root

    def test_two_graders_of_a_group_work_on_one_course(
        self, graders: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = graders / "checkout"  # pytest's folder is closed to other users
        shutil.copytree(checkout, source)
        monkeypatch.setenv("DLO_COURSE", str(source))
        course = create_course(graders / "course", students=["emmy", "sofia"], group=GROUP)
        fill_source(open_course(course), small_lab().info)
        os.umask(0o022)
        assert mode(course) == 0o2770
        assert as_user(STUDENT, graders, source, "ls", str(course)).returncode != 0

        def dlo(name: str, *words: str) -> str:
            done = as_user(name, graders, source, *DLO, *words, "--course", str(course))
            assert done.returncode == 0, f"{name} {words}: {done.stdout}{done.stderr}"
            return done.stdout

        inbox = graders / "inbox"
        for student, notebook in (("emmy", right), ("sofia", wrong_scale)):
            hand_in(inbox, student, json.dumps(notebook(small_lab())))
        generate = [sys.executable, "-m", "nbgrader", "generate_assignment", LAB]
        done = as_user(ADA, graders, source, "sh", "-c", f"cd {course} && exec {' '.join(generate)}")
        assert done.returncode == 0, done.stderr
        dlo(ADA, "collect", "91", "--from", str(inbox / "submitted"))
        dlo(ADA, "grade", "91", "--unsafe", "--jobs", "1")
        shutil.rmtree(inbox / "submitted" / "sofia")
        hand_in(inbox, "sofia", json.dumps(right(small_lab())))
        dlo(GRACE, "collect", "91", "--from", str(inbox / "submitted"))
        dlo(GRACE, "grade", "91", "--unsafe", "--jobs", "1")
        assert "sofia,91_small" in (table := dlo(ADA, "export", "91"))
        assert table.count(",12,12,") == 2
        dlo(ADA, "grade", "91", "--unsafe", "--only", "emmy")
        of_others = [
            path
            for path in course.rglob("*")
            if not path.is_symlink() and (path.group() != GROUP or not mode(path) & stat.S_IRGRP)
        ]
        assert of_others == []
