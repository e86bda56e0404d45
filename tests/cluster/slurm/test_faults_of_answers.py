"""What each answer of a SLURM command means, with small programs in place of the commands."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.cli.grade_slurm import SlurmElements
from dlo_lib.cli.jobs import cancel as cancel_command
from dlo_lib.cluster import Job, State
from dlo_lib.cluster.run import array_parts, endings, records, submissions, turns
from dlo_lib.cluster.run.records import Turn
from dlo_lib.cluster.slurm.answers import JobMark, of_accounting, of_controller, of_queue
from dlo_lib.cluster.slurm.commands import NoAnswer
from tests.cluster.fixtures import OTHER_SITE

CONFIG = "ClusterName = fake\nAccountingStorageType = accounting_storage/slurmdbd"
NO_JOB = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
NEVER = "exec sleep 1000"


class Commands:
    """Programs in place of SLURM's commands: each is a piece of bash, which a test replaces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("sbatch", "squeue", "scancel", "sacct", "sacctmgr", "scontrol", "sinfo"):
            self.set(name, "true")
        self.set("sbatch", 'echo "$@" >> "$0.calls"; echo 7')
        self.show(NO_JOB)

    def set(self, name: str, text: str) -> None:
        (self.folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (self.folder / name).chmod(0o755)

    def show(self, job: str) -> None:
        """Set what ``scontrol show job`` does."""
        requeue = 'echo "$@" >> "$0.calls"'
        text = f'case "$*" in ping) ;; *config*) echo "{CONFIG}" ;; requeue*) {requeue} ;; *) {job} ;; esac'
        self.set("scontrol", text)

    def list(self, job: Job, state: str, number: int = 7) -> None:
        """Let the queue list the job in its state."""
        token = job.record.turns[-1].token
        command = f"{job.folder / records.SCRIPT} {token}"
        self.set("squeue", f"echo '{number}|N/A|{state}|None|N/A|0:01|a comment|{job.name}|{command}'")

    @property
    def submissions(self) -> list[str]:
        calls = (self.folder / "sbatch.calls").read_text().splitlines()
        return [call for call in calls if "--test-only" not in call]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "DLO_SITE"))]:
        monkeypatch.delenv(name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "site.toml").write_text(OTHER_SITE)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))  # so that no other test's answers are kept
    monkeypatch.setenv("DLO_POLL_S", "0")
    monkeypatch.chdir(tmp_path)
    return Commands(tmp_path / "bin")


def sent(**options: object) -> Job:
    job = cluster.submit(["true"], site="site.toml", gpus=0, name="fake", **options)
    assert isinstance(job, Job)
    return job


def state(job: Job) -> State:
    return job.status()[0].state


@pytest.mark.parametrize(
    "squeue",
    [
        "echo 'squeue: error: Invalid user: ada' >&2",  # its status is 0
        "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
    ],
)
def test_a_queue_that_does_not_answer_gives_no_verdict(commands, squeue):
    job = sent()
    commands.set("squeue", squeue)
    commands.show("exit 1")
    assert state(job) is State.UNKNOWN
    assert "squeue does not answer: " in job.status()[0].reason
    assert job.record.over is None
    with pytest.raises(cluster.JobFailed, match="is not over after 0 s"):
        job.wait(timeout=0, poll=0)
    commands.list(job, "RUNNING")
    assert state(job) is State.RUNNING


def test_an_empty_queue_is_no_end(commands):
    job = sent()
    commands.show(f"echo 'JobId=7 JobName={job.name} JobState=RUNNING Reason=None Command=x'")
    assert state(job) is State.RUNNING
    commands.show("true")
    assert state(job) is State.UNKNOWN


def test_a_failed_accounting_gives_no_verdict(commands):
    job = sent()
    commands.set("sacct", "echo 'sacct: error: slurmdbd: Connection refused' >&2; exit 1")
    assert state(job) is State.UNKNOWN
    assert job.status()[0].reason == "sacct does not answer: slurmdbd: Connection refused"
    commands.set("sacct", "true")
    assert state(job) is State.UNKNOWN, "its row may come"
    commands.set("sacct", f"echo '7|FAILED|0:9|2026-11-27T05:00:00|00:00:01||{job.name}'")
    assert state(job) is State.FAILED
    assert job.record.over is not None


