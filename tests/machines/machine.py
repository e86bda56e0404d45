"""Machines to test the project on: minimal Debian root file systems, isolated from this machine.

A machine is an overlay: read-only layers below, and one folder above for all writes. Layers are kept in a
cache under a name with a hash of their inputs, so a second run builds nothing. A command has separate
namespaces for mounts, processes and host name, and for the network if the machine has none or only a proxy;
all its processes end with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dockerfile import Stage, State, lineage, read_stages, run_line
from pip_settings import PipSettings
from proxy import Proxy

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SUITE = "bookworm"
TESTING = "testing"  # its only Python is 3.14
# A mirror may hold a snapshot, and the index of testing is valid for a week.
OPTIONS = {TESTING: ['--aptopt=Acquire::Check-Valid-Until "false"']}
STUDENT = 1000
COPY = "/opt/dlo"  # the course in the image
TOOLS = "/run/machines"  # these modules, inside
HOSTS = "127.0.0.1\tlocalhost\n127.0.1.1\tmachine\n::1\tlocalhost ip6-localhost\n"
NAMES = ("/etc/resolv.conf", "/etc/resolv.conf", "ro")  # name resolution of this machine


class CannotTry(Exception):
    """A requirement that this machine lacks, and its cure, in one line."""


@dataclass(frozen=True)
class Done:
    """A command that ended: its exit status (None: stopped at its time limit), output, seconds."""

    command: str
    status: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        """The command with its output and exit status, for a log."""
        return f"$ {self.command}\n{self.stdout}{self.stderr}exit status {self.status}\n"


@dataclass
class Machine:
    """One machine.

    Attributes:
        lower: its read-only layers, uppermost first.
        folder: its writable files and its mount point.
        alone: whether it has no network except loopback; ``proxy`` is then the only connection.
        binds: (from, to, "ro" or "rw") of folders of this machine.
    """

    lower: list[Path]
    folder: Path
    uid: int = STUDENT
    cwd: str = "/"
    alone: bool = False
    proxy: Proxy | None = None
    binds: list[tuple[str, str, str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    umask: int | None = None

    def __post_init__(self) -> None:
        for name in ("upper", "work", "at"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    @property
    def upper(self) -> Path:
        return self.folder / "upper"

    @property
    def home(self) -> str:
        return "/root" if self.uid == 0 else "/home/student"

    def but(self, **changes: Any) -> Machine:
        """Return the same machine with other settings."""
        return replace(self, **changes)

    def on_top(self, folder: Path, **changes: Any) -> Machine:
        """Return a new machine that starts from the present state of this one."""
        return replace(self, lower=[self.upper, *self.lower], folder=folder, **changes)

    def run(self, command: str | Sequence[str], limit: float = 600.0) -> Done:
        """Run a command and wait for it; a string runs in the machine's shell, a list is process 1."""
        # The shell stays process 1, like init: process 1 ignores signals that it does not handle.
        words = ["sh", "-c", f"{command}\nexit $?"] if isinstance(command, str) else list(command)
        spec = {
            "lower": [str(layer) for layer in self.lower],
            "upper": str(self.upper),
            "work": str(self.folder / "work"),
            "at": str(self.folder / "at"),
            "alone": self.alone,
            "proxy_fd": self.proxy.channel.fileno() if self.proxy else None,
            "proxy_port": Proxy.PORT,
            "binds": [*self.binds, (str(HERE), TOOLS, "ro")],
            "umask": self.umask,
            "uid": self.uid,
            "cwd": self.cwd,
            "command": words,
            "env": self.environment(),
        }
        # When this process or unshare ends, all processes inside are killed.
        enter = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--mount",
            "--pid",
            "--ipc",
            "--uts",
            "--fork",
            "--kill-child",
        ]
        enter += ["--net"] if self.alone else []
        enter += [sys.executable, str(HERE / "enter.py"), json.dumps(spec)]
        begun = time.monotonic()
        keep = [spec["proxy_fd"]] if self.proxy else []
        process = subprocess.Popen(
            enter, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=keep
        )
        try:
            out, err = process.communicate(timeout=limit)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            status = None
        shown = command if isinstance(command, str) else shlex.join(command)
        return Done(
            shown,
            status,
            out.decode("utf-8", "replace"),
            err.decode("utf-8", "replace"),
            time.monotonic() - begun,
        )

    def environment(self) -> dict[str, str]:
        """Return the variables of a login on such a machine, and those of this one."""
        user = "root" if self.uid == 0 else "student"
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        login = {
            "HOME": self.home,
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "PATH": path,
            "LANG": "C.UTF-8",
        }
        return {name: value for name, value in {**login, **self.env}.items() if value != ""}

    def put_course(self, folder: str, names: Sequence[str] = ()) -> None:
        """Copy the checkout to ``folder``, like a clone or an unpacked archive.

        Only ``names`` of its top level if given.
        """
        for name in tracked_files():
            if not names or name.split("/")[0] in names:
                target = self.upper / folder.lstrip("/") / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target)
        self.own(folder)

    def own(self, folder: str) -> None:
        """Give a folder of the upper layer to the machine's user, with its parents below the home."""
        path = self.upper / folder.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        for each in (path, *path.rglob("*")):
            os.lchown(each, self.uid, self.uid)
        home = self.upper / self.home.lstrip("/")
        for parent in path.parents:
            if parent == home or home in parent.parents:
                os.chown(parent, self.uid, self.uid)


