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

The first row needs no nbgrader: the CPU time of the grader for a submission of the class, beyond the
submission's own, in one run of the command. ``python -m benchmarks hostile`` is about submissions that take
all they can get.
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

from benchmarks.paired import Row, Spread
from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.grading.classroom.gradebook.nbgrader_course import STOCK_FOLDER, create_course, open_course
from dlo_lib.grading.classroom.publish.publication import fill_source
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.mutants import read_mutants
from dlo_lib.grading.lab.release import release_notebook
from dlo_lib.grading.lab.source import LabSource, notebook_text, read_lab, source_folder
from dlo_lib.grading.sandbox.limits import descendants, resident_bytes

LAB = "13_dp_limit"
SUBMISSIONS = 40
LARGER = 7.5  # the factor of the class for the growth of the memory
NBGRADER = [sys.executable, "-m", "nbgrader"]
DLO = [sys.executable, "-c", "from dlo_lib.cli import main; main()"]
GROUPS = Path("/sys/fs/cgroup")
ROWS = 3


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
        new = graded(course, "--only", "s000")
        one = graded(course, "--only", "s000")
        ours = [graded(course)]
        yield _class_row(ours[0], one, pairs)
        _cost([*NBGRADER, "generate_assignment", LAB], course / STOCK_FOLDER)
        stock = _cost([*NBGRADER, "autograde", LAB], course / STOCK_FOLDER)
        ours.append(graded(course))
    beyond = spread([(cost.cpu - cost.own) / pairs for cost in ours])
    each = spread([_beyond(cost, one, pairs) for cost in ours])
    first = spread([cost.rows[0].second for cost in ours])
    judged = spread([min((row.second for row in cost.rows if row.judged), default=0.0) for cost in ours])
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
    time_ratio = spread([cost.wall / stock.wall for cost in ours])
    cpu_ratio = spread([cost.cpu / stock.cpu for cost in ours])
    yield Row("dlo grade", "nbgrader autograde", 1, time_ratio, cpu_ratio, note=speed)

    with tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as name:
        large = graded(_class(Path(name) / "course", lab, int(LARGER * pairs)))
    # Before the first judged row, the service has no twins
    held = [row.held for row in large.rows if row.judged]
    early, late = held[len(held) // 10], held[-1]
    memory = f"{len(large.rows)} submissions in {large.wall:.0f} s: "
    memory += f"{late >> 20} MiB after the last, {early >> 20} MiB after a tenth"
    ratio = spread([late / early])
    yield Row("dlo grade, last row", "dlo grade, a tenth of the rows", 1, memory_ratio=ratio, note=memory)


def _beyond(cost: Cost, one: Cost, submissions: int) -> float:
    """Return the CPU time of the grader for a submission, without the start of the command and the
    submission's own; ``one`` is the cost of the command for one submission."""
    return (cost.cpu - cost.own - one.cpu + one.own) / max(1, submissions - 1)


def _class_row(cost: Cost, one: Cost, submissions: int) -> Row:
    own = cost.own / submissions
    beyond = _beyond(cost, one, submissions)
    note = (
        f"{submissions} submissions in one run: {beyond:.2f} s of CPU time of the grader for each, "
        f"the submission's own {own:.2f} s; start of the command {one.cpu - one.own - beyond:.1f} s"
    )
    return Row("a submission, beyond its own", "its own", 1, cpu_ratio=spread([beyond / own]), note=note)


def spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


def new_course(folder: Path, lab: LabSource, answers: Mapping[str, Mapping[str, str]]) -> None:
    """Create a course with a submission of each student."""
    create_course(folder, students=list(answers))
    course = open_course(folder)
    fill_source(course, lab.info)
    if not course.generate_assignment(LAB)["success"]:
        raise UserError(f"{LAB} cannot be released: `dlo release {LAB} --prove-only` says why")
    for student, own in answers.items():
        notebook = release_notebook(lab.folder)
        for cell in notebook.cells:
            cell.source = own.get(cell.id, cell.source)
        write_text(folder / "submitted" / student / LAB / lab.info.notebook, notebook_text(notebook))


def _class(folder: Path, lab: LabSource, submissions: int) -> Path:
    students = [f"s{number:03d}" for number in range(submissions)]
    reference = {question: lab.solution(question).answer for question in lab.questions}
    planted = [mutant.planted(lab) for mutant in read_mutants(lab.folder)]
    chosen = {}
    for number, student in enumerate(students):
        half = {question: reference[question] for question in lab.questions[: len(lab.questions) // 2]}
        mutant = planted[number // 4 % len(planted)]
        chosen[student] = (reference, half, {**reference, mutant.question: mutant.answer}, {})[number % 4]
    new_course(folder, lab, chosen)
    return folder


def graded(course: Path, *options: str) -> Cost:
    """Run `dlo grade` and return its cost."""
    cost = _cost([*DLO, "grade", LAB, *options], course)
    with open(course / "grades" / LAB / "timings.csv", encoding="utf-8", newline="") as file:
        own = {row["student"]: float(row["student_cpu_seconds"]) for row in csv.DictReader(file)}
    chosen = own.values() if "--only" not in options else [own[options[-1]]]
    return Cost(cost.wall, cost.cpu, sum(chosen), cost.rows)


def _cost(command: list[str], folder: Path) -> Cost:
    printed: list[Printed] = []
    began = time.perf_counter()
    with counting_group() as group, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            inside(group, command),
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
        return Cost(wall, group_seconds(group), 0.0, tuple(printed))


def inside(group: Path, command: list[str]) -> list[str]:
    """Return the command that runs ``command`` in a control group."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]


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
def counting_group() -> Iterator[Path]:
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


def group_seconds(group: Path) -> float:
    """Return the CPU time of all processes that have been in a control group."""
    if (group / "cpuacct.usage").is_file():
        return int((group / "cpuacct.usage").read_text()) / 1e9
    lines = (group / "cpu.stat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("usage_usec")) / 1e6
