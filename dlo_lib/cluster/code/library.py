"""The library that a job was submitted with, so that a `git pull` between two turns does not change the job.

    <state folder>/library/<hash of its files>/dlo_lib/...     one copy for all jobs with this version
    <folder of a job>/library                                  a link to it, first in the module path

The packages that a job imports, and all that they import, are part of the job's identity. For this, a package
of ``dlo_lib`` counts as a whole.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import dlo_lib
from dlo_lib.base.files import state_dir
from dlo_lib.base.locks import file_lock
from dlo_lib.cluster.run.records import jobs_dir

LINK = "library"
ROOT = Path(dlo_lib.__file__).resolve().parent

_IMPORT = re.compile(
    rb"^\s*(?:from\s+dlo_lib\.(\w+)|import\s+dlo_lib\.(\w+)|from\s+dlo_lib\s+import\s+(\([^)]*\)|[^\n#]+))",
    re.MULTILINE,
)
_MENTION = re.compile(rb"\bdlo_lib\.(\w+)")
_COMMAND = re.compile(rb"(?:^|[\s;&|/'\"(])dlo\s+[a-z]", re.MULTILINE)
_BESIDE = ("datasets", "labs", "solutions")  # of the repository, which the library finds beside itself


@dataclass(frozen=True)
class _File:
    content: bytes
    changed: int  # in ns


@cache
def _files() -> dict[Path, _File]:
    """Return the files of the library by their paths in it, read once in a process."""
    found = {}
    for folder, inside, names in os.walk(ROOT):
        inside[:] = [name for name in inside if name[0] != "." and name != "__pycache__"]
        for file in (Path(folder, name) for name in names if name[0] != "."):
            changed = file.stat().st_mtime_ns
            found[file.relative_to(ROOT)] = _File(file.read_bytes(), changed)
    return found


@cache
def version() -> str:
    """Return the hash of all files of the library, 16 hexadecimal digits."""
    whole = hashlib.sha256()
    for name, file in sorted(_files().items()):
        whole.update(f"{name}\0{len(file.content)}\0".encode() + file.content)
    return whole.hexdigest()[:16]


def imported_by(contents: Iterable[bytes], names: Iterable[str] = ()) -> frozenset[str]:
    """Return the packages and modules of ``dlo_lib`` that code imports, directly or through others.

    Args:
        contents: of Python files and shell scripts.
        names: dotted names of modules; those of other projects are left out.
    """
    queue = [name.split(".")[1] for name in names if name.startswith("dlo_lib.")]
    for content in contents:
        queue += _imports(content)
        queue += [name.decode() for name in _MENTION.findall(content)]
        if _COMMAND.search(content):
            queue += sorted({name.parts[0].removesuffix(".py") for name in _files()})
    seen = set[str]()
    while queue:
        name = queue.pop()
        if name not in seen and (inside := _of(name)):
            seen.add(name)
            for file in inside:
                queue += _imports(_files()[file].content) if file.suffix == ".py" else ()
    return frozenset(seen)


def content(names: Iterable[str]) -> list[tuple[str, bytes]]:
    """Return what identifies packages and modules of the library: the paths and contents of their files."""
    return sorted((str(file), _files()[file].content) for name in names for file in _of(name))


def place_of(folder: Path) -> Path:
    """Return the entry of the module path of the job in ``folder``."""
    return folder / LINK


def store_of_copies() -> Path:
    """Return the folder of all copies, which containers of jobs see; create it if it does not exist."""
    store = state_dir() / LINK
    store.mkdir(exist_ok=True)
    return store


def link(folder: Path) -> None:
    """Link the library of this process to the folder of a job; copy it before if no job has this version."""
    store = store_of_copies()
    with file_lock(store / "lock"):
        if not (store / version()).exists():
            _remove_unused(store)
            _copy(store)
        place_of(folder).unlink(missing_ok=True)  # of a submission that was killed
        place_of(folder).symlink_to(store / version())


def _of(name: str) -> list[Path]:
    return [file for file in _files() if file.parts[0] == name or file == Path(f"{name}.py")]


def _imports(content: bytes) -> Iterator[str]:
    for package, module, several in _IMPORT.findall(content):
        if name := package or module:
            yield name.decode()
        else:
            yield from (word.decode() for word in re.findall(rb"(\w+)(?:\s+as\s+\w+)?", several))


def _copy(store: Path) -> None:
    aside = store / f".{version()}.part"
    shutil.rmtree(aside, ignore_errors=True)  # of a killed process
    for name, file in _files().items():
        target = aside / ROOT.name / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        os.utime(target, ns=(file.changed, file.changed))  # for its compiled form
        if name.suffix == ".py":
            _copy_compiled(ROOT / name, target, file)
    for beside in _BESIDE:
        if (ROOT.parent / beside).is_dir():
            (aside / beside).symlink_to(ROOT.parent / beside)
    aside.rename(store / version())


def _copy_compiled(original: Path, target: Path, file: _File) -> None:
    """Copy the compiled form of a module if it is of this content, so that the first job does not compile."""
    compiled = Path(importlib.util.cache_from_source(str(original)))
    try:
        code = compiled.read_bytes()
    except OSError:
        return
    of_source = (file.changed // 10**9, len(file.content))  # the header names both, with 32 bits
    if (int.from_bytes(code[8:12], "little"), int.from_bytes(code[12:16], "little")) == of_source:
        place = Path(importlib.util.cache_from_source(str(target)))
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(code)


def _remove_unused(store: Path) -> None:
    """Remove the versions to which no job is linked."""
    used = {os.path.basename(os.readlink(job)) for job in jobs_dir().glob(f"*/{LINK}") if job.is_symlink()}
    for old in store.iterdir():
        if old.is_dir() and old.name not in used:
            shutil.rmtree(old, ignore_errors=True)  # in use by a job that is being forgotten
