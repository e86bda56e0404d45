"""The fault table: what each operation shows and does while a command of SLURM times out, fails or is slow.

A row is one command with one fault, on a real SLURM. While the fault lasts, a state that is shown is true or
*unknown*; afterwards it is true, no job is lost, and none has run twice. ``make slurm-faults`` runs all rows,
``make test`` one row for each fault.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.cli.grade_slurm import SlurmElements, Wanted, array_of_judges
from dlo_lib.cluster import Job, JobFailed, State
from dlo_lib.cluster.run import records, submissions
from dlo_lib.cluster.slurm import commands
from dlo_lib.grading.judge import array
from dlo_lib.grading.judge.array import ElementEnd
from dlo_lib.grading.judge.client import JudgeJob
from tests.cluster.fixtures import OTHER_SITE, log_in_to
from tests.cluster.slurm.slurm_faults import COMMANDS, FAULTS, Faults

ACCOUNTED, BARE = "", "without-accounting"
ALWAYS = [
    ("squeue", "before", ACCOUNTED),
    ("sbatch", "after", ACCOUNTED),
    ("sacct", "error", ACCOUNTED),
    ("scancel", "error-after", ACCOUNTED),
    ("squeue", "empty", BARE),
    ("sbatch", "mute", ACCOUNTED),
    ("scontrol", "slow", ACCOUNTED),
]
"""One row for each fault, which run without ``--every-fault``."""
EVERYTHING = [(command, fault, ACCOUNTED) for fault in FAULTS for command in COMMANDS] + [
    (command, fault, BARE) for fault in FAULTS for command in ("sbatch", "squeue", "scontrol")
]
SMALL = {"gpus": 0, "cores": 1, "time": 120}
JUDGE = """
cd "$1" && mkdir -p "taken/$3" || exit 0
while true; do
  for file in "taken/$3"/*.json todo/*.json; do
    number="$(basename "$file" .json)"
    if mv "$file" "taken/$3/" 2> /dev/null || [ -e "taken/$3/$number.json" ]; then
      echo "$number" >> "$OLDPWD/judged"
      mv "taken/$3/$number.json" "done/$number.0"
      continue 2
    fi
  done
  exit 0
done
"""
"""An element of the graders' array that judges nothing: it takes submissions from the queue in ``$1``."""
WAITS = "echo begun >> {name}; until [ -e go-{name} ]; do sleep 0.3; done; echo end of {name}"


def until(condition: Callable[[], bool], what: object = "") -> None:
    begun, pause = time.monotonic(), 0.1
    while not condition():
        assert time.monotonic() - begun < 300, what
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)  # on a busy machine, many questions would make it busier


def lines(name: str) -> int:
    file = Path(name)
    return len(file.read_text().splitlines()) if file.exists() else 0


def sent(name: str, text: str = WAITS, **options: object) -> Job:
    """Submit a job at the site in ``$DLO_SITE``."""
    job = cluster.submit(["bash", "-c", text.format(name=name)], name=name, **(SMALL | options))
    assert isinstance(job, Job)
    return job


def state_of(job: Job) -> State:
    return job.status()[0].state


class Bench:
    """Jobs in every state for all rows, with the records that they had before anything looked at them."""

    def __init__(self, folder: Path, patched: pytest.MonkeyPatch, site: dict[str, str]) -> None:
        self.folder, self.site = folder, site
        self.is_accounted = commands.has_accounting()
        self.faults = Faults(folder / "bin", patched)
        self.runs = sent("runs")
        self.waits = sent("waits", options={"hold": True})
        self.failed = sent("failed", "echo its last words; exit 3")
        self.killed = sent("killed", "kill -9 $PPID")
        self.array = sent("array", 'exit "$1"', sweep=[{"code": 0}, {"code": 9}])
        over = {job.record.turns[0].number for job in (self.failed, self.killed, self.array)}
        until(lambda: len(self._ended(over)) == 4 and bool(lines("runs")))
        self.faults.forget(*over)
        everything = (self.runs, self.waits, self.failed, self.killed, self.array)
        self._records = {job.folder: (job.folder / records.RECORD).read_text() for job in everything}

    def restore(self) -> None:
        """Give the jobs the records that they had at first."""
        for folder, text in self._records.items():
            (folder / records.RECORD).write_text(text)
            for since in folder.glob("turns/*/forgotten-*"):
                since.unlink()
        commands.changed()

    def _ended(self, numbers: set[int]) -> list[str]:
        wanted = ",".join(map(str, numbers))
        ask = ("sacct", "-nPX", "-j", wanted, "-o", "JobID,State")
        if not self.is_accounted:
            ask = ("squeue", "-hr", "-t", "all", "-j", wanted, "-o", "%i|%T")
        rows = self.faults.real(*ask).splitlines()
        return [row for row in rows if row.split("|")[1] in ("COMPLETED", "FAILED")]


