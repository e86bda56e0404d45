"""The job script of a run that stops early: when it goes back into the queue, and when it ends.

The programs of SLURM are small scripts here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.base.progress import RunProgress, read, report
from dlo_lib.cluster import submit
from dlo_lib.cluster.run import records
from dlo_lib.cluster.script.template import JobScript
from dlo_lib.cluster.script.work import Once
from dlo_lib.cluster.site.description import site
from dlo_lib.cluster.site.request import allocate, make_request
from dlo_lib.cluster.slurm.states import ElementStatus, State, stopped_early
from tests.cluster.fixtures import OTHER_SITE

# SLURM ends the script of a job that it requeues.
REQUEUE = '[ "$1" = requeue ] || exit 1; echo "$@" >> requeued; kill -KILL "$PPID"'
LAST_WORDS = "no progress in 2 restarts: the run ends at step"


class Turns:
    """Runs one job script several times, as SLURM does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "other.toml").write_text(OTHER_SITE)
        self.allocation = allocate(site(str(folder / "other.toml")), make_request("1:00:00", gpus=1))
        (folder / "bin").mkdir()
        self.scontrol(REQUEUE)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("DLO_REQUEUES", "2")
        monkeypatch.setenv("DLO_REQUEUE_PAUSE", "0")
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.chdir(folder)

    def scontrol(self, lines: str) -> None:
        """Let ``scontrol`` run these lines."""
        (self.folder / "bin" / "scontrol").write_text(f"#!/usr/bin/env bash\n{lines}\n")
        (self.folder / "bin" / "scontrol").chmod(0o755)

    def start(self, program: str, restart: int = 0) -> subprocess.Popen[str]:
        (self.folder / "work.sh").write_text(program)
        work = Once(("bash", str(self.folder / "work.sh")))
        script = JobScript("run", self.allocation, work, requeue=True, folder=self.folder, python="python")
        (self.folder / "job.sh").write_text(script.text())
        return subprocess.Popen(
            ["bash", "job.sh"],
            env={**os.environ, "SLURM_RESTART_COUNT": str(restart)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def turn(self, program: str, restart: int = 0) -> tuple[int, str]:
        """Return the exit status of a turn and its output."""
        script = self.start(program, restart)
        output, _ = script.communicate(timeout=60)
        return script.returncode, output

    @property
    def requeued(self) -> int:
        file = self.folder / "requeued"
        return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Turns:
    return Turns(tmp_path, monkeypatch)


def stopping_at(step: int) -> str:
    return f'echo "{step} 400 stopped" > "$DLO_PROGRESS"; exit 75'


def wait_for(file: Path) -> None:
    begun = time.monotonic()
    while not file.exists():
        assert time.monotonic() - begun < 60
        time.sleep(0.02)


def test_a_run_that_stops_early_goes_back_into_the_queue(turns):
    assert turns.turn(stopping_at(49))[0] == -signal.SIGKILL
    assert (turns.folder / "requeued").read_text() == "requeue 7\n"
    assert records.exit_code(turns.folder, 0) is None
    assert turns.turn("exit 0", restart=1)[0] == 0
    assert records.exit_code(turns.folder, 0) == 0


def test_a_run_that_fails_does_not(turns):
    assert turns.turn("exit 3")[0] == 3
    assert turns.requeued == 0


def test_requeues_without_progress_are_bounded_and_the_last_line_reports_it(turns):
    for restart in range(2):
        turns.turn(stopping_at(3), restart)
        assert turns.requeued == restart + 1
    assert turns.turn(stopping_at(9), 2)[0] == -signal.SIGKILL, "it has reached a new step"
    for restart in (3, 4):
        assert turns.turn(stopping_at(9), restart)[0] == -signal.SIGKILL
    status, output = turns.turn(stopping_at(9), 5)
    assert (status, turns.requeued) == (75, 5)
    assert output.splitlines()[-1].startswith(f"{LAST_WORDS} 9")


def test_nodes_that_fail_again_and_again_end_a_run_without_progress(turns):
    for restart in range(3):
        assert turns.turn("exit 1", restart)[0] == 1  # SLURM, not the script, starts it again
    status, output = turns.turn("touch started; exit 1", 3)
    assert status == 75
    assert output.startswith(LAST_WORDS)
    assert not (turns.folder / "started").exists()


def test_the_status_of_the_launcher_does_not_hide_that_the_run_stopped(turns):
    turns.turn('echo "49 400 stopped" > "$DLO_PROGRESS"; exit 1')
    assert turns.requeued == 1


def test_a_requeue_that_fails_once_is_tried_again(turns):
    turns.scontrol(f"[ -e tried ] || {{ touch tried; echo busy >&2; exit 1; }}; {REQUEUE}")
    assert turns.turn(stopping_at(49))[0] == -signal.SIGKILL
    assert turns.requeued == 1


def test_the_state_of_a_run_that_slurm_does_not_requeue_says_who_must_act(turns):
    turns.scontrol('echo "$@" >> requeued; echo "Job is not requeueable" >&2; exit 1')
    status, output = turns.turn(stopping_at(49))
    assert (status, turns.requeued) == (75, 3)
    assert "SLURM does not requeue this run: submit it again, and it continues after step 49" in output
    ended = stopped_early(ElementStatus(0, State.FAILED, exit_code=75), read(turns.folder / "progress" / "0"))
    assert (ended.text, ended.reason) == (
        "stopped at 49 of 400",
        "SLURM did not requeue it: resubmit() continues it",
    )


def test_a_signal_after_the_last_step_does_not_make_a_completed_run_fail(turns):
    """SLURM's warning ends a program of the user that is about to end."""
    ends = "kill -USR1 $$"
    assert turns.turn(f'echo "400 400" > "$DLO_PROGRESS"; {ends}')[0] == 0
    assert turns.turn(f'echo "399 400" > "$DLO_PROGRESS"; {ends}')[0] == 138


def test_a_cancelled_run_does_not_go_back_into_the_queue(turns):
    script = turns.start(f"touch started; while [ ! -e go ]; do sleep 0.05; done; {stopping_at(49)}")
    wait_for(turns.folder / "started")
    script.send_signal(signal.SIGTERM)
    (turns.folder / "go").touch()
    assert script.wait(timeout=600) == 75
    assert turns.requeued == 0


def test_the_signal_waits_until_the_run_can_be_asked_to_stop(turns):
    program = f"""
touch started
while [ ! -e go ]; do sleep 0.05; done # SIGUSR1 would end it here
trap '{stopping_at(1)}' USR1
echo "0 400" > "$DLO_PROGRESS"
while true; do sleep 0.05; done
"""
    script = turns.start(program)
    wait_for(turns.folder / "started")
    script.send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    assert script.poll() is None
    (turns.folder / "go").touch()
    script.communicate(timeout=60)
    assert turns.requeued == 1


def test_training_resumes_when_slurm_starts_it_again(turns):
    def scripted(**changes: object) -> str:
        base = JobScript("run", turns.allocation, Once(("true",)), python="python")
        from dlo_lib.cluster.script.work import work_of

        return replace(base, work=work_of("dlo_lib.train"), **changes).text()

    assert "  arguments+=(--resume)" in scripted()
    assert "  arguments+=(--resume)" not in scripted(arguments=("--resume",))
    assert "#SBATCH --open-mode=append" in scripted()


def test_a_program_that_does_not_handle_the_signal_is_not_requeued(turns):
    def asked(what: object) -> None:
        submit(what, site=str(turns.folder / "other.toml"), requeue=True, dry_run=True)

    program = turns.folder / "program.py"
    program.write_text("# HANDLES_STOP = True\nprint(1)\n")
    (turns.folder / "work.sh").write_text("make\n")

    def function() -> None:
        pass

    for what, cure in (
        (program, "add HANDLES_STOP = True"),
        ("json.tool", "add HANDLES_STOP = True"),
        ("work.sh", "add HANDLES_STOP=true"),
        (["make"], "a command cannot say it: put it in a shell script"),
        (function, "add function.HANDLES_STOP = True"),
    ):
        with pytest.raises(UserError, match=f"requeue=True, but .* does not say .*status 75.*{cure}"):
            asked(what)
    program.write_text("HANDLES_STOP: bool = True\n")
    (turns.folder / "work.sh").write_text("HANDLES_STOP=true\n")
    function.HANDLES_STOP = True
    for what in (program, "work.sh", function, "dlo_lib.train"):
        asked(what)


def test_a_stopped_run_says_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("DLO_PROGRESS", str(tmp_path / "progress"))
    assert read(tmp_path / "progress") is None
    report(49, 400, stopped=True)
    progress = read(tmp_path / "progress")
    assert progress == RunProgress(49, 400, stopped=True)
    failed = ElementStatus(0, State.FAILED, exit_code=75)
    assert stopped_early(failed, progress).text == "stopped at 49 of 400"
    assert stopped_early(failed, None).text == "stopped"
    assert stopped_early(ElementStatus(0, State.LOST, exit_code=75), progress).state is State.STOPPED
    for state, code in ((State.FAILED, 1), (State.COMPLETED, 0)):
        other = ElementStatus(0, state, exit_code=code)
        assert stopped_early(other, progress) is other
