"""Grading a class of 13_dp_limit: `dlo grade` against nbgrader's own `autograde`, both as commands, on the same submissions.

A fourth each of the class hands in the reference, its first half, a mutant, the untouched notebook; ours runs before and after nbgrader's,
which grades in the course's ``stock/`` configuration with a gradebook of its own. The first batch of all proves the lab and keeps that.

CPU time is that of all processes of a command, as its control group counts it: workers in a sandbox are nobody's waited-for children.
*The submission's own* CPU time is what its processes spend between being asked to run cells or answer a check and the answer, given cells
included, their start not; the rest is the grader's. Memory is what the batch and its judging service hold that is no file's (RssAnon),
after the last row against after a tenth of the judged rows, in a class of seven times as many.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paired import Row, Spread
from dlo_lib.errors import UserError
from dlo_lib.files import write_text
from dlo_lib.grading.course import find_lab, source_labs
from dlo_lib.grading.limits import descendants, resident_bytes
from dlo_lib.grading.mutants import mutants_of, read_mutant
from dlo_lib.grading.nbgrader_course import STOCK_FOLDER, create_course, open_course
from dlo_lib.grading.release import release_notebook
from dlo_lib.grading.source import LabSource, build_notebook, notebook_text, read_lab, source_folder

LAB = "13_dp_limit"
SUBMISSIONS = 40
LARGER = 7.5  # times as many for the memory's growth
NBGRADER = [sys.executable, "-m", "nbgrader"]
DLO = [sys.executable, "-c", "from dlo_lib.cli import main; main()"]
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Printed:
    """A row of `dlo grade`: the second after the command's start at which it stood, how it went, and bytes held then."""

    second: float
    judged: bool
    held: int


@dataclass(frozen=True)
class Cost:
    """Of one command: seconds of wall time, of CPU time of all its processes, and of the submissions' own in that; its rows."""

    wall: float
    cpu: float
    own: float
    rows: tuple[Printed, ...]


def rows(pairs: int = SUBMISSIONS) -> list[Row]:
    """``pairs``: submissions, each graded by both."""
    lab = read_lab(source_folder(find_lab(LAB, source_labs())))
    with tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as name:
        course = _class(Path(name) / "course", lab, pairs)
        new = _graded(course, "--only", "s000")
        one = _graded(course, "--only", "s000")
        ours = [_graded(course)]
        _cost([*NBGRADER, "generate_assignment", LAB], course / STOCK_FOLDER)
        stock = _cost([*NBGRADER, "autograde", LAB], course / STOCK_FOLDER)
        ours.append(_graded(course))
    with tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as name:
        large = _graded(_class(Path(name) / "course", lab, int(LARGER * pairs)))
    beyond = _spread([(cost.cpu - cost.own) / pairs for cost in ours])
    each = _spread([(cost.cpu - cost.own - one.cpu + one.own) / max(1, pairs - 1) for cost in ours])
    first = _spread([cost.rows[0].second for cost in ours])
    judged = _spread([min((row.second for row in cost.rows if row.judged), default=0.0) for cost in ours])
    gaps = [later.second - sooner.second for sooner, later in itertools.pairwise(row for row in ours[0].rows if row.judged)]
    speed = (
        f"{pairs} submissions: {ours[0].wall:.0f} s against {stock.wall:.0f} s; a submission's own CPU time {ours[0].own / pairs:.2f} s, "
        f"beyond that {beyond} s with the command's start, {each} s without; nbgrader {stock.cpu / pairs:.2f} s with its own; "
        f"first row after {first} s, first judged row after {judged} s ({new.rows[0].second:.1f} s for a lab never proved), "
        f"then {statistics.median(gaps or [0.0]):.2f} s a row"
    )
    held = [row.held for row in large.rows if row.judged]  # before the first of them the service has no twins
    early, late = held[len(held) // 10], held[-1]
    memory = f"{len(large.rows)} submissions in {large.wall:.0f} s: {late >> 20} MiB after the last, {early >> 20} MiB after a tenth"
    time_ratio, cpu_ratio = _spread([cost.wall / stock.wall for cost in ours]), _spread([cost.cpu / stock.cpu for cost in ours])
    growth = _spread([late / early])
    return [
        Row("dlo grade", "nbgrader autograde", 1, time_ratio, cpu_ratio, note=speed),
        Row("dlo grade, last row", "dlo grade, a tenth of the rows", 1, memory_ratio=growth, note=memory),
    ]


def _spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


def _class(folder: Path, lab: LabSource, submissions: int) -> Path:
    students = [f"s{number:03d}" for number in range(submissions)]
    create_course(folder, students=students)
    build_notebook(lab.folder)
    if not open_course(folder).generate_assignment(LAB)["success"]:
        raise UserError(f"{LAB} cannot be released: `dlo release {LAB} --prove-only` says why")
    reference = {question: lab.solution(question).answer for question in lab.questions}
    planted = [read_mutant(file) for file in mutants_of(lab)]
    for number, student in enumerate(students):
        half = {question: reference[question] for question in lab.questions[: len(lab.questions) // 2]}
        mutant = planted[number // 4 % len(planted)]
        answers = (reference, half, {**reference, mutant.question: mutant.source}, {})[number % 4]
        notebook = release_notebook(lab.folder)
        for cell in notebook.cells:
            cell.source = answers.get(cell.id, cell.source)
        write_text(folder / "submitted" / student / LAB / lab.info.notebook, notebook_text(notebook))
    return folder


def _graded(course: Path, *options: str) -> Cost:
    """`dlo grade`."""
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
            inside, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "COLUMNS": "200"}
        )
        assert process.stdout is not None
        printed.extend(
            Printed(time.perf_counter() - began, line.rstrip().endswith(" GRADED"), _held(process.pid))
            for line in process.stdout
            if " s  s" in line  # a row as it stands, not of the table at the end
        )
        if process.wait():
            errors.seek(0)
            raise UserError(f"{command[-2]} {command[-1]} failed: {errors.read().strip().splitlines()[-1:]}")
        wall = time.perf_counter() - began
        return Cost(wall, _seconds(group), 0.0, tuple(printed))


def _held(pid: int) -> int:
    """By the batch and its judging service; judges and sandboxes come and go."""
    service = [child for child in descendants(pid) if b"grading.service" in _command_line(child)][:1]
    return sum(resident_bytes(process) for process in (pid, *service))


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # gone meanwhile
        return b""


@contextlib.contextmanager
def _group() -> Iterator[Path]:
    """A control group that counts CPU time, of either version.

    Raises:
        UserError: this user may make none.
    """
    group = (GROUPS / "cpuacct" if (GROUPS / "cpuacct").is_dir() else GROUPS) / f"dlo-benchmark-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise UserError(f"CPU time of sandboxed processes needs a control group ({error}): run this as root") from error
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
    return next(int(line.split()[1]) for line in (group / "cpu.stat").read_text().splitlines() if line.startswith("usage_usec")) / 1e6
