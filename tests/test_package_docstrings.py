"""The docstring of each package agrees with its folder: the modules, and the rooms that they import.

A list has one module a line, ``- ``name``: a few words``, in reading order. A new file that its package does
not name fails, and so does a name without a file. Modules with a leading underscore are private: no list has
them. The sentence with "imports" names each room that the files of the folder import, and no other.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "dlo_lib"
EVERYWHERE = "base"  # every room imports it, so no docstring names it
_ENTRY = re.compile(r"^- ``(\w+)``: \S.*", re.MULTILINE)
_IMPORTS = re.compile(r"\b[Ii]mport(?:s|ed)?\b(.*?)(?:[.;](?=\s|$)|\Z)", re.DOTALL)


def packages() -> list[Path]:
    return sorted(file.parent for file in LIBRARY.rglob("__init__.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def children(package: Path) -> frozenset[str]:
    """Modules and packages of a folder, without private modules and ``__init__``."""
    names = {file.stem for file in package.glob("*.py")}
    names |= {folder.name for folder in package.iterdir() if (folder / "__init__.py").is_file()}
    return frozenset(name for name in names if not name.startswith("_"))


def docstring(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""


def drift(package: Path) -> list[str]:
    """Return what the list of ``package`` leaves out, invents or repeats, one line each."""
    names = _ENTRY.findall(docstring(package))
    there = children(package)
    return [
        *(f"{name} is not listed" for name in sorted(there - set(names))),
        *(f"{name} is listed and there is no such file" for name in sorted(set(names) - there)),
        *(f"{name} is listed twice" for name, count in Counter(names).items() if count > 1),
    ]


def _paths(package: Path) -> Iterator[list[str]]:
    """What the files of ``package`` import from the library, as names below ``dlo_lib``."""
    for file in package.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            yield from (name.split(".")[1:] for name in names if name.startswith("dlo_lib."))


def _room(path: list[str], package: Path) -> str | None:
    """Return the room of ``path``: a neighbour of ``package``, or a room of the library; None for others."""
    own = package.relative_to(LIBRARY).parts if package.is_relative_to(LIBRARY) else (package.name,)
    for depth in range(len(own) - 1, -1, -1):  # the nearest neighbours first
        above = LIBRARY.joinpath(*own[:depth])
        full = tuple(path) if tuple(path[:depth]) == own[:depth] else (*own[:depth], *path)
        if len(full) > depth and full[depth] in children(above):
            name = full[depth]
            is_room = depth > 0 or (LIBRARY / name / "__init__.py").is_file()
            return name if name != own[depth] and is_room and name != EVERYWHERE else None
    return None


def rooms_imported(package: Path) -> set[str]:
    return {room for path in _paths(package) if (room := _room(path, package))}


def rooms_said(package: Path) -> set[str]:
    """Return the rooms in the sentences about imports; modules of ``package`` are left out."""
    literals = (
        literal
        for sentence in _IMPORTS.findall(_ENTRY.sub("", docstring(package)))
        for literal in re.findall(r"``(?:dlo_lib\.)?(\w+(?:\.\w+)*)``", sentence)
    )
    rooms = {_room(literal.split("."), package) for literal in literals}
    return {room for room in rooms if room}


@pytest.mark.parametrize("package", packages(), ids=name_of)
def test_a_package_names_each_of_its_modules(package: Path) -> None:
    assert drift(package) == []


@pytest.mark.parametrize("package", [p for p in packages() if p != LIBRARY], ids=name_of)
def test_a_package_names_the_rooms_that_it_imports(package: Path) -> None:
    assert rooms_said(package) == rooms_imported(package)


def test_drift_is_found(tmp_path: Path) -> None:
    for name in ("here", "forgotten", "_private", "room/__init__"):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    listed = "- ``here``: a module\n- ``here``: again\n- ``gone``: no file"
    (tmp_path / "__init__.py").write_text(f'"""A room.\n\n{listed}\n\n``forgotten`` is prose.\n"""')

    assert drift(tmp_path) == [
        "forgotten is not listed",
        "room is not listed",
        "gone is listed and there is no such file",
        "here is listed twice",
    ]
