"""A class with all submissions that a grader must survive, beside four honest students, through ``dlo
grade``.
"""

from __future__ import annotations

import csv
import ctypes
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from hostile import CLASS, JUDGED
from hostile.case import ALL, LAB, NOTEBOOK, Case, Notebook, cell, own_cell, write

from dlo_lib.cli import main
from dlo_lib.grading.classroom.gradebook.batch import Options, grade_lab
from dlo_lib.grading.classroom.gradebook.nbgrader_course import create_course, open_course
from dlo_lib.grading.classroom.publish.publication import fill_source
from dlo_lib.grading.judge import client
from dlo_lib.grading.judge.client import RECORD_FILE, JudgeClient
from dlo_lib.grading.judge.environment import environment
from dlo_lib.grading.judge.judge import Judge, judge_answer, open_submission, zygote_for
from dlo_lib.grading.judge.preprocessor import SECRET_FILE
from dlo_lib.grading.judge.report import Report
from dlo_lib.grading.judge.report_store import report_file
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.grading.lab.release import release_notebook
from dlo_lib.grading.lab.source import LabSource, notebook_text, read_lab, source_notebook
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.isolation import find_isolation
from dlo_lib.grading.sandbox.limits import descendants
from dlo_lib.grading.sandbox.lockdown import PR_SET_CHILD_SUBREAPER
from dlo_lib.grading.switch import exchange, server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_isolation().isolation is None, reason=f"NOT TESTED HERE: the sandbox {find_isolation().reasons}"
    ),
]
HOME = Path(__file__).parents[1] / "hostile" / "course"
HELD_BACK = {"CLASS_SECRET": "keep this secret"}  # in the environment of the grader
SMALL = 64 << 20  # bytes that the switch holds for ranks that receive nothing
SECRET = "the same inputs in every class"
ROWS_OF_THE_LIST = [*map(str, range(1, 26)), "23b", "23c"]  # 26 is a separate test


# -- the honest four


def ada(notebook: Notebook, released: Notebook) -> None:
    """All right."""


def blaise(notebook: Notebook, released: Notebook) -> None:
    """One question half right."""
    cell(notebook, "scale")["source"] = "def absmax_scale(x):\n    return x.abs().amax(dim=1) / 127"


def chloe(notebook: Notebook, released: Notebook) -> None:
    """Two questions unchanged, and an added cell."""
    for question in ("mean", "fsdp"):
        cell(notebook, question)["source"] = cell(released, question)["source"]
    notebook["cells"].insert(3, own_cell("print('what next?')"))


def dorothy(notebook: Notebook, released: Notebook) -> None:
    """Wrong on ranks."""
    cell(notebook, "mean")["source"] = "def all_reduce_mean(x):\n    dist.all_reduce(x)\n    return x"


HONEST = {"ada": 11.0, "blaise": 10.0, "chloe": 6.0, "dorothy": 8.0}
ABSENT = "evariste"


# -- the class


@dataclass(frozen=True)
class Graded:
    """A course after ``dlo grade``, with its exit status and output."""

    course: Path
    status: int
    said: str

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the rows of results.json by student."""
        table = json.loads((self.course / "grades" / LAB / "results.json").read_text(encoding="utf-8"))
        return {row["student"]: row for row in table["rows"]}

    def lines(self) -> dict[str, bytes]:
        """Return the lines of results.csv by student, without the header."""
        lines = (self.course / "grades" / LAB / "results.csv").read_bytes().splitlines()[1:]
        return {next(csv.reader([line.decode()]))[0]: line for line in lines}

    def messages(self, student: str) -> str:
        """Return all messages of the judge on a submission, for its instructor."""
        file = report_file(self.course / "grades" / LAB / "reports", student)
        if not file.is_file():  # there is no submission
            return ""
        return messages(json.loads(file.read_text(encoding="utf-8"))["report"])


def messages(report: dict[str, Any]) -> str:
    """Return all messages of a report."""
    questions = report["questions"].values()
    checks = [check["message"] for question in questions for check in question["checks"]]
    return "\n".join(
        [report["status"], *report["warnings"], *checks, *(question["note"] for question in questions)]
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkout with only this lab."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(HOME, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLO_COURSE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def in_checkout(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLO_COURSE", str(home))


def new_class(home: Path, course: Path, cases: list[Case], judges: JudgeClient | None = None) -> Path:
    """Create a course with the honest four, one student without submission, and the students of ``cases``.

    The service ``judges`` has proved the lab with the same secret: its record stands in the course, so that a
    command does not prove it again.
    """
    create_course(course, students=[*HONEST, ABSENT, *(case.student for case in cases)])
    (course / SECRET_FILE).write_text(f"{SECRET}\n")
    if judges is not None:
        record = course / "grades" / LAB / RECORD_FILE
        record.parent.mkdir(parents=True)
        shutil.copy2(judges.course / record.relative_to(course), record)
    source = home / "solutions" / LAB
    opened = open_course(course)
    fill_source(opened, read_lab(source).info)
    assert opened.generate_assignment(LAB)["success"]
    reference, released = notebooks(source)
    for alter in (ada, blaise, chloe, dorothy):
        notebook = json.loads(json.dumps(reference))
        alter(notebook, released)
        write(
            Case(alter.__name__, lambda _, __, notebook=notebook: notebook, "", ALL, "", ""),
            reference,
            released,
            course,
        )
    for case in cases:
        write(case, reference, released, course)
    return course


@functools.cache
def notebooks(source: Path) -> tuple[Notebook, Notebook]:
    """Return the lab's notebook with the solutions, and as released."""
    return as_json(source_notebook(source)), as_json(release_notebook(source))


