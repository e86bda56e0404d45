"""The grading of a class with 13_dp_limit: the command `dlo grade` compared with the command `autograde` of
nbgrader, on the same submissions.

One quarter of the class each submits the reference, its first half, a mutant, and the untouched notebook.
Ours runs before and after nbgrader, which grades with the ``stock/`` configuration of the course and a
separate gradebook. The first grading proves the lab and stores the result.

CPU time is that of all processes of a command, counted by a control group, because no process waits for the
workers in a sandbox. The CPU time *of the submission* is the time that its processes spend between a request
(to run cells or to answer a check) and the answer, including the given cells, but without the start of the
processes. The rest is the time of the grader. Memory is the anonymous memory (RssAnon) of the batch and of
its judging service, after the last row divided by after a tenth of the judged rows, in a class that is 7.5
times as large.

The last two rows are about submissions that take all they can get (``bombs``): the seconds until the row of
each, and those of the honest submission that is judged beside each.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bombs import BOMBS, bombed
from benchmarks.paired import Row, Spread
from dlo_lib.errors import UserError
from dlo_lib.files import write_text
from dlo_lib.grading.classroom.nbgrader_course import STOCK_FOLDER, create_course, open_course
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.mutants import read_mutants
from dlo_lib.grading.lab.release import release_notebook
from dlo_lib.grading.lab.source import LabSource, build_notebook, notebook_text, read_lab, source_folder
from dlo_lib.grading.sandbox.limits import descendants, resident_bytes

LAB = "13_dp_limit"
SUBMISSIONS = 40
LARGER = 7.5  # the factor of the class for the growth of the memory
NBGRADER = [sys.executable, "-m", "nbgrader"]
DLO = [sys.executable, "-c", "from dlo_lib.cli import main; main()"]
GROUPS = Path("/sys/fs/cgroup")
ROWS = 2


@dataclass(frozen=True)
class Printed:
    """A row of `dlo grade`: the seconds from the start of the command to the row, whether it was judged, and
    the memory at that time in bytes."""

    second: float
    judged: bool
    held: int


@dataclass(frozen=True)
class Cost:
    """The cost of one command: wall time, CPU time of all processes and CPU time of the submissions, in
    seconds; and its rows."""

    wall: float
    cpu: float
    own: float
    rows: tuple[Printed, ...]


def rows(pairs: int = SUBMISSIONS) -> Iterator[Row]:
    """``pairs`` is the number of submissions. Both commands grade each submission."""
    lab = read_lab(source_folder(find_lab(LAB, source_labs())))
    with tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as name:
        course = _class(Path(name) / "course", lab, pairs)
        new = _graded(course, "--only", "s000")
        one = _graded(course, "--only", "s000")
        ours = [_graded(course)]
        _cost([*NBGRADER, "generate_assignment", LAB], course / STOCK_FOLDER)
        stock = _cost([*NBGRADER, "autograde", LAB], course / STOCK_FOLDER)
        ours.append(_graded(course))
    beyond = _spread([(cost.cpu - cost.own) / pairs for cost in ours])
    each = _spread([(cost.cpu - cost.own - one.cpu + one.own) / max(1, pairs - 1) for cost in ours])
    first = _spread([cost.rows[0].second for cost in ours])
    judged = _spread([min((row.second for row in cost.rows if row.judged), default=0.0) for cost in ours])
    judged_rows = [row for row in ours[0].rows if row.judged]
    gaps = [later.second - sooner.second for sooner, later in itertools.pairwise(judged_rows)]
    speed = (
        f"{pairs} submissions: {ours[0].wall:.0f} s against {stock.wall:.0f} s; "
        f"CPU time of a submission {ours[0].own / pairs:.2f} s, "
        f"of the grader {beyond} s with the start of the command, {each} s without; "
        f"nbgrader {stock.cpu / pairs:.2f} s including the submission; "
        f"first row after {first} s, first judged row after {judged} s "
        f"({new.rows[0].second:.1f} s for a lab that was not proved before), "
        f"then {statistics.median(gaps or [0.0]):.2f} s per row"
    )
    time_ratio = _spread([cost.wall / stock.wall for cost in ours])
    cpu_ratio = _spread([cost.cpu / stock.cpu for cost in ours])
    yield Row("dlo grade", "nbgrader autograde", 1, time_ratio, cpu_ratio, note=speed)

    with tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as name:
        large = _graded(_class(Path(name) / "course", lab, int(LARGER * pairs)))
    # Before the first judged row, the service has no twins
    held = [row.held for row in large.rows if row.judged]
    early, late = held[len(held) // 10], held[-1]
    memory = f"{len(large.rows)} submissions in {large.wall:.0f} s: "
    memory += f"{late >> 20} MiB after the last, {early >> 20} MiB after a tenth"
    ratio = _spread([late / early])
    yield Row("dlo grade, last row", "dlo grade, a tenth of the rows", 1, memory_ratio=ratio, note=memory)
    yield from _bombs(lab)


def _bombs(lab: LabSource) -> Iterator[Row]:
    """Compare each bomb with the honest submission, and the honest one beside a bomb with it alone."""
    students = {f"bomb{number:02d}": name for number, name in enumerate(BOMBS)}
    with tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as name:
        course = Path(name) / "course"
        answers = {"honest": {question: lab.solution(question).answer for question in lab.questions}}
        answers |= {student: bombed(lab, BOMBS[bomb]) for student, bomb in students.items()}
        _new_course(course, lab, answers)
        _graded(course, "--only", "honest")  # proves the lab
        honest = _graded(course, "--only", "honest")
        alone = _wall_seconds(course, "honest")
        costs = {student: _graded(course, "--only", student) for student in students}
    seconds = {student: cost.wall - honest.wall + alone for student, cost in costs.items()}
    longest = max(seconds, key=seconds.__getitem__)
    note = f"alone {alone:.1f} s; seconds, and of CPU time: " + ", ".join(
        f"{bomb} {seconds[student]:.1f}, {costs[student].cpu - honest.cpu + honest.own:.1f}"
        for student, bomb in students.items()
    )
    slowest = f"a bomb in each answer (the longest: {students[longest]})"
    yield Row(slowest, "the reference", 1, _spread([value / alone for value in seconds.values()]), note=note)

    ratios: dict[str, float] = {}
    for student, bomb in students.items():
        with tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as name:
            course = Path(name) / "course"
            _new_course(course, lab, {student: answers[student], "honest": answers["honest"]})
            _graded(course, "--only", "honest")
            before = _wall_seconds(course, "honest")
            _graded(course)  # with two jobs
            ratios[bomb] = _wall_seconds(course, "honest") / before
    note = ", ".join(f"{bomb} {ratio:.2f}" for bomb, ratio in ratios.items())
    yield Row("the reference beside a bomb", "alone", 1, _spread(list(ratios.values())), note=note)


def _wall_seconds(course: Path, student: str) -> float:
    """Return the seconds in which a submission was judged."""
    with open(course / "grades" / LAB / "timings.csv", encoding="utf-8", newline="") as file:
        return next(float(row["wall_seconds"]) for row in csv.DictReader(file) if row["student"] == student)


def _spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


def _new_course(folder: Path, lab: LabSource, answers: Mapping[str, Mapping[str, str]]) -> None:
    """Create a course with a submission of each student."""
    create_course(folder, students=list(answers))
    build_notebook(lab.folder)
    if not open_course(folder).generate_assignment(LAB)["success"]:
        raise UserError(f"{LAB} cannot be released: `dlo release {LAB} --prove-only` says why")
    for student, own in answers.items():
        notebook = release_notebook(lab.folder)
        for cell in notebook.cells:
            cell.source = own.get(cell.id, cell.source)
        write_text(folder / "submitted" / student / LAB / lab.info.notebook, notebook_text(notebook))


def _class(folder: Path, lab: LabSource, submissions: int) -> Path:
    students = [f"s{number:03d}" for number in range(submissions)]
    reference = {question: lab.solution(question).answer for question in lab.questions}
    planted = [mutant.planted(lab) for mutant in read_mutants(lab)]
    chosen = {}
    for number, student in enumerate(students):
        half = {question: reference[question] for question in lab.questions[: len(lab.questions) // 2]}
        mutant = planted[number // 4 % len(planted)]
        chosen[student] = (reference, half, {**reference, mutant.question: mutant.answer}, {})[number % 4]
    _new_course(folder, lab, chosen)
    return folder


def _graded(course: Path, *options: str) -> Cost:
    """Run `dlo grade` and return its cost."""
    cost = _cost([*DLO, "grade", LAB, *options], course)
    with open(course / "grades" / LAB / "timings.csv", encoding="utf-8", newline="") as file:
        own = {row["student"]: float(row["student_cpu_seconds"]) for row in csv.DictReader(file)}
    chosen = own.values() if "--only" not in options else [own[options[-1]]]
    return Cost(cost.wall, cost.cpu, sum(chosen), cost.rows)


def _cost(command: list[str], folder: Path) -> Cost:
    printed: list[Printed] = []
    began = time.perf_counter()
    with _group() as group, tempfile.TemporaryFile("w+") as errors:
        inside = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]
        process = subprocess.Popen(
            inside,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        assert process.stdout is not None
        printed.extend(
            Printed(time.perf_counter() - began, line.rstrip().endswith(" GRADED"), _held(process.pid))
            for line in process.stdout
            if " s  s" in line  # a row during the run, not a row of the table at the end
        )
        if process.wait():
            errors.seek(0)
            raise UserError(f"{command[-2]} {command[-1]} failed: {errors.read().strip().splitlines()[-1:]}")
        wall = time.perf_counter() - began
        return Cost(wall, _seconds(group), 0.0, tuple(printed))


def _held(pid: int) -> int:
    """Return the anonymous memory of the batch and of its judging service, in bytes. Judges and sandboxes are
    not counted, because they are short-lived."""
    service = [child for child in descendants(pid) if b"judge.server" in _command_line(child)][:1]
    return sum(resident_bytes(process) for process in (pid, *service))


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # the process has ended
        return b""


@contextlib.contextmanager
def _group() -> Iterator[Path]:
    """Create a control group (version 1 or 2) that counts CPU time, for the duration of the context.

    Raises:
        UserError: the user has no permission to create one.
    """
    group = (GROUPS / "cpuacct" if (GROUPS / "cpuacct").is_dir() else GROUPS) / f"dlo-benchmark-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise UserError(
            f"CPU time of sandboxed processes needs a control group ({error}): run this as root"
        ) from error
    try:
        yield group
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def _seconds(group: Path) -> float:
    if (group / "cpuacct.usage").is_file():
        return int((group / "cpuacct.usage").read_text()) / 1e9
    lines = (group / "cpu.stat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("usage_usec")) / 1e6
