"""The machines to test, and the expected result of each command: it works, or one line names the cure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from machine import NAMES, STUDENT, TESTING, TOOLS, CannotTry, Done, Layers, Machine
from proxy import Proxy

LAB = "17_pipeline_schedules"  # one of the quickest to grade
LARGEST_IMAGE = 2.5e9  # bytes
Expected = Callable[[Done], str]  # returns what is wrong; "" if nothing is


class Stop(Exception):
    """The remaining steps of a case cannot work."""


def works(contains: str = "", without: str = "") -> Expected:
    """Expect exit status 0 and output with ``contains`` and without ``without``."""

    def judge(done: Done) -> str:
        if done.status != 0:
            return "stopped after its time limit" if done.status is None else f"exit status {done.status}"
        output = done.stdout + done.stderr
        if contains not in output:
            return f"the output lacks {contains!r}"
        return f"the output has {without!r}" if without and without in output else ""

    return judge


def one_line(*contains: str) -> Expected:
    """Expect exit status 2 and one line on stderr with all of ``contains``; make's lines do not count."""

    def judge(done: Done) -> str:
        lines = complaint(done)
        if done.status != 2:
            return (
                "stopped after its time limit"
                if done.status is None
                else f"exit status {done.status} instead of 2"
            )
        if len(lines) != 1 or "Traceback" in done.stdout:
            return f"{len(lines)} lines on stderr instead of one"
        missing = [text for text in contains if text not in lines[0]]
        return f"the line lacks {missing[0]!r}" if missing else ""

    return judge


def graded(sandbox: bool) -> Expected:
    """Expect that the demo students have all points or none, and a warning without a sandbox."""

    def judge(done: Done) -> str:
        if wrong := works("NO_ATTEMPT")(done):
            return wrong
        if not re.search(r"\bada\W+(\d+)\W+\1\b", done.stdout):
            return "ada does not have all points"
        warned = "NO SANDBOX" in done.stdout + done.stderr
        return (
            ""
            if warned != sandbox
            else "graded without a sandbox"
            if warned
            else "no warning that there is no sandbox"
        )

    return judge


def complaint(done: Done) -> list[str]:
    """Return the lines on stderr that make did not write."""
    return [
        line for line in done.stderr.splitlines() if line.strip() and not re.match(r"make(\[\d+\])?: ", line)
    ]


class Trial:
    """One run of some cases: its folder, its layers and the table of results."""

    def __init__(self, layers: Layers, folder: Path, logs: Path) -> None:
        self.layers, self.folder, self.logs = layers, folder, logs
        self.rows: list[tuple[str, str, str, bool, float]] = []
        self.case = ""
        self._ready: Machine | None = None

    def step(
        self, label: str, machine: Machine, command: str | list[str], expected: Expected, limit: float = 300.0
    ) -> Done:
        """Run one command and record whether its result is the expected one."""
        done = machine.run(command, limit)
        wrong = expected(done)
        lines = complaint(done)
        said = f": {lines[-1].strip()}" if lines and done.status != 0 else ""
        self.note(
            label, f"{wrong or 'as expected'}{said}" if wrong or said else "works", not wrong, done.seconds
        )
        log = self.logs / f"{self.case}-{len(self.rows):02d}.txt"
        log.write_text(f"{label} as user {machine.uid} in {machine.cwd}\n{done.output}", encoding="utf-8")
        return done

    def note(self, label: str, result: str, good: bool, seconds: float) -> None:
        self.rows.append((self.case, label, result, good, seconds))
        mark = "ok  " if good else "FAIL"
        print(f"{mark}  {self.case:<15} {label:<34} {seconds:6.1f} s  {result[:200]}", flush=True)

    def needed(self) -> None:
        """Stop the case if its last step failed."""
        if not self.rows[-1][3]:
            raise Stop

    def place(self, name: str = "") -> Path:
        return self.folder / (name or self.case)

    # Machines

    def fresh(
        self, course: str, *, lower: list[Path] | None = None, uid: int = STUDENT, cached: bool = True
    ) -> Machine:
        """Return a machine with the course at ``course``, and this machine's network and pip settings."""
        machine = Machine(lower or self.layers.base(), self.place(), uid=uid, cwd=course)
        machine.own(machine.home)
        machine.put_course(course)
        return self.online(machine, cached)

    def online(self, machine: Machine, cached: bool = True) -> Machine:
        """Add the network and pip's settings; ``cached`` adds the downloads of earlier cases."""
        settings = self.layers.settings
        binds, env = [NAMES, *settings.binds], dict(settings.environment)
        if cached:
            store = self.layers.cache / "downloads" / str(machine.uid)
            store.mkdir(parents=True, exist_ok=True)
            os.chown(store, machine.uid, machine.uid)
            binds.append((str(store), "/var/cache/downloads", "rw"))
            env |= {
                "UV_CACHE_DIR": "/var/cache/downloads/uv",
                "PIP_CACHE_DIR": "/var/cache/downloads/pip",
                "UV_LINK_MODE": "copy",
            }
        return machine.but(binds=[*machine.binds, *binds], env={**machine.env, **env})

    def ready(self) -> Machine:
        """Return a user's machine after the first `make setup`.

        It is never changed, other machines build on it.
        """
        if self._ready is None:
            place, case = self.place("ready"), self.case
            machine = Machine(self.layers.base(), place, cwd="/home/student/course")
            machine.put_course(machine.cwd)
            self.case = "user"
            self.step(
                "set-up from nothing",
                self.online(machine, cached=False),
                "make setup",
                works("setup: ready"),
                600,
            )
            self.needed()
            self.case, self._ready = case, machine
        return self._ready

    def like_ready(self, **changes: object) -> Machine:
        return self.ready().on_top(self.place(), **changes)

    # Commands

    def commands(self, machine: Machine) -> None:
        """Run the README's three commands; grading works without a sandbox, which minimal systems lack."""
        self.lab(machine)
        self.step("make grade", machine, f"make grade LAB={LAB}", graded(sandbox=False))
        self.doctor(machine)

    def lab(self, machine: Machine, label: str = "make lab, Ctrl-C") -> None:
        self.step(
            label,
            machine,
            f"python3 {TOOLS}/inside.py make lab ARGS=--no-browser",
            works("lab answers 200"),
            600,
        )

    def doctor(self, machine: Machine) -> None:
        self.step("dlo doctor", machine, ".venv/bin/dlo doctor", works())


