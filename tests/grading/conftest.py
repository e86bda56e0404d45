"""The small lab of the tests, a running zygote for it, its notebook, and a course in which it is released."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.grading.classroom.gradebook.nbgrader_course import create_course, open_course
from dlo_lib.grading.classroom.publish.publication import publish
from dlo_lib.grading.judge.environment import environment
from dlo_lib.grading.judge.judge import judge_notebook, zygote_for
from dlo_lib.grading.judge.report import Report
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.release import release_lab
from dlo_lib.grading.lab.source import LabSource, notebook_text, read_lab, source_notebook
from dlo_lib.grading.sandbox.host import Zygote
from tests.grading.small_class import (
    SMALL_COURSE,
    checkout,
    class_,
    graded_class,
    in_checkout,
    judges,
    ungraded,
)

__all__ = ["checkout", "class_", "graded_class", "in_checkout", "judges", "ungraded"]

SHARDED_COURSE = SMALL_COURSE.with_name("sharded_course")
SMALL = SMALL_COURSE / "solutions" / "91_small"
ROSTER = {
    "ada": "Ada Lovelace",
    "blaise": "Blaise Pascal",
    "chloe": "Chloé Dupont",
    "dan": "Dan Moore",
    "dan2": "Dan Moore",
}


@pytest.fixture(scope="session")
def small() -> LabSource:
    """The small lab's source."""
    return read_lab(SMALL)


@pytest.fixture(scope="session")
def zygote(small: LabSource) -> Iterator[Zygote]:
    """One zygote for all tests, started by a process that has a secret in its environment."""
    with environment({"CLASS_SECRET": "keep this secret"}), zygote_for(small) as warm:
        yield warm


@pytest.fixture
def reference() -> dict[str, Any]:
    """The small lab's notebook with the solutions, as parsed JSON, for tests to change and submit."""
    return json.loads(notebook_text(source_notebook(SMALL)))


@pytest.fixture
def judge(small: LabSource, zygote: Zygote, tmp_path: Path) -> Callable[..., Report]:
    """Submit a notebook, given as parsed JSON or as text, and judge it."""

    def run(notebook: object, name: str = "small.ipynb", **settings: Any) -> Report:
        (tmp_path / name).write_text(
            notebook if isinstance(notebook, str) else json.dumps(notebook), encoding="utf-8"
        )
        return judge_notebook(tmp_path / "small.ipynb", small, "secret", **{"zygote": zygote, **settings})

    return run


@pytest.fixture(scope="session")
def released_course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with two labs, and in ``course`` a course that has released the small one; read-only for
    tests.
    """
    root = tmp_path_factory.mktemp("released")
    for one in (SMALL_COURSE, SHARDED_COURSE):
        shutil.copytree(one, root, dirs_exist_ok=True)
    (root / "exchange").mkdir()
    with environment({"DLO_COURSE": str(root)}):
        lab = find_lab("91", source_labs())
        release_lab(lab)
        course = open_course(create_course(root / "course", root / "exchange"))
        publish(course, lab)
        with course.gradebook as gradebook:
            for student, name in ROSTER.items():
                first, last = name.split()
                gradebook.update_or_create_student(student, first_name=first, last_name=last)
    return root


@pytest.fixture
def course(released_course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate course folder with an empty exchange: the small lab is released, without submissions."""
    monkeypatch.setenv("DLO_COURSE", str(released_course))
    folder = tmp_path / "course"
    shutil.copytree(released_course / "course", folder, symlinks=True)
    inbound = tmp_path / "exchange" / "dlo" / "inbound"
    inbound.mkdir(parents=True)
    (inbound.parent / "feedback").mkdir()
    with open(folder / "nbgrader_config.py", "a", encoding="utf-8") as config:
        config.write(
            f"c.Exchange.root = {str(tmp_path / 'exchange')!r}\nc.ExchangeCollect.check_owner = False\n"
        )
    return folder
