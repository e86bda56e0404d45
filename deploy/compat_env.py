"""The pairs of Python and PyTorch that the README promises, and an environment for each of them.

uv creates the environments in ``$XDG_CACHE_HOME/dlo-compat`` (2 to 8 GB each, shared with uv's cache).
The last two that were used are kept, and those that another run uses. PyTorch is installed first and alone:
the requirements in its metadata show which pins of ``constraints.txt`` it contradicts. Only these are left
out.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import newest_python  # in this folder
import setup_env  # in this folder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlo-compat"
EXTRAS = "labs,dev"
KEPT = 2
STAMP = "made-from"
NEWEST = "newest"


class CompatError(Exception):
    """A missing requirement and its cure, in one line."""


@dataclass(frozen=True)
class Pair:
    """A release of PyTorch and a Python.

    Attributes:
        release: "2.8.0", "2.9" for the newest patch release of 2.9, or "newest" for the newest release that
            the index has, with the newest release of each other package that pyproject.toml allows.
        python: such as (3, 12).
    """

    release: str
    python: tuple[int, int]

    @property
    def name(self) -> str:
        """The name on the command line and in the table, such as 2.9/3.12."""
        return f"{self.release}/{'.'.join(map(str, self.python))}"

    @property
    def requirement(self) -> str:
        """What uv is asked for."""
        if self.release == NEWEST:
            return "torch"
        return f"torch=={self.release}" if self.release.count(".") == 2 else f"torch=={self.release}.*"

    def is_named(self, asked: str) -> bool:
        """Whether an argument of the command selects this pair.

        >>> [Pair("2.8.0", (3, 12)).is_named(asked) for asked in ("2.8", "2.8.0/3.12", "2.8/3.13", "2")]
        [True, True, False, False]
        """
        release, _, python = asked.partition("/")
        minor = self.release.rpartition(".")[0] if self.release.count(".") == 2 else self.release
        return release in (self.release, minor) and python in ("", self.name.partition("/")[2])


def promised_pairs() -> tuple[Pair, ...]:
    """Return the pairs, the oldest release first; the pinned release is tried on each other Python."""
    oldest, pinned = oldest_release(), pinned_release()
    return (
        *(Pair(release, (3, 12)) for release in (oldest, "2.9", "2.11")),
        *(Pair(pinned, python) for python in ((3, 11), (3, 13), (3, 14))),
        Pair(NEWEST, (3, 12)),
    )


def oldest_release() -> str:
    """Return the first patch release of the minor release in pyproject.toml: 2.8 means that 2.8.0 works."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (least,) = re.findall(r'^    "torch>=([\d.]+)",', text, re.MULTILINE)
    return least if least.count(".") == 2 else f"{least}.0"


def pinned_release() -> str:
    """Return the release in constraints.txt, with which everything is developed."""
    (pinned,) = re.findall(r"^torch==(\S+)$", "\n".join(pins()), re.MULTILINE)
    return pinned


def pins() -> list[str]:
    """Return the lines of constraints.txt that pin a package, such as ``numpy==2.4.6``."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def interpreter(pair: Pair) -> str | None:
    """Return an interpreter of the pair's Python: $PYTHON, or one on PATH or of pyenv; None without one."""
    asked = os.environ.get("PYTHON")
    found = [*([asked] if asked else []), *newest_python.candidates()]
    wanted = ".".join(map(str, pair.python))
    named = shutil.which(f"python{wanted}")
    return next(
        (path for path in [*found, *([named] if named else [])] if setup_env.version_of(path) == pair.python),
        None,
    )


def environment(uv: str, pair: Pair, python: str) -> Path:
    """Return the interpreter of an environment with this release of PyTorch.

    The environment is created if it is missing or was created from other requirements; with the newest
    packages, also if it is of another day. The pinned release on the Python of .venv is .venv.

    Raises:
        CompatError: the packages cannot be installed.
    """
    if is_venv(pair):
        return setup_env.PYTHON
    folder = folder_of(pair)
    own, stamp, wanted = folder / "bin" / "python", folder / STAMP, fingerprint(pair, python)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        stamp.touch()  # it is the last one used
        return own
    print(f"compat: creating {folder} ...", flush=True)
    make_room(folder)
    CACHE.mkdir(parents=True, exist_ok=True)
    run_uv(uv, "venv", "--clear", "--python", python, str(folder))
    install_torch(uv, own, pair)
    torch = torch_of(folder)
    constraints = folder / "constraints.txt"
    kept, left_out = split_pins([] if pair.release == NEWEST else pins(), torch, pair)
    constraints.write_text("\n".join([*kept, f"torch=={torch.version}", ""]), encoding="utf-8")
    if left_out:
        print(f"compat: torch {torch.version} requires other releases than {', '.join(left_out)}", flush=True)
    install(uv, own, "-c", str(constraints), "-e", f"{ROOT}[{EXTRAS}]")
    stamp.write_text(wanted, encoding="utf-8")
    return own


