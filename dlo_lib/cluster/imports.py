"""The modules of the user's project that a program or a function imports, found without running it.

The files are parsed, and each import is searched as Python would: first in the folder of the program, then
along the module path. Modules of the environment (the standard library, installed packages, this library) are
not of the project. An import by a computed name cannot be followed, which the result has as ``computed``.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_LIBRARY = "dlo_lib"  # part of the environment, as PyTorch is
_SUFFIXES = (*importlib.machinery.EXTENSION_SUFFIXES, ".py")


@dataclass(frozen=True)
class Module:
    """A file of the project; ``name`` is its dotted name, "" for a program, found below ``entry``."""

    name: str
    file: Path
    entry: Path

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.file.name == "__init__.py" else self.name.rpartition(".")[0]


@dataclass
class Imports:
    """What is imported.

    Attributes:
        modules: by their files, programs included.
        entries: folders of the module path that hold them, in its order.
        computed: whether a module imports by a name that is computed when it runs.
    """

    modules: dict[Path, Module] = field(default_factory=dict)
    entries: list[Path] = field(default_factory=list)
    computed: bool = False


def follow(programs: Sequence[Path], names: Iterable[str], path: Sequence[str] | None = None) -> Imports:
    """Return the modules of the project that programs and named modules import, themselves included.

    Args:
        programs: files that Python runs.
        names: dotted names; those of other projects and of no module are left out.
        path: the module path; None: that of this process.
    """
    search = list(dict.fromkeys(program.parent for program in programs))
    for entry in sys.path if path is None else path:
        folder = Path(entry or ".").resolve()
        if folder.is_dir() and folder not in search:
            search.append(folder)
    found = Imports()
    queue = [Module("", program, program.parent) for program in programs]
    for name in names:
        queue += _find(name, search)
    while queue:
        module = queue.pop()
        if module.file in found.modules:
            continue
        found.modules[module.file] = module
        if module.file.suffix == ".py":
            for name in _imported(module, found):
                queue += _find(name, search)
    used = {module.entry for module in found.modules.values()}
    found.entries = [entry for entry in search if entry in used]
    found.entries += sorted(used.difference(found.entries))
    return found


def is_installed(folder: Path) -> bool:
    """Return whether a folder belongs to the environment and not to the user's project."""
    return any(folder.is_relative_to(place) for place in _environment()) or bool(
        {"site-packages", "dist-packages"} & set(folder.parts)
    )


@cache
def _environment() -> tuple[Path, ...]:
    places = {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return tuple(Path(place).resolve() for place in places)


def _find(name: str, search: Sequence[Path]) -> list[Module]:
    """Return the files of a dotted name: each package on the way, and the module."""
    top, *below = name.split(".")
    if top == _LIBRARY or top in sys.builtin_module_names:
        return []
    for entry in search:
        first = _file(entry / top)
        if first is not None:
            return [] if is_installed(entry) else _chain(top, below, first, entry)
    for entry in search:  # a package without __init__.py counts only if there is no other of this name
        if (entry / top).is_dir() and not is_installed(entry):
            return _chain(top, below, None, entry)
    return _by_hook(top, below)


def _by_hook(top: str, below: list[str]) -> list[Module]:
    """Return the files of a package that an editable installation finds without the module path."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return []
    if spec is None or spec.origin is None or not (file := Path(spec.origin)).is_file():
        return []
    entry = (file.parent.parent if file.stem == "__init__" else file.parent).resolve()
    return [] if is_installed(entry) else _chain(top, below, file.resolve(), entry)


def _chain(top: str, below: list[str], first: Path | None, entry: Path) -> list[Module]:
    found = [] if first is None else [Module(top, first, entry)]
    folder, name = entry / top, top
    for part in below:
        file, name = _file(folder / part), f"{name}.{part}"
        if file is None and not (folder / part).is_dir():
            break  # an attribute of the module
        found += [] if file is None else [Module(name, file, entry)]
        folder /= part
    return found


def _file(stem: Path) -> Path | None:
    """Return the file of a module or a package, None if there is none."""
    if (stem / "__init__.py").is_file():
        return stem / "__init__.py"
    return next((file for suffix in _SUFFIXES if (file := Path(f"{stem}{suffix}")).is_file()), None)


def _imported(module: Module, found: Imports) -> Iterator[str]:
    try:
        tree = ast.parse(module.file.read_bytes())
    except (SyntaxError, ValueError):
        return  # the program itself reports it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            yield from (f"{base}.{alias.name}".strip(".") for alias in node.names if alias.name != "*")
            if base:
                yield base
        elif isinstance(node, ast.Call) and _imports(node.func):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield f"{module.package}{first.value}" if first.value.startswith(".") else first.value
            else:
                found.computed = True


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.package.split(".")
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _imports(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")
