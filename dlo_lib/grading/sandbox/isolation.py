"""Isolate the student's processes from the rest of the machine.

A ``View`` lists what the processes can see, all of it read-only: the interpreter, the library, the lab's
files. An ``Isolation`` turns the view into a command line. bubblewrap creates namespaces where the kernel
lets users do so; Apptainer does it on clusters that have Apptainer instead (tests cover its command line, not
a run). ``find_isolation`` runs the interpreter inside each isolation, in nested namespaces as workers get
them, and records the reason of each failure.

When root starts the sandbox, the sandbox drops root first: an outer bubblewrap binds what only root can read,
``setpriv`` changes to the user nobody, and an inner bubblewrap creates the namespaces as for any user.
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
from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr

NOBODY_ID = 65534
# Folders of /usr that are shown. The others, such as share and src, may contain an nbgrader exchange.
SYSTEM = ("bin", "lib", "lib32", "lib64", "libexec", "share/zoneinfo")
TOP_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
SCRATCH = 64 << 20  # bytes of the zygote's /tmp
PROBE_SECONDS = 30
UNSANDBOXED = "UNSANDBOXED"
SANDBOX_CURE = "apt-get install bubblewrap, on a host that lets users make namespaces"


@dataclass(frozen=True)
class View:
    """What the processes inside see, all read-only.

    Args:
        shown: paths that are visible at the same path inside.
        masked: paths below ``shown`` that appear empty.
        placed: path inside → folder outside.
        environment: the complete environment of the processes.
    """

    shown: tuple[Path, ...]
    masked: tuple[Path, ...] = ()
    placed: Mapping[Path, Path] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Isolation(Protocol):
    """A way to start a process that can reach only its view."""

    @property
    def name(self) -> str:
        """The name that messages print."""
        ...

    @property
    def confines(self) -> bool:
        """True if workers inside can create nested namespaces; they must then do so."""
        ...

    def command(self, argv: Sequence[str], view: View) -> list[str]:
        """Return the command line that runs ``argv`` inside, with ``view`` as its file system."""
        ...


@dataclass(frozen=True)
class Unsandboxed:
    """No isolation: on a student's computer, and for ``dlo grade --unsafe``."""

    name: str = "none"
    confines: bool = False

    def command(self, argv: Sequence[str], view: View) -> list[str]:
        """Return ``argv`` unchanged; the caller passes the environment."""
        return list(argv)


@dataclass(frozen=True)
class Bubblewrap:
    """New namespaces (user, mount, pid, net, ipc, uts, cgroup), no capabilities, no new privileges."""

    program: str
    as_root: bool = False
    name: str = "bubblewrap"
    confines: bool = True

    def command(self, argv: Sequence[str], view: View) -> list[str]:
        """Return the command that runs ``argv`` in a file system of only the view and kills it when its
        parent ends.
        """
        environment = [part for name, value in view.environment.items() for part in ("--setenv", name, value)]
        masks = [
            part
            for path in view.masked
            # Read-only too: one worker could otherwise leave compiled modules there for the next one.
            for part in (
                ("--tmpfs", str(path), "--remount-ro", str(path))
                if path.is_dir()
                else ("--ro-bind", os.devnull, str(path))
            )
        ]
        inner = [
            self.program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
            "--clearenv", *environment, "--size", str(SCRATCH), "--tmpfs", "/tmp",
            *_binds(view, inside=self.as_root), *masks, "--proc", "/proc", "--dev", "/dev",
            "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", *argv,
        ]  # fmt: skip
        if not self.as_root:
            return inner
        # The kernel lets the inner bubblewrap mount a /proc only if nothing is mounted over the outer one.
        ids = [f"--reuid={NOBODY_ID}", f"--regid={NOBODY_ID}"]
        drop = ["setpriv", *ids, "--clear-groups", "--no-new-privs", "--"]
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
    """A container without an image: the view is bound into an empty folder, the container's root."""

    program: str
    root: Path
    name: str = "apptainer"
    confines: bool = True

    def command(self, argv: Sequence[str], view: View) -> list[str]:
        """Return the command that runs ``argv`` in a contained namespace without network and capabilities."""
        binds = [part for path in view.shown for part in ("--bind", f"{path.resolve()}:{path}:ro")]
        masks = [
            part
            for path in view.masked
            if not path.is_dir()
            for part in ("--bind", f"{os.devnull}:{path}:ro")
        ]
        environment = [
            part for name, value in view.environment.items() for part in ("--env", f"{name}={value}")
        ]
        binds += [part for path, folder in view.placed.items() for part in ("--bind", f"{folder}:{path}:ro")]
        return [
            self.program, "exec", "--userns", "--containall", "--cleanenv", "--no-home", "--no-eval",
            "--net", "--network", "none", "--drop-caps", "all", "--no-privs", "--pwd", "/tmp",
            *environment, *binds, *masks, str(self.root), *argv,
        ]  # fmt: skip