def at_site(patched: pytest.MonkeyPatch, folder: Path, site: dict[str, str]) -> None:
    """Submit from ``folder``, with short pauses between two looks."""
    log_in_to(Path(site["SLURM_CONF"]), patched)
    for name, value in site.items():
        patched.setenv(name, value)
    for name in ("home", "work"):
        (folder / name).mkdir(exist_ok=True)
    patched.setenv("DLO_POLL_S", "0.2")
    patched.setenv("DLO_HOME", str(folder / "home"))
    patched.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    patched.chdir(folder / "work")


@contextlib.contextmanager
def benches(site: dict[str, str], factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Yield a bench on the cluster and the site in these variables."""
    folder = factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patched:
        at_site(patched, folder, site)
        found = Bench(folder, patched, site)
    yield found
    with pytest.MonkeyPatch.context() as patched:
        at_site(patched, folder, site)
        Path("go-runs").touch()
        found.runs.cancel()
        found.waits.cancel()


@pytest.fixture(scope="module")
def accounted(
    jean_zay_conf: Path, jean_zay_sites: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    site = {"DLO_SITES": str(jean_zay_sites), "DLO_SITE": "jean-zay-v100", "DLO_ACCOUNT": "abc@v100"}
    with benches({**site, "SLURM_CONF": str(jean_zay_conf)}, tmp_path_factory) as found:
        yield found


@pytest.fixture(scope="module")
def bare(elsewhere_conf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """On a cluster without accounting."""
    folder = tmp_path_factory.mktemp("sites")
    (folder / "elsewhere.toml").write_text(OTHER_SITE)
    site = {"DLO_SITES": str(folder), "DLO_SITE": "elsewhere", "SLURM_CONF": str(elsewhere_conf)}
    with benches(site, tmp_path_factory) as found:
        yield found


class Row:
    """One command with one fault, and the jobs that the operations change."""

    def __init__(self, bench: Bench, command: str, fault: str) -> None:
        self.bench, self.faults, self.command, self.fault = bench, bench.faults, command, fault
        bench.restore()
        self.name = f"{command}-{fault}"
        self.ends = sent(f"ends-{self.name}")
        self.cancelled = sent(f"cancelled-{self.name}")
        sweep = [{"code": 0}, {"code": 9}]
        self.graded = sent(f"graded-{self.name}", 'exit "$1"', sweep=sweep)
        self.again = sent(f"again-{self.name}", "echo begun >> {name}; [ -e go-{name} ]")
        until(lambda: all(lines(job.record.name) for job in (self.ends, self.cancelled)))
        until(lambda: state_of(self.again) is State.FAILED and self.graded.done)

    def check_all_known(self, job: Job) -> None:
        """Check that a job of SLURM which the record does not have was given up, and did nothing."""
        recorded = {turn.number for turn in job.record.turns}
        others = {number: state for number, state in self.at_rest(job).items() if number not in recorded}
        given_up = [turn for turn in job.record.turns if turn.given_up]
        assert set(others.values()) <= {"FAILED"}
        assert len(others) <= len(given_up)

    @contextlib.contextmanager
    def spoilt(self) -> Iterator[None]:
        self.faults.spoil(self.command, self.fault)
        try:
            yield
        finally:
            self.faults.mend()

    def at_rest(self, job: Job) -> dict[int, str]:
        """Return the jobs of SLURM with the script of ``job``, when all have ended."""
        until(
            lambda: not {"PENDING", "RUNNING", "COMPLETING"} & set(self.faults.of_folder(job.folder).values())
        )
        return self.faults.of_folder(job.folder)


@pytest.fixture
def row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Row:
    command, fault, where = request.param
    bench = request.getfixturevalue("bare" if where == BARE else "accounted")
    at_site(monkeypatch, bench.folder, bench.site)
    monkeypatch.setenv("PATH", f"{bench.faults.folder}:{os.environ['PATH']}")
    # The estimate of the start is asked for under the fault, where it counts.
    with monkeypatch.context() as patched:
        patched.setattr(commands, "expected_start", lambda script: ("", ""))
        return Row(bench, command, fault)


def submission(row: Row) -> None:
    name = f"new-{row.name}"
    job = None
    with row.spoilt():
        with contextlib.suppress(UserError):
            job = sent(name, "echo begun >> {name}")
        for known in [one for one in cluster.jobs() if one.record.name == name]:
            assert state_of(known) in (State.UNKNOWN, State.PENDING, State.RUNNING, State.COMPLETED)
    if job is not None:
        assert job.folder in [known.folder for known in cluster.jobs()], "the record is kept"
        at_slurm = row.faults.of_folder(job.folder)
        if at_slurm:
            assert job.wait(timeout=300).status()[0].state is State.COMPLETED
            assert job.record.turns[-1].number in at_slurm
    job = sent(name, "echo begun >> {name}").wait(timeout=300)  # what a user does who is not sure
    row.check_all_known(job)
    assert lines(name) == 1, "it has run once"


def status(row: Row) -> None:
    bench = row.bench
    true = {
        bench.runs: State.RUNNING,
        bench.waits: State.PENDING,
        bench.failed: State.FAILED,
        bench.killed: State.FAILED if bench.is_accounted else State.LOST,
    }
    with row.spoilt():
        for job, state in true.items():
            for _ in range(2):
                assert state_of(job) in (state, State.UNKNOWN), job.name
    for job, state in true.items():
        until(lambda job=job: state_of(job) is not State.UNKNOWN)
        assert state_of(job) is state, job.name


def waiting(row: Row) -> None:
    with row.spoilt():
        Path(f"go-{row.ends.record.name}").touch()
        with contextlib.suppress(JobFailed):
            assert row.ends.wait(timeout=1, poll=0.1).status()[0].state is State.COMPLETED
        with pytest.raises(JobFailed, match="not over after 0.1 s"):
            row.bench.runs.wait(timeout=0.1, poll=0.1)
    assert row.ends.wait(timeout=300).status()[0].state is State.COMPLETED


def cancelling(row: Row) -> None:
    job = row.cancelled
    number = job.record.turns[0].number
    with row.spoilt():
        with contextlib.suppress(UserError):
            job.cancel()
            assert row.faults.of_folder(job.folder)[number] in ("CANCELLED", "COMPLETING")
        runs = row.faults.of_folder(job.folder)[number] == "RUNNING"
        assert state_of(job) in {State.UNKNOWN, State.RUNNING} | ({State.CANCELLED} if not runs else set())
    job.cancel()
    until(lambda: job.done)
    assert state_of(job) is State.CANCELLED
    assert row.at_rest(job) == {number: "CANCELLED"}


def resubmission(row: Row) -> None:
    job = row.again
    Path(f"go-{job.record.name}").touch()
    with row.spoilt():
        with contextlib.suppress(UserError):
            job.resubmit()
        for _ in range(2):
            assert state_of(job) is not State.CANCELLED
            assert state_of(job) is not State.LOST
    if len(row.faults.of_folder(job.folder)) == 2:  # it was accepted
        job.wait(timeout=300)
    else:
        assert state_of(job) in (State.UNKNOWN, State.FAILED)
        job.resubmit().wait(timeout=300)
    row.check_all_known(job)
    assert lines(job.record.name) == 2, "it has run once more"


def logs(row: Row) -> None:
    with row.spoilt():
        assert row.bench.failed.logs().endswith("its last words\n")
        assert row.bench.failed.logs(lines=1) == "its last words\n"


def grading(row: Row) -> None:
    true = {0: ElementEnd.FINISHED, 1: ElementEnd.LOST}
    elements = SlurmElements(row.bench.array)
    with row.spoilt():
        for _ in range(2):
            assert elements.ended().items() <= true.items()
        elements.cancel()
    until(lambda: elements.ended() == true)


def whole_grading(row: Row) -> None:
    """`dlo grade --slurm` with elements that judge nothing; the fault ends while it waits for them."""
    Path("judged").unlink(missing_ok=True)
    lab = SimpleNamespace(directory=row.name)
    judges = array_of_judges(lab, Path(), Wanted(2, cores=1, time="120"), unsafe=True)
    students = [JudgeJob(f"s{number}", Path("a"), Path("b"), "") for number in range(3)]
    looks: list[object] = []

    def waiting(_: object) -> None:
        looks.append(_)
        if len(looks) == 3:
            row.faults.mend()

    with pytest.MonkeyPatch.context() as patched, row.spoilt():
        patched.setattr(submissions, "ACCEPTED_S", 2.0)
        patched.setattr(array, "trusted_python", lambda code, queue, **_: ["bash", "-c", JUDGE, "_", queue])
        patched.setattr(judges, "_on_record", lambda: True)
        try:
            rows = list(judges.judge(students, 1, waiting))
        except UserError as error:
            if "SLURM" not in str(error) and row.command not in str(error):
                raise
            row.faults.mend()
            assert not Path("judged").exists(), "nothing ran"
            rows = list(judges.judge(students, 1))
    assert sorted((job.student, code) for job, code in rows) == [("s0", 0), ("s1", 0), ("s2", 0)]
    assert sorted(Path("judged").read_text().split()) == ["00000", "00001", "00002"], "each was judged once"
    for job in [one for one in cluster.jobs() if one.record.name == f"dlo-grade-{row.name}"]:
        row.at_rest(job)


def requeueing(row: Row) -> None:
    job = row.graded
    with row.spoilt():
        done = False
        with contextlib.suppress(UserError):
            SlurmElements(job).requeue(1)
            done = row.fault != "empty"  # then scontrol claims it
        assert job.status()[1].state in (State.UNKNOWN, State.PENDING, State.RUNNING, State.FAILED)
    until(lambda: job.status()[1].state is not State.UNKNOWN)
    rows = row.faults.real("squeue", "-h", "-r", "-t", "all", "-o", "%K|%T|%o").splitlines()
    now, *more = [line.split("|")[1] for line in rows if line.startswith("1|") and str(job.folder) in line]
    assert not more, "it is in the queue once"
    assert job.status()[0].state is State.COMPLETED
    if now != "COMPLETING":
        assert job.status()[1].state is (State.FAILED if now == "FAILED" else State.PENDING)
    assert not done or now != "FAILED", "requeued is what has been done"
    job.cancel()


OPERATIONS = (
    status,
    logs,
    grading,
    whole_grading,
    requeueing,
    cancelling,
    waiting,
    resubmission,
    submission,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    rows = EVERYTHING if metafunc.config.getoption("--every-fault") else ALWAYS
    metafunc.parametrize("row", rows, ids=["-".join(filter(None, row)) for row in rows], indirect=True)


@pytest.mark.slow
def test_no_fault_of_slurm_gives_a_wrong_state_loses_a_job_or_runs_it_twice(row: Row) -> None:
    wrong = {}
    for operation in OPERATIONS:
        try:
            operation(row)
        except Exception as error:  # noqa: BLE001  the table shows all that is wrong
            wrong[operation.__name__] = error
    for job in (row.ends, row.cancelled):
        Path(f"go-{job.record.name}").touch()
    said = [f"{operation}: {type(error).__name__}: {str(error)[:300]}" for operation, error in wrong.items()]
    assert not said, "\n".join(said)
