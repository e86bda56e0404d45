"""The house, drawn from the imports: no circle, no arrow upwards, and each room says what lives in
it and what it may import.

Every import counts, also those inside functions and for type checkers only: they tie two files together as
well. The floors are those of CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "dlo_lib"


@cache
def modules() -> dict[str, Path]:
    """Every module of the library by its name."""
    files = sorted((ROOT / LIBRARY).rglob("*.py"))
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }


@cache
def house() -> dict[str, set[str]]:
    """For each module the modules of the library that it imports."""
    return {name: set(imported(name)) - {name} for name in modules()}


def imported(name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(modules()[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports by a relative name: use the full one"
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield from (
                    known
                    for known in [below if below in modules() else str(node.module)]
                    if known in modules()
                )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())


def floors() -> dict[str, dict[str, int]]:
    """For each house of CONTRIBUTING.md its rooms, with the number of their floor, 0 at the bottom."""
    lines = re.findall(r"`([\w.]+): ([^`]*→[^`]*)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    return {
        name: {
            room.strip(): number
            for number, floor in enumerate(reversed(order.split("→")))
            for room in floor.split(",")
        }
        for name, order in lines
    }


def upward(graph: dict[str, set[str]], name: str, rooms: dict[str, int]) -> list[str]:
    """The imports within the house ``name`` that do not lead to a lower floor."""

    def room(module: str) -> str | None:
        first = module.removeprefix(f"{name}.").split(".")[0]
        return first if module.startswith(f"{name}.") and first in rooms else None

    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if (here := room(module)) and (there := room(other)) and here != there and rooms[there] >= rooms[here]
    ]


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that reach each other."""

    @cache
    def reached(start: str) -> frozenset[str]:
        found, new = set(), [start]
        while new:
            for other in graph[new.pop()] - found:
                found.add(other)
                new.append(other)
        return frozenset(found)

    found: list[set[str]] = []
    for module in graph:
        if module in reached(module) and not any(module in circle for circle in found):
            found.append({other for other in reached(module) if module in reached(other)})
    return found


def test_no_circle() -> None:
    assert circles(house()) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [{"b", "c"}, {"d"}]


def test_imports_lead_to_lower_floors() -> None:
    assert set(floors()) == {
        "dlo_lib",
        "dlo_lib.grading",
        "dlo_lib.grading.classroom",
        "dlo_lib.cluster",
        "dlo_lib.comm",
    }
    assert [arrow for name, rooms in floors().items() for arrow in upward(house(), name, rooms)] == []


def test_an_upward_import_is_found() -> None:
    graph = {
        "x.low.a": {"x.high.b", "x.low.c"},
        "x.high.b": {"x.low.c"},
        "x.beside.d": {"x.low.a"},
        "x.low.c": set(),
    }
    found = ["x.low.a imports x.high.b", "x.beside.d imports x.low.a"]
    assert upward(graph, "x", {"high": 1, "low": 0, "beside": 0}) == found


def at_import(file: Path) -> set[str]:
    """The modules that are imported when ``file`` is: by statements outside functions and type checking."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_only_a_sharded_checkpoint_imports_dtensor() -> None:
    """DTensor needs SymPy: 1 s of CPU time in each rank that imports it."""
    users = [name for name, file in modules().items() if "torch.distributed.tensor" in at_import(file)]
    assert users == ["dlo_lib.parallel.checkpoint"]
    importers = [name for name, file in modules().items() if set(users) & at_import(file)]
    assert importers == []


def packages() -> list[str]:
    return [name for name, file in modules().items() if file.name == "__init__.py" and name != LIBRARY]


def test_every_room_has_a_floor() -> None:
    rooms = {name.split(".")[1] for name in packages()}
    assert rooms == floors()[LIBRARY].keys()
    for name in floors().keys() - {LIBRARY}:
        below = [package.removeprefix(f"{name}.") for package in packages() if package.startswith(f"{name}.")]
        assert {package for package in below if "." not in package} == floors()[name].keys()


@pytest.mark.parametrize("room", packages())
def test_a_room_says_what_lives_there_and_what_it_imports(room: str) -> None:
    said = ast.get_docstring(ast.parse(modules()[room].read_text(encoding="utf-8"))) or ""
    assert len(said.splitlines()) >= 4, "five lines: what lives here, and what it may import"
    assert re.search(r"\bimports?\b", said, re.IGNORECASE), "which other rooms may it import?"


def shared_names(files: Mapping[str, Path]) -> dict[str, list[str]]:
    """The public classes at the top level of modules whose name occurs in more than one module."""
    places: dict[str, list[str]] = {}
    for name, file in files.items():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_public_classes_share_a_name() -> None:
    assert shared_names(modules()) == {}


def test_a_shared_name_is_found(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.py" for name in ("one", "two")}
    for file in files.values():
        file.write_text("class Schedule: ...\nclass _Private: ...\n")
    assert shared_names(files) == {"Schedule": ["one", "two"]}