@dataclass(frozen=True)
class FoundIsolation:
    """The isolation of this host, or None with ``reasons``, one for each isolation that was tried and
    failed.
    """

    isolation: Isolation | None
    reasons: tuple[str, ...] = ()


@functools.cache
def find_isolation() -> FoundIsolation:
    """Return the first isolation that runs the interpreter on this host; the result is cached."""
    reasons: list[str] = []
    for isolation in (_bubblewrap(), _apptainer()):
        reason = isolation if isinstance(isolation, str) else why_not(isolation)
        if not isinstance(isolation, str) and not reason:
            return FoundIsolation(isolation, tuple(reasons))
        reasons.append(str(reason))
    return FoundIsolation(None, tuple(reasons))


def best_isolation() -> Isolation:
    """Return the isolation of this host, or :class:`Unsandboxed` if none works."""
    return find_isolation().isolation or Unsandboxed()


def required_isolation() -> Isolation:
    """Return the isolation of this host.

    Raises:
        UserError: none works. The message names the cure; ``--unsafe`` grades without isolation.
    """
    found = find_isolation()
    if found.isolation is None:
        raise UserError(
            tr(
                "this host cannot isolate submissions ({reasons}): "
                "{cure}, or add --unsafe if you trust every submission with this account",
                reasons="; ".join(found.reasons),
                cure=SANDBOX_CURE,
            )
        )
    return found.isolation


def marked(status: str, isolation: Isolation) -> str:
    """Return the status of a row, with a mark if the submission ran without isolation.

    >>> marked("GRADED", Unsandboxed())
    'GRADED (UNSANDBOXED)'
    """
    return status if isolation.confines else f"{status} ({UNSANDBOXED})"


def why_not(isolation: Isolation) -> str:
    """Run the interpreter inside, in nested namespaces; return the reason of a failure, or an empty text."""
    nested = ["unshare", "--user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--mount-proc"]
    command = isolation.command([*nested, sys.executable, "-I", "-S", "-c", ""], system_view())
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{isolation.name}: {error}"
    last = done.stderr.strip().splitlines()[-1:] or [tr("exit status {code}", code=done.returncode)]
    return f"{isolation.name}: {last[0]}" if done.returncode else ""


def system_view() -> View:
    """Return the view of the system's programs, the interpreter and the library, without the rest of the
    checkout.
    """
    paths = [Path("/usr") / part for part in SYSTEM]
    for prefix in dict.fromkeys((sys.base_prefix, sys.base_exec_prefix, sys.prefix)):
        paths += [Path(prefix) / part for part in ("bin", "lib", "lib64", "pyvenv.cfg")]
    paths += [Path(path) for path in SETTINGS]
    paths.append(Path(dlo_lib.__file__).resolve().parent)
    return View(tuple(dict.fromkeys(path for path in paths if path.exists())))


def files_of(modules: Sequence[str]) -> tuple[Path, ...]:
    """Return the files or folders of ``modules``, and their ``__pycache__`` folders, without
    importing them.
    """
    found: list[Path] = []
    for module in modules:
        top, *rest = module.split(".")
        spec = importlib.util.find_spec(top)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            place = Path(folder, *rest)
            found += [path for path in (place, place.with_suffix(".py")) if path.exists()]
            compiled = place.parent / "__pycache__"
            with contextlib.suppress(OSError):  # a read-only folder: Python cannot write there either
                compiled.mkdir(exist_ok=True)  # so that it exists and can be masked
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
    """Return the mount arguments for a view: parent folders that every user may enter, binds, and links to
    /usr.

    ``inside``: the arguments of the inner bubblewrap, which finds each path where the outer one has bound it.
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