Case = Callable[[Trial], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__.replace("_", "-")] = function
    return function


@case
def user(trial: Trial) -> None:
    """A user without root rights, from a clone: the README's commands."""
    machine = trial.online(trial.like_ready(), cached=False)
    trial.commands(machine)
    trial.step("make setup, nothing to do", machine, "make setup", works(without="setup:"))


@case
def root(trial: Trial) -> None:
    """The same as root, as in a container."""
    machine = trial.fresh("/root/course", uid=0)
    trial.commands(machine)


@case
def testing(trial: Trial) -> None:
    """Debian testing, whose only Python is 3.14: the README's commands, from nothing."""
    lower = trial.layers.base(TESTING)
    machine = trial.fresh("/home/student/course", lower=lower, cached=False)
    trial.step("make setup", machine, "make setup", works("setup: ready"), 900)
    trial.needed()
    trial.step("its Python", machine, ".venv/bin/python -VV", works("Python 3.14."))
    trial.commands(machine)


@case
def nothing(trial: Trial) -> None:
    """No Python: install what each message names, until the set-up works."""
    machine = trial.fresh("/root/course", lower=[trial.layers.bare()], uid=0)
    trial.step("apt-get update", machine, "apt-get update -qq", works())
    for _ in range(4):
        done = machine.run("make setup", 600)
        if done.status == 0:
            trial.note("make setup", "works", True, done.seconds)
            return trial.doctor(machine)
        wrong = one_line("apt-get install")(done)
        line = (complaint(done) or [""])[-1]
        trial.note("make setup", f"{wrong or 'as expected'}: {line}", not wrong, done.seconds)
        cure = re.search(r"apt-get install ([a-z0-9.+\- ]*[a-z0-9.+])", line)
        if cure is None:
            raise Stop
        trial.step(
            f"apt-get install {cure[1]}",
            machine,
            f"DEBIAN_FRONTEND=noninteractive apt-get install -y -qq {cure[1]} >&2",
            works(),
        )
    trial.note("make setup", "not ready after four cures", False, 0.0)


@case
def spaces(trial: Trial) -> None:
    """A folder with spaces and accents in its name."""
    trial.commands(trial.fresh("/home/student/Mes cours d'été (2026)/deep learning"))


@case
def offline(trial: Trial) -> None:
    """No network after the set-up: everything works."""
    trial.commands(trial.like_ready(alone=True))


