"""What keeps the student's processes from the rest of the machine, and what they see of it.

A ``View`` says what is there: the interpreter, the library, the lab's own files, all read-only; an ``Isolation`` turns it into a command
line. bubblewrap makes the namespaces where the kernel lets users do so; Apptainer does it at sites that have that instead (its command line
is tested, a run of it is not). ``find_isolation`` does not guess: it runs the interpreter inside, in a second set of namespaces as
workers get them, and keeps the reason where that fails.

Started by root, the sandbox gives root up first: one bubblewrap shows what only root can reach, ``setpriv`` turns into nobody, and a second
one makes the namespaces as any user would.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import dlo_lib
from dlo_lib.errors import UserError
from dlo_lib.text import tr

NOBODY = 65534
SYSTEM = ("bin", "lib", "lib32", "lib64", "libexec", "share/zoneinfo")  # of /usr; its share and src may hold an exchange, and are not shown
TOP_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
SCRATCH = 64 << 20  # bytes that the zygote itself may leave in its /tmp
PROBE_SECONDS = 30
UNSANDBOXED = "UNSANDBOXED"


@dataclass(frozen=True)
class View:
    """What the processes inside see, all read-only. ``shown``: each at its own path; of that ``masked`` is as if it were empty; ``placed``:
    path inside → folder; ``environment`` is all of their environment."""

    shown: tuple[Path, ...]
    masked: tuple[Path, ...] = ()
    placed: Mapping[Path, Path] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Isolation(Protocol):
    """A way to start a process that reaches nothing but its view."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def confines(self) -> bool:
        """Workers inside can, and must, make namespaces of their own."""
        ...

    def command(self, argv: Sequence[str], view: View) -> list[str]:
        """The command line that runs ``argv`` inside."""
        ...


@dataclass(frozen=True)
class Unsandboxed:
    """None at all: for a student's own machine, and for ``dlo grade --unsafe``."""

    name: str = "none"
    confines: bool = False

    def command(self, argv: Sequence[str], view: View) -> list[str]:
        """``argv`` as it is; its environment is what whoever runs it passes."""
        return list(argv)


@dataclass(frozen=True)
class Bubblewrap:
    """Namespaces of its own for everything (user, mount, pid, net, ipc, uts, cgroup), no capability, no way to more privileges."""

    program: str
    as_root: bool = False
    name: str = "bubblewrap"
    confines: bool = True

    def command(self, argv: Sequence[str], view: View) -> list[str]:
        """``argv`` in a file system that holds the view and nothing else, killed when its parent ends."""
        environment = [part for name, value in view.environment.items() for part in ("--setenv", name, value)]
        masks = [
            part
            for path in view.masked
            # Empty for good: in a folder that one worker could write to, the next would find what it had compiled for it.
            for part in (("--tmpfs", str(path), "--remount-ro", str(path)) if path.is_dir() else ("--ro-bind", os.devnull, str(path)))
        ]
        inner = [
            self.program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv", *environment,
            "--size", str(SCRATCH), "--tmpfs", "/tmp", *_binds(view, inside=self.as_root), *masks, "--proc", "/proc", "--dev", "/dev",
            "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", *argv,
        ]  # fmt: skip
        if not self.as_root:
            return inner
        # The second one must find a /proc with nothing mounted over it, or the kernel gives it none of its own.
        drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs", "--"]
        outer = [
            self.program,
            "--die-with-parent",
            "--tmpfs",
            "/tmp",
            *_binds(view, inside=False),
            "--bind",
            "/proc",
            "/proc",
            "--dev",
            "/dev",
        ]
        return [*outer, "--", *drop, *inner]