def as_json(notebook: Any) -> Notebook:
    """Parse a notebook and join the source of each cell."""
    values = json.loads(notebook_text(notebook))
    for one in values["cells"]:
        one["source"] = "".join(one["source"])
    return values


class Lent:
    """A service for one command, which does not end it: starting another would cost as much as judging half
    of the class.
    """

    def __init__(self, judges: JudgeClient) -> None:
        self.screen, self.judge = judges.screen, judges.judge

    def __enter__(self) -> Lent:
        return self

    def __exit__(self, *_: object) -> None:
        """The service continues."""


def grade(course: Path, judges: JudgeClient) -> Graded:
    """Grade as an instructor does, in this process."""
    out, status = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        patch.setattr(client, "start_client", lambda *_: Lent(judges))
        patch.setattr(sys, "argv", ["dlo", "grade", "93", "--jobs", "2"])
        patch.chdir(course)
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
    return Graded(course, status, out.getvalue())


@pytest.fixture(scope="module")
def judges(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgeClient]:
    """One judging service for the batches that this process grades; all classes here have the same secret."""
    course = new_class(home, tmp_path_factory.mktemp("judges") / "course", [])
    with environment(HELD_BACK):
        service = JudgeClient(find_lab(LAB, source_labs()), course)
    with service as running:
        running.prove()  # from here on all its processes exist, so that none counts as a leftover
        yield running


@pytest.fixture(scope="module")
def alone(home: Path, judges: JudgeClient, tmp_path_factory: pytest.TempPathFactory) -> Graded:
    """The honest four alone."""
    course = new_class(home, tmp_path_factory.mktemp("alone") / "course", [])
    grade_lab(find_lab(LAB, source_labs()), course, options=Options(jobs=2), judges=judges)
    return Graded(course, 0, "")


@pytest.fixture(scope="module")
def lab(home: Path) -> LabSource:
    return read_lab(home / "solutions" / LAB)


@pytest.fixture(scope="module")
def zygote(lab: LabSource) -> Iterator[Zygote]:
    """The zygote of the cases without a class."""
    with environment(HELD_BACK), zygote_for(lab) as running:
        yield running.wait()


