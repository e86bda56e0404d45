"""The feedback page has the checks' messages, the plots and no script, and reveals nothing of hidden
checks.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.collect.collection import collect
from dlo_lib.grading.classroom.feedback import feedback, student_page
from dlo_lib.grading.classroom.feedback.feedback import (
    make_feedback,
    note_on_inputs,
    release_feedback,
    release_receipts,
)
from dlo_lib.grading.classroom.feedback.student_page import receipt_card
from dlo_lib.grading.classroom.gradebook.batch import grade_lab
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.judge.environment import environment
from dlo_lib.grading.judge.report import NO_ATTEMPT, CheckReport, QuestionReport
from dlo_lib.grading.lab.course import LabInfo, find_lab, source_labs
from dlo_lib.grading.lab.release import release_notebook
from dlo_lib.grading.lab.source import notebook_text, read_lab, source_folder, source_notebook

LAB = "91_small"
SCRIPT = "<script>alert(1)</script>"
EVIL_NAME = "small <img src=x onerror=alert(2)>.ipynb"
WRONG = {
    "quantise": "def quantise(x):\n    scale = absmax_scale(x)\n"
    "    safe = torch.where(scale == 0, torch.ones_like(scale), scale)\n"
    "    return torch.floor(x / safe[:, None]).to(torch.int8), scale",
    "scale": "def absmax_scale(x):\n    return x.abs().amax(dim=1) / 127",
    "mean": f"def all_reduce_mean(x):\n    raise ValueError('{SCRIPT} & \\u202etxt')",
    "quiz": 'quiz = {"q1": "b", "q2": "b"}',
}


def png() -> str:
    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(1, 1))
    axes.plot([1, 2])
    from io import BytesIO

    content = BytesIO()
    figure.savefig(content, format="png")
    plt.close(figure)
    return base64.b64encode(content.getvalue()).decode()


def answered(notebook: dict[str, Any], **answers: str) -> dict[str, Any]:
    for cell in notebook["cells"]:
        cell["source"] = answers.get(cell["id"], cell["source"])
    return notebook


@pytest.fixture(scope="module")
def graded(released_course: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A course with four graded students: Ada is right, Blaise partly wrong, Chloé untouched, Dan's file
    damaged.
    """
    root = tmp_path_factory.mktemp("graded")
    shutil.copytree(released_course / "course", root / "course", symlinks=True)
    with open(root / "course" / "nbgrader_config.py", "a", encoding="utf-8") as config:
        config.write(f"c.Exchange.root = {str(root / 'exchange')!r}\n")
    (root / "exchange" / "dlo" / "feedback").mkdir(parents=True)
    with environment({"DLO_COURSE": str(released_course)}):
        lab = find_lab(LAB, source_labs())
        source = source_folder(lab)
        right = json.loads(notebook_text(source_notebook(source)))
        wrong = answered(json.loads(notebook_text(source_notebook(source))), **WRONG)
        outputs = [{"image/png": png()}, {"text/html": SCRIPT, "image/jpeg": "aaaa"}]
        checked_on = {"dlo": {"torch": "1.13.1"}}
        plots = [{"output_type": "display_data", "metadata": checked_on, "data": data} for data in outputs]
        wrong["cells"].append(
            {
                "cell_type": "code",
                "id": "mine",
                "metadata": {},
                "source": "plot()",
                "outputs": plots,
                "execution_count": 1,
            }
        )
        untouched = json.loads(notebook_text(release_notebook(source)))
        files = {
            "ada/small.ipynb": json.dumps(right), "ada/small.html": "<p>my page</p>",
            f"blaise/{EVIL_NAME}": json.dumps(wrong),
            "chloe/small.ipynb": json.dumps(untouched), "dan/small.ipynb": "{",
        }  # fmt: skip
        for name, text in files.items():
            (root / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "in" / name).write_text(text, encoding="utf-8")
        course = open_course(root / "course")
        collect(course, lab, root / "in")
        grade_lab(lab, root / "course")
        make_feedback(course, lab)
        yield root / "course"