@pytest.mark.parametrize(("sacct", "final"), [("true", True), ("exit 1", False)])
def test_an_end_that_the_accounting_never_has_is_lost(commands, monkeypatch, sacct, final):
    job = sent()
    turn = job.record.turns[0]
    (job.folder / submissions.TURNS / turn.token / "0").touch()  # the script has begun
    (job.folder / "logs" / "0.out").touch()
    commands.set("sacct", sacct)
    assert state(job) is State.UNKNOWN
    monkeypatch.setattr(endings, "SETTLED_S", 0)
    assert state(job) is State.LOST
    assert (job.record.over is not None) is final, "a verdict is final only when it is certain"


ERRORS = {
    "sbatch: error: Batch job submission failed: Invalid account or account/partition combination": "refused",
    "sbatch: error: invalid option": "refused",
    "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation": "unknown",
    "sbatch: error: Batch job submission failed: Unable to contact slurm controller": "unknown",
    "": "unknown",
}


@pytest.mark.parametrize(("error", "then"), ERRORS.items())
def test_only_a_verdict_of_slurm_removes_a_job(commands, error, then, capsys):
    commands.set("sbatch", f"echo '{error}' >&2; exit 1" if error else "true")
    if then == "refused":
        with pytest.raises(UserError, match="SLURM refuses the job: "):
            sent()
        assert cluster.jobs() == []
        return
    job = sent()
    assert state(job) is State.UNKNOWN
    assert job.record.numbers == "?"
    said = capsys.readouterr().out
    assert f"SLURM may have accepted {job.name}" in said
    assert "submitted job" not in said
    commands.list(job, "PENDING", number=12)
    assert (state(job), job.record.numbers) == (State.PENDING, "12")


def test_nothing_is_submitted_twice_while_the_queue_does_not_answer(commands, capsys):
    commands.set("sbatch", 'echo "$@" >> "$0.calls"; exit 1')
    job = sent()
    commands.set("squeue", "exit 1")
    with pytest.raises(NoAnswer, match=r"SLURM may have fake-\w+, but does not answer .*: nothing is"):
        sent()
    assert len(commands.submissions) == 1
    commands.set("squeue", "true")
    commands.set("sbatch", 'echo "$@" >> "$0.calls"; echo 8')
    assert sent().record.numbers == "8", "the queue does not have the first one"
    assert len(commands.submissions) == 2
    first, second = job.record.turns
    assert first.given_up
    assert not second.given_up


def test_a_submission_that_slurm_never_had_is_lost_after_a_while(commands, monkeypatch):
    commands.set("sbatch", "exit 1")
    job = sent()
    assert state(job) is State.UNKNOWN
    monkeypatch.setattr(submissions, "ACCEPTED_S", -1)
    assert state(job) is State.LOST
    commands.set("sbatch", "echo 9")
    job.resubmit()
    commands.list(job, "RUNNING", number=9)
    assert (state(job), job.record.numbers) == (State.RUNNING, "9")


def test_a_submission_that_ended_before_it_began_is_found_in_the_accounting(commands, monkeypatch):
    """It was accepted without an answer, and cancelled in a terminal. Then the queue forgot it."""
    commands.set("sbatch", "exit 1")
    job = sent()
    token = job.record.turns[0].token
    monkeypatch.setattr(submissions, "ACCEPTED_S", -1)
    commands.set("sacct", "echo 'sacct: error: slurmdbd: Connection refused' >&2; exit 1")
    assert state(job) is State.UNKNOWN
    ended = f"echo '11|CANCELLED by 0|0:0|Unknown|00:00:00||{job.name}'"
    rows = f"echo '10|sbatch x/job.sh another'; echo '11|sbatch --parsable x/job.sh {token}'"
    commands.set("sacct", f'case "$*" in *SubmitLine*) {rows} ;; *) {ended} ;; esac')
    assert (state(job), job.record.numbers) == (State.CANCELLED, "11")
    assert len(job.record.turns) == 1
    assert not job.record.turns[0].given_up


def test_no_more_elements_run_at_once_than_asked_also_in_several_arrays(commands, monkeypatch):
    monkeypatch.setattr(array_parts, "most_elements", lambda: 2)
    commands.set("sbatch", 'echo "$@" >> "$0.calls"; wc -l < "$0.calls"')
    job = sent(sweep=[{"n": n} for n in range(7)], at_once=2)
    numbers = [turn.number for turn in job.record.turns]
    calls = [re.findall(r"--array=\S+|--dependency=\S+", call) for call in commands.submissions]
    assert calls == [
        ["--array=0-1%1"],
        ["--array=0-1%1"],
        ["--array=0-1%1", f"--dependency=afterany:{numbers[0]}"],
        ["--array=0%1", f"--dependency=afterany:{numbers[1]}"],
    ]