def folder_of(pair: Pair) -> Path:
    """Return the folder of the pair's environment."""
    return CACHE / pair.name.replace("/", "-py")


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Hold an environment, so that no other run replaces or removes it.

    Raises:
        CompatError: another run holds it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CompatError(
                f"another `make compat` uses {folder}: start this one when it has ended"
            ) from None
        except OSError:
            print("compat: this file system has no locks: start one run at a time", flush=True)
        yield


def is_free(folder: Path) -> bool:
    """Return whether no run holds an environment."""
    try:
        with in_use(folder):
            return True
    except CompatError:
        return False


def is_venv(pair: Pair) -> bool:
    """Return whether .venv, as `make setup-dev` leaves it, is what the pair asks for."""
    if pair.release != pinned_release() or setup_env.version_of(setup_env.PYTHON) != pair.python:
        return False
    code = "import importlib.metadata; print(importlib.metadata.version('torch'))"
    done = setup_env.run([str(setup_env.PYTHON), "-c", code])
    return done.stdout.strip().partition("+")[0] == pair.release


def install_torch(uv: str, python: Path, pair: Pair) -> None:
    """Install PyTorch alone: the CPU build if an index has one, else the build in pip's indexes."""
    patient = {"UV_HTTP_RETRIES": "1", "UV_HTTP_CONNECT_TIMEOUT": "5"}
    command = ("--no-deps", pair.requirement)
    try:
        install(uv, python, *command, "--torch-backend", "cpu", **patient)
    except CompatError:
        install(uv, python, *command)


def install(uv: str, python: Path, *arguments: str, **settings: str) -> None:
    """Install with uv. Raises CompatError."""
    command = ("pip", "install", "--python", str(python), "--index-strategy", "unsafe-best-match")
    run_uv(uv, *command, *arguments, **settings)


def torch_of(folder: Path) -> importlib.metadata.Distribution:
    """Return the metadata of the PyTorch in an environment."""
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (torch,) = importlib.metadata.distributions(name="torch", path=[str(packages)])
    return torch


def split_pins(
    pinned: list[str], torch: importlib.metadata.Distribution, pair: Pair
) -> tuple[list[str], list[str]]:
    """Return the pins to keep, and those that contradict the requirements of this PyTorch."""
    python = ".".join(map(str, pair.python))
    target = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    needs = [Requirement(text) for text in torch.requires or ()]
    wants = {
        canonicalize_name(need.name): need.specifier
        for need in needs
        if need.marker is None or need.marker.evaluate(target)
    }
    kept: list[str] = []
    left_out: list[str] = []
    for pin in pinned:
        name, _, version = pin.partition("==")
        specifier = wants.get(canonicalize_name(name))
        if name == "torch":
            continue
        (kept if specifier is None or specifier.contains(version) else left_out).append(pin)
    return kept, left_out


def make_room(folder: Path) -> None:
    """Remove the environments that were used least recently, so that KEPT of them stay with ``folder``.

    An environment that another run uses stays.
    """
    others = [path for path in CACHE.glob("*") if path.is_dir() and path != folder]
    others.sort(key=lambda path: (path / STAMP).stat().st_mtime if (path / STAMP).exists() else 0.0)
    for path in others[: max(0, len(others) - (KEPT - 1))]:
        if not is_free(path):
            continue
        print(f"compat: removing {path}, because {KEPT} environments are kept", flush=True)
        shutil.rmtree(path)


def fingerprint(pair: Pair, python: str) -> str:
    """Return a hash of everything that determines the environment."""
    parts = [
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
        *pins(),
        str(ROOT),
        python,
        pair.name,
        datetime.date.today().isoformat() if pair.release == NEWEST else "",
    ]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def run_uv(uv: str, *arguments: str, **settings: str) -> None:
    """Run uv with the settings of the set-up. Raises CompatError."""
    done = subprocess.run(
        [uv, "--quiet", *arguments],
        env={**setup_env.uv_settings(), **settings},
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise CompatError(
            f"uv {arguments[0]} failed ({said[:300]}): check the network, the disk and the release's number"
        )