@pytest.fixture
def lab(released_course: Path, monkeypatch: pytest.MonkeyPatch) -> LabInfo:
    monkeypatch.setenv("DLO_COURSE", str(released_course))
    return find_lab(LAB, source_labs())


def page_of(course: Path, student: str) -> str:
    return (course / "feedback" / student / LAB / "small.html").read_text(encoding="utf-8")


def card(page: str, question: str) -> str:
    found = re.search(rf'<section class="card" id="{question}">.*?</section>', page, re.DOTALL)
    assert found is not None
    return found[0]


def test_everyone_who_was_graded_has_a_page(graded: Path) -> None:
    assert {folder.name for folder in (graded / "feedback").iterdir()} == {"ada", "blaise", "chloe", "dan"}


def test_passed_checks_are_listed_with_their_points(graded: Path) -> None:
    page = page_of(graded, "ada")
    assert "12 <small>of 12 points" in page
    assert "One scale a row" in card(page, "scale")
    assert "3 / 3" in card(page, "scale")
    assert "✗" not in page
    assert "Read next" not in page


def test_failed_checks_have_their_message_and_hints(graded: Path) -> None:
    quantise = card(page_of(graded, "blaise"), "quantise")
    assert "Nothing is further away than half a step" in quantise
    assert "away from x: more than half a step" in quantise
    assert "1 / 4" in quantise
    assert "You have the scale already." in quantise
    assert "You have the scale already." not in page_of(graded, "ada")


def test_the_page_names_what_to_read_about_lost_points(graded: Path) -> None:
    assert "how the library does it: <code>dlo_lib/optim/step</code>" in page_of(graded, "blaise")


def test_a_hidden_check_shows_only_the_authors_words(graded: Path, lab: LabInfo) -> None:
    hidden = (source_folder(lab) / "hidden.py").read_text()
    for student in ("ada", "blaise", "chloe", "dan"):
        page = page_of(graded, student)
        assert "check_scale_dtype" not in page
        assert not [
            line
            for line in hidden.splitlines()
            if len(line) > 30 and line.strip().startswith(("t.", "x", "q")) and line in page
        ]


def test_a_hidden_check_whose_message_contains_values_shows_its_title_alone(graded: Path) -> None:
    scale = card(page_of(graded, "blaise"), "scale")
    assert "2 / 3" in scale
    assert "Scales are float32 whatever x is" in scale
    assert "bfloat16" not in scale


def test_an_exception_of_hidden_checks_shows_no_value_of_theirs(graded: Path) -> None:
    mean = card(page_of(graded, "blaise"), "mean")
    visible, hidden = re.findall(r"your code raised[^<]*", mean)
    assert "ValueError" in visible
    assert hidden == "your code raised an exception"  # its text could reveal the check's inputs


def test_before_the_due_date_no_page_names_an_input(graded: Path, lab: LabInfo) -> None:
    """The inputs are those of the whole class: who knows them could write the results down."""
    course, full = open_course(graded), card(page_of(graded, "blaise"), "quantise")
    try:
        for days, note in ((1, "has not passed"), (-1, ""), (None, "has no due date")):
            due = None if days is None else datetime.now(UTC).replace(tzinfo=None) + timedelta(days=days)
            with course.gradebook as gradebook:
                gradebook.find_assignment(LAB).duedate = due
                gradebook.db.commit()
            make_feedback(course, lab)
            quantise = card(page_of(graded, "blaise"), "quantise")
            assert note in note_on_inputs(course, lab)
            assert bool(note) == bool(note_on_inputs(course, lab))
            if days == 1:
                mean = card(page_of(graded, "blaise"), "mean")
                assert re.search(r"up to 0\.\d+ away", full)
                assert "up to … away" in quantise
                assert "Others may still submit" in page_of(graded, "blaise")
                visible, hidden = re.findall(r"your code raised[^<]*", mean)
                assert visible == "your code raised ValueError (line 2 of cell "
                assert hidden == "your code raised an exception"
            else:
                assert quantise == full
                assert "Others may still submit" not in page_of(graded, "blaise")
    finally:
        with course.gradebook as gradebook:
            gradebook.find_assignment(LAB).duedate = None
            gradebook.db.commit()