def test_an_unknown_job_is_cancelled_in_the_queue_or_never_runs(commands):
    commands.set("sbatch", "exit 1")
    job = sent()
    commands.set("squeue", "exit 1")
    with pytest.raises(NoAnswer, match="squeue does not answer"):
        job.cancel()
    commands.set("squeue", "true")
    job.cancel()
    assert state(job) is State.CANCELLED
    assert script(job, 7).returncode == 1, "a job that SLURM starts later does nothing"
    job.forget()
    assert cluster.jobs() == []


@pytest.mark.parametrize("scancel", ["true", "echo 'Socket timed out' >&2; exit 1", NEVER])
def test_cancelled_is_what_the_controller_confirms(commands, scancel, monkeypatch):
    job = sent()
    commands.show(f"echo 'JobId=7 JobName={job.name} JobState=RUNNING Reason=None Command=x'")
    commands.list(job, "RUNNING")
    commands.set("scancel", scancel)
    if scancel == NEVER:
        monkeypatch.setenv("DLO_ANSWER_S", "1")
    with pytest.raises(NoAnswer, match=r"job 7 is not cancelled \(.+\): cancel it again later"):
        job.cancel()
    assert state(job) is State.RUNNING


def test_the_command_calls_cancelled_only_what_it_cancelled(commands, capsys):
    job = sent(sweep=[{"n": 1}, {"n": 2}])
    line = f"JobId=%s ArrayJobId=7 ArrayTaskId=%s JobName={job.name} JobState=%s Reason=None Command=x"
    first, second = (line % (8, 0, "COMPLETED"), line % (7, 1, "RUNNING"))
    commands.show(
        f"echo '{first}'; [ -e \"$0.gone\" ] && echo '{second}' | sed s/RUNNING/CANCELLED/ || echo '{second}'"
    )
    commands.set("scancel", 'touch "${0%/*}/scontrol.gone"')
    for element, said in (
        (0, "has already ended: completed"),
        (1, "is cancelled"),
        (1, "has already ended: c"),
    ):
        cancel_command(job.name, element)
        assert f"element {element} of {job.name} {said}" in capsys.readouterr().out
    assert job.cancel() == []


def test_elements_of_graders_that_run_end_by_themselves_and_those_that_wait_are_cancelled(commands):
    job = sent(sweep=[{"n": 1}, {"n": 2}])
    line = f"JobId=%s ArrayJobId=7 ArrayTaskId=%s JobName={job.name} JobState=%s Reason=None Command=x"
    lines = (line % (8, 0, "RUNNING"), line % (7, 1, "PENDING"))
    commands.show(f"printf '%s\\n' '{lines[0]}' '{lines[1]}'")
    commands.set("scancel", 'echo "$@" >> "$0.calls"')
    SlurmElements(job).cancel_waiting()
    assert (commands.folder / "scancel.calls").read_text() == "7_1\n"
    SlurmElements(job).cancel()
    assert (commands.folder / "scancel.calls").read_text() == "7_1\n7_0 7_1\n"


def test_an_element_whose_dependency_failed_has_a_reason_in_words(commands):
    job = sent()
    line = f"JobId=7 JobName={job.name} JobState=%s Reason=DependencyNeverSatisfied StartTime=%s RunTime="
    line += "00:00:00 Command=x"
    commands.show(f"echo '{line % ('PENDING', 'Unknown')}'")
    assert job.status()[0].reason == "DependencyNeverSatisfied", "explained below the table"
    commands.show(f"echo '{line % ('CANCELLED', '2026-11-27T05:00:00')}'")
    assert job.look()[1][0].start == "", "it never began, and SLURM says the time of its end"
    said = (
        r"cancelled \(the job that it waited for did not complete\); 1 of 1 did not complete. "
        r"resubmit\(\) runs it again. It has printed nothing."
    )
    with pytest.raises(cluster.JobFailed, match=said):
        job.wait()


