"""One run owns one folder, on every file system, and a killed one does not keep it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.base.ownership import FILE, Owner, owned

HELD = f"{FILE}.held"
JOB = {"SLURM_JOB_ID": "54", "SLURM_STEP_ID": "0", "SLURM_CLUSTER_NAME": "jz"}
ELSEWHERE = Owner("another-node", 7, 7, "jz", "53", "0", "0")
OWNS = """
import sys, time
from pathlib import Path
from dlo_lib.base.ownership import owned
with owned(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(600)
"""


@pytest.fixture(params=["flock", "no flock"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    if request.param == "no flock":
        monkeypatch.setattr(fcntl, "flock", refuse)
    return request.param


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a squeue first in PATH that runs some lines of sh, and make this process a step of job 54."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()

    def answers(lines: str) -> None:
        (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / "bin" / "squeue").chmod(0o755)

    return answers


def leave(folder: Path, owner: Owner, file_system: str) -> None:
    """Leave the lock of an owner that did not remove it."""
    folder.mkdir()
    (folder / (FILE if file_system == "flock" else HELD)).write_text(json.dumps(asdict(owner)))


def test_a_second_run_is_refused_and_the_next_one_is_not(tmp_path, file_system):
    folder = tmp_path / "runs" / "train"
    with owned(folder):
        with (
            pytest.raises(
                UserError, match=rf"belongs to another run \(process {os.getpid()} on .*wait until"
            ),
            owned(folder),
        ):
            raise AssertionError("two runs own the folder")
        assert folder.exists()
        (folder / "metrics.jsonl").touch()
    assert [file.name for file in folder.iterdir()] == ["metrics.jsonl"]
    with owned(folder):
        pass


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path, file_system):
    with pytest.raises(RuntimeError), owned(tmp_path / "runs" / "train"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_does_not_keep_its_folder(tmp_path, file_system):
    code = OWNS
    if file_system == "no flock":
        code = f"import fcntl\ndef no(*_): raise OSError({errno.ENOSYS}, 'no')\nfcntl.flock = no\n{OWNS}"
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        assert run.stdout.readline() == "owned\n"
        with pytest.raises(UserError, match=f"process {run.pid} on {socket.gethostname()}"), owned(tmp_path):
            pass
    finally:
        run.kill()
        run.wait()
    with owned(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="NOT TESTED HERE: a forked process, on this system")
def test_a_child_of_a_run_does_not_keep_its_folder(tmp_path):
    reading, writing = os.pipe()
    with owned(tmp_path / "run"):
        if (child := os.fork()) == 0:
            os.close(writing)
            os.read(reading, 1)  # lives until the test has ended
            os._exit(0)
        with pytest.raises(UserError), owned(tmp_path / "run"):
            pass
    try:
        with owned(tmp_path / "run"):
            pass
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("answer", "runs"),
    [
        ('case "$*" in *--steps*) echo 53.0 ;; *) echo "RUNNING 0" ;; esac', True),
        ('case "$*" in *--steps*) echo 53.1 ;; *) echo "RUNNING 0" ;; esac', False),
        ('echo "RUNNING 1"', False),  # requeued, and started again
        ('echo "PENDING 0"', False),
        ("true", False),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", False),
        ("echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1", None),
        ("echo 'error: Invalid user' >&2", None),  # the directory of users does not answer
    ],
)
def test_slurm_knows_whether_the_job_of_an_owner_runs(answer, runs, tmp_path, file_system, squeue):
    squeue(answer)
    assert ELSEWHERE.is_alive() is runs
    leave(tmp_path / "run", ELSEWHERE, file_system)
    refuses = runs or (runs is None and file_system == "no flock")  # with flock, the lock was taken
    if not refuses:
        with owned(tmp_path / "run"):
            pass
        return
    cure = "wait until it has ended" if runs else "remove .*, which this machine cannot tell"
    with (
        pytest.raises(UserError, match=f"job 53, process 7 on another-node.*{cure}"),
        owned(tmp_path / "run"),
    ):
        pass


def test_an_earlier_turn_of_the_same_job_is_dead(tmp_path, file_system, squeue, monkeypatch):
    squeue("exit 1")
    leave(tmp_path / "run", replace(ELSEWHERE, job="54"), file_system)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with owned(tmp_path / "run"):
        pass


def test_a_process_with_the_number_of_an_ended_one_is_not_the_owner(tmp_path, file_system):
    leave(tmp_path / "run", replace(Owner.here(), born=1), file_system)
    with owned(tmp_path / "run"):
        pass


def test_a_damaged_lock_without_flock_names_the_file_to_remove(tmp_path, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / HELD).write_text("{")
    with pytest.raises(UserError, match=rf"remove {tmp_path / HELD} if that run has ended"), owned(tmp_path):
        pass
