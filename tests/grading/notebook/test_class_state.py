"""The map and the commands know the class: released, due, submitted, late, graded, feedback to fetch."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from nbgrader.utils import notebook_hash

from dlo_lib.cli.submission import what_counts
from dlo_lib.grading.classroom.feedback.feedback_page import Page, ReceiptCard, feedback_html
from dlo_lib.grading.classroom.feedback.pictures import Plots
from dlo_lib.grading.lab.course import LabInfo, course_root, find_lab
from dlo_lib.grading.lab.times import DEADLINES_FILE
from dlo_lib.grading.notebook.class_state import ClassState, class_states
from dlo_lib.grading.notebook.progress import Standing
from dlo_lib.grading.notebook.start_page import StartPage

LAB = "00_start_here"
NOW = datetime.now(UTC)


class Class:
    """The exchange of a class that has released lab 00, and the folders of one student."""

    def __init__(self, root: Path) -> None:
        self.course, self.cache, self.labs = root / "exchange" / "dl", root / "cache" / "dl", root / "labs"
        for folder in (self.course / "outbound" / LAB, self.course / "feedback", self.cache, self.labs):
            folder.mkdir(parents=True)

    def due(self, hours: float, replaces: bool = False) -> None:
        """Set the due date ``hours`` from now."""
        due = (NOW + timedelta(hours=hours)).isoformat()
        dates = {"due": due, "grace_ends": due, "late": "1 point less a day", "replaces": replaces}
        text = json.dumps({"timezone": "Europe/Paris", "labs": {LAB: dates}})
        (self.course / DEADLINES_FILE).write_text(text, encoding="utf-8")

    def submit(self, hours: float, secret: str = "s") -> str:
        stamp = f"{NOW + timedelta(hours=hours):%Y-%m-%d %H:%M:%S.%f} UTC"
        folder = self.cache / f"ada+{LAB}+{stamp}"
        folder.mkdir()
        (folder / "submission_secret.txt").write_text(secret, encoding="utf-8")
        return stamp

    def state(self) -> ClassState:
        (found,) = class_states([find_lab("00")], self.labs).values()
        return found


def feedback_page(lab: LabInfo, total: float) -> str:
    card = ReceiptCard("ada", lab.notebook, 1, "", "", "0" * 64)
    page = Page("ada", lab.directory, lab.title, total, 9.0, 0.0, "GRADED", (), (), (), Plots((), 0))
    return feedback_html(page, card)


@pytest.fixture
def class_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Class:
    made = Class(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "nbgrader_config.py").write_text(
        f"c = get_config()\nc.Exchange.root = {str(made.course.parent)!r}\n"
        f"c.Exchange.cache = {str(made.cache.parent)!r}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path / "config"))
    return made


def test_a_person_alone_has_no_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlo_lib.grading.notebook.class_state.has_class", lambda: False)
    assert class_states([find_lab("00")], tmp_path) == {}
    shown = StartPage(course_root() / "labs").shown_table()
    assert "class" not in str(shown).splitlines()[0]


def test_a_lab_is_released_then_due_then_overdue(class_: Class) -> None:
    assert class_.state().said() == "released"
    class_.due(50)
    assert "CE" in class_.state().said(NOW)  # CET or CEST, the zone of the class
    assert class_.state().said(NOW).endswith("(in 2 d 2 h)")
    assert not class_.state().is_late
    class_.due(-3)
    assert class_.state().said(NOW).endswith(", 3 h ago")
    assert class_.state().is_late


def test_the_submission_that_counts_is_shown(class_: Class) -> None:
    class_.due(-10)
    class_.submit(-8)
    assert class_.state().said().endswith(", 2 h late")
    class_.submit(-12)
    class_.submit(-11)
    state = class_.state()
    assert (state.on_time, state.is_late) == (NOW - timedelta(hours=11), False)
    class_.due(-10, replaces=True)
    assert (class_.state().on_time, class_.state().is_late) == (None, True)


def test_points_and_feedback_come_from_the_page_of_the_submission(class_: Class) -> None:
    stamp = class_.submit(-1, "a secret")
    lab = find_lab("00")
    name = notebook_hash(secret="a secret", notebook_id=lab.name)
    page = class_.course / "feedback" / f"{name}.html"
    page.write_text("<title>Your work was received</title>", encoding="utf-8")
    assert class_.state().said().startswith("submitted ")
    page.write_text(feedback_page(lab, 7.5), encoding="utf-8")
    assert class_.state().said() == "graded: 7.5 of 9 points; feedback to fetch"
    own = class_.labs / LAB / "feedback" / stamp / f"{lab.name}.html"
    own.parent.mkdir(parents=True)
    own.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    assert class_.state().said() == "graded: 7.5 of 9 points"
    shown = StartPage(class_.labs)
    (row,) = (row for row in shown.rows if row.directory == LAB)
    assert row.feedback.endswith(f"/{LAB}/feedback/{stamp}/{lab.name}.html")
    assert "Fetch feedback" not in " ".join(shown.summary)
    page.write_text(feedback_page(lab, 8.0), encoding="utf-8")  # graded again
    assert "Fetch feedback" in " ".join(StartPage(class_.labs).summary)
    assert class_.state().said() == "graded: 8 of 9 points; feedback to fetch"


def test_the_map_shows_the_class_beside_the_progress(class_: Class) -> None:
    class_.due(-3)
    page = StartPage(class_.labs)
    (row,) = (row for row in page.rows if row.directory == LAB)
    assert row.in_class in str(page.shown_table())
    assert row.in_class in page.shown_table().html
    assert 'class="dlo-class dlo-late"' in page.shown_table().html


def test_what_others_wrote_into_the_exchange_changes_nothing(class_: Class) -> None:
    for text in ("[1]", '{"labs": []}', '{"labs": {"00_start_here": {"due": 3}}}', "\0", '{"timezone": "X"}'):
        (class_.course / DEADLINES_FILE).write_text(text, encoding="utf-8")
        assert class_.state().due is None
    (class_.cache / f"ada+{LAB}+yesterday").mkdir()
    assert class_.state().submitted is None


def test_a_broken_configuration_is_named_and_the_map_stays(class_: Class, tmp_path: Path) -> None:
    (tmp_path / "config" / "nbgrader_config.py").write_text(
        "c.Exchange.root = 'x'\nopen(\n", encoding="utf-8"
    )
    page = StartPage(class_.labs)
    assert len(page.rows) > 10
    assert page.summary[-1].startswith(f"the class is not shown, because {tmp_path / 'config'}")
    assert "SyntaxError" in page.summary[-1]


def test_submit_says_when_it_is_late_and_what_counts(class_: Class) -> None:
    notebook = class_.labs / LAB / "start_here.ipynb"
    assert what_counts("00", notebook) == []
    class_.submit(-1)
    class_.due(1)
    (line,) = what_counts("00", notebook)
    assert line.startswith("It is on time: the due date is ")
    class_.due(-3)
    late, rule, extension = what_counts("00", notebook)
    assert late.startswith("It is 2 h LATE: the due date was ")
    assert rule == "Late work in this class: 1 point less a day."
    assert "extension" in extension
    class_.submit(-4)
    assert "which was on time, counts; your instructor sees both" in what_counts("00", notebook)[1]


@pytest.mark.parametrize(
    ("state", "earned", "visible", "share"),
    [("done", 7, 7, 1), ("started", 3.5, 7, 0.5), ("not started", 0, 7, 0), ("started", 1, 0, 0)],
)
def test_the_bar_is_full_with_all_points_of_the_notebook(
    state: str, earned: float, visible: float, share: float
) -> None:
    """Hidden checks give the others in grading, and no student could fill such a bar."""
    standing = Standing("13_x", 13, "x", "X", True, 60, 10.0, earned, state, visible)
    assert standing.share == share