@pytest.fixture(scope="module")
def leftovers(judges: JudgeClient, zygote: Zygote) -> Iterator[set[int]]:
    """The processes that the grader left; they are children of this process."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield set(descendants(os.getpid()))
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture(scope="module")
def together(
    home: Path, leftovers: set[int], judges: JudgeClient, tmp_path_factory: pytest.TempPathFactory
) -> Graded:
    """All students in one class."""
    return grade(new_class(home, tmp_path_factory.mktemp("together") / "course", CLASS, judges), judges)


def test_every_row_of_the_list_is_a_case() -> None:
    cases = {case.student: case for case in [*CLASS, *JUDGED]}
    assert {case.row for case in cases.values()} - {""} == set(ROWS_OF_THE_LIST)
    for each in (CLASS, JUDGED):
        assert len({case.student for case in each}) == len(each)


def test_the_batch_ends_well_with_one_row_for_each_student_of_the_roster(together: Graded) -> None:
    assert together.status == 0, together.said
    assert list(together.rows()) == sorted([*HONEST, ABSENT, *(case.student for case in CLASS)])
    assert len(together.lines()) == len(together.rows())


def test_honest_rows_are_those_of_a_batch_without_the_others(alone: Graded, together: Graded) -> None:
    assert {student: row["total"] for student, row in alone.rows().items()} == {**HONEST, ABSENT: 0.0}
    for student in (*HONEST, ABSENT):
        assert together.lines()[student] == alone.lines()[student]
        assert json.dumps(together.rows()[student]) == json.dumps(alone.rows()[student])
        mine = [graded.course / "autograded" / student / LAB / NOTEBOOK for graded in (alone, together)]
        assert student == ABSENT or mine[0].read_bytes() == mine[1].read_bytes()


def name_of(case: Case) -> str:
    return f"{case.row}-{case.student}" if case.row else case.student


def compare(case: Case, points: dict[str, float], status: str, said: str) -> None:
    assert {name: earned for name, earned in points.items() if earned} == case.points, said
    assert status.startswith(case.status), said
    assert case.says in said
    assert case.status != "GRADED" or status == "GRADED", said
    assert "GRADER_ERROR" not in status, said


@pytest.mark.parametrize("case", CLASS, ids=name_of)
def test_case(together: Graded, case: Case) -> None:
    row, said = together.rows()[case.student], together.messages(case.student)
    compare(case, {name: each["points"] for name, each in row["questions"].items()}, row["status"], said)
    assert "keep this secret" not in said


@pytest.mark.parametrize("case", JUDGED, ids=name_of)
def test_judged(
    lab: LabSource, zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """A submission without a class. Ranks may hold less than in a class, so that a bomb is small."""
    monkeypatch.setattr(exchange, "MAX_HELD", SMALL)
    monkeypatch.setattr(server, "MAX_HELD", SMALL)
    write(case, *notebooks(lab.folder), tmp_path)
    report = judged(tmp_path / "submitted" / case.student / LAB / NOTEBOOK, lab, zygote)
    points = {name: question.points for name, question in report.questions.items()}
    said = messages(asdict(report))
    compare(case, points, report.status, said)
    assert "keep this secret" not in said
    assert not pwned(tmp_path)


def judged(path: Path, lab: LabSource, zygote: Zygote) -> Report:
    """Judge a notebook as a class does: again if it waited for a processor until its time was over."""
    checks = load_checks(lab.given, lab.folder)
    opened = open_submission(path, lab, checks)
    if isinstance(opened, Report):
        return opened
    for _ in range(2):
        judge = Judge(lab, checks, SECRET, zygote)
        report = judge.judge(*opened)
        if not judge.crowded:
            break
    return report


def test_the_answers_of_the_library_would_pass_without_the_block() -> None:
    """So the cases of row 25 lose points because of what they call, not because of how they call it."""
    lab = read_lab(HOME / "solutions" / LAB)
    open_lab = replace(lab, info=replace(lab.info, taught=()))
    answers = {case.student: case for case in JUDGED if case.row == "25"}
    with zygote_for(open_lab) as zygote:
        for student, case in answers.items():
            notebook = as_json(source_notebook(lab.folder))
            case.hand_in(notebook, lab.folder / "x" / "y")
            report = judge_answer(open_lab, "fsdp", cell(notebook, "fsdp")["source"], zygote)
            assert report.points == ALL["fsdp"], (student, report)


def pwned(course: Path) -> list[Path]:
    """Return the files that an attack has written to a course or to folders that are known."""
    known = [path for folder in ("/tmp", "/dev/shm", Path.cwd()) for path in Path(folder).glob("pwned*")]
    return [*course.glob("**/pwned*"), *known]


def test_nothing_was_written_outside(together: Graded) -> None:
    assert not pwned(together.course)


def test_a_killed_and_resumed_batch_gives_the_same_table(
    home: Path, together: Graded, judges: JudgeClient, tmp_path: Path
) -> None:
    """Row 26, with those of each family that cost little; without those that state no status, because theirs
    depends on the machine's speed. The small class is killed twice, see test_batch.py."""
    cases = [case for case in CLASS if case.status[:4] in ("GRAD", "INVA", "NO_A")][::14]
    course = new_class(home, tmp_path / "course", cases, judges)
    command = [sys.executable, "-c", "from dlo_lib.cli import main; main()", "grade", "93", "--jobs", "2"]
    grader = subprocess.Popen(
        [*command, "--resume"], cwd=course, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while len(list(course.glob("autograded/*"))) < len(cases) // 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert grader.poll() is None
    grader.kill()
    grader.wait()
    grade_lab(find_lab(LAB, source_labs()), course, options=Options(jobs=2, resume=True), judges=judges)
    resumed = Graded(course, 0, "")
    of_all = together.lines()
    assert resumed.lines() == {student: of_all[student] for student in resumed.lines()}


def test_no_process_is_left(together: Graded, leftovers: set[int]) -> None:
    """Neither of the batch nor, where the tests before this one ran, of the grader that was killed."""
    deadline = time.monotonic() + 30  # the kernel ends a sandbox's processes after its first process
    while (
        left := set(filter(is_running, descendants(os.getpid()))) - leftovers
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def is_running(pid: int) -> bool:
    """Return True if a process exists and has not ended; only this process waits for orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
