"""One run owns one folder: a second run that would write to it is refused, and a killed one does not keep it.

    <folder>/.owner     {"host": "r1i0n3", "process": 4711, "born": 88123, "cluster": "jz", "job": "53", ...}

The owner holds ``flock`` on the file, which the kernel releases however the process ends. Two kinds of file
system need more. Without ``flock`` (Lustre, NFS), the existence of ``.owner.held`` is the lock. Where
``flock`` works within one machine only (Lustre mounted with ``localflock``), the content of the file shows an
owner on another machine. In both cases the owner is known to be dead if its process has ended on this
machine, or if SLURM no longer runs its job: the number of the job is in the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.lifetime import start_time
from dlo_lib.base.locks import without_flock

FILE = ".owner"
_ANSWER_S = 30
_RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")
_held: set[int] = set()


@dataclass(frozen=True)
class Owner:
    """A process that owns a folder.

    Attributes:
        born: its :func:`~dlo_lib.base.lifetime.start_time`.
        cluster, job, step: of SLURM; "" outside of it. ``turn``: how often the job was requeued.
    """

    host: str
    process: int
    born: int
    cluster: str = ""
    job: str = ""
    step: str = ""
    turn: str = ""

    @classmethod
    def here(cls) -> Owner:
        """Return this process."""
        job, step, turn, cluster = (
            os.environ.get(f"SLURM_{name}", "")
            for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT", "CLUSTER_NAME")
        )
        return cls(
            socket.gethostname(),
            os.getpid(),
            start_time(os.getpid()),
            cluster,
            job,
            step,
            turn or "0" * bool(job),
        )

    def __str__(self) -> str:
        where = f"process {self.process} on {self.host}"
        return f"job {self.job}, {where}" if self.job else where

    def is_alive(self) -> bool | None:
        """Return whether it runs; None if this machine cannot tell."""
        here = Owner.here()
        if self.host == here.host:
            return start_time(self.process) == self.born
        if not self.job or self.cluster != here.cluster:
            return None
        if self.job == here.job and self.turn != here.turn:
            return False
        return _slurm_runs(self)


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own ``folder`` in the context; create it, and remove it again if nothing was written to it.

    Raises:
        UserError: another run owns the folder.
        OSError: the folder cannot be written to.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder / FILE):
            yield
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            for created in missing:
                created.rmdir()


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    try:
        handle = _flocked(file)
    except OSError as error:
        if not without_flock(error):
            raise
        file.unlink(missing_ok=True)
        with _held_by_a_file(file.with_name(f"{file.name}.held")):
            yield
        return
    refused = False
    try:
        before, here = _owner(os.pread(handle, 4096, 0)), Owner.here()
        # The lock may not reach another machine. There, an owner that SLURM runs as another job is alive.
        refused = before is not None and before.host != here.host and before.job != here.job
        refused = refused and before.is_alive() is True  # type: ignore[union-attr]
        if refused:
            raise _refused(file, before)
        _write(handle, here)
        yield
    finally:
        if not refused:
            file.unlink(missing_ok=True)
        _held.discard(handle)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # also of the copies of the handle in forked processes
        os.close(handle)


def _flocked(file: Path) -> int:
    """Return the open file, which this process has locked.

    Raises:
        UserError: another process has locked it.
        OSError: the file system has no locks.
    """
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(handle, file):
                _held.add(handle)
                return handle
        except BlockingIOError:
            raise _refused(file, _owner(os.pread(handle, 4096, 0))) from None
        finally:
            if handle not in _held:
                os.close(handle)


def _is_file(handle: int, file: Path) -> bool:
    """Whether the open file still has this name: its last owner may have removed it after it was opened."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _held_by_a_file(file: Path) -> Iterator[None]:
    """Hold the lock that is the existence of ``file``."""
    here = Owner.here()
    aside = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        _write(handle, here)
        os.close(handle)
        while True:
            try:
                os.link(aside, file)  # complete or absent
                break
            except FileExistsError:
                _remove_dead(file)
        aside.unlink()
        yield
    finally:
        aside.unlink(missing_ok=True)
        if file.exists() and _owner(file.read_bytes()) == here:
            file.unlink()


def _remove_dead(file: Path) -> None:
    """Remove the lock of an owner that has ended.

    Raises:
        UserError: the owner runs, or may run.
    """
    try:
        before = _owner(file.read_bytes())
    except FileNotFoundError:
        return
    if before is None or before.is_alive() is not False:
        raise _refused(file, before)
    taken = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(file, taken)
        if _owner(taken.read_bytes()) != before:  # another process was faster, and this is its lock
            with contextlib.suppress(FileExistsError):
                os.link(taken, file)
        taken.unlink()


def _refused(file: Path, owner: Owner | None) -> UserError:
    of_whom = "another run" if owner is None else f"another run ({owner})"
    cure = "choose another --out, or wait until it has ended"
    if owner is None or owner.is_alive() is None:
        cure = f"choose another --out, or remove {file} if that run has ended, which this machine cannot tell"
    return UserError(f"{file.parent} belongs to {of_whom}: {cure}")


def _write(handle: int, owner: Owner) -> None:
    text = json.dumps(asdict(owner)).encode()
    os.ftruncate(handle, 0)
    os.pwrite(handle, text, 0)


def _owner(text: bytes) -> Owner | None:
    """Return the owner that a file names; None for an empty or damaged file."""
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _slurm_runs(owner: Owner) -> bool | None:
    """Return whether SLURM runs the job and the step of ``owner``; None if it does not answer."""
    known = _ask("--jobs", owner.job, "--Format=State:40,RestartCnt:20")
    if known is None or not known:
        return None if known is None else False
    state, turn = known[0].split()[:2]
    if state not in _RUNS or turn != owner.turn:
        return False
    if not owner.step:
        return True
    steps = _ask("--steps", "--jobs", owner.job, "--format=%i")
    return None if steps is None else any(step.rpartition(".")[2] == owner.step for step in steps)


def _ask(*options: str) -> list[str] | None:
    """Return the lines of squeue, none if it does not know the job; None if it does not answer."""
    try:
        done = subprocess.run(
            ["squeue", "--noheader", *options], capture_output=True, text=True, timeout=_ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or (not lines and done.stderr.strip()):  # with the status 0 if it finds no user
        return [] if "Invalid job id" in done.stderr else None
    return lines


def _close_in_child() -> None:
    """Close the files in a forked process, which would keep the locks after its parent has ended."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