def test_a_page_has_no_script_and_no_external_file(graded: Path) -> None:
    for student in ("ada", "blaise", "chloe", "dan"):
        page = page_of(graded, student)
        assert "default-src 'none'" in page
        assert "<script" not in page.lower()
        assert "<img src=x" not in page
        assert "\u202e" not in page
        tags = re.findall(r"<[^>]+>", page)
        assert not [tag for tag in tags if re.search(r"\b(?:href|action|on\w+|srcset)\s*=", tag)]
        assert not [
            tag for tag in tags if "src=" in tag and not tag.startswith('<img src="data:image/png;base64,')
        ]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page_of(graded, "blaise")


def test_plots_are_shown_and_other_pictures_are_counted(graded: Path) -> None:
    page = page_of(graded, "blaise")
    assert page.count('<img src="data:image/png;base64,') == 1
    assert "from cell</figcaption>" not in page
    assert "<code>mine</code>" in page
    assert "Pictures that are only in your notebook: 1" in page


def test_a_page_names_another_release_of_pytorch_than_the_judge_s(graded: Path) -> None:
    """An answer can use what only one of the two releases has: the student would look for a mistake."""
    said = f"The checks in the notebook ran on PyTorch 1.13.1, the judge on PyTorch {version('torch')}: "
    assert said in page_of(graded, "blaise")
    assert "ran on PyTorch" not in page_of(graded, "ada")


def test_students_without_answer_or_with_a_damaged_file_get_the_reason(graded: Path) -> None:
    assert "there was nothing to judge" in page_of(graded, "chloe")
    assert "There was no answer of yours, so this question has no points." in page_of(graded, "chloe")
    assert "INVALID" in page_of(graded, "dan")
    assert "damaged: not valid JSON; open it in Jupyter" in page_of(graded, "dan")


def test_the_page_ends_with_the_receipt(graded: Path) -> None:
    content = (graded / "submitted" / "blaise" / LAB / EVIL_NAME).read_bytes()
    page = page_of(graded, "blaise")
    assert hashlib.sha256(content).hexdigest() in page
    assert "dlo receipt &#39;small &lt;img" in page


def test_points_given_by_hand_and_comments_are_on_the_page(graded: Path, lab: LabInfo) -> None:
    course = open_course(graded)
    with course.gradebook as gradebook:
        notebook = gradebook.find_submission_notebook(lab.name, LAB, "blaise")
        (grade,) = [grade for grade in notebook.grades if grade.name == "test_mean"]
        (comment,) = [comment for comment in notebook.comments if comment.name == "mean"]
        text = f"Nearly. {SCRIPT} *Look* at $\\frac{{1}}{{n}}$ and $\\unknowable$."
        grade.manual_score, comment.manual_comment = 1.5, text
        gradebook.db.commit()
    make_feedback(course, lab)
    mean = card(page_of(graded, "blaise"), "mean")
    assert "1.5 / 2" in mean
    assert "Your instructor gave these points by hand." in mean
    assert "Your instructor&#39;s comment" in mean
    assert "Nearly. &lt;script&gt;" in mean
    assert "<em>Look</em> at <img" in mean
    assert 'src="data:image/svg+xml;base64,' in mean
    assert r'alt="\frac{1}{n}"' in mean
    assert r"<code>$\unknowable$</code>" in mean, "a formula that matplotlib does not know stays as written"


def test_a_wrong_answer_of_the_quiz_is_explained(graded: Path) -> None:
    quiz = card(page_of(graded, "blaise"), "quiz")
    assert "q1: 8 bits make 2**8 values" in quiz
    assert "q2: zero divided by the scale is zero" in quiz
    assert "2 / 3" in quiz