def test_a_job_with_the_same_number_is_not_cancelled(commands):
    job = sent()
    commands.show("echo 'JobId=7 JobName=another JobState=RUNNING Reason=None Command=/x/job.sh'")
    commands.set("scancel", 'touch "$0.called"')
    job.cancel()
    assert not (commands.folder / "scancel.called").exists()


def script(job: Job, number: int, element: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script of the first submission of a job as SLURM does."""
    given = {"SLURM_JOB_ID": str(number), "SLURM_CPUS_PER_TASK": "1"}
    if element is not None:
        given = {"SLURM_JOB_ID": "99", "SLURM_ARRAY_JOB_ID": str(number), "SLURM_ARRAY_TASK_ID": str(element)}
    token = job.record.turns[0].token
    words = ["bash", str(job.folder / records.SCRIPT), token]
    return subprocess.run(words, env={**os.environ, **given}, capture_output=True, text=True)


def test_a_job_that_has_begun_is_found_without_the_queue(commands):
    commands.set("sbatch", "exit 1")
    job = sent()
    done = script(job, 41)
    assert done.returncode == 0, done.stderr
    commands.set("squeue", "exit 1")
    assert (state(job), job.record.numbers) == (State.UNKNOWN, "41")
    assert script(job, 41).returncode == 0, "SLURM may start it again"
    assert script(job, 42).returncode == 1, "the submission has one job"


def test_all_elements_of_an_array_are_one_submission(commands):
    commands.set("sbatch", "exit 1")
    job = sent(sweep=[{"n": 1}, {"n": 2}])
    for element in (0, 1):
        done = script(job, 41, element)
        assert done.returncode == 0, done.stderr
    assert job.look()[0].numbers == "41"
    turn = job.record.turns[0]
    assert [submissions.has_begun(job.folder, turn, element) for element in (0, 1, 2)] == [True, True, False]


def test_giving_up_and_the_start_of_the_job_exclude_each_other(commands):
    commands.set("sbatch", "exit 1")
    job = sent()
    turn = job.record.turns[0]
    assert script(job, 41).returncode == 0
    assert submissions.give_up(job.folder, turn).number == 41
    other = cluster.submit(["true"], ["other"], site="site.toml", gpus=0, name="other")
    assert submissions.give_up(other.folder, other.record.turns[0]).given_up
    assert "this submission was given up" in script(other, 42).stderr


def test_an_element_that_slurm_may_have_is_not_requeued_as_another_job(commands):
    commands.set("sbatch", 'echo "$@" >> "$0.calls"; exit 1')
    elements = SlurmElements(sent())
    with pytest.raises(NoAnswer, match=r"SLURM may have element 0 of fake-\w+, and its number is not"):
        elements.requeue(0)
    with pytest.raises(NoAnswer, match="SLURM may have fake-.*: nothing is submitted"):
        turns.start(elements.job.folder, (0,))
    elements.job.cancel()
    with pytest.raises(UserError, match="SLURM never had element 0 of"):
        elements.job.requeue(0)
    commands.set("sbatch", 'echo "$@" >> "$0.calls"; echo 8')
    elements.requeue(0)
    assert elements.job.record.numbers == "8"
    assert len(commands.submissions) == 2


def test_an_empty_queue_does_not_make_a_requeue_another_job(commands):
    job = sent()
    commands.show(f"echo 'JobId=7 JobName={job.name} JobState=FAILED Reason=None Command=x'")
    SlurmElements(job).requeue(0)
    assert (commands.folder / "scontrol.calls").read_text() == "requeue 7\n"
    assert job.record.numbers == "7"


def test_a_full_disk_changes_no_state(commands, monkeypatch, caplog):
    job = sent()
    commands.list(job, "COMPLETED")

    def full(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(records, "write", full)
        assert state(job) is State.COMPLETED
    assert "its state is not recorded: [Errno 30] Read-only file system" in caplog.text
    assert job.record.over is None


def test_other_limits_are_those_of_one_submission(commands):
    job = sent()
    commands.list(job, "TIMEOUT")
    for given, error in (
        ({"time": "soon"}, 'time is "soon": write it as hours:minutes:seconds'),
        ({"memory": "much"}, 'memory is "much": write a number and a unit'),
    ):
        with pytest.raises(UserError, match=error):
            job.resubmit(**given)
    job.resubmit(time="1:30:00", memory="8G")
    *_, call = commands.submissions
    assert "--time=01:30:00 --mem=8G" in call
    script = (job.folder / records.SCRIPT).read_text()
    assert "01:30:00" not in script


def test_a_longer_limit_than_the_qos_allows_is_refused(commands, monkeypatch):
    monkeypatch.setenv("DLO_SITES", str(Path.cwd()))
    job = cluster.submit(["true"], site="site", gpus=2)
    commands.list(job, "TIMEOUT")
    with pytest.raises(UserError, match=r"30 h is more than normal allows \(24 h\): use a shorter time"):
        job.resubmit(time="30:00:00")
    assert len(commands.submissions) == 1


def test_grading_keeps_its_table_when_the_array_cannot_be_cancelled(commands, capsys):
    job = sent()
    commands.show("exit 1")
    commands.set("squeue", "exit 1")
    SlurmElements(job).cancel()
    said = capsys.readouterr().err
    assert said.startswith("the array may still be in the queue (")
    assert said.endswith(f"): dlo jobs cancel {job.name}\n")


def test_a_record_of_a_newer_version_is_read_and_a_damaged_one_is_left_out(commands):
    job, other = sent(), cluster.submit(["true"], ["x"], site="site.toml", gpus=0, name="other")
    file = job.folder / records.RECORD
    values = json.loads(file.read_text())
    values["turns"][0]["of tomorrow"] = 1
    values["of tomorrow"] = {}
    file.write_text(json.dumps(values))
    assert job.record.turns[0].number == 7
    file.write_text("{")
    assert [known.folder for known in cluster.jobs()] == [other.folder]
    assert records.damaged() == [job.folder]
    with pytest.raises(UserError, match="is damaged: the job may still be at SLURM"):
        _ = job.record


def test_a_record_of_an_older_version_is_read(commands):
    job = sent()
    file = job.folder / records.RECORD
    values = json.loads(file.read_text())
    values["turns"] = [{"number": 7, "elements": [0], "born": 0, "cluster": "fake"}]
    file.write_text(json.dumps(values))
    assert job.record.turns == (Turn(7, (0,), cluster="fake"),)
    commands.list(job, "RUNNING")
    assert state(job) is State.RUNNING


@pytest.mark.parametrize("name", ["DLO_ANSWER_S", "DLO_POLL_S"])
def test_a_setting_that_is_no_number_is_one_line(commands, monkeypatch, name):
    monkeypatch.setenv(name, "soon")
    with pytest.raises(UserError, match=f"{name} is 'soon': set it to a number of seconds"):
        sent().wait(timeout=0)


def test_a_command_that_did_not_answer_is_not_asked_again_at_once(commands, monkeypatch):
    first, second = sent(), cluster.submit(["true"], ["x"], site="site.toml", gpus=0, name="second")
    commands.set("squeue", f'echo asked >> "$0.calls"; {NEVER}')
    monkeypatch.setenv("DLO_ANSWER_S", "0.5")
    monkeypatch.setenv("DLO_POLL_S", "600")
    assert [state(job) for job in (first, second)] == [State.UNKNOWN] * 2
    assert (commands.folder / "squeue.calls").read_text() == "asked\n"


def test_rows_of_arrays_and_odd_names() -> None:
    mark = JobMark("a|b #2", "/jobs/x y/job.sh")
    (row,) = of_queue("7|3|RUNNING|None|N/A|0:01|note|dlo-1|a|b #2|/elsewhere/job.sh t\n")
    assert mark.fits(row.called)
    assert not JobMark("b").fits("|a|c|/jobs/job.sh")
    assert JobMark("other", "/jobs/x y/job.sh").fits("||unnamed|/jobs/x y/job.sh token")
    line = (
        "JobId=9 ArrayJobId=7 ArrayTaskId=0-2%1 JobName=a|b #2 UserId=me(1) JobState=PENDING "
        "Reason=Resources RunTime=00:00:00 StartTime=Unknown Command=/jobs/x y/job.sh WorkDir=/jobs\n"
    )
    rows = list(of_controller(line))
    assert [(row.number, row.element, row.state) for row in rows] == [(7, n, "PENDING") for n in range(3)]
    assert mark.fits(rows[0].called)
    answer = "7_[1-2%1]|CANCELLED by 0|0:0|None|00:00:00||a|b #2\n7_0|FAILED|3:0|None|00:00:01||other\n"
    found = of_accounting(answer, mark)
    assert {element: one.state for element, one in found.items()} == dict.fromkeys((1, 2), State.CANCELLED)