@dataclass(frozen=True)
class Apptainer:
    """A container without an image of its own: the view is bound into an empty folder that is its root."""

    program: str
    root: Path
    name: str = "apptainer"
    confines: bool = True

    def command(self, argv: Sequence[str], view: View) -> list[str]:
        """``argv`` in a contained namespace with no network and no capability."""
        binds = [part for path in view.shown for part in ("--bind", f"{path.resolve()}:{path}:ro")]
        masks = [part for path in view.masked if not path.is_dir() for part in ("--bind", f"{os.devnull}:{path}:ro")]
        environment = [part for name, value in view.environment.items() for part in ("--env", f"{name}={value}")]
        binds += [part for path, folder in view.placed.items() for part in ("--bind", f"{folder}:{path}:ro")]
        return [
            self.program, "exec", "--userns", "--containall", "--cleanenv", "--no-home", "--no-eval", "--net", "--network", "none",
            "--drop-caps", "all", "--no-privs", "--pwd", "/tmp", *environment, *binds, *masks, str(self.root), *argv,
        ]  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What this host has: ``isolation`` or, when that is None, ``reasons`` why not, one for each way that was tried."""

    isolation: Isolation | None
    reasons: tuple[str, ...] = ()


@functools.cache
def find_isolation() -> Found:
    """The first isolation that works here, tried by running the interpreter in it. The answer is kept for this process."""
    reasons: list[str] = []
    for isolation in (_bubblewrap(), _apptainer()):
        reason = isolation if isinstance(isolation, str) else why_not(isolation)
        if not isinstance(isolation, str) and not reason:
            return Found(isolation, tuple(reasons))
        reasons.append(str(reason))
    return Found(None, tuple(reasons))


def best_isolation() -> Isolation:
    """What this host has, or none at all."""
    return find_isolation().isolation or Unsandboxed()


def required_isolation() -> Isolation:
    """What this host has.

    Raises:
        UserError: nothing that works; with the cure. Grading refuses then, unless the instructor takes the risk.
    """
    found = find_isolation()
    if found.isolation is None:
        raise UserError(
            tr(
                "this host cannot isolate submissions ({reasons}): apt-get install bubblewrap and allow user namespaces, "
                "or add --unsafe if you trust every submission with this account",
                reasons="; ".join(found.reasons),
            )
        )
    return found.isolation


def marked(status: str, isolation: Isolation) -> str:
    """The status word of a row, with a mark when nothing kept the submission from the rest of the machine.

    >>> marked("GRADED", Unsandboxed())
    'GRADED (UNSANDBOXED)'
    """
    return status if isolation.confines else f"{status} ({UNSANDBOXED})"


def why_not(isolation: Isolation) -> str:
    """Run the interpreter inside, in namespaces within the namespaces; the reason when that fails, else nothing."""
    nested = ["unshare", "--user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--mount-proc"]
    command = isolation.command([*nested, sys.executable, "-I", "-S", "-c", ""], system_view())
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{isolation.name}: {error}"
    last = done.stderr.strip().splitlines()[-1:] or [tr("exit status {code}", code=done.returncode)]
    return f"{isolation.name}: {last[0]}" if done.returncode else ""


def system_view() -> View:
    """The system's programs and libraries, the interpreter's, and the library; nothing of the checkout that it may lie in."""
    paths = [Path("/usr") / part for part in SYSTEM]
    for prefix in dict.fromkeys((sys.base_prefix, sys.base_exec_prefix, sys.prefix)):
        paths += [Path(prefix) / part for part in ("bin", "lib", "lib64", "pyvenv.cfg")]
    paths += [Path(path) for path in SETTINGS]
    paths.append(Path(dlo_lib.__file__).resolve().parent)
    return View(tuple(dict.fromkeys(path for path in paths if path.exists())))


def files_of(modules: Sequence[str]) -> tuple[Path, ...]:
    """The files, or the folders, of modules and the folders of their compiled forms; found without importing them."""
    found: list[Path] = []
    for module in modules:
        top, *rest = module.split(".")
        spec = importlib.util.find_spec(top)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            place = Path(folder, *rest)
            found += [path for path in (place, place.with_suffix(".py")) if path.exists()]
            compiled = place.parent / "__pycache__"
            with contextlib.suppress(OSError):  # nobody can compile into it then
                compiled.mkdir(exist_ok=True)  # what is compiled only later must find it masked
            found += [compiled] if compiled.is_dir() else []
    return tuple(dict.fromkeys(found))


def _bubblewrap() -> Bubblewrap | str:
    program = shutil.which("bwrap")
    if program is None:
        return tr("bubblewrap is not installed")
    as_root = os.geteuid() == 0
    if as_root and shutil.which("setpriv") is None:
        return tr("setpriv is not installed")
    return Bubblewrap(program, as_root)


def _apptainer() -> Apptainer | str:
    program = shutil.which("apptainer") or shutil.which("singularity")
    if program is None:
        return tr("neither is Apptainer")
    root = Path(os.environ.get("DLO_APPTAINER_ROOT", "/var/empty"))
    return Apptainer(program, root)


def _binds(view: View, inside: bool) -> list[str]:
    """What bubblewrap mounts for a view, with parents that anyone may pass, and the links that stand for parts of /usr.

    ``inside``: of the second bubblewrap, which finds everything where the first one has put it.
    """
    arguments: list[str] = []
    parents = {parent for path in view.shown for parent in path.parents if str(parent) not in ("/", "/tmp")}
    for parent in sorted(parents):
        if not any(parent.is_relative_to(path) for path in view.shown):
            arguments += ["--perms", "0755", "--dir", str(parent)]
    for path in view.shown:
        arguments += ["--ro-bind", str(path if inside else path.resolve()), str(path)]
    for link in map(Path, TOP_LINKS):
        if link.is_symlink():
            arguments += ["--symlink", os.readlink(link), str(link)]
        elif link.is_dir():
            arguments += ["--ro-bind", str(link), str(link)]
    for path, folder in view.placed.items():
        arguments += ["--ro-bind", str(path if inside else folder), str(path)]
    return arguments