@pytest.mark.parametrize(
    ("explain", "early", "says"),
    [
        ("at once", True, "q1: why"),
        ("at once", False, "q1: why"),
        ("after due", True, "explained after the due date"),
        ("after due", False, "q1: why"),
        ("never", True, ""),
        ("never", False, ""),
    ],
)
def test_the_course_file_decides_when_the_quiz_is_explained(
    lab: LabInfo, explain: str, early: bool, says: str
) -> None:
    """Right reasons too: one student could pass them on. What only this student's answer shows, stays."""
    reason = CheckReport(
        "quiz_q1", "The answer to q1 is right", 0, 1, "WRONG", "", "q1: why", True, "q1: why"
    )
    visible = CheckReport("quiz_complete", "Complete", 0, 1, "WRONG", "", "no answer", False, "no answer")
    report = QuestionReport("quiz", 0.0, 2.0, "GRADED", (visible, reason))
    marks = student_page._Marks({}, frozenset(), {}, 0.0, 0.0, 2.0, early, explain)
    shown = student_page._card(read_lab(source_folder(lab)), "quiz", report, marks, {}, [])
    assert [check.says for check in shown.checks] == ["no answer", says]


def test_a_question_that_was_missing_from_the_file_is_named(graded: Path, lab: LabInfo) -> None:
    source = read_lab(source_folder(lab))
    report = QuestionReport("mean", 0.0, 2.0, NO_ATTEMPT, ())
    marks = student_page._Marks({}, frozenset(), {}, 0.0, 0.0, 2.0, early=False)
    said = student_page._card(source, "mean", report, marks, {}, ["mean"]).said
    assert said == "The question `mean` was missing from your file, so it has no points."


def test_released_pages_have_names_that_cannot_be_guessed(graded: Path, lab: LabInfo) -> None:
    release_feedback(open_course(graded), lab)
    published = sorted((graded.parent / "exchange" / "dlo" / "feedback").iterdir())
    assert all(re.fullmatch(r"[0-9a-f]{32}\.html", path.name) for path in published)
    pages = [path.read_text(encoding="utf-8") for path in published]
    assert not [page for page in pages if "my page" in page]
    assert len({page for page in pages if "What was graded" in page}) == 4


def test_students_without_a_page_are_listed_with_the_reason(graded: Path, lab: LabInfo) -> None:
    course = open_course(graded)
    reasons = feedback.students_without_page(course, lab, {"ada"})
    assert reasons["nothing submitted"] == ["dan2"]
    assert {"blaise", "chloe"} <= set(reasons["not graded yet"])
    assert "ada" not in [student for students in reasons.values() for student in students]
    made = make_feedback(course, lab)
    assert feedback.students_without_page(course, lab, made) == {"nothing submitted": ["dan2"]}


def test_without_a_grade_there_is_no_feedback(course: Path) -> None:
    with pytest.raises(
        UserError,
        match="no submission of 91_small is graded: `dlo grade 91_small` comes first",
    ):
        make_feedback(open_course(course), find_lab(LAB, source_labs()))


def test_feedback_replaces_the_receipt_in_the_exchange(course: Path, lab: LabInfo) -> None:
    exchange = course.parent / "exchange" / "dlo"
    place = exchange / "inbound" / f"ada+{LAB}+2026-11-20 11:00:00.5 UTC+nonce"
    place.mkdir()
    content = notebook_text(release_notebook(source_folder(lab)))
    for name, text in {
        "small.ipynb": content,
        "timestamp.txt": "2026-11-20 11:00:00.5 UTC",
        "submission_secret.txt": "s" * 20,
    }.items():
        (place / name).write_text(text, encoding="utf-8")
    opened = open_course(course)
    release_receipts(opened, collect(opened, lab))
    (page,) = (exchange / "feedback").iterdir()
    assert hashlib.sha256(content.encode()).hexdigest() in page.read_text(encoding="utf-8")
    assert "Your work was received" in page.read_text(encoding="utf-8")
    before = page.read_bytes()
    release_receipts(opened, collect(opened, lab))  # there is no new submission, so no page is replaced
    assert page.read_bytes() == before
    assert not (course / ".receipts").exists()