@case
def no_network(trial: Trial) -> None:
    """No network before the set-up: one line; with a network the set-up works."""
    machine = Machine(trial.layers.base(), trial.place(), cwd="/home/student/course", alone=True)
    machine.put_course(machine.cwd)
    trial.step("make lab, no network", machine, "make lab ARGS=--no-browser", one_line("network"))
    trial.step(
        "make setup, with a network",
        trial.online(machine.but(alone=False)),
        "make setup",
        works("setup: ready"),
        600,
    )


@case
def proxy(trial: Trial) -> None:
    """A network through a proxy only: the set-up uses it."""
    settings = trial.layers.settings
    if any(name.lower() in ("http_proxy", "https_proxy") for name in settings.environment):
        return trial.note("set-up", "NOT TESTED HERE: this machine has only a proxy itself", True, 0.0)
    way_out = Proxy()
    url = f"http://127.0.0.1:{Proxy.PORT}"
    machine = trial.fresh("/home/student/course", cached=False)
    machine.binds.remove(NAMES)
    machine = machine.but(alone=True, proxy=way_out)
    machine.env |= {"http_proxy": url, "https_proxy": url, "no_proxy": "127.0.0.1,localhost"}
    trial.step("make setup", machine, "make setup", works("setup: ready"), 600)
    count, hosts = sum(way_out.hosts.values()), len(way_out.hosts)
    used = (
        f"{count} connections to {hosts} hosts through the proxy"
        if count
        else "all of it came from file:// indexes"
    )
    trial.note("... through the proxy", used, bool(count) or "PIP_NO_INDEX" in settings.environment, 0.0)
    way_out.close()


@case
def read_only_home(trial: Trial) -> None:
    """A read-only home: set-up works elsewhere; the rest names DLO_HOME and DLO_WORK, and works with them."""
    machine = trial.fresh("/srv/course", cached=False)
    home = f"{machine.folder / 'at'}{machine.home}"
    machine = machine.but(binds=[*machine.binds, (home, machine.home, "ro")])
    trial.step("make setup", machine, "make setup", works("setup: ready"), 600)
    trial.needed()
    trial.step("make lab", machine, "make lab ARGS=--no-browser", one_line("DLO_WORK"))
    trial.step("make grade", machine, f"make grade LAB={LAB}", one_line("DLO_HOME"))
    trial.step("dlo doctor", machine, ".venv/bin/dlo doctor", one_line())
    trial.commands(
        machine.but(
            env={**machine.env, "DLO_HOME": "/srv/course/runs/state", "DLO_WORK": "/srv/course/runs/labs"}
        )
    )


@case
def full_disk(trial: Trial) -> None:
    """A disk that is too small, fills up during the set-up, or is full afterwards: one line each."""
    with small_disk(trial.place("disk"), "size=40m") as (disk, resize):
        machine = Machine(
            trial.layers.base(), trial.place(), cwd="/srv/disk/course", binds=[(str(disk), "/srv/disk", "rw")]
        )
        machine.put_course("/srv/course")
        shutil.copytree(machine.upper / "srv/course", disk / "course")
        subprocess.run(["chown", "-R", f"{STUDENT}:{STUDENT}", str(disk)], check=True)
        machine = trial.online(machine)
        trial.step("make setup, 30 MB free", machine, "make setup", one_line())
        resize("size=600m")
        trial.step("make setup, 600 MB free", machine, "make setup", one_line("free"))
        resize("size=5g,nr_inodes=9000")
        trial.step("make setup, fills up", machine, "make setup", one_line("disk"), 600)
        resize("size=5g,nr_inodes=0")
        trial.step("make setup, with space", machine, "make setup", works("setup: ready"), 600)
        trial.step("dlo labs", machine, ".venv/bin/dlo labs", works("13_dp_limit"))
    with small_disk(trial.place("disk"), "size=200k") as (disk, resize):
        os.chown(disk, STUDENT, STUDENT)
        after = trial.like_ready(binds=[(str(disk), "/srv/disk", "rw")])
        for name, command in {
            "DLO_WORK": "make lab ARGS=--no-browser",
            "DLO_HOME": f"make grade LAB={LAB}",
        }.items():
            trial.step(
                f"{command.split(' ARGS')[0]}, {name} full",
                after.but(env={name: "/srv/disk/own"}),
                command,
                one_line("/srv/disk"),
            )
        resize("size=100m")
        trial.lab(after.but(env={"DLO_WORK": "/srv/disk/own"}), "make lab, with space again")


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Mount a file system in memory; yield its folder and a function that changes its size."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield (
            folder,
            lambda changed: (
                subprocess.run(["mount", "-o", f"remount,{changed}", str(folder)], check=True) and None
            ),
        )
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@case
def posix(trial: Trial) -> None:
    """LC_ALL=POSIX and no LANG, as in many containers."""
    trial.commands(trial.like_ready(env={"LANG": "", "LC_ALL": "POSIX"}))


