"""The fault table: what each operation shows and does while a command of SLURM times out, fails or is slow.

A row is one command with one fault, on a real SLURM. While the fault lasts, a state that is shown is true or
*unknown*; afterwards it is true, no job is lost, and none has run twice. ``make slurm-faults`` runs all rows,
``make test`` one row for each fault.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlo_lib import cluster
from dlo_lib.cli.grade_slurm import SlurmElements
from dlo_lib.cluster import Job, JobFailed, State
from dlo_lib.errors import UserError
from dlo_lib.grading.judge.array import ElementEnd
from tests.cluster.slurm_faults import COMMANDS, FAULTS, Faults

ALWAYS = {
    ("squeue", "before"),
    ("sbatch", "after"),
    ("sacct", "error"),
    ("scontrol", "error-after"),
    ("squeue", "empty"),
    ("sbatch", "mute"),
    ("scontrol", "slow"),
}
SMALL = {"site": "jean-zay-v100", "account": "abc@v100", "gpus": 0, "cores": 1, "time": 5}
WAITS = "echo begun >> {name}; until [ -e go-{name} ]; do sleep 0.1; done; echo end of {name}"
ANSWERS = {State.COMPLETED: ElementEnd.FINISHED, State.FAILED: ElementEnd.LOST}


def until(condition: Callable[[], bool], what: object = "") -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < 120, what
        time.sleep(0.1)


def lines(name: str) -> int:
    file = Path(name)
    return len(file.read_text().splitlines()) if file.exists() else 0


def sent(name: str, text: str = WAITS, **options: object) -> Job:
    job = cluster.submit(["bash", "-c", text.format(name=name)], name=name, **(SMALL | options))
    assert isinstance(job, Job)
    return job


def state_of(job: Job) -> State:
    return job.status()[0].state


class Row:
    """One command with one fault, and jobs in every state, at which nothing has looked yet."""

    def __init__(self, faults: Faults, command: str, fault: str) -> None:
        self.faults, self.command, self.fault = faults, command, fault
        self.runs = sent("runs")
        self.ends = sent("ends")
        self.cancelled = sent("cancelled")
        self.waits = sent("waits", options={"hold": True})
        self.failed = sent("failed", "echo its last words; exit 3")
        self.killed = sent("killed", "kill -9 $PPID")
        self.again = sent("again", "echo begun >> again; [ -e go-again ]")
        self.array = cluster.submit(
            ["bash", "-c", 'exit "$2"', "x"],
            name="array",
            sweep=[{"code": 0}, {"code": 9}],
            **SMALL,
        )
        until(lambda: all(lines(name) for name in ("runs", "ends", "cancelled", "again")))
        until(lambda: state_of(self.again) is State.FAILED)
        over = {job.record.turns[0].number for job in (self.failed, self.killed, self.array)}
        until(lambda: len(self._ended(over)) == 4)
        faults.forget(*over)
        # The answers of a moment ago are no longer valid.
        time.sleep(0.1)

    def _ended(self, numbers: set[int]) -> list[str]:
        wanted = ",".join(map(str, numbers))
        rows = self.faults.real("sacct", "-nPX", "-j", wanted, "-o", "JobID,State").splitlines()
        return [row for row in rows if row.split("|")[1] in ("COMPLETED", "FAILED")]

    @contextlib.contextmanager
    def spoilt(self) -> Iterator[None]:
        self.faults.spoil(self.command, self.fault)
        try:
            yield
        finally:
            self.faults.mend()


@pytest.fixture
def row(
    request: pytest.FixtureRequest,
    jean_zay: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Row:
    monkeypatch.setenv("DLO_POLL_S", "0.05")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    command, fault = request.param
    return Row(Faults(tmp_path / "bin", monkeypatch), command, fault)


def submission(row: Row) -> None:
    job = None
    with row.spoilt():
        with contextlib.suppress(UserError):
            job = sent("new", "echo begun >> new")
        for known in [one for one in cluster.jobs() if one.record.name == "new"]:
            assert state_of(known) in (State.UNKNOWN, State.PENDING, State.RUNNING, State.COMPLETED)
    if job is not None:
        assert job.folder in [known.folder for known in cluster.jobs()], "the record is kept"
        at_slurm = row.faults.of_folder(job.folder)
        if at_slurm:
            assert job.wait(timeout=60).status()[0].state is State.COMPLETED
            assert job.record.turns[-1].number in at_slurm
    job = sent("new", "echo begun >> new").wait(timeout=60)  # what a user does who is not sure
    until(lambda: not {"PENDING", "RUNNING", "COMPLETING"} & set(row.faults.of_folder(job.folder).values()))
    assert lines("new") == 1, "it has run once"
    assert len(row.faults.of_folder(job.folder)) == 1, "one submission"


def status(row: Row) -> None:
    true = {
        row.runs: {State.RUNNING},
        row.waits: {State.PENDING},
        row.failed: {State.FAILED},
        row.killed: {State.FAILED},
    }
    with row.spoilt():
        for job, states in true.items():
            for _ in range(2):
                assert state_of(job) in states | {State.UNKNOWN}, job.name
    for job, states in true.items():
        until(lambda job=job: state_of(job) is not State.UNKNOWN)
        assert state_of(job) in states, job.name


def waiting(row: Row) -> None:
    with row.spoilt():
        Path("go-ends").touch()
        with contextlib.suppress(JobFailed):
            assert row.ends.wait(timeout=1, poll=0.1).status()[0].state is State.COMPLETED
        with pytest.raises(JobFailed, match="not over after 0.1 s"):
            row.runs.wait(timeout=0.1, poll=0.1)
    assert row.ends.wait(timeout=60).status()[0].state is State.COMPLETED


def cancelling(row: Row) -> None:
    number = row.cancelled.record.turns[0].number
    with row.spoilt():
        with contextlib.suppress(UserError):
            row.cancelled.cancel()
            assert row.faults.of_folder(row.cancelled.folder)[number] in ("CANCELLED", "COMPLETING")
        truth = row.faults.of_folder(row.cancelled.folder)[number]
        shown = state_of(row.cancelled)
        assert shown is State.UNKNOWN or (shown is State.CANCELLED) <= (truth != "RUNNING")
    row.cancelled.cancel()
    until(lambda: row.cancelled.done)
    assert state_of(row.cancelled) is State.CANCELLED
    assert row.faults.of_folder(row.cancelled.folder) == {number: "CANCELLED"}


def resubmission(row: Row) -> None:
    job = row.again
    Path("go-again").touch()
    with row.spoilt():
        with contextlib.suppress(UserError):
            job.resubmit()
        for _ in range(2):
            assert state_of(job) in (
                State.UNKNOWN,
                State.FAILED,
                State.PENDING,
                State.RUNNING,
                State.COMPLETED,
            )
    if len(row.faults.of_folder(job.folder)) == 2:  # it was accepted
        job.wait(timeout=60)
    else:
        assert state_of(job) in (State.UNKNOWN, State.FAILED)
        job.resubmit().wait(timeout=60)
    until(lambda: not {"PENDING", "RUNNING", "COMPLETING"} & set(row.faults.of_folder(job.folder).values()))
    assert lines("again") == 2, "it has run once more"
    assert len(row.faults.of_folder(job.folder)) == 2


def logs(row: Row) -> None:
    with row.spoilt():
        assert row.failed.logs().endswith("its last words\n")
        assert row.failed.logs(lines=1) == "its last words\n"


def grading(row: Row) -> None:
    true = {0: ElementEnd.FINISHED, 1: ElementEnd.LOST}
    elements = SlurmElements(row.array)
    with row.spoilt():
        for _ in range(2):
            assert elements.ended().items() <= true.items()
        with contextlib.suppress(UserError):
            elements.cancel()
    until(lambda: elements.ended() == true)


ROWS = [(command, fault) for fault in FAULTS for command in COMMANDS]


@pytest.mark.parametrize("row", ROWS, ids="-".join, indirect=True)
def test_no_fault_of_slurm_gives_a_wrong_state_loses_a_job_or_runs_it_twice(
    row: Row, request: pytest.FixtureRequest
) -> None:
    if (row.command, row.fault) not in ALWAYS and not request.config.getoption("--every-fault"):
        pytest.skip("NOT TESTED HERE: make slurm-faults runs all rows")
    wrong = {}
    for operation in (status, logs, grading, cancelling, waiting, resubmission, submission):
        try:
            operation(row)
        except Exception as error:  # noqa: BLE001  the table shows all that is wrong
            wrong[operation.__name__] = error
    for name in ("runs", "ends", "cancelled"):
        Path(f"go-{name}").touch()
    row.faults.mend()
    row.faults.real("scancel", *[str(job.record.turns[0].number) for job in (row.runs, row.waits)])
    said = [f"{operation}: {type(error).__name__}: {str(error)[:300]}" for operation, error in wrong.items()]
    assert not said, "\n".join(said)