def test_the_receipt_and_the_feedback_of_a_second_submission_name_the_first(
    course: Path, lab: LabInfo
) -> None:
    exchange, opened = course.parent / "exchange" / "dlo", open_course(course)

    def submit(hour: int) -> None:
        place = exchange / "inbound" / f"ada+{LAB}+2026-11-20 {hour}:00:00.5 UTC+nonce"
        place.mkdir()
        texts = {
            "small.ipynb": notebook_text(release_notebook(source_folder(lab))),
            "timestamp.txt": f"2026-11-20 {hour}:00:00.5 UTC",
            "submission_secret.txt": str(hour) * 20,
        }
        for name, text in texts.items():
            (place / name).write_text(text, encoding="utf-8")

    def page() -> str:
        before = set((exchange / "feedback").iterdir()) if (exchange / "feedback").is_dir() else set()
        release_receipts(opened, collect(opened, lab))
        (new,) = set((exchange / "feedback").iterdir()) - before
        return new.read_text(encoding="utf-8")

    says = "It replaces your submission of 2026-11-20 {hour}:00:00 UTC, which does not count."
    submit(10)
    assert "It replaces" not in page()
    submit(11)  # collected in between
    assert says.format(hour=10) in page()
    submit(12)
    submit(13)  # both since the last collection
    assert says.format(hour=12) in page()
    collect(opened, lab)
    card = receipt_card(opened.coursedir, lab, "ada", 0)
    assert card.replaced == "2026-11-20 12:00:00"
    assert receipt_card(opened.coursedir, lab, "blaise", 0).replaced == ""


def test_a_receipt_that_failed_is_released_by_the_next_collection(
    course: Path,
    lab: LabInfo,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = course.parent / "exchange" / "dlo" / "inbound" / f"ada+{LAB}+2026-11-20 11:00:00.5 UTC+nonce"
    place.mkdir()
    for name, text in {
        "small.ipynb": "{}",
        "timestamp.txt": "2026-11-20 11:00:00.5 UTC",
        "submission_secret.txt": "s" * 20,
    }.items():
        (place / name).write_text(text)
    opened = open_course(course)
    with monkeypatch.context() as patch:
        patch.setattr(
            opened, "release_feedback", lambda *_: {"success": False, "error": "disk full", "log": ""}
        )
        with pytest.raises(UserError, match="release receipts.*disk full"):
            release_receipts(opened, collect(opened, lab))
    release_receipts(opened, collect(opened, lab))
    (page,) = (course.parent / "exchange" / "dlo" / "feedback").iterdir()
    assert "Your work was received" in page.read_text(encoding="utf-8")


def test_an_undecodable_name_does_not_stop_other_receipts(course: Path, lab: LabInfo) -> None:
    content = notebook_text(release_notebook(source_folder(lab)))
    for student, name in {"ada": "small \udcff\u202e.ipynb", "blaise": "small.ipynb"}.items():
        place = (
            course.parent
            / "exchange"
            / "dlo"
            / "inbound"
            / f"{student}+{LAB}+2026-11-20 11:00:00.5 UTC+nonce"
        )
        place.mkdir()
        (place / name).write_text(content, encoding="utf-8")
        (place / "timestamp.txt").write_text("2026-11-20 11:00:00.5 UTC")
        (place / "submission_secret.txt").write_text(student * 5)
    opened = open_course(course)
    release_receipts(opened, collect(opened, lab))
    pages = [
        page.read_text(encoding="utf-8")
        for page in (course.parent / "exchange" / "dlo" / "feedback").iterdir()
    ]
    assert len(pages) == 2
    assert [page for page in pages if "Notebook: small ??.ipynb" in page]


def test_formgrader_releases_feedback_on_a_submission_from_a_folder(
    graded: Path, lab: LabInfo, tmp_path: Path
) -> None:
    """Its buttons call nbgrader's steps, which need the secret and the time that a folder lacks."""
    shutil.copytree(graded, tmp_path / "course", symlinks=True)
    shutil.rmtree(tmp_path / "course" / "feedback")
    feedback = tmp_path / "exchange" / "dlo" / "feedback"
    feedback.mkdir(parents=True)
    with open(tmp_path / "course" / "nbgrader_config.py", "a", encoding="utf-8") as config:
        config.write(f"c.Exchange.root = {str(tmp_path / 'exchange')!r}\n")
    course = open_course(tmp_path / "course")
    for step in (course.generate_feedback, course.release_feedback):
        done = step(LAB, "ada")
        assert done["success"], done
    (page,) = feedback.iterdir()
    assert '<meta name="dlo-grade" content="12 12">' in page.read_text(encoding="utf-8")