@case
def ascii(trial: Trial) -> None:
    """An ASCII locale: a folder whose name it cannot encode is refused in one line; other folders work."""
    ascii_only = {"LANG": "", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    accent = trial.fresh("/home/student/été")
    accent.env |= ascii_only
    trial.step("make setup, accent", accent, "make setup", one_line("LC_ALL=C.UTF-8"))
    accent.env |= {"LC_ALL": "C.UTF-8"}
    trial.step("make setup, with the cure", accent, "make setup", works("setup: ready"), 600)
    trial.step("dlo labs, with the cure", accent, ".venv/bin/dlo labs", works("13_dp_limit"))
    machine = trial.like_ready(env=ascii_only)
    trial.commands(machine)
    trial.step("dlo labs", machine, ".venv/bin/dlo labs", works("13_dp_limit"))


@case
def umask(trial: Trial) -> None:
    """umask 077: files are readable only by their owner."""
    trial.commands(trial.like_ready(umask=0o077))


@case
def host_name(trial: Trial) -> None:
    """A host name that does not resolve, as on many laptops: the ranks connect."""
    machine = trial.like_ready(alone=True)
    hosts = machine.upper / "etc" / "hosts"
    hosts.parent.mkdir(parents=True)
    hosts.write_text("127.0.0.1\tlocalhost\n", encoding="utf-8")
    trial.doctor(machine)


@case
def image(trial: Trial) -> None:
    """The stages of deploy/Dockerfile: built by their instructions, started like containers, offline.

    Their size.
    """
    layers = trial.layers
    machine = Machine(layers.base(), trial.place("image-student"))
    build(trial, "student", machine)
    trial.needed()
    container, command = layers.container("student", machine.on_top(trial.place("container"), alone=True))
    trial.step(
        "student: its command",
        container,
        ["python3", f"{TOOLS}/inside.py", *command],
        works("lab answers 200"),
    )
    trial.step("student: dlo doctor", container, "dlo doctor", works())
    trial.step(
        "student: no solutions", container, "test ! -e /opt/dlo/solutions && test ! -w /opt/dlo", works()
    )
    grader = machine.on_top(trial.place("image-instructor"))
    build(trial, "instructor", grader)
    container, _ = layers.container(
        "instructor", grader.on_top(trial.place("container-instructor"), alone=True)
    )
    trial.step("instructor: in the sandbox", container, f"dlo classroom {LAB}", graded(sandbox=True))
    trial.step("instructor: as root", container.but(uid=0), f"dlo classroom {LAB}", graded(sandbox=True))
    trial.step("instructor: dlo doctor", container, "dlo doctor", works("bubblewrap"))
    server = machine.on_top(trial.place("image-hub"))
    build(trial, "hub", server)
    container, command = layers.container("hub", server.on_top(trial.place("container-hub"), alone=True))
    trial.step(
        "hub: its command",
        container,
        ["python3", f"{TOOLS}/inside.py", "--hub", *command],
        works("lab answers 200"),
    )


def build(trial: Trial, name: str, machine: Machine) -> None:
    """Build one stage and record its size, including the layers below it."""
    stage = trial.layers.stages[name]
    try:
        done = trial.layers.run_stage(stage, machine)
    except CannotTry as error:
        trial.note(f"{name}: build", str(error), False, 0.0)
        return
    size = sum(disk_usage(layer) for layer in [machine.upper, *machine.lower])
    trial.note(f"{name}: build", f"{size / 1e9:.2f} GB", size <= LARGEST_IMAGE, done)


def disk_usage(folder: Path) -> int:
    done = subprocess.run(
        ["du", "-s", "--block-size=1", str(folder)], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[0])


def describe() -> str:
    return "\n".join(
        f"{name:<15} {(function.__doc__ or '').strip().splitlines()[0]}" for name, function in CASES.items()
    )