def tracked_files() -> list[str]:
    """Return the files of a clone of this working tree.

    In an unpacked archive, all files not created by set-up.
    """
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists() and shutil.which("git"):
        done = subprocess.run(listed, capture_output=True, text=True, check=True)
        return sorted(name for name in done.stdout.split("\0") if name and (ROOT / name).is_file())
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if not {".venv", "__pycache__"} & set(path.parts))


class Layers:
    """The first layers of machines, built once and kept in ``cache``."""

    def __init__(self, cache: Path, settings: PipSettings) -> None:
        self.cache, self.settings = cache, settings
        self.stages = read_stages((ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8"))

    def bare(self, suite: str = SUITE) -> Path:
        """Return a minimal Debian with `make` and without Python."""
        packages, options = "make", OPTIONS.get(suite, [])
        folder = self.cache / f"bare-{digest(suite, packages, HOSTS, *options)}"
        if not folder.exists():
            if shutil.which("mmdebstrap") is None:
                raise CannotTry("no mmdebstrap here: apt-get install mmdebstrap")
            say(f"building a minimal Debian ({suite}) in {folder}: once, about two minutes ...")
            aside = folder.with_name(f".{folder.name}.{os.getpid()}")
            command = [
                "mmdebstrap",
                "--variant=minbase",
                f"--include={packages}",
                "--quiet",
                *options,
                suite,
                str(aside),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                shutil.rmtree(aside, ignore_errors=True)
                raise CannotTry(
                    f"mmdebstrap failed ({last_line(done.stderr)}): "
                    "check the network and apt's sources, then try again"
                )
            (aside / "etc" / "hosts").write_text(HOSTS, encoding="utf-8")
            aside.rename(folder)
        return folder

    def base(self, suite: str = SUITE) -> list[Path]:
        """Return the stage `base` of the Dockerfile: the README's packages and an unprivileged user."""
        bare, stage = self.bare(suite), self.stages["base"]
        sources = [(ROOT / name).read_text(encoding="utf-8") for names, _ in stage.copies() for name in names]
        folder = self.cache / f"base-{digest(bare.name, str(stage.steps), *sources)}"
        if not folder.exists():
            say(f"building the stage base on Debian {suite}: once, about a minute ...")
            aside = folder.with_name(f".{folder.name}.{os.getpid()}")
            try:
                self.run_stage(stage, Machine([bare], aside))
            except CannotTry:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            aside.rename(folder)
        return [folder / "upper", bare]

    def run_stage(self, stage: Stage, machine: Machine) -> float:
        """Run the instructions of one stage in a machine that starts from its parent; return the seconds.

        Raises:
            CannotTry: a command failed.
        """
        begun, state = time.monotonic(), State()
        for each in lineage(self.stages, stage.name):
            arguments: dict[str, str] = {}
            for instruction, rest in each.steps:
                state.note(instruction, rest, arguments)
                if each is not stage:
                    continue
                if instruction == "COPY":
                    *sources, target = shlex.split(rest)
                    copy_in(machine.upper, sources, os.path.join(state.folder, target))
                elif instruction == "WORKDIR":
                    # Inside, because the folder may exist there.
                    machine.but(uid=0).run(["mkdir", "-p", state.folder])
                elif instruction == "RUN":
                    _, command = run_line(rest)
                    env = {
                        **self.settings.environment,
                        **state.env,
                        **arguments,
                        "UV_NO_CACHE": "1",
                        "PIP_NO_CACHE_DIR": "1",
                    }
                    done = machine.but(
                        uid=0 if state.user == "root" else STUDENT,
                        cwd=state.folder,
                        env=env,
                        binds=[NAMES, *self.settings.binds],
                    ).run(command, limit=900)
                    if done.status != 0:
                        raise CannotTry(f"stage {stage.name}, RUN {command}: {last_line(done.stderr)}")
        return time.monotonic() - begun

    def container(self, name: str, machine: Machine) -> tuple[Machine, list[str]]:
        """Return the machine as a container of this image starts, and its default command."""
        state = State()
        for each in lineage(self.stages, name):
            for instruction, rest in each.steps:
                state.note(instruction, rest, {})
        uid = 0 if state.user == "root" else STUDENT
        return machine.but(uid=uid, cwd=state.folder, env=state.env), [*state.entrypoint, *state.command]


def copy_in(upper: Path, sources: Sequence[str], target: str) -> None:
    """Perform a COPY: the content of folders, and files by name."""
    place = upper / os.path.normpath(target).lstrip("/")
    into = len(sources) > 1 or target.endswith(("/", "."))
    names = tracked_files()
    for source in sources:
        if (ROOT / source).is_file():
            pairs = [(source, place / Path(source).name if into else place)]
        else:
            pairs = [
                (name, place / Path(name).relative_to(source))
                for name in names
                if Path(source) in Path(name).parents
            ]
        for name, to in pairs:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")
